"""What other programs take of a machine while something is measured is told apart, and the measurement repeated."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polylane.profiling import machine_load
from polylane.profiling.machine_load import LoadWatch, MachineLoad, measure_undisturbed

QUIET, BUSY, BUSIER = MachineLoad(0.0, 2), MachineLoad(0.9, 2), MachineLoad(1.4, 2)


def compute(seconds: float) -> None:
    """Use a core for so many CPU seconds."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        sum(range(1000))


@pytest.fixture(autouse=True)
def _bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the library, in place of the tests'."""
    monkeypatch.setattr(machine_load, "FOREIGN", 0.1)
    monkeypatch.setattr(machine_load, "SLOWER", 1.25)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """The seconds of the whole machine as this one's processes use them, and what a test adds to them."""
    added = {"busy": 0.0}

    def busy_seconds(_: object) -> float:
        return sum(map(machine_load._process_seconds, machine_load._own_processes())) + added["busy"]

    monkeypatch.setattr(machine_load, "_busy_seconds", busy_seconds)
    yield added


def test_what_this_process_and_those_that_it_starts_compute_is_not_foreign(machine: dict[str, float]) -> None:
    before, watch = sum(map(machine_load._process_seconds, machine_load._own_processes())), LoadWatch()
    child = multiprocessing.get_context("fork").Process(target=compute, args=(0.3,))
    child.start()
    compute(0.2)
    child.join()
    load = watch.read()
    assert sum(map(machine_load._process_seconds, machine_load._own_processes())) - before >= 0.45, "both count"
    assert load.foreign_cores == pytest.approx(0.0, abs=0.05)


def test_what_others_compute_is_counted_in_cores(machine: dict[str, float]) -> None:
    watch, start = LoadWatch(), time.monotonic()
    time.sleep(0.3)
    machine["busy"] += 0.6 * (time.monotonic() - start)
    load = watch.read()
    assert load.foreign_cores == pytest.approx(0.6, rel=0.2)
    assert MachineLoad(load.foreign_cores, 2).is_disturbing and not MachineLoad(load.foreign_cores, 32).is_disturbing


def test_seconds_of_the_cores_that_a_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Idle time and waiting for disks are not busy; what the host of a guest takes for others ("steal") is."""
    lines = ["cpu  9 9 9 9 9 9 9 9 9 9", "cpu0 100 10 50 9999 8888 1 2 37 70 7", "cpu1 5 5 5 5 5 5 5 5 0 0", "intr 1"]
    (tmp_path / "stat").write_text("\n".join(lines))
    monkeypatch.setattr(machine_load, "Path", lambda _: tmp_path / "stat")
    monkeypatch.setattr(machine_load, "_ticks_per_second", 100)
    assert machine_load._busy_seconds({0}) == 2.0
    assert machine_load._busy_seconds({1}) == 0.3 and machine_load._busy_seconds({0, 1}) == 2.3


@pytest.mark.parametrize(
    ("loads", "kept"), [([QUIET], 0), ([BUSY, QUIET], 1), ([BUSY, BUSIER], 0), ([BUSIER, BUSY], 1)]
)
def test_a_disturbed_measurement_is_repeated_and_the_least_disturbed_one_kept(
    monkeypatch: pytest.MonkeyPatch, loads: list[MachineLoad], kept: int
) -> None:
    remaining, numbers = iter(loads), iter(range(9))
    monkeypatch.setattr(LoadWatch, "read", lambda _: next(remaining))
    assert measure_undisturbed(lambda _: next(numbers)) == (kept, loads[kept])
    assert next(remaining, None) is None, "all of them were measured, and no more"


def test_a_loop_that_slows_down_disturbs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_load, "_busy_seconds", lambda _: 0.0)
    seconds = iter([0.010, 0.012, 0.011, 0.016])
    monkeypatch.setattr(machine_load, "_time_loop", lambda: next(seconds))
    watch = LoadWatch()
    watch.time_loop()
    assert not (calm := watch.read()).is_disturbing and calm.slowdown == pytest.approx(1.2)
    assert (slow := watch.read()).is_disturbing and str(slow).endswith("up to 1.6 times as long")
