"""What inspect shows of a plan to people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polylane.cli import app

RECIPE = """
import torch
from torch import nn

def model():
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def data(split):
    return [(torch.ones(8), torch.ones(8)) for _ in range(16)]
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "four.py"
    file.write_text(RECIPE)
    yield file
    sys.modules.pop("four", None)


def inspect(recipe: Path, *more: str) -> Any:
    done = CliRunner().invoke(app, ["inspect", str(recipe), "--batch", "16", *more], prog_name="polylane")
    assert done.exit_code == 0, done.stderr
    return done.stdout


def test_the_title_says_the_meshes(recipe: Path) -> None:
    shown = " ".join(inspect(recipe, "--plan", "[data=2 | tensor=2],microbatches=2").split())
    assert "[data=2 | tensor=2],schedule=1f1b,microbatches=2 stage workers mesh after first node" in shown
    assert "stage 0 (data=2) -> stage 1 (tensor=2): " in shown


@pytest.mark.parametrize("mesh", ["{}", "{data: 2}"])
def test_memory_and_time_of_every_stage(recipe: Path, mesh: str) -> None:
    """In a chain of equal meshes, too."""
    devices = "[1, 2]" if "data" in mesh else "[1]"
    first, second = "{nodes: ['0', '1'], devices: [0]}", f"{{nodes: ['2', loss], devices: {devices}, mesh: {mesh}}}"
    Path("plan.yaml").write_text(f"stages: [{first}, {second}]\nmicrobatches: 2\n")
    shown = inspect(recipe, "--plan", "plan.yaml")
    (head,) = (line.split() for line in shown.splitlines() if " first node " in line)
    assert head[-4:] == ["parameters", "gradients", "values", "time"]
    told = json.loads(inspect(recipe, "--plan", "plan.yaml", "--json"))
    assert [stage["parameter_bytes"] for stage in told["stages"]] == [576, 576]
    assert [stage["gradient_bytes"] for stage in told["stages"]] == [576, 576]
    # Of two microbatches what both layers give; of one what came, the third layer's, and the difference.
    samples = 4 if "data" in mesh else 8
    assert [stage["held"] for stage in told["stages"]] == [2 * 2 * 8 * 8 * 4, 3 * samples * 8 * 4]
    assert all(stage["memory"]["total"] > stage["parameter_bytes"] for stage in told["stages"])
    assert all(stage["seconds"] > 0 for stage in told["stages"])
    rows = [line for line in shown.splitlines() if "/linear" in line and "576 B" in line]
    assert len(rows) == 2 and all("s (" in line and line.rstrip().endswith("%)") for line in rows)
