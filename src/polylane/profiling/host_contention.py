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

from torch import nn

from polylane.graph.batch import Rebuild, clone_leaves
from polylane.graph.capture.export import Loss, ModelWithLoss

SECONDS = 0.4  # of measuring, for each number of copies in each round
ROUNDS = 2
FEWEST = 2  # timed passes of a copy at least, after one warm-up
PATIENCE = 60.0  # seconds for each number of copies in each round, after which the measurement is abandoned


def together(
    model: nn.Module, loss: Loss, leaves: Sequence[Any], rebuild: Rebuild, counts: Collection[int]
) -> dict[int, float]:
    """Measure the speed of each of several concurrent copies relative to one alone.

    CPU time is measured, not wall-clock time: so the figures show contention for memory and caches, however many cores
    there are. The copies are forked from this process, whose own model stays as it is.

    Args:
        model, loss: the user's, on the CPU.
        leaves, rebuild: flat batch of one copy, and the function that restores its structure.
        counts: numbers of copies to run at once.

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
    copies = [
        fork.Process(target=_copy, args=(model, loss, leaves, rebuild, copy_counts, index, barrier, pipe), daemon=True)
        for index, (_, pipe) in enumerate(pipes)
    ]
    for copy in copies:
        copy.start()
    # While the parent has a sending end open, its pipe never reports that all copies are gone.
    for _, pipe in pipes:
        pipe.close()
    reports = list[list[tuple[int, float]]]()
    try:
        for copy, (receive, _) in zip(copies, pipes, strict=True):
            reports.append(_told(copy, receive, PATIENCE * ROUNDS * len(copy_counts)))
            if not reports[-1]:  # the others would wait for it at the barrier
                return {}
    finally:
        for copy in copies:
            copy.kill()  # whatever handlers of signals it has inherited
            copy.join()
    means: dict[int, list[float]] = {count: [] for count in copy_counts}
    for times in zip(*reports, strict=True):
        count = times[0][0]
        means[count].append(statistics.mean(seconds for _, seconds in times[:count]))
    typical = {count: statistics.median(values) for count, values in means.items()}
    slowest, factors = 1.0, dict[int, float]()
    for count in copy_counts[1:]:  # more copies cannot run faster: a rise is noise
        factors[count] = slowest = min(slowest, typical[1] / typical[count])
    return factors


def _told(copy: BaseProcess, pipe: Connection, patience: float) -> list[tuple[int, float]]:
    """Receive the times of a copy; empty if it was killed or gave up."""
    wait([pipe, copy.sentinel], patience)
    try:
        times = json.loads(pipe.recv_bytes()) if pipe.poll() else []
    except EOFError:  # every process that had the sending end is gone
        return []
    return [(count, seconds) for count, seconds in times]


def _copy(
    model: nn.Module,
    loss: Loss,
    leaves: Sequence[Any],
    rebuild: Rebuild,
    counts: Sequence[int],
    index: int,
    barrier: threading.Barrier,
    pipe: Connection,
) -> None:
    """Run one copy: send its CPU seconds of a pass for every count, 0 for counts that it sits out."""
    model_with_loss, times = ModelWithLoss(model, loss, rebuild), list[tuple[int, float]]()
    try:
        for _ in range(ROUNDS):
            for count in counts:
                barrier.wait(PATIENCE)
                times.append((count, _pass(model_with_loss, leaves) if index < count else 0.0))
        pipe.send_bytes(json.dumps(times).encode())
    except threading.BrokenBarrierError:
        pipe.send_bytes(b"[]")


def _pass(model_with_loss: ModelWithLoss, leaves: Sequence[Any]) -> float:
    """Return the median CPU seconds of a forward and backward pass, over a fixed wall-clock time."""
    times, end = list[float](), time.perf_counter() + SECONDS
    while len(times) <= FEWEST or time.perf_counter() < end:
        inputs = clone_leaves(leaves)
        start = time.process_time()
        model_with_loss(*inputs)[0].backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])
