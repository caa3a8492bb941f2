"""Measure a device: every case of the sweep, forward and backward, and how fast its memory streams."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.cost.operation import Operation
from polylane.probe.stopwatch import Fixed, median, stopwatch, undisturbed
from polylane.probe.sweep import WEIGHT, Case, Given

FEWEST, MOST = 2, 20  # runs of a case in a round
LEAST = 0.2  # of what was measured is always left: what is fixed is itself measured, and may come out at more


@dataclass(frozen=True)
class Timed:
    """A case as it was measured.

    Attributes:
        name, family: of the case.
        operation: what it asks of a device.
        dtype: of its tensors ("float32").
        forward, backward: seconds.
    """

    name: str
    family: str
    operation: Operation
    dtype: str
    forward: float
    backward: float


def sweep(
    cases: Sequence[Case],
    dtype: str,
    device: torch.device,
    budget: float,
    rounds: int,
    told: Callable[[], Any] = lambda: None,
) -> list[Timed]:
    """Measure cases, in rounds, so that what else goes on in the machine for a while does not hit one of them alone.

    Of all runs of a case the quarter counts that was disturbed least.

    Args:
        budget: seconds for each case in each round.
        told: called after each case of each round.
    """
    fixed, found = Fixed(device), [list[tuple[float, float]]() for _ in cases]
    for _ in range(rounds):
        for runs, case in zip(found, cases, strict=True):
            runs += _runs(case, dtype, device, budget)
            told()
    return [_timed(case, dtype, runs, fixed) for case, runs in zip(cases, found, strict=True)]


def _timed(case: Case, dtype: str, runs: Sequence[tuple[float, float]], fixed: Fixed) -> Timed:
    forward, backward = (undisturbed(each) for each in zip(*runs, strict=True))
    ways = (max(each - off, LEAST * each) for each, off in ((forward, fixed.watch), (backward, fixed.engine)))
    return Timed(case.name, case.family, case.operation(getattr(torch, dtype)), dtype, *ways)


def _runs(case: Case, dtype: str, device: torch.device, budget: float) -> list[tuple[float, float]]:
    """Seconds of forward and backward passes, as many as there is time for, after one that does not count.

    The backward pass adds the gradients of weights to what is there, as training with microbatches does.
    """
    arguments, watch, target = case.made(getattr(torch, dtype), device), stopwatch(device), case.target
    inputs, kept = _with_gradients(case, arguments)
    times = list[tuple[float, float]]()
    end = time.perf_counter() + budget
    while len(times) <= FEWEST or (len(times) <= MOST and time.perf_counter() < end):
        forward, out = watch(lambda: target(*arguments))
        seed = torch.ones_like(out)
        backward, _ = watch(lambda: _back(out, inputs, seed, kept))  # noqa: B023 (called at once)
        times.append((forward, backward))
    return times[1:]


def _with_gradients(case: Case, arguments: Sequence[Any]) -> tuple[list[Tensor], list[Tensor | None]]:
    """The tensors that have gradients, and for each of them that is a weight the gradient so far."""
    inputs = list[Tensor]()
    kept = list[Tensor | None]()
    for given, made in zip(case.arguments, arguments, strict=True):
        if isinstance(given, Given) and given.learns:
            inputs.append(made)
            kept.append(torch.zeros_like(made) if given.role == WEIGHT else None)
    return inputs, kept


def _back(out: Tensor, inputs: Sequence[Tensor], seed: Tensor, kept: Sequence[Tensor | None]) -> None:
    for own, gradient in zip(kept, torch.autograd.grad([out], inputs, [seed]), strict=True):
        if own is not None:
            own.add_(gradient)


def streamed(device: torch.device, size: int) -> float:
    """Bytes per second that are read and written as one array of ``size`` bytes is copied to another."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / median(lambda: target.copy_(source), stopwatch(device), runs=9)


def sane(dtype: str, device: torch.device, least: float) -> bool:
    """Whether matmuls of a dtype run at ``least`` of float32's rate; some kernels only exist, and are slow."""
    watch, seconds = stopwatch(device), []
    try:
        for each in ("float32", dtype):
            own = torch.ones(128, 128, device=device, dtype=getattr(torch, each))
            seconds.append(median(lambda: own @ own, watch, runs=5))  # noqa: B023 (called at once)
    except RuntimeError:  # there is no such kernel
        return False
    return seconds[0] / seconds[1] >= least
