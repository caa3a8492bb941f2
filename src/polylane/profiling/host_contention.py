"""Host contention: how much copies of a model slow each other when they run their passes at the same time."""

from __future__ import annotations

import json
import multiprocessing
import statistics
import threading
import time
from collections.abc import Collection, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch

from polylane.graph.batch import clone_leaves
from polylane.graph.capture.export import ModelWithLoss

SECONDS = 0.4  # of measuring, for each number of copies in each round
ROUNDS = 2
FEWEST = 2  # timed passes of a copy at least, after one warm-up
PATIENCE = 60.0  # seconds for each number of copies in each round, after which the measurement is abandoned


def measure_model_contention(
    model_with_loss: ModelWithLoss,
    leaves: Sequence[Any],
    counts: Collection[int],
    seconds: float = SECONDS,
    rounds: int = ROUNDS,
) -> dict[int, float]:
    """Measure the speed of each of several concurrent copies relative to one alone.

    CPU time is measured, not wall-clock time: so the figures show contention for memory and caches, however many cores
    there are. The copies are forked from this process, whose own model stays as it is, and have one thread each.

    Args:
        model_with_loss: the model and its loss, on the CPU.
        leaves: flat batch of one copy.
        counts: numbers of copies to run at once.
        seconds: of measuring, for each number of copies in each round.
        rounds: number of times that every number of copies is measured.

    Returns:
        Relative speed by count; empty if the copies cannot run (no memory for them) or are too slow.
    """
    copy_counts = [1, *sorted({count for count in counts if count > 1})]
    if len(copy_counts) == 1:
        return {}
    # Forked, so that model and batch are shared copy-on-write and need not be pickled.
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(copy_counts[-1])
    pipes = [fork.Pipe(duplex=False) for _ in range(copy_counts[-1])]

    def run_copy(index: int, pipe: Connection) -> None:
        """Run one copy: send its CPU seconds of a pass for every count, 0 for counts that it sits out."""
        times = list[tuple[int, float]]()
        # A copy has none of the threads that this process's pool may have: work for them would wait for ever.
        torch.set_num_threads(1)
        try:
            for count in copy_counts * rounds:
                barrier.wait(PATIENCE)
                times.append((count, _time_passes(model_with_loss, leaves, seconds) if index < count else 0.0))
            pipe.send_bytes(json.dumps(times).encode())
        except threading.BrokenBarrierError:  # another process died or is stuck: no times are reported
            pipe.send_bytes(b"[]")

    copies = [fork.Process(target=run_copy, args=(i, pipe), daemon=True) for i, (_, pipe) in enumerate(pipes)]
    for copy in copies:
        copy.start()
    # While the parent has a sending end open, its pipe never reports that all copies are gone.
    for _, pipe in pipes:
        pipe.close()
    reports = list[list[tuple[int, float]]]()
    try:
        for copy, (receive, _) in zip(copies, pipes, strict=True):
            reports.append(_receive_times(copy, receive, PATIENCE * rounds * len(copy_counts)))
            if not reports[-1]:  # the others would wait for it at the barrier
                return {}
    finally:
        for copy in copies:
            copy.kill()  # whatever handlers of signals it has inherited
            copy.join()
    return _relative_speeds(reports)


def _relative_speeds(reports: Sequence[Sequence[tuple[int, float]]]) -> dict[int, float]:
    """Return the relative speed by count.

    Args:
        reports: of every copy, the number of copies and its own seconds of a pass, for each count of each round.
    """
    means: dict[int, list[float]] = {}
    for times in zip(*reports, strict=True):
        count = times[0][0]
        means.setdefault(count, []).append(statistics.mean(seconds for _, seconds in times[:count]))
    typical = {count: statistics.median(values) for count, values in means.items()}
    slowest, factors = 1.0, dict[int, float]()
    for count in sorted(means.keys() - {1}):  # more copies cannot run faster: a rise is noise
        factors[count] = slowest = min(slowest, typical[1] / typical[count])
    return factors


def _receive_times(copy: BaseProcess, pipe: Connection, patience: float) -> list[tuple[int, float]]:
    """Receive the times of a copy; empty if it was killed or gave up."""
    wait([pipe, copy.sentinel], patience)
    try:
        times = json.loads(pipe.recv_bytes()) if pipe.poll() else []
    except EOFError:  # every process that had the sending end is gone
        return []
    return [(count, seconds) for count, seconds in times]


def _time_passes(model_with_loss: ModelWithLoss, leaves: Sequence[Any], seconds: float) -> float:
    """Return the median CPU seconds of a forward and backward pass, over a fixed wall-clock time."""
    times, end = list[float](), time.perf_counter() + seconds
    while len(times) <= FEWEST or time.perf_counter() < end:
        inputs = clone_leaves(leaves)
        start = time.process_time()
        model_with_loss(*inputs)[0].backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])
