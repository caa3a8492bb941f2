"""Contention on a host: how much copies of a model slow each other down that run their passes at the same time."""

from __future__ import annotations

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

SECONDS = 0.4  # for each number of copies in each round
ROUNDS = 2
FEWEST = 2  # passes of a copy
PATIENCE = 60.0  # seconds for each number of copies in each round, after which they are given up


def together(
    model: nn.Module, loss: Loss, leaves: Sequence[Any], rebuild: Rebuild, counts: Collection[int]
) -> dict[int, float]:
    """How fast each of so many copies runs forward and backward passes at once, in parts of the speed of one alone.

    Counted is the time in which a copy has a core, so that what is seen is the memory and the caches that they share,
    however many cores there are. The copies are forked from this process; the model here stays as it is.

    Args:
        model, loss: on the CPU.
        leaves, rebuild: what a copy has in hand.
        counts: how many copies run at once.

    Returns:
        By count; empty where the copies cannot run (there is no memory for them), or are too slow.
    """
    wanted = [1, *sorted({count for count in counts if count > 1})]
    if len(wanted) == 1:
        return {}
    fork = multiprocessing.get_context("fork")
    barrier = fork.Barrier(wanted[-1])
    pipes = [fork.Pipe(duplex=False) for _ in range(wanted[-1])]
    copies = [
        fork.Process(target=_copy, args=(model, loss, leaves, rebuild, wanted, index, barrier, pipe), daemon=True)
        for index, (_, pipe) in enumerate(pipes)
    ]
    for copy in copies:
        copy.start()
    for _, pipe in pipes:
        pipe.close()
    told = list[list[tuple[int, float]]]()
    try:
        for copy, (receive, _) in zip(copies, pipes, strict=True):
            told.append(_told(copy, receive, PATIENCE * ROUNDS * len(wanted)))
            if not told[-1]:  # the others wait for it in vain
                return {}
    finally:
        for copy in copies:
            copy.terminate()
            copy.join()
    found: dict[int, list[float]] = {count: [] for count in wanted}
    for times in zip(*told, strict=True):
        count = times[0][0]
        found[count].append(statistics.mean(seconds for _, seconds in times[:count]))
    typical = {count: statistics.median(each) for count, each in found.items()}
    slowest, factors = 1.0, dict[int, float]()
    for count in wanted[1:]:  # more copies slow each other no less: what says so is noise
        factors[count] = slowest = min(slowest, typical[1] / typical[count])
    return factors


def _told(copy: BaseProcess, pipe: Connection, patience: float) -> list[tuple[int, float]]:
    """What a copy has found; nothing where it was killed, or gave up."""
    wait([pipe, copy.sentinel], patience)
    try:
        found: list[tuple[int, float]] = pipe.recv() if pipe.poll() else []
    except EOFError:  # it ended, and so did all who had the pipe
        return []
    return found


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
    """One copy: for every count the computing seconds of a pass, 0 where it does not take part."""
    whole, found = ModelWithLoss(model, loss, rebuild), list[tuple[int, float]]()
    try:
        for _ in range(ROUNDS):
            for count in counts:
                barrier.wait(PATIENCE)
                found.append((count, _pass(whole, leaves) if index < count else 0.0))
        pipe.send(found)
    except threading.BrokenBarrierError:
        pipe.send([])


def _pass(whole: ModelWithLoss, leaves: Sequence[Any]) -> float:
    """The median of the computing seconds of both passes, over some time of the wall's clock."""
    times, end = list[float](), time.perf_counter() + SECONDS
    while len(times) <= FEWEST or time.perf_counter() < end:
        own = clone_leaves(leaves)
        start = time.process_time()
        whole(*own)[0].backward()
        times.append(time.process_time() - start)
    return statistics.median(times[1:])
