"""polylane advise: from a run's folder to the batch with the most learning goodput, for any cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from polylane.cli import app
from polylane.commands.learning.finished_steps import RunOptions, read_options, read_steps
from polylane.errors import PolylaneError
from tests.cli.tiny_recipe import RECIPE


def write_run(
    folder: Path, scale: float, steps: int = 60, adam: float | None = None, batch: int = 8, width: int = 12
) -> Path:
    """Write the files of a run whose noise scale is about ``scale``."""
    (folder / "tiny.py").write_text(RECIPE)
    run, generator = folder / "run", np.random.default_rng(0)
    run.mkdir()
    options = RunOptions(str(folder / "tiny.py"), (f"width={width}",), batch, 0, 2, None)
    (run / "run.json").write_text(json.dumps(options.to_dict()))
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(steps):
            line: dict[str, Any] = {
                "step": step + 1,
                "samples": batch,
                "samples_per_second": 100.0,
                "learning_rate": 0.1,
            }
            noise = {"step_g2": float(generator.normal(1, 0.5)), "step_s": float(generator.normal(scale, scale / 9))}
            if adam is not None:
                noise["adam"] = {"step_g2": noise["step_g2"], "step_s": noise["step_s"] * adam / scale}  # type: ignore[assignment]
            file.write(json.dumps(line | {"noise": noise}) + "\n")
        file.write('{"step": 61, "sam')
    return run


def advise(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["advise", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    answer: dict[str, Any] = json.loads(result.output[result.output.index("{") :])
    return answer


def test_a_run_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = write_run(tmp_path, 100.0)
    steps = read_steps(run)
    assert steps.batch == 8 and steps.samples_per_second == 100.0
    assert steps.noise.scale == pytest.approx(100, rel=0.2) and steps.noise.batches == 59
    assert steps.deciding_noise is steps.noise
    assert read_options(run).settings == ("width=12",)


def test_more_noise_asks_for_larger_batches(tmp_path: Path) -> None:
    """For a cluster that is not there, each batch by the plan that the planner finds for it."""
    choices = []
    for scale in (3.0, 3000.0):
        folder = tmp_path / f"{scale:g}"
        folder.mkdir()
        answer = advise(write_run(folder, scale, width=2048), "--cluster", "2:gtx-1080-ti")
        rows = answer["batches"]
        assert [row["goodput"] for row in rows] == sorted((row["goodput"] for row in rows), reverse=True)
        for row in rows:
            phi = answer["noise"]["scale"]
            assert row["efficiency"] == pytest.approx((phi + 8) / (phi + row["batch"]))
            assert row["goodput"] == pytest.approx(row["samples_per_second"] * row["efficiency"])
        assert any(row["batch"] == 8 for row in rows) and all(row["plan"] for row in rows)
        choices.append(rows[0]["batch"])
    assert choices[0] < choices[1]


def test_steps_of_adam_decide_by_the_gradients_that_it_divides(tmp_path: Path) -> None:
    answer = advise(write_run(tmp_path, 100.0, adam=500.0), "--cluster", "1:h100-80g", "--batches", 8, "--batches", 64)
    assert answer["adam_noise"]["scale"] == pytest.approx(500, rel=0.2) and "as Adam divides" in answer["words"][0]
    assert answer["batches"][0]["efficiency"] == pytest.approx(508 / 564, rel=0.03)


def test_a_table_for_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", str(write_run(tmp_path, 100.0)), "--batches", "8", "--batches", "16"])
    assert result.exit_code == 0, result.output
    assert (
        "8 *" in result.output and "Best: batches of" in result.output and "Measured in the run: 100" in result.output
    )


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path, 100.0, steps=5)
    result = CliRunner().invoke(app, ["advise", str(run)])
    assert result.exit_code == 2 and "not enough data yet: after 4 measured steps" in result.output
    (run / "metrics.jsonl").write_text('{"step": 1, "samples": 8, "samples_per_second": 1}\n')
    assert "the gradient noise was not measured" in CliRunner().invoke(app, ["advise", str(run)]).output
    (run / "run.json").write_text("{}")
    with pytest.raises(PolylaneError, match="it was edited"):
        read_options(run)
    with pytest.raises(PolylaneError, match="cannot be read"):
        read_options(tmp_path)
