"""Runs that end badly: what ends a run is one sentence, which `polylane why` and the run's page say as well."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from polylane.commands.logs.file_names import TIMELINE
from polylane.commands.reporting.page_data import describe_state
from polylane.commands.reporting.page_verdict import find_verdict
from polylane.commands.reporting.run_files import read_run
from polylane.commands.running.run_folder import RunFolder
from polylane.commands.why import read_report
from polylane.errors import PolylaneError
from tests.support.workers import forked_commands

RECIPE = """
import torch

import polylane


class Escape(BaseException):
    pass


class Fails(polylane.Callback):
    def __init__(self, kind):
        self.kind = kind

    def on_evaluate_end(self, status, results):
        raise self.kind("of the callback")


class Raises(torch.optim.SGD):
    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps == 20:
            raise ArithmeticError("of the optimizer")
        return super().step(closure)


def callbacks(fault=""):
    kinds = {"callback": ValueError, "escape": Escape}
    return [Fails(kinds[fault])] if fault in kinds else []


def model():
    return torch.nn.Linear(4, 1)


def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()


def optimizer(parameters, fault=""):
    return (Raises if fault == "optimizer" else torch.optim.SGD)([p for _, p in parameters], lr=0.01)


def metrics(model, batch):
    return {"unknown": batch[1] * float("nan")}


def data(split, fault=""):
    x = torch.arange(64.0).reshape(16, 4) / 64
    if fault == "nan" and split == "train":
        x[9] = float("nan")
    return list(zip(x, x[:, :1]))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "line.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def polylane(line: str) -> subprocess.CompletedProcess[str]:
    return forked_commands.run([sys.executable, "-m", "polylane", *line.split()])


def train(options: str) -> subprocess.CompletedProcess[str]:
    return polylane(f"train line.py --plan data=2 --batch 4 --audit off --noise off --run run {options}")


ENDS = {
    "--epochs 2 --set fault=callback": (
        2,
        r"Fails.on_evaluate_end raised ValueError: of the callback \(.*:16\)",
    ),
    "--epochs 2 --set fault=nan": (2, "the loss was nan at step"),
    "--epochs 2 --set fault=nan --on-nan warn": (2, "the weights were not saved after 8 steps: weight holds NaN"),
    "--epochs 6 --set fault=optimizer": (2, "optimizer.step\\(\\) raised ArithmeticError: of the optimizer"),
    "--epochs 2 --set fault=escape": (1, "worker [01] failed: Escape: of the callback"),
}


@pytest.mark.parametrize("options", ENDS)
def test_what_ended_a_run_is_told_afterwards(folder: Path, options: str) -> None:
    code, words = ENDS[options]
    done = train(options)
    assert done.returncode == code, done.stderr
    run = read_run(folder / "run")
    assert describe_state(run) == "failed" and find_verdict(run) == run.failure
    why = polylane("why run")
    assert why.returncode == 0, why.stderr
    assert re.search(words, run.failure), run.failure
    assert why.stdout.splitlines()[0].endswith(f": {run.failure}")
    if code == 2:  # the sentence itself
        assert done.stderr.splitlines()[-1] == f"polylane: {run.failure}"
    picture = polylane("why run --svg why.svg")
    assert picture.returncode == 0 or "has no picture of its end" in picture.stderr


def test_a_run_that_ended_well_has_no_report(folder: Path) -> None:
    """Also where the attempt before it did not."""
    assert train("--epochs 1 --set fault=callback").returncode == 2
    assert train("--epochs 1").returncode == 0
    why = polylane("why run")
    assert (why.returncode, why.stderr) == (2, "polylane: run has no report: none of its workers hung or failed\n")


def test_of_a_run_without_a_report_it_is_told_how_it_is(tmp_path: Path) -> None:
    place, said = RunFolder(tmp_path / "x"), list[str]()
    with pytest.raises(KeyboardInterrupt), place.claimed(True):
        place.begin()
        place.plan("data: 2\n", {"steps": 3})
        place.metric({"step": 1})
        with pytest.raises(PolylaneError) as refused:
            read_report(tmp_path / "x")
        said.append(str(refused.value))
        raise KeyboardInterrupt
    with pytest.raises(PolylaneError) as refused:
        read_report(tmp_path / "x")
    said.append(str(refused.value))
    assert "it is running, and none of its workers has hung or failed" in said[0]
    assert "it was ended before its training was done, by a signal" in said[1]
    (tmp_path / "x" / TIMELINE).write_text("{}")  # as of a run that has ended well
    with pytest.raises(PolylaneError, match="has no report: none of its workers hung or failed"):
        read_report(tmp_path / "x")


def test_a_result_that_is_never_a_number(folder: Path) -> None:
    """It is said once, and at the end that nothing was kept; a training that waits for a better one ends for that."""
    done = train("--epochs 3 --keep-best unknown:min:3")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == [
        "polylane: --keep-best unknown:min:3: unknown is NaN after epoch 1: it cannot be compared",
        "polylane: --keep-best unknown:min:3: unknown was NaN in every test, and no checkpoint was kept",
    ]
    done = train("--epochs 9 --early-stop unknown:2 --stop-at unknown:1 --json")
    assert done.returncode == 0, done.stderr
    reason = json.loads(done.stdout.splitlines()[-1])["stop_reason"]
    assert reason == "unknown was NaN in 2 tests, which is no better than any value"
    assert done.stderr.count("it cannot be compared") == 2 == done.stderr.count("was NaN in every test\n")
