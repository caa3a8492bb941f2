"""polylane train with callbacks: early stopping, an end at a value, the best checkpoints, and those of a recipe."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from polylane.checkpoint.commit import list_steps
from polylane.checkpoint.store import open_checkpoint
from tests.support.recipes.binary import BINARY
from tests.support.workers import forked_commands

RECIPE = (
    BINARY
    + """
class Notes(polylane.Callback):
    def __init__(self, stop_after):
        self.stop_after, self.steps, self.tests = stop_after, 0, 0

    def on_train_start(self, status):
        print(f"start {status.workers} {self.tests}", flush=True)

    def on_step_end(self, status, step):
        self.steps += 1
        assert step["loss"] > 0 and step["step"] <= status.step

    def on_evaluate_end(self, status, results):
        self.tests += 1
        if status.rank == status.workers - 1 and self.tests == self.stop_after:
            status.stop("the last worker has seen enough")

    def on_train_end(self, status):
        print(f"end {status.step} {self.steps} {self.tests}", flush=True)

    def state_dict(self):
        return {"tests": self.tests}

    def load_state_dict(self, state):
        self.tests = state["tests"]


def metrics(model, batch):
    return {"accuracy": (model(batch[0]).flatten() > 0) == (batch[1] > 0.5)}


def callbacks(stop_after=0):
    return [Notes(stop_after)]
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "binary.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(options: str, workers: int = 2) -> subprocess.CompletedProcess[str]:
    command = f"train binary.py --workers {workers} --batch 8 --run run {options}"
    return forked_commands.run([sys.executable, "-m", "polylane", *command.split()])


def epochs(folder: Path) -> list[dict[str, Any]]:
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if "train_loss" in row]


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_one_worker_of_a_recipe_ends_the_training(folder: Path, plan: str) -> None:
    done = train(f"--plan {plan} --epochs 9 --set stop_after=3")
    assert done.returncode == 0, done.stderr
    assert "ended early: the last worker has seen enough" in done.stdout
    assert len(epochs(folder)) == 3
    assert done.stdout.count("start 2 0") == 2 and done.stdout.count("end 15 15 3") == 2
    assert (folder / "run/model.safetensors").exists()


def test_a_training_ends_at_a_value(folder: Path) -> None:
    done = train("--plan data=2 --epochs 40 --stop-at accuracy:0.9 --json")
    assert done.returncode == 0, done.stderr
    values = [row["metrics"]["accuracy"] for row in epochs(folder)]
    assert values[-1] >= 0.9 > max(values[:-1]) and len(values) < 40
    assert "accuracy is" in json.loads(done.stdout.splitlines()[-1])["stop_reason"]


def test_a_training_ends_where_nothing_becomes_better(folder: Path) -> None:
    # A result that is constant from its first test on: the learning rate is 0.
    done = train("--plan data=2 --epochs 9 --early-stop test_loss:2 --set lr=0")
    assert done.returncode == 0, done.stderr
    assert len(epochs(folder)) == 3
    assert "ended early: test_loss has not become better for 2 tests: the best was" in done.stdout


def test_the_best_checkpoints_are_kept_and_can_be_resumed(folder: Path) -> None:
    done = train("--plan data=2 --epochs 6 --keep-best test_loss:min:2 --save-every 7")
    assert done.returncode == 0, done.stderr
    losses = [row["test_loss"] for row in epochs(folder)]
    order = sorted(range(6), key=lambda i: losses[i])[:2]
    steps = list_steps(str(folder / "run/best"))
    assert {step for step, _ in steps} == {5 * (i + 1) for i in order}
    assert list_steps(str(folder / "run/checkpoints"))[-1][0] == 30  # of the last step, whatever the best are
    run = open_checkpoint(folder / "run/checkpoints")[1].run
    assert [step for step, _ in run["callbacks"]["best"]["steps"]] == [5 * (i + 1) for i in order]
    assert run["callbacks"]["callbacks"][0] == ["Notes", {"tests": 6}]

    resumed = train(f"--plan pipeline=2 --epochs 8 --resume {steps[0][1]} --run other")
    assert resumed.returncode == 0, resumed.stderr
    assert f"start 2 {steps[0][0] // 5}" in resumed.stdout

    again = train("--plan data=2 --epochs 1 --keep-best test_loss")
    assert again.returncode == 2 and "best/ has checkpoints of an earlier run" in again.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--early-stop accurcy:3", "there is no result 'accurcy'; known are train_loss, test_loss, accuracy"),
        ("--early-stop accuracy", "give NAME[:max|min]:NUMBER"),
        ("--keep-best accuracy:max:0.5", "must be a whole number"),
        ("--stop-at :1", "give NAME[:max|min]:NUMBER"),
    ],
)
def test_wrong_rules_are_refused_before_the_first_step(folder: Path, options: str, words: str) -> None:
    done = train(f"--plan data=2 {options}")
    assert done.returncode == 2 and words in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
