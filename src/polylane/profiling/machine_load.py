"""Machine load: what other programs take of a host while something is measured on it, and measuring again for it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch

from polylane.parent_death import read_status

Measured = TypeVar("Measured")

# A measurement is disturbed where other programs take more than this share of the cores, or where a fixed loop of
# computations takes so many times its fastest run in the middle of it.
FOREIGN, SLOWER = 0.1, 1.25
ATTEMPTS = 2  # measurements at most, where the first is disturbed
SO_WHAT = "predictions may be too slow, and for some plans more than for others"
# The loop: products of matrices that a core's cache holds, and sums of a vector that it does not.
_SIDE, _LENGTH, _RUNS = 128, 1 << 20, 5
_ticks_per_second = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class MachineLoad:
    """What disturbed a measurement.

    Attributes:
        foreign_cores: cores that other programs, or other guests of the machine, kept busy on average.
        cores: cores that this process may use.
        slowdown: the slowest time of a fixed loop of computations over its fastest one.
    """

    foreign_cores: float = 0.0
    cores: int = 1
    slowdown: float = 1.0

    @property
    def is_disturbing(self) -> bool:
        """Whether figures that were measured meanwhile are likely to be too slow."""
        return self.foreign_cores > FOREIGN * self.cores or self.slowdown > SLOWER

    def __str__(self) -> str:
        if self.foreign_cores > FOREIGN * self.cores:
            return f"other programs kept {self.foreign_cores:.1f} of {self.cores} cores busy"
        if self.slowdown > SLOWER:
            return f"one and the same computation took up to {self.slowdown:.1f} times as long"
        return "nothing else kept the machine busy"


class LoadWatch:
    """Watches a host from its creation on, for :meth:`read`. Without /proc only the loop is timed."""

    def __init__(self) -> None:
        self._cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else {0}
        self._loop_seconds = list[float]()
        self.time_loop()
        self._begin = self._read_seconds()

    def time_loop(self) -> None:
        """Time the fixed loop once more, on this thread: a few milliseconds, between parts of a measurement."""
        self._loop_seconds.append(_time_loop())

    def read(self) -> MachineLoad:
        """Return the load of the machine since this watch began."""
        readings = zip(self._begin, self._read_seconds(), strict=True)
        seconds, machine_seconds, process_seconds = (end - begin for begin, end in readings)
        self.time_loop()
        foreign_cores = max(0.0, machine_seconds - process_seconds) / max(seconds, 1e-9)
        return MachineLoad(foreign_cores, len(self._cores), max(self._loop_seconds) / min(self._loop_seconds))

    def _read_seconds(self) -> tuple[float, float, float]:
        """Return the time, and the CPU seconds that all programs and this one's processes have used so far."""
        return time.monotonic(), _busy_seconds(self._cores), sum(map(_process_seconds, _own_processes()))


def measure_undisturbed(measure: Callable[[LoadWatch], Measured]) -> tuple[Measured, MachineLoad]:
    """Measure, and measure again if other programs disturbed it; return what was disturbed least, with its load.

    Args:
        measure: measures once; it may time the loop of the watch between its parts.
    """
    attempts = list[tuple[Measured, MachineLoad]]()
    while len(attempts) < ATTEMPTS and (not attempts or attempts[-1][1].is_disturbing):
        watch = LoadWatch()
        measured = measure(watch)
        attempts.append((measured, watch.read()))
    return min(attempts, key=lambda attempt: (attempt[1].is_disturbing, attempt[1].foreign_cores, attempt[1].slowdown))


def _time_loop() -> float:
    matrix, vector = torch.ones(_SIDE, _SIDE), torch.ones(_LENGTH)
    times = list[float]()
    for _ in range(_RUNS):
        start = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        vector.sum()
        times.append(time.perf_counter() - start)
    return min(times)


def _busy_seconds(cores: Iterable[int]) -> float:
    """Return the CPU seconds that some cores have spent on anything since the machine started; 0 without /proc."""
    try:
        lines = Path("/proc/stat").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0.0
    ticks = {fields[0]: list(map(int, fields[1:9])) for line in lines if (fields := line.split())[0].startswith("cpu")}
    # user, nice, system, idle, iowait, irq, softirq, steal: all but idle and iowait, so that what the host of a
    # virtual machine gives to others counts.
    return sum(sum(ticks.get(f"cpu{core}", [0] * 8)) - sum(ticks.get(f"cpu{core}", [0] * 8)[3:5]) for core in cores) / (
        _ticks_per_second
    )


def _own_processes() -> list[int]:
    """Return this process and its descendants."""
    parents = dict[int, int]()
    for entry in Path("/proc").glob("[0-9]*") if Path("/proc/stat").exists() else ():
        if fields := read_status(int(entry.name)):
            parents[int(entry.name)] = int(fields[1])
    family = {os.getpid()}
    while children := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= children
    return sorted(family)


def _process_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of those of its children that it has waited for."""
    fields = read_status(pid)
    return sum(map(int, fields[11:15])) / _ticks_per_second if fields else 0.0
