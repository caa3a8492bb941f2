"""Machine measurement: operators, links and contention, with as many worker processes as will train on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from polylane.errors import PolylaneError
from polylane.graph.capture.export import ModelWithLoss
from polylane.probe.codec_speed import measure_codecs
from polylane.probe.device_speed import TimedCase, is_fast_enough, measure_bandwidth, time_cases
from polylane.probe.effort import Effort, concurrent_counts
from polylane.probe.interleaved_sums import measure_interleaved_sums
from polylane.probe.link_speed import TimedTraffic, measure_traffic
from polylane.probe.machine import accelerators, check_workers, shared_cores
from polylane.probe.stopwatch import measure_dispatch, warm_up
from polylane.probe.transformer_block import HIDDEN, LENGTH, SAMPLES, TransformerBlock
from polylane.profiling.host_contention import measure_model_contention
from polylane.runtime.workers import allocator
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import choose_start_method, start_workers
from polylane.runtime.workers.threads import limit_to_one_thread

# Progress callback: what is being measured, and how many ticks of it are done.
Told = Callable[[str, int], Any]

# Dtype of the full sweep by device type; and the fraction of float32's rate that a dtype's matmuls must reach to get a
# figure: some kernels exist but are slow.
MAIN = {"cpu": "float32", "cuda": "bfloat16"}
LEAST = {"float32": 0.0, "float64": 0.01, "bfloat16": 0.5, "float16": 0.5}


def further_dtypes(device_type: str) -> dict[str, float]:
    """Return the dtypes besides the main one, with the fraction of float32's rate that each must reach."""
    return {dtype: fraction for dtype, fraction in LEAST.items() if dtype != MAIN[device_type]}


@dataclass(frozen=True)
class Accelerator:
    """Properties of an accelerator, as its driver reports them.

    Attributes:
        name: model name from the driver.
        memory: bytes of device memory.
        units: number of compute units (streaming multiprocessors).
        dispatch: seconds of the host to issue one operator.
    """

    name: str
    memory: int
    units: int
    dispatch: float


@dataclass(frozen=True)
class TransportMeasurements:
    """Measurements of what workers send each other, in a world of their number.

    Attributes:
        timed_traffic: measured messages and collectives.
        sums: ranks of a group -> seconds of a small sum between computations, see :attr:`.link.Link.sums`.
    """

    timed_traffic: tuple[TimedTraffic, ...]
    sums: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class WorkerMeasurements:
    """Measurements of all workers of a machine.

    Attributes:
        threads: number of threads of each worker.
        gpu: a worker's accelerator; None for a share of the CPU.
        timed_cases: measured operators of the sweep.
        bandwidth: memory bandwidth in bytes per second.
        timed_traffic: measured messages and collectives between workers, as many as have cores of their own.
        codecs: bytes of float32 gradients per second of every gradient compressor, by name.
        sums: ranks of a group -> seconds of a small sum between computations of these workers.
        crowded: the same between all workers, where they are more than the cores; else None.
        contention: workers that compute at once -> relative speed, see :class:`polylane.cluster.cluster.Hosts`.
    """

    threads: int
    gpu: Accelerator | None
    timed_cases: tuple[TimedCase, ...]
    bandwidth: float
    timed_traffic: tuple[TimedTraffic, ...]
    contention: dict[int, float]
    codecs: dict[str, float] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)
    crowded: TransportMeasurements | None = None


def traffic_worlds(workers: int) -> list[int]:
    """Return the numbers of workers between which messages are measured: with cores of their own, then all of them.

    The two differ: a worker that waits polls only where every worker of the host has a core.
    """
    roomy = workers if accelerators() else min(workers, max(2, shared_cores(workers)))
    return sorted({roomy, workers}) if workers > 1 else []


def measure_machine(workers: int, effort: Effort, tick: Told = lambda activity, parts: None) -> WorkerMeasurements:
    """Measure this machine with ``workers`` processes, which are started for it and take turns.

    Raises:
        PolylaneError: fewer than one worker, or more than the machine can run.
        WorkerFailed: a worker raised an error or died.
    """
    check_workers(workers)
    limit_to_one_thread()
    start = partial(start_workers, start_method=choose_start_method())
    measurements = start(partial(_worker, effort), workers, _relay(tick))[0]
    assert measurements is not None
    between = [start(partial(_traffic_worker, effort), count, _relay(tick))[0] for count in traffic_worlds(workers)]
    if not between:
        return measurements
    crowded = between[-1] if len(between) > 1 else None
    return replace(measurements, timed_traffic=between[0].timed_traffic, sums=between[0].sums, crowded=crowded)


def _relay(tick: Told) -> Callable[[int, dict[str, Any]], None]:
    return lambda _, message: tick(message["what"], message["parts"])


def _traffic_worker(effort: Effort, context: WorkerContext) -> TransportMeasurements:
    """Run one of the workers that send each other messages, over the transport that a plan of theirs has."""
    world, device = context.world, context.device

    def told(activity: str) -> None:
        if context.rank == 0:
            context.send_message({"what": activity, "parts": 1})

    if device.type == "cpu":
        allocator.retain_freed_memory()
    timed = measure_traffic(world, effort.sizes, effort.traffic_seconds, effort.rounds, lambda: told("messages"))
    sums = dict[int, float]()
    if device.type == "cpu":
        sums = measure_interleaved_sums(world, effort, lambda: told("sums between computations"))
    return TransportMeasurements(tuple(timed), sums)


def _worker(effort: Effort, context: WorkerContext) -> WorkerMeasurements | None:
    """Run one worker: the first one measures the device, and how much copies of a model slow each other."""
    if context.rank:
        return None
    device, workers = context.device, context.world.size
    if device.type == "cpu":
        allocator.retain_freed_memory()  # as every worker of a training does

    def told(activity: str, parts: int = 1) -> None:
        context.send_message({"what": activity, "parts": parts})

    told("operators", 0)
    warm_up(device, effort.warm_seconds)
    bandwidth = measure_bandwidth(device, effort.stream_bytes)
    codecs = measure_codecs(device, effort.case_seconds)
    timed = _measure_operators(effort, device, told)
    contention = dict[int, float]()
    if workers > 1 and device.type == "cpu":
        told("workers at once", 0)
        contention = _measure_contention(effort, workers)
        told("workers at once", (1 + len(concurrent_counts(workers))) * effort.rounds)
    threads = torch.get_num_threads()
    return WorkerMeasurements(threads, _gpu(device), tuple(timed), bandwidth, (), contention, codecs)


def _measure_contention(effort: Effort, workers: int) -> dict[int, float]:
    block = ModelWithLoss(TransformerBlock(), lambda model, x: model(x).sum(), lambda leaves: leaves[0])
    counts, x = concurrent_counts(workers), torch.randn(SAMPLES, LENGTH, HIDDEN)
    contention = measure_model_contention(block, [x], counts, effort.contention_seconds, effort.rounds)
    if not contention:
        raise PolylaneError(f"{workers} copies of a small model cannot run here at once; give fewer --workers")
    return contention


def _gpu(device: torch.device) -> Accelerator | None:
    if device.type != "cuda":
        return None
    gpu = torch.cuda.get_device_properties(device)
    return Accelerator(gpu.name, gpu.total_memory, gpu.multi_processor_count, measure_dispatch(device))


def _measure_operators(effort: Effort, device: torch.device, tick: Callable[..., None]) -> list[TimedCase]:
    """Time the sweep in the main dtype, then matmuls in every further dtype that is fast enough."""
    seconds, rounds = effort.case_seconds, effort.rounds
    cases = time_cases(effort.cases, MAIN[device.type], device, seconds, rounds, lambda: tick("operators"))
    for dtype, fraction in further_dtypes(device.type).items():
        if is_fast_enough(dtype, device, fraction):
            cases += time_cases(effort.dtype_cases, dtype, device, seconds, rounds, lambda: tick("operators"))
        else:
            tick("operators", len(effort.dtype_cases) * rounds)
    return cases
