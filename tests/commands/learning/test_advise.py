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
    assert steps.noise.plain.scale == pytest.approx(100, rel=0.2) and steps.noise.plain.batches == 59
    assert steps.noise.deciding is steps.noise.plain and steps.measured_sizes == [8]
    assert steps.rate_factor is None and steps.learning_rate == 0.1
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
    best = answer["batches"][0]
    assert best["efficiency"] == pytest.approx(508 / 564, rel=0.03)
    assert f"by {best['gain'] ** 0.5:.2f}: the root of" in " ".join(answer["words"])


def test_a_table_for_this_machine(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["advise", str(write_run(tmp_path, 100.0)), "--batches", "8", "--batches", "16"])
    assert result.exit_code == 0, result.output
    assert (
        "8 *" in result.output
        and "Best: batches of" in result.output
        and "the run made 100 with batches of 8, by its own plan" in result.output
        and "price" not in result.output  # what this machine costs is not known
    )


def write_grown_run(folder: Path, sizes: tuple[int, ...], measured: int = 5) -> Path:
    """Write a run whose batch changes every 30 steps, of which some are measured; the last one is of a short batch."""
    run, generator, lines = write_run(folder, 100.0), np.random.default_rng(1), list[dict[str, Any]]()
    for number, size in enumerate(sizes):
        if number:
            change = {"step": 30 * number, "size": size, "noise_scale": 90.0, "gain": 1.1, "rate_factor": 1.5 * number}
            lines.insert(len(lines) - 2, {"batch": change})  # steps are written some steps later
        for step in range(30 * number + 1, 30 * number + 31):
            line: dict[str, Any] = {"step": step, "samples": size, "samples_per_second": 10.0 * size}
            line |= {"learning_rate": 0.1 * max(1.5 * number, 1)}
            if step % measured == 0:
                line["noise"] = {"step_g2": float(generator.normal(1, 0.1)), "step_s": float(generator.normal(100, 5))}
            lines.append(line)
    lines.append({**lines[-1], "step": lines[-1]["step"] + 1, "samples": 3})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return run


@pytest.mark.parametrize("sizes", [(8, 16, 32), (32, 16)])
def test_a_batch_that_changed_is_told_as_it_was(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    """Steps, sizes, batch, speed and learning rate are those of the file, and a factor is of the present rate."""
    run = write_grown_run(tmp_path, sizes)
    steps = read_steps(run)
    assert steps.batch == sizes[-1] and steps.samples_per_second == 10.0 * sizes[-1]
    assert steps.measured_sizes == [3, *sorted(sizes)] and steps.noise.deciding.batches == 6 * len(sizes)
    factor = 1.5 * (len(sizes) - 1)
    assert steps.rate_factor == factor and steps.learning_rate == pytest.approx(0.1 * factor)
    answer = advise(run, "--cluster", "1:h100-80g", "--batches", sizes[-1], "--batches", 4 * sizes[-1])
    words = " ".join(answer["words"])
    assert answer["batch"] == sizes[-1]
    assert f"from {6 * len(sizes)} measured steps of 3 to {max(sizes)} samples." in words
    assert f"changed the batch from 8 to {sizes[-1]} samples" in words and f"is {factor:.2f} times what" in words
    best = answer["batches"][0]
    if best["batch"] == sizes[-1]:
        assert "The learning rate stays as it is." in words
    else:
        assert f"({0.1 * factor:.4g} in the latest step) by {best['gain']:.2f}: AdaScale's gain." in words


def test_the_largest_batch_is_a_quarter_of_the_data(tmp_path: Path) -> None:
    run = write_run(tmp_path, 1e5)
    options = json.loads((run / "run.json").read_text()) | {"population": 150}
    (run / "run.json").write_text(json.dumps(options))
    answer = advise(run, "--cluster", "1:h100-80g")
    assert {row["batch"] for row in answer["batches"]} == {2, 4, 8, 16, 32}
    assert "more than a quarter of the 150 samples of an epoch" in " ".join(answer["words"])


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
