"""Seconds that calls take, of the device they run on, without what looking at the clock takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Call = Callable[[], Any]
Watch = Callable[[Call], tuple[float, Any]]

RUNS = 51
# Cycles for which a GPU is kept waiting while the host issues what is to be timed: about half a millisecond.
_AHEAD = 1_000_000


def time_on_cpu(call: Call) -> tuple[float, Any]:
    """Seconds in which this thread computed, and what the call gives; while others have the core, no time goes by."""
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def time_on_cuda(call: Call) -> tuple[float, Any]:
    """Seconds between two events of the current stream, with the host ahead, and what the call gives."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


def stopwatch(device: torch.device) -> Watch:
    """The clock of a device."""
    return time_on_cuda if device.type == "cuda" else time_on_cpu


def median_seconds(call: Call, watch: Watch, runs: int = RUNS) -> float:
    """The median of so many runs, after one that does not count."""
    watch(call)
    return statistics.median(watch(call)[0] for _ in range(runs))


def lower_quartile(times: Sequence[float]) -> float:
    """The lower quartile: what else goes on in a machine only makes things slower."""
    return sorted(times)[len(times) // 4]


def synchronizer_of(device: torch.device) -> Callable[[], Any]:
    """What to call before the wall's clock is read: accelerators compute on their own."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None


def run_small_operators(device: torch.device) -> None:
    """A few operators, as a pass has them between two messages: less than a millisecond on a CPU."""
    own = torch.ones(64, 64, device=device)
    for _ in range(20):
        own @ own


def warm_up(device: torch.device, seconds: float) -> None:
    """Compute for a while, so that clocks and caches are as in the middle of a training."""
    own, wait = torch.ones(64, 64, device=device), synchronizer_of(device)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for _ in range(20):
            own @ own
        wait()


class FixedOverhead:
    """What a measurement holds that an operator in the middle of a pass does not: looking at the clock, and on the CPU
    the start of a backward pass, which a whole pass makes but once.

    Attributes:
        clock_seconds: seconds of a forward pass that does nothing.
        autograd_seconds: seconds of a backward pass through no operators.
    """

    LONG = 40  # operators of the longer of two chains, whose difference is that of the operators

    def __init__(self, device: torch.device) -> None:
        watch = stopwatch(device)
        self.clock_seconds = median_seconds(lambda: None, watch)
        first, long = (_chain_backward_seconds(length, device, watch) for length in (1, 1 + self.LONG))
        self.autograd_seconds = max(0.0, first - (long - first) / self.LONG)


def _chain_backward_seconds(length: int, device: torch.device, watch: Watch) -> float:
    """Seconds of the backward pass through so many operators that do next to nothing."""
    x = torch.ones(8, device=device, requires_grad=True)
    seed, times = torch.ones(8, device=device), []
    for _ in range(RUNS):
        y = x
        for _ in range(length):
            y = torch.ops.aten.neg.default(y)
        times.append(watch(lambda y=y: torch.autograd.grad([y], [x], [seed]))[0])  # type: ignore[misc]
    return statistics.median(times[1:])


def measure_dispatch(device: torch.device) -> float:
    """Seconds of the host for each operator that it issues to a GPU, which is busy with something else meanwhile."""
    x, found = torch.ones(8, device=device, requires_grad=True), list[float]()
    for _ in range(RUNS // 5):
        torch.cuda._sleep(20 * _AHEAD)
        start = time.perf_counter()
        y: Tensor = x
        for _ in range(100):
            y = torch.ops.aten.neg.default(y)
        torch.autograd.grad([y], [x], [torch.ones_like(y)])
        found.append((time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
    return statistics.median(found)
