"""Whole or halved: moves that halve a backward pass of an order, or join its halves, and joins that cost nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from polylane.schedule.problem import SLACK, Orders, ScheduleProblem, play_orders

FAR = 6  # places behind a first half, at most, at which a move puts the second


@dataclass(frozen=True, slots=True)
class OrderMove:
    """A change of an order: other tasks, or the same ones in another order, at some of its places.

    Attributes:
        worker: the worker whose order it is.
        low, high: the places that are replaced, from the first to behind the last.
        tasks: the tasks that come into these places, in order.
        pairs: (first, second) of the tasks that the move puts into this order. Of a pass that is halved these are its
            halves; of one whose halves are joined, its halves the other way round.
        halved, joined: the first halves of the passes that it halves and joins.
    """

    worker: int
    low: int
    high: int
    tasks: list[int]
    pairs: list[tuple[int, int]]
    halved: frozenset[int] = frozenset()
    joined: frozenset[int] = frozenset()


def halving_moves(
    problem: ScheduleProblem, order: list[int], worker: int, places: Sequence[int], whole_passes: frozenset[int]
) -> Iterator[OrderMove]:
    """Yield the moves that halve or join backward passes at some places of a worker's order.

    Args:
        problem: the tasks, which an order may have whole or in halves.
        order: one worker's tasks, first to last.
        worker: the number of that worker, from 0.
        places: positions in the order at which passes may be changed.
        whole_passes: first halves that stand for whole passes.
    """
    seen_passes = set[int]()
    for at in places:
        task, kind = order[at], order[at] % 3
        if kind == 1 and task in whole_passes:
            yield from _halve(problem, order, worker, at, whole_passes)
        elif kind and task - kind not in seen_passes:
            seen_passes.add(task - kind)
            first_half = task - kind + 1
            low = at if kind == 1 else order.index(first_half, 0, at)
            high = at if kind == 2 else order.index(first_half + 1, at)
            yield from _join(problem, order, worker, low, high)


def _halve(
    problem: ScheduleProblem, order: list[int], worker: int, at: int, whole_passes: frozenset[int]
) -> Iterator[OrderMove]:
    """Yield moves that halve a pass, with the second half at one of the next places."""
    task = order[at]
    stage = problem.split_task(task)[0]
    for end in range(at + 1, min(at + 2 + FAR, len(order) + 1)):
        between = order[at + 1 : end]
        tasks = [task, *between, task + 1]
        yield OrderMove(worker, at, end, tasks, [(task, task + 1)], halved=frozenset({task}))
        if end < len(order):
            following = order[end]
            # Gradients of weights accumulate in ascending order of microbatch.
            if problem.split_task(following)[0] == stage and (following in whole_passes or following % 3 == 2):
                return


def _join(problem: ScheduleProblem, order: list[int], worker: int, low: int, high: int) -> Iterator[OrderMove]:
    """Yield moves that join the halves at two places: where the first is, and where the second is."""
    task, between = order[low], order[low + 1 : high]
    kinds = [
        inner_task % 3 for inner_task in between if problem.split_task(inner_task)[0] == problem.split_task(task)[0]
    ]
    pairs, joined = [(task + 1, task)], frozenset({task})
    if 2 not in kinds:  # else second halves of earlier microbatches would come behind this one's
        yield OrderMove(worker, low, high + 1, [task, *between], pairs, joined=joined)
    if between and 1 not in kinds:  # else first halves of later microbatches would come before this one's
        yield OrderMove(worker, low, high + 1, [*between, task], pairs, joined=joined)


def join_halves(problem: ScheduleProblem, orders: Orders, effort: int) -> Orders:
    """Return orders in which as many backward passes as can be are whole without a later end.

    Halves are joined one pass after the other, second halves of earlier microbatches before them.

    Args:
        problem: the tasks, their seconds and the memory there is.
        orders: orders that run, with passes in halves.
        effort: number of tasks that may be played.
    """
    played = play_orders(problem, orders)
    assert played is not None  # the caller has played them
    best, current = played.makespan, orders
    halves = sorted((task for order in orders for task in order if task % 3 == 2), key=lambda t: played.heads[t])
    for task in halves[: max(1, effort // problem.tasks)]:
        worker = problem.workers[problem.split_task(task)[0]]
        changed = [_joined(problem, order, task) if at == worker else order for at, order in enumerate(current)]
        candidate = play_orders(problem, changed)
        if candidate is not None and candidate.makespan <= best * (1 + SLACK):
            best, current = candidate.makespan, changed
    return current


def _joined(problem: ScheduleProblem, order: list[int], second: int) -> list[int]:
    """Return an order with the pass of a second half whole, where its first half was."""
    stage, microbatch, _ = problem.split_task(second)
    earlier = {problem.task(stage, m, 2) for m in range(microbatch)}
    at = order.index(second - 1)
    pulled = [task for task in order[at:] if task in earlier]
    remaining_tasks = [task for task in order[at:] if task not in earlier and task != second]
    return [*order[:at], *pulled, *remaining_tasks]
