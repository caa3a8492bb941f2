"""polylane lanes of a file of stages: its errors call stages by the names that the file gives them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polylane.cli import app

BRANCHES = Path(__file__).parent.parent.parent / "examples" / "lanes" / "branches.yaml"


def lanes(file: Path) -> Any:
    return CliRunner().invoke(app, ["lanes", "1f1b", "--stages", str(file), "--microbatches", "2"])


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            "{stem: , near: {after: [far]}, far: {after: [stem, near]}}",
            "stages near -> far -> near wait for each other",
        ),
        ("{own: {after: [own]}}", "stages own -> own wait for each other"),
    ],
)
def test_a_circle_is_told_by_names(stages: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text(f"stages: {stages}")
    done = lanes(tmp_path / "stages.yaml")
    assert done.exit_code == 2 and done.stderr == f"polylane: stages {tmp_path / 'stages.yaml'}: {says}\n"


def test_halves_of_stages_in_a_file(tmp_path: Path) -> None:
    """A stage that says no weight half has half of its backward pass."""
    file = tmp_path / "stages.yaml"
    file.write_text("stages: {a: {backward: 4, weight: 1}, b: {after: [a]}}")
    done = CliRunner().invoke(app, ["lanes", "zb-h1", "--stages", str(file), "--microbatches", "1"])
    assert done.stdout.splitlines()[3:5] == ["stage 0 │  0 · ·<0<0<0=0", "stage 1 │  · 0<0=0 · · ·"]


def test_the_example() -> None:
    assert "stages: 0 stem, 1 near, 2 far, 3 head" in lanes(BRANCHES).stdout
