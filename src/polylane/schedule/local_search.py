"""Local improvement of an order of passes: tabu search over the blocks of its critical path.

Only moves within a block, passes that follow each other without a gap on one worker and on the longest path, can make
the whole shorter. Nowicki and Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996, and Balas and
Vazacopoulos, "Guided Local Search with Shifting Bottleneck for Job Shop Scheduling", 1998, for moves to a block's ends.
"""

from __future__ import annotations

from collections.abc import Iterator

from polylane.schedule.problem import (
    SLACK,
    Orders,
    PlayedOrders,
    ScheduleProblem,
    must_precede,
    peak_bytes,
    play_orders,
)

TABU = 12  # steps for which a move is not undone
STUCK = 400  # steps without a better order after which the search ends

_Move = tuple[int, int, int]  # worker, from which place, to which


def improve_orders(problem: ScheduleProblem, orders: Orders, steps: int) -> tuple[float, Orders]:
    """Return the makespan and the orders of the best that a search of so many steps finds; it is deterministic.

    Args:
        problem: the tasks, their seconds and the memory there is.
        orders: where the search starts; they fit into the memory and wait for nothing in a circle.
        steps: number of moves at most.
    """
    current = [list(order) for order in orders]
    played = play_orders(problem, current)
    assert played is not None  # the caller has played them
    best, found = played.makespan, [list(order) for order in current]
    forbidden: dict[tuple[int, int], int] = {}  # (task, task) that must not get into this order until that step
    since = 0
    for step in range(steps):
        if best <= problem.lower_bound * (1 + SLACK) or since > STUCK:
            break
        tried = _best_move(problem, current, played, forbidden, step, best)
        if tried is None:
            break
        worker, source, target = tried
        order = current[worker]
        task = order.pop(source)
        passed = order[target:source] if target < source else order[source:target]
        order.insert(target, task)
        for other in passed:
            back = (task, other) if target > source else (other, task)
            forbidden[back] = step + TABU
        after = play_orders(problem, current)
        if after is None:
            # They would wait for each other through another worker: taken back, and not tried again soon.
            order.insert(source, order.pop(target))
            for other in passed:
                forbidden[(other, task) if target > source else (task, other)] = step + 10 * TABU
            since += 1
            continue
        played = after
        since += 1
        if played.makespan < best * (1 - SLACK):
            best, found, since = played.makespan, [list(each) for each in current], 0
    return best, found


def _best_move(
    problem: ScheduleProblem,
    orders: Orders,
    played: PlayedOrders,
    forbidden: dict[tuple[int, int], int],
    step: int,
    best: float,
) -> _Move | None:
    """Return the move with the smallest estimate that is not forbidden, or that would be the best so far."""
    chosen: tuple[float, _Move] | None = None
    oldest: tuple[int, float, _Move] | None = None
    for move in _moves(problem, orders, played):
        worker, source, target = move
        order = orders[worker]
        task = order[source]
        low, high = min(source, target), max(source, target)
        window = order[low : high + 1]
        others = window[1:] if target > source else window[:-1]
        if any(must_precede(problem, *((task, o) if target > source else (o, task))) for o in others):
            continue
        moved = [*others, task] if target > source else [task, *others]
        if not _window_fits(problem, worker, order, low, moved):
            continue
        estimate = _estimate(problem, order, played, low, moved)
        pairs = [(o, task) if target > source else (task, o) for o in others]
        tabu = any(forbidden.get(pair, -1) >= step for pair in pairs)
        if tabu and estimate >= best * (1 - SLACK):
            # Where all moves are forbidden, the one that has been so for longest leads on.
            until = max(forbidden.get(pair, -1) for pair in pairs)
            oldest = min(oldest or (until, estimate, move), (until, estimate, move))
            continue
        if chosen is None or estimate < chosen[0]:
            chosen = (estimate, move)
    if chosen is None:
        return None if oldest is None else oldest[2]
    return chosen[1]


def _moves(problem: ScheduleProblem, orders: Orders, played: PlayedOrders) -> Iterator[_Move]:
    """Yield moves of tasks within the blocks of a critical path, to the block's ends and past their neighbours."""
    place = {task: (worker, at) for worker, order in enumerate(orders) for at, task in enumerate(order)}
    for worker, first, last in _critical_blocks(problem, orders, played, place):
        if first == last:
            continue
        yield worker, first, first + 1
        if last - 1 > first:
            yield worker, last - 1, last
        for at in range(first + 1, last):
            yield worker, at, first
            yield worker, at, last
        if last - first > 1:
            yield worker, first, last
            yield worker, last, first


def _critical_blocks(
    problem: ScheduleProblem, orders: Orders, played: PlayedOrders, place: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (worker, first place, last place) of the blocks of one longest path, from its end to its start."""
    heads, seconds = played.heads, problem.seconds
    slack = played.makespan * SLACK
    task = max(place, key=lambda each: (heads[each] + seconds[each], -each))
    worker, at = place[task]
    last = at
    while True:
        worker, at = place[task]
        before = orders[worker][at - 1] if at else None
        if before is not None and heads[before] + seconds[before] >= heads[task] - slack and heads[task] > slack:
            task = before
            continue
        yield worker, at, last
        # The block began when a value arrived.
        sources = [
            read for read, hop in problem.predecessors[task] if heads[read] + seconds[read] + hop >= heads[task] - slack
        ]
        if heads[task] <= slack or not sources:
            return
        task = sources[0]
        last = place[task][1]


def _window_fits(problem: ScheduleProblem, worker: int, order: list[int], low: int, moved: list[int]) -> bool:
    if not problem.memory:
        return True
    alive = sum(problem.live_change[task] for task in order[:low])
    return alive + peak_bytes(problem, moved) <= problem.bound_of(worker) * (1 + SLACK)


def _estimate(problem: ScheduleProblem, order: list[int], played: PlayedOrders, low: int, moved: list[int]) -> float:
    """Estimate the makespan with a window of an order replaced: exact where no path leaves the window and returns."""
    seconds, heads, tails = problem.seconds, played.heads, played.tails
    clock = heads[order[low - 1]] + seconds[order[low - 1]] if low else 0
    starts: list[float] = []
    for task in moved:
        for read, hop in problem.predecessors[task]:
            clock = max(clock, heads[read] + seconds[read] + hop)
        starts.append(clock)
        clock += seconds[task]
    high = low + len(moved)
    behind = seconds[order[high]] + tails[order[high]] if high < len(order) else 0
    most = 0.0
    for task, start in zip(reversed(moved), reversed(starts), strict=True):
        for reader, hop in problem.successors[task]:
            behind = max(behind, hop + seconds[reader] + tails[reader])
        behind += seconds[task]
        most = max(most, start + behind)
    return most
