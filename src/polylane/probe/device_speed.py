"""Device speed: time every case of the sweep, forward and backward, and the memory bandwidth."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.cost.operators.operation import Operation
from polylane.probe.cases import WEIGHT, CaseTensor, OperatorCase
from polylane.probe.stopwatch import FixedOverhead, lower_quartile, median_seconds, stopwatch

FEWEST, MOST = 2, 20  # timed runs of a case in a round
LEAST = 0.2  # of a time remains at least after subtracting the fixed overhead, which is itself measured with noise


@dataclass(frozen=True)
class TimedCase:
    """A case with its measured seconds.

    Attributes:
        name, family: readable name and family of the case.
        operation: demand of the operator, for the device model.
        dtype: dtype of its floating-point tensors ("float32").
        forward, backward: seconds of the two passes, without fixed overhead.
    """

    name: str
    family: str
    operation: Operation
    dtype: str
    forward: float
    backward: float


def time_cases(
    cases: Sequence[OperatorCase],
    dtype: str,
    device: torch.device,
    budget: float,
    rounds: int,
    tick: Callable[[], Any] = lambda: None,
) -> list[TimedCase]:
    """Time cases in rounds, so that a temporary disturbance of the machine does not hit one case alone.

    The lower quartile of all runs of a case counts, since disturbances only make runs slower.

    Args:
        cases: operators to time, each in every round.
        dtype: dtype of the floating-point tensors ("float32").
        device: device on which all tensors are.
        budget: seconds for each case in each round.
        rounds: number of passes over all cases.
        tick: progress callback, called after each case of each round.
    """
    fixed, case_runs = FixedOverhead(device), [list[tuple[float, float]]() for _ in cases]
    for _ in range(rounds):
        for runs, case in zip(case_runs, cases, strict=True):
            runs += _time_runs(case, dtype, device, budget)
            tick()
    return [_summarize_runs(case, dtype, runs, fixed) for case, runs in zip(cases, case_runs, strict=True)]


def _summarize_runs(
    case: OperatorCase, dtype: str, runs: Sequence[tuple[float, float]], fixed: FixedOverhead
) -> TimedCase:
    forward, backward = (lower_quartile(times) for times in zip(*runs, strict=True))
    seconds = (
        max(total - off, LEAST * total)
        for total, off in ((forward, fixed.clock_seconds), (backward, fixed.autograd_seconds))
    )
    return TimedCase(case.name, case.family, case.describe_operation(getattr(torch, dtype)), dtype, *seconds)


def _time_runs(case: OperatorCase, dtype: str, device: torch.device, budget: float) -> list[tuple[float, float]]:
    """Return the seconds of as many forward and backward passes as the budget allows, after a warm-up.

    The backward pass accumulates the gradients of weights, as training with microbatches does.
    """
    arguments, watch, target = case.make_arguments(getattr(torch, dtype), device), stopwatch(device), case.target
    inputs, sums = _with_gradients(case, arguments)
    times = list[tuple[float, float]]()
    end = time.perf_counter() + budget
    while len(times) <= FEWEST or (len(times) <= MOST and time.perf_counter() < end):
        forward, out = watch(lambda: target(*arguments))
        seed = torch.ones_like(out)
        backward, _ = watch(lambda: _run_backward(out, inputs, seed, sums))  # noqa: B023 (called at once)
        times.append((forward, backward))
    return times[1:]


def _with_gradients(case: OperatorCase, arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Return the tensors with gradients, and for weights among them an accumulated gradient (else None)."""
    inputs = list[Tensor]()
    sums = list[Tensor | None]()
    for argument, tensor in zip(case.arguments, arguments, strict=True):
        if isinstance(argument, CaseTensor) and argument.requires_grad:
            inputs.append(tensor)
            sums.append(torch.zeros_like(tensor) if argument.role == WEIGHT else None)
    return inputs, sums


def _run_backward(out: Tensor, inputs: Sequence[Tensor], seed: Tensor, sums: Sequence[Tensor | None]) -> None:
    for gradient_sum, gradient in zip(sums, torch.autograd.grad([out], inputs, [seed]), strict=True):
        if gradient_sum is not None:
            gradient_sum.add_(gradient)


def measure_bandwidth(device: torch.device, size: int) -> float:
    """Return the bytes per second read and written while copying an array of ``size`` bytes."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), stopwatch(device), runs=9)


def is_fast_enough(dtype: str, device: torch.device, min_ratio: float) -> bool:
    """Return whether matmuls of a dtype reach ``min_ratio`` times float32's rate; some kernels exist but are slow."""
    watch, seconds = stopwatch(device), []
    try:
        for name in ("float32", dtype):
            matrix = torch.ones(128, 128, device=device, dtype=getattr(torch, name))
            seconds.append(median_seconds(lambda: matrix @ matrix, watch, runs=5))  # noqa: B023 (called at once)
    except RuntimeError:  # there is no such kernel
        return False
    return seconds[0] / seconds[1] >= min_ratio
