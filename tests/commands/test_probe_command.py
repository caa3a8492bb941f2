"""``polylane probe`` as a command: what it writes and says, and what it refuses before it measures."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.cluster.cluster_file import load
from polylane.cluster.spec import parse
from polylane.commands import planning, probe
from polylane.commands import user_inputs as inputs
from polylane.commands.requests import PredictRequest, ProbeRequest, RecipeRequest
from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.probe.machine import local_cluster
from polylane.probe.profiles import load_profile
from tests.support.known_measurements import quick

torch.set_num_threads(1)

RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn

def model(width=8):
    return nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))

def loss(model, batch):
    x, y = batch
    return F.cross_entropy(model(x), y)

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1)

def data(split):
    return [(torch.ones(4) * i, i % 2) for i in range(32)]
"""


def run(output: Path | None, **change: Any) -> None:
    probe.run(ProbeRequest(output=output, **{"workers": 2, **change}), effort=quick())


def captured(request: RecipeRequest) -> Graph:
    """The graph that predictions look a profile up for."""
    asked = PredictRequest(recipe=request.recipe, batch=request.batch, settings=request.settings, cluster="2:cpu")
    return planning.capture_for_prediction(inputs.open_recipe(asked), parse(asked.cluster), asked)[1].graph


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("POLYLANE_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "recipe.py"
    path.write_text(RECIPE)
    return path


def test_it_writes_a_cluster_file_and_says_how_it_went(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "new" / "cluster.yaml"
    run(path)
    cluster = load(path)
    assert cluster.count == 2 and cluster.device(0).kind in capsys.readouterr().out
    assert path.read_text().startswith("# Measured by polylane probe, ")


def test_progress_goes_to_stderr_and_json_to_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.yaml"
    run(path, json=True)
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert told["file"] == str(path) and told["workers"] == 2 and told["profiles"] == []
    assert 0 <= told["operators"]["median"] <= told["operators"]["worst"]
    assert 0 <= told["messages"]["median"] <= told["messages"]["worst"]
    what = ("operators", "workers at once", "messages", "sums between computations")
    assert err.splitlines() == [f"measuring {each}" for each in what]


def test_a_recipes_nodes_are_measured_and_found_again(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    request = RecipeRequest(recipe=str(recipe), batch=16, settings=("width=6",))
    run(None, recipes=(request,))
    assert f"{recipe}: " in capsys.readouterr().out
    graph = captured(request)
    found = load_profile(graph, local_cluster(2).device(0), threads=1)
    assert found is not None and found.samples == (1, 4, 8, 16)
    assert set(found.nodes) == {node.name for node in graph.nodes}
    assert all(seconds > 0 for both in found.steps for seconds in both) and found.update_seconds > 0
    assert load_profile(captured(replace(request, settings=())), local_cluster(2).device(0), threads=1) is None


def test_nothing_asked_for_is_refused() -> None:
    with pytest.raises(PolylaneError, match=r"give -o FILE .* or --profile RECIPE"):
        run(None)


@pytest.mark.parametrize("workers", [0, 100_000])
def test_workers_that_cannot_be(tmp_path: Path, workers: int) -> None:
    path = tmp_path / "cluster.yaml"
    with pytest.raises(PolylaneError, match="--workers"):
        run(path, workers=workers)
    assert not path.exists()


def test_a_file_that_cannot_be_written_is_told_before_measuring(tmp_path: Path, capfd: Any) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path, tmp_path / "file" / "cluster.yaml"):
        with pytest.raises(PolylaneError, match=f"{path} cannot be written: ") as raised:
            run(path)
        assert "\n" not in str(raised.value)
    assert "measuring" not in capfd.readouterr().err


def test_a_file_that_is_there_stays_until_it_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("mine")
    with pytest.raises(PolylaneError):
        run(path, workers=0)
    assert path.read_text() == "mine"


def test_a_recipe_that_is_wrong_is_one_sentence(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("def loss", "def lost"))
    with pytest.raises(PolylaneError, match="loss") as raised:
        run(None, recipes=(RecipeRequest(recipe=str(recipe), batch=16),))
    assert "\n" not in str(raised.value)
