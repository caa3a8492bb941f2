"""Goodput in time: what a run's time went to adds up to its wall time, over all of its attempts."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from polylane.commands.logs import goodput
from polylane.commands.logs.goodput import GoodputLedger, PhaseClock, describe_goodput, find_process_start
from polylane.diagnosis.page_layout import Phase


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A wall clock that a test moves."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(goodput.time, "time", lambda: clock.now)
    return clock


SHARES = {"computing": 0.5, "waiting": 0.2, "bubble": 0.2, "loading": 0.3}


def attempt(ledger: GoodputLedger, clock: SimpleNamespace, start: float, step: int, resumed_at: int | None) -> None:
    """Make an attempt: ``start`` seconds until its first step, 2 of that step, 40 of later ones, 8 of loading."""
    earlier = None
    clock.now += start
    ledger.begin("data=2", 2, resumed_at, earlier)
    clock.now += 51
    ledger.update(step, {"training": 42.0, "loading": 8.0}, 2.0, SHARES)


def test_causes_add_up_to_the_wall_time(clock: SimpleNamespace) -> None:
    ledger = GoodputLedger(began=995.0)
    attempt(ledger, clock, 5.0, step=20, resumed_at=None)
    record = ledger.to_dict()
    assert record["wall_seconds"] == pytest.approx(61.0)
    assert sum(record["seconds"].values()) == pytest.approx(61.0, rel=1e-12)
    assert record["seconds"]["computing"] == pytest.approx(20.0) and record["seconds"]["overhead"] == pytest.approx(4.0)
    assert record["seconds"]["first step"] == 2.0 and record["seconds"]["start"] == 10.0
    assert record["share"] == pytest.approx(20 / 61)
    assert describe_goodput(record).startswith("goodput 33% of 61 s; lost to: 16% start, 13% ")


def test_an_attempt_that_failed_costs_its_steps_that_are_made_again_and_the_restart(clock: SimpleNamespace) -> None:
    ledger = GoodputLedger(began=1000.0)
    attempt(ledger, clock, 5.0, step=20, resumed_at=None)
    attempt(ledger, clock, 7.0, step=35, resumed_at=15)  # a worker died, and others were started
    record = ledger.to_dict()
    assert sum(record["seconds"].values()) == pytest.approx(record["wall_seconds"], rel=1e-12) == pytest.approx(114.0)
    assert record["attempts"][0]["redone_steps"] == 5
    # A quarter of the first attempt's steps: its first one and what overhead they had are lost as well.
    assert record["seconds"]["redone steps"] == pytest.approx(0.25 * 42.0)
    assert record["seconds"]["computing"] == pytest.approx(0.75 * 20 + 20)
    assert record["seconds"]["start"] == pytest.approx(12.0)


def test_steps_that_are_told_of_alone_count_as_those_before(clock: SimpleNamespace) -> None:
    ledger = GoodputLedger(began=1000.0)
    attempt(ledger, clock, 5.0, step=20, resumed_at=None)
    before = dict(ledger.to_dict()["seconds"])
    for step in range(21, 31):
        clock.now += 1.0
        ledger.note_step(step)
    record = ledger.to_dict()
    assert record["attempts"][0]["last_step"] == 30 and record["wall_seconds"] == pytest.approx(66.0)
    assert sum(record["seconds"].values()) == pytest.approx(66.0, rel=1e-12)
    steady = before["computing"] / (51 - 2.0)  # of the time since the first step
    assert record["seconds"]["computing"] == pytest.approx(before["computing"] + 10 * steady)
    clock.now += 1.0
    ledger.update(31, {"training": 52.0, "loading": 8.0}, 2.0, SHARES)
    assert sum(ledger.to_dict()["seconds"].values()) == pytest.approx(67.0, rel=1e-12)


def test_a_run_that_is_resumed_later_remembers_what_was_before(clock: SimpleNamespace) -> None:
    first = GoodputLedger(began=1000.0)
    attempt(first, clock, 5.0, step=20, resumed_at=None)
    before = first.to_dict()
    clock.now += 600  # the machine was somebody else's
    again = GoodputLedger(began=clock.now)
    clock.now += 4
    again.begin("data=3", 3, 20, before)
    clock.now += 20
    again.update(30, {"training": 20.0}, 1.0, SHARES)
    record = again.to_dict()
    assert [attempt["plan"] for attempt in record["attempts"]] == ["data=2", "data=3"]
    assert record["seconds"]["stopped"] == pytest.approx(600.0)
    assert sum(record["seconds"].values()) == pytest.approx(record["wall_seconds"], rel=1e-12) == pytest.approx(680.0)
    fresh = GoodputLedger(began=clock.now)
    fresh.begin("data=2", 2, None, before)
    assert len(fresh.to_dict()["attempts"]) == 1  # it begins anew: the run before it is another one


@pytest.mark.parametrize("earlier", [{}, {"attempts": None}, {"attempts": [{"began": 1.0}]}, {"attempts": [3]}])
def test_a_file_of_anything_says_nothing_of_earlier_attempts(clock: SimpleNamespace, earlier: dict[str, Any]) -> None:
    ledger = GoodputLedger(began=clock.now)
    ledger.begin("data=2", 2, 20, earlier)
    assert len(ledger.to_dict()["attempts"]) == 1 and describe_goodput(ledger.to_dict()).startswith("goodput 0%")


def test_the_clock_tells_of_phases_since_the_first_step_began() -> None:
    seconds = dict.fromkeys(Phase, 3.0)
    progress: Any = SimpleNamespace(phase_seconds=lambda phase: seconds[phase])
    messages = list[dict[str, Any]]()
    clock = PhaseClock(progress, messages.append, dict)
    seconds[Phase.TRAINING] += 1.5
    clock.note_step(1)
    seconds[Phase.TRAINING] += 4.0
    seconds[Phase.SAVING] += 0.5
    clock.note_step(2)  # too early for another message
    clock.tell(2)
    assert [message["step"] for message in messages] == [1, 2]
    assert messages[-1]["first_step"] == 1.5 and messages[-1]["phases"]["training"] == 5.5
    assert messages[-1]["phases"]["checkpoint"] == 0.5 and messages[-1]["phases"]["start"] == 0


def test_this_process_began_before_now() -> None:
    assert 0 < time.time() - find_process_start() < 24 * 3600
