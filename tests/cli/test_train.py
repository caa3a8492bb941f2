"""polylane train: what it prints and writes, and how it ends, on workers of this host and under torchrun."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polylane.observe.timeline import Timeline
from polylane.plan import plan_file as plans
from tests.cli.tiny_recipe import FILES, alive, call, execute, metrics, start, wait_for


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[dict[str, Any], str, Path]:
    """One training on four workers: the JSON that it printed, what it said meanwhile, and its folder."""
    line = "train tiny.py --workers 4 --plan data=2,pipeline=2,microbatches=4 --epochs 2 --batch 9 --run run/four"
    out, err = execute(folder, f"{line} --set width=12 --json")
    return json.loads(out), err, folder / "run/four"


def test_train_says_how_it_went(trained: tuple[dict[str, Any], str, Path]) -> None:
    result, said, run = trained
    assert result["steps"] == 6
    assert result["samples"] == 44
    assert result["workers"] == 4
    assert 0 < result["utilization"] <= 1
    assert result["samples_per_second"] > 0
    assert {Path(file).name for file in result["files"].values()} == FILES
    assert "epoch 2/2: mean loss" in said
    steps, epochs = metrics(run)
    assert result["loss"] == steps[-1]["loss"]
    assert result["test_loss"] == epochs[-1]["test_loss"]


def test_train_writes_a_line_a_step(trained: tuple[dict[str, Any], str, Path]) -> None:
    _, _, run = trained
    steps, epochs = metrics(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2, 2, 2]
    assert [line["samples"] for line in steps] == [9, 9, 4, 9, 9, 4]
    assert steps[1]["learning_rate"] == pytest.approx(0.09)
    assert steps[0]["samples_per_second"] == pytest.approx(9 / steps[0]["seconds"])
    assert [line["epoch"] for line in epochs] == [1, 2]
    mean = sum(line["loss"] * line["samples"] for line in steps[:3]) / 22
    assert epochs[0]["train_loss"] == pytest.approx(mean)


def test_trained_weights_load_into_the_plain_model(trained: tuple[dict[str, Any], str, Path], here: Path) -> None:
    recipe = polylane_recipe("tiny.py", {"width": "12"})
    model = recipe.model()
    model.load_state_dict(load_file(trained[2] / "model.safetensors"), strict=True)
    test = recipe.collate(list(recipe.data("test")))
    with torch.no_grad():
        assert float(recipe.loss(model, test)) == pytest.approx(trained[0]["test_loss"], rel=1e-5)


def polylane_recipe(path: str, settings: dict[str, str]) -> Any:
    from polylane.recipe import load

    return load(path, settings)


def test_the_timeline_is_of_a_late_full_step(trained: tuple[dict[str, Any], str, Path]) -> None:
    run = trained[2]
    timeline = Timeline.from_dict(json.loads((run / "timeline.json").read_text()))
    assert timeline.ranks == 4
    assert timeline.utilization() == trained[0]["utilization"]
    assert list(timeline.sent()) == trained[0]["sent_bytes"] and min(timeline.sent()) > 0
    assert int(timeline.notes["step"]) in (1, 2, 4, 5)
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert "<html" in (run / "swimlane.html").read_text()


def test_a_written_plan_is_a_plan_to_use(trained: tuple[dict[str, Any], str, Path], here: Path) -> None:
    file = trained[2] / "plan.yaml"
    plan = plans.load(file)
    assert plan.spec == trained[0]["plan"] == "data=2,pipeline=2,schedule=1f1b,microbatches=4"
    result = call("inspect", "tiny.py", "--set", "width=12", "--plan", file, "--json")
    assert [stage["first"] for stage in json.loads(result.stdout)["stages"]] == [
        stage.nodes[0] for stage in plan.stages
    ]
    other = call("train", "tiny.py", "--set", "width=12", "--set", "depth=2", "--plan", file)
    assert other.exit_code == 2
    assert f"plan {file} is for another model: it " in other.stderr
    fewer = call("train", "tiny.py", "--set", "width=12", "--workers", "2", "--plan", file)
    assert "--workers 2, but the plan takes 4" in fewer.stderr


def test_one_worker_trains_to_the_same_weights(trained: tuple[dict[str, Any], str, Path], folder: Path) -> None:
    line = "train tiny.py --set width=12 --epochs 2 --batch 9 --run run/one --plan microbatches=4"
    out, err = execute(folder, line)
    assert "final loss" in out
    assert "samples/s" in out
    assert "run/one/report.html" in out
    assert err == ""
    one, four = (load_file(run / "model.safetensors") for run in (folder / "run/one", trained[2]))
    for name, value in one.items():
        torch.testing.assert_close(value, four[name])


def test_steps_go_through_as_many_epochs_as_they_need(folder: Path) -> None:
    """And iterators are asked for anew, a missing test split is none, and the folder is one that was not there."""
    line = "train tiny.py --steps 4 --batch 8 --workers 2 --json"
    for fault, name in (("iterator", "tiny"), ("no test", "tiny-2")):
        result = json.loads(execute(folder, f"{line} --set 'fault={fault}'")[0])
        assert result["run"] == f"run/{name}"
        assert (result["steps"], result["samples"]) == (4, 8 + 8 + 6 + 8)
        steps, epochs = metrics(folder / "run" / name)
        assert [line["epoch"] for line in steps] == [1, 1, 1, 2]
        assert [line["epoch"] for line in epochs] == [1, 2]
        assert (result["test_loss"] is None) == (fault == "no test")


NORMED = """
import torch
from tiny import collate, data, loss, optimizer

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
"""


def test_a_last_batch_that_cannot_be_trained_on(folder: Path) -> None:
    """It is refused before the first step; not where it is dropped, nor where training ends before it comes."""
    (folder / "normed.py").write_text(NORMED)
    line = "train normed.py --set samples=17 --batch 8 --plan pipeline=2,microbatches=2 --run run/normed"
    for way in ("", "--steps 3", "--set fault=iterator --steps 3"):
        stream = "iterator" in way
        _, err = execute(folder, f"{line} {way}", code=2)
        known = "the last batch of an epoch (17 samples in batches of 8) has 1 sample, but 1/batch_norm"
        assert ("this batch has 1 sample" if stream else f"polylane: {known}") in err
        assert stream or "leave it out with --drop-last, or take another --batch" in err
        assert (folder / "run/normed").exists() == stream
    for way, steps, samples in (("--drop-last --epochs 2", 4, 32), ("--steps 2", 2, 16)):
        result = json.loads(execute(folder, f"{line} {way} --json")[0])
        assert (result["steps"], result["samples"]) == (steps, samples)
    short = execute(folder, "train normed.py --set samples=5 --batch 8 --drop-last --plan data=1", code=2)[1]
    assert "the dataset has 5 samples, no batch of 8, and a shorter one is to be dropped" in short


def test_a_batch_larger_than_the_data_is_remarked_on(folder: Path) -> None:
    _, told = execute(folder, "train tiny.py --steps 1 --batch 1000 --json")
    assert "--batch 1000: data('train') has 22 samples, so that an epoch is one batch of 22" in " ".join(told.split())
    _, told = execute(folder, "train tiny.py --steps 1 --batch 22 --json")
    assert "--batch" not in told


def test_on_nan_stop(folder: Path) -> None:
    line = "train tiny.py --set fault=nan --on-nan stop --batch 4 --workers 2 --epochs 9 --run run/nan"
    _, err = execute(folder, line, code=2)
    steps, epochs = metrics(folder / "run/nan")
    bad = next(line["step"] for line in steps if line["loss"] is None)
    assert f"polylane: the loss was nan at step {bad} (epoch 1): training stopped" in err
    assert len(steps) <= bad + 1
    assert epochs == []
    assert not (folder / "run/nan/model.safetensors").exists()


def test_a_worker_that_raises(folder: Path) -> None:
    _, err = execute(folder, "train tiny.py --set fault=worker --batch 8 --workers 2 --run run/raises", code=1)
    assert err.startswith("polylane: worker ")
    assert "no such device" in err
    assert err.count("Traceback") == 1


def test_a_sample_that_raises(folder: Path) -> None:
    _, err = execute(folder, "train tiny.py --set fault=sample --batch 8 --workers 2 --run run/sample", code=2)
    assert re.match(r"polylane: batch 3 of epoch 1: sample 21 of the dataset raised OSError: bad sector \(.*\)\n$", err)


def test_ctrl_c_ends_all_and_keeps_what_was_written(folder: Path) -> None:
    run = folder / "run/interrupted"
    process = start(folder, "train tiny.py --workers 2 --epochs 100000 --run run/interrupted")
    file = run / "metrics.jsonl"
    wait_for(lambda: file.exists() and file.read_text().count("\n") > 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    kept = "run/interrupted/ keeps what was written so far, no weights among it: no checkpoints were requested"
    assert err == f"polylane: interrupted: {kept}\n"
    wait_for(lambda: not alive(process.pid))
    assert len(metrics(run)[0]) >= 2
    plans.load(run / "plan.yaml")


def test_the_same_command_under_torchrun(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "polylane")
    line = "train tiny.py --plan pipeline=2,microbatches=4 --steps 3 --batch 9 --run run/torchrun --json"
    out, _ = execute(folder, line, program=torchrun)
    result = json.loads(out)
    assert (result["steps"], result["workers"]) == (3, 2)
    assert {file.name for file in (folder / "run/torchrun").iterdir()} == FILES
    again, _ = execute(folder, line.replace("torchrun", "forked"))
    assert json.loads(again)["loss"] == pytest.approx(result["loss"], rel=1e-5)


ACCELERATED = """
import multiprocessing.util
import sys
from polylane.cli import main
from polylane.runtime.workers import team
from tests.support.workers import forked_commands

if __name__ == "__main__":  # new processes import this file again
    team.choose_start_method = lambda: "spawn"
    multiprocessing.util.spawnv_passfds = forked_commands.spawn
    main(sys.argv[1:])
"""


def test_new_processes_where_there_are_accelerators(folder: Path) -> None:
    (folder / "accelerated.py").write_text(ACCELERATED)
    line = "train tiny.py --plan data=2,microbatches=2 --steps 3 --batch 9 --run run/spawned --json"
    result = json.loads(execute(folder, line, program=("accelerated.py",))[0])
    again = json.loads(execute(folder, line.replace("spawned", "as_forked"))[0])
    assert {file.name for file in (folder / "run/spawned").iterdir()} == FILES
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)


def test_train_writes_the_gradient_noise(folder: Path) -> None:
    line = "train tiny.py --workers 2 --plan data=2 --epochs 2 --batch 9"
    execute(folder, f"{line} --noise on --run run/noisy")
    steps, _ = metrics(folder / "run/noisy")
    assert [step["noise"]["parts"] for step in steps] == [2] * len(steps)
    assert all(
        {"g2", "s", "scale", "low", "high", "batches", "effective", "step_g2"} <= step["noise"].keys() for step in steps
    )
    execute(folder, f"{line} --noise off --run run/quiet")
    assert not any("noise" in step for step in metrics(folder / "run/quiet")[0])


def test_a_batch_that_follows_the_noise(folder: Path) -> None:
    """An epoch has every sample once, whatever its batches; a resumed run goes on with the batch of its checkpoint."""
    line = "train tiny.py --workers 2 --plan data=2 --batch auto:4:16 --set samples=240 --set lr=0.02 --run run/grown"
    execute(folder, f"{line} --epochs 2 --save-every 20")
    steps, _ = metrics(folder / "run/grown")
    assert [sum(step["samples"] for step in steps if step["epoch"] == epoch) for epoch in (1, 2)] == [240, 240]
    changes = [
        step["batch"] for step in map(json.loads, (folder / "run/grown/metrics.jsonl").open()) if "batch" in step
    ]
    sizes = {change["step"]: change["size"] for change in changes}
    assert changes and all(
        steps[step]["samples"] in (size, 240 - sum(s["samples"] for s in steps[:step]) % 240)
        for step, size in sizes.items()
    )
    for change in changes:
        rate = steps[change["step"]]["learning_rate"] / steps[0]["learning_rate"] / 0.9 ** change["step"]
        assert rate == pytest.approx(change["rate_factor"])
    execute(folder, f"{line} --epochs 3 --resume auto")
    resumed, _ = metrics(folder / "run/grown")
    assert sum(step["samples"] for step in resumed if step["epoch"] == 3) == 240
    largest = max([4, *sizes.values()])
    assert resumed[len(steps)]["samples"] == (changes[-1]["size"] if changes else 4) <= largest
