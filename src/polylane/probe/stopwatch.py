"""Stopwatch: seconds of calls on their device, and the fixed overhead of measuring them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.profiling.time_operators import wait_for

Call = Callable[[], Any]
Watch = Callable[[Call], tuple[float, Any]]

RUNS = 51  # odd, so that the median is one of them
# GPU cycles for which the stream sleeps while the host issues the timed call: about half a millisecond.
_AHEAD = 1_000_000


def time_on_cpu(call: Call) -> tuple[float, Any]:
    """Return the CPU seconds of this thread in a call, and its result; time without a core does not count."""
    start = time.thread_time()
    result = call()
    return time.thread_time() - start, result


def time_on_cuda(call: Call) -> tuple[float, Any]:
    """Return the seconds between two events around a call on the current stream, and its result.

    The stream sleeps first, so that the host has issued everything before the first event.
    """
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_AHEAD)
    begin.record()
    result = call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3, result


def stopwatch(device: torch.device) -> Watch:
    """Return the stopwatch of a device."""
    return time_on_cuda if device.type == "cuda" else time_on_cpu


def median_seconds(call: Call, watch: Watch, runs: int = RUNS) -> float:
    """Return the median seconds of ``runs`` calls, after one to warm up."""
    watch(call)
    return statistics.median(watch(call)[0] for _ in range(runs))


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile, robust since disturbances of a machine only make runs slower."""
    return sorted(times)[len(times) // 4]


def run_small_operators(device: torch.device) -> None:
    """Run a few small operators, as a pass does between two messages: less than a millisecond on a CPU."""
    matrix = torch.ones(64, 64, device=device)
    for _ in range(20):
        matrix @ matrix


def warm_up(device: torch.device, seconds: float) -> None:
    """Compute for some seconds, so that clock rates and caches are as in the middle of a training."""
    end, wait = time.perf_counter() + seconds, wait_for(device)
    while time.perf_counter() < end:
        run_small_operators(device)
        wait()


class FixedOverhead:
    """Fixed overhead of a measurement, which an operator in the middle of a pass does not have.

    It is that of reading the clock, and on the CPU of starting a backward pass, which a whole pass does only once.

    Attributes:
        clock_seconds: seconds measured for an empty call.
        autograd_seconds: seconds of a backward pass without operators.
    """

    LONG = 40  # further operators of the longer of two chains

    def __init__(self, device: torch.device) -> None:
        watch = stopwatch(device)
        self.clock_seconds = median_seconds(lambda: None, watch)
        # Extrapolated to a chain without operators: the difference of the chains is the time of LONG
        # operators.
        short, long = (_chain_backward_seconds(length, device, watch) for length in (1, 1 + self.LONG))
        self.autograd_seconds = max(0.0, short - (long - short) / self.LONG)


def _chain_backward_seconds(length: int, device: torch.device, watch: Watch) -> float:
    """Return the median seconds of the backward pass through ``length`` tiny operators."""
    x = torch.ones(8, device=device, requires_grad=True)
    seed, times = torch.ones(8, device=device), []
    for _ in range(RUNS):
        y = x
        for _ in range(length):
            y = torch.ops.aten.neg.default(y)
        times.append(watch(lambda y=y: torch.autograd.grad([y], [x], [seed]))[0])  # type: ignore[misc]
    return statistics.median(times[1:])


def measure_dispatch(device: torch.device) -> float:
    """Return the seconds of the host per operator issued to a GPU that is kept busy meanwhile."""
    x, times = torch.ones(8, device=device, requires_grad=True), list[float]()
    for _ in range(RUNS // 5):
        torch.cuda._sleep(20 * _AHEAD)
        start = time.perf_counter()
        y: Tensor = x
        for _ in range(100):
            y = torch.ops.aten.neg.default(y)
        torch.autograd.grad([y], [x], [torch.ones_like(y)])
        times.append((time.perf_counter() - start) / 200)
        torch.cuda.synchronize()
    return statistics.median(times)
