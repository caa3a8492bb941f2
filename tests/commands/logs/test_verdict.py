"""Verdicts: one line that says how fast a run was, what its workers did, and for whom they waited."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from polylane.commands.logs.verdict import advise_on_speed, describe_verdict
from polylane.commands.progress import NoLines
from polylane.commands.running.reporter import Reporter
from polylane.commands.running.run_folder import RunFolder

SHARES: dict[str, Any] = {"computing": 0.61, "bubble": 0.22, "waiting": 0.12, "moving": 0.05, "seconds": 0.1}


@pytest.mark.parametrize(
    ("changes", "workers", "alone", "line"),
    [
        (
            {"waiting_for": {3: 0.11, 1: 0.01}},
            4,
            0.29,
            "2.9 times the speed of one device, on 4 workers; "
            "61% computing, 22% bubble, 12% waiting for rank 3, 5% moving bytes",
        ),
        (
            {"waiting_for": {3: 0.07, 1: 0.05}},
            4,
            None,
            "61% computing, 22% bubble, 12% waiting, most for rank 3, 5% moving bytes",
        ),
        (
            {"waiting_for": {0: 0.06, 1: 0.06}, "loading": 0.5},
            2,
            0.06,
            "1.2 times the speed of one device, on 2 workers; "
            "30% computing, 50% waiting for data, 11% bubble, 6% waiting, 2% moving bytes",
        ),
        ({"waiting": 0.0, "moving": 0.0, "bubble": 0.0}, 1, 0.1, "61% computing"),
    ],
)
def test_a_verdict_in_words(changes: dict[str, Any], workers: int, alone: float | None, line: str) -> None:
    assert describe_verdict(SHARES | changes, workers, alone) == line


def test_without_an_observed_step_there_is_none() -> None:
    assert describe_verdict({}, 2, 0.1) == ""


def test_a_verdict_has_what_was_predicted_beside_what_was_measured() -> None:
    assert describe_verdict(SHARES, 2, 0.05, 0.025).startswith(
        "0.5 times the speed of one device, on 2 workers (100 ms a step, 25 ms predicted); 61% computing"
    )


@pytest.mark.parametrize(
    ("alone", "predicted", "said"),
    [
        (0.05, 0.025, ["a step takes 4 times what was predicted", "one worker is likely to be faster, with 50 ms"]),
        (0.05, 0.05, ["one worker is likely to be faster"]),
        (0.15, 0.08, []),
        (None, None, []),
    ],
)
def test_workers_that_are_slower_than_they_should_be_are_told_what_to_do(
    alone: float | None, predicted: float | None, said: list[str]
) -> None:
    sentences = advise_on_speed(SHARES, 2, alone, predicted)
    assert len(sentences) == len(said) and all(map(str.startswith, sentences, said))
    assert advise_on_speed(SHARES, 1, alone, predicted) == advise_on_speed({}, 2, alone, predicted) == []


@pytest.mark.parametrize(("seconds", "steps", "count"), [(0.5, 60, 2), (0.01, 60, 0), (4.0, 9, 0)])
def test_a_long_run_is_told_so_before_its_end(
    seconds: float, steps: int, count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Once: after EARLY_SECONDS of steps, of which the first is no measure."""
    place = RunFolder(tmp_path / "x")
    with place.claimed(True), Reporter(place, NoLines()) as reporter:
        reporter(0, {"kind": "predicted", "run": {"one_device_seconds": 0.003, "step_seconds": 0.002}})
        start = {"plan": "data: 2\n", "spec": "data=2", "workers": 2}
        reporter(0, {"kind": "begin", **start, "resumed_at": None, "resumed_loss": math.nan, "resumed_own": False})
        for step in range(1, steps + 1):
            reporter(0, {"kind": "step", "step": step, "loss": 1.0, "seconds": 90.0 if step == 1 else seconds})
    said = capfd.readouterr().err.splitlines()
    assert len(said) == count, said
    if count:
        assert said[0].startswith("polylane: a step takes 250 times what was predicted") and "one worker is" in said[1]


def test_a_slow_worker_is_told_of_once_before_the_end_and_kept(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    place, slow = RunFolder(tmp_path / "x"), {"sentence": "host-b computes at 0.50 times the speed", "gain": 1.5}
    with place.claimed(True), Reporter(place, NoLines()) as reporter:
        start = {"plan": "data: 2\n", "spec": "data=2", "workers": 2}
        reporter(0, {"kind": "begin", **start, "resumed_at": None, "resumed_loss": math.nan, "resumed_own": False})
        for step in (1, 2):
            shares = {"computing": 0.5, "slow": slow}
            reporter(0, {"kind": "time", "step": step, "phases": {}, "first_step": 0.0, "shares": shares})
        (kept,) = (json.loads(path.read_text())["slow"] for path in tmp_path.rglob("goodput.json"))
    assert kept == slow and capfd.readouterr().err.count(slow["sentence"]) == 1
    assert advise_on_speed(SHARES | {"slow": slow}, 2, None, None) == [slow["sentence"]]
