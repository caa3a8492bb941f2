"""Measure this machine, in as many workers as will train on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from polylane.probe.effort import Effort, side_by_side
from polylane.probe.machine import accelerators, check_workers
from polylane.probe.rates import Timed, sane, streamed, sweep
from polylane.probe.sharing import contention
from polylane.probe.stopwatch import issuing, warm
from polylane.probe.traffic import Carried, traffic
from polylane.runtime.elastic import spawn
from polylane.runtime.launch import Context, fork, single_threaded

# Called as work goes on: what is being measured, and how many parts of it are done.
Told = Callable[[str, int], Any]

# The dtype of the whole sweep; and what of float32's rate a dtype's matmuls must reach to be worth a figure: some
# kernels only exist.
MAIN = {"cpu": "float32", "cuda": "bfloat16"}
LEAST = {"float32": 0.0, "float64": 0.01, "bfloat16": 0.5, "float16": 0.5}


def further(device_type: str) -> dict[str, float]:
    """Dtypes besides the main one, and what of float32's rate they must reach."""
    return {dtype: least for dtype, least in LEAST.items() if dtype != MAIN[device_type]}


@dataclass(frozen=True)
class Gpu:
    """An accelerator, as its driver describes it.

    Attributes:
        name: of the model.
        memory: bytes.
        units: compute units.
        dispatch: seconds of the host for each operator that it issues.
    """

    name: str
    memory: int
    units: int
    dispatch: float


@dataclass(frozen=True)
class Seen:
    """What the workers saw.

    Attributes:
        threads: that each of them computed with.
        gpu: what a worker computes on; None for a share of the CPU.
        timed: the sweep.
        bandwidth: of memory, bytes per second.
        carried: messages and collectives.
        contention: see :class:`polylane.cluster.cluster.Hosts`.
    """

    threads: int
    gpu: Gpu | None
    timed: tuple[Timed, ...]
    bandwidth: float
    carried: tuple[Carried, ...]
    contention: dict[int, float]


def measure(workers: int, effort: Effort, told: Told = lambda what, parts: None) -> Seen:
    """Measure this machine with so many workers, in processes of their own, which wait for each other's turns.

    Raises:
        PolylaneError: no workers, or more than the machine can hold.
        WorkerFailed: one of them did.
    """
    check_workers(workers)
    single_threaded()
    start = spawn if accelerators() else fork
    return start(partial(_worker, effort), workers, lambda _, said: told(said["what"], said["parts"]))[0]


def _worker(effort: Effort, context: Context) -> Seen:
    """What each worker does; the first one measures the device, while the others wait."""
    world, device = context.world, context.device

    def told(what: str, parts: int = 1) -> None:
        if context.rank == 0:
            context.message({"what": what, "parts": parts})

    carried, shares, timed, bandwidth = list[Carried](), dict[int, float](), list[Timed](), 0.0
    if context.rank == 0:
        told("operators", 0)
        warm(device, effort.warm_seconds)
        bandwidth = streamed(device, effort.stream_bytes)
        timed = _operators(effort, device, told)
    if world.size > 1:
        seconds, rounds = effort.traffic_seconds, effort.rounds
        carried = traffic(world, effort.sizes, seconds, rounds, lambda: told("messages"))
    if world.size > 1 and device.type == "cpu":
        counts = side_by_side(world.size)
        shares = contention(world, counts, effort.sharing_seconds, effort.rounds, lambda: told("workers at once"))
    return Seen(torch.get_num_threads(), _gpu(device), tuple(timed), bandwidth, tuple(carried), shares)


def _gpu(device: torch.device) -> Gpu | None:
    if device.type != "cuda":
        return None
    found = torch.cuda.get_device_properties(device)
    return Gpu(found.name, found.total_memory, found.multi_processor_count, issuing(device))


def _operators(effort: Effort, device: torch.device, told: Callable[..., None]) -> list[Timed]:
    """The sweep in the main dtype, then matmuls in the others that are worth it."""
    seconds, rounds = effort.case_seconds, effort.rounds
    found = sweep(effort.cases, MAIN[device.type], device, seconds, rounds, lambda: told("operators"))
    for dtype, least in further(device.type).items():
        if sane(dtype, device, least):
            found += sweep(effort.rated, dtype, device, seconds, rounds, lambda: told("operators"))
        else:
            told("operators", len(effort.rated) * rounds)
    return found
