"""Local improvement of an order of passes: tabu search over the blocks of its critical path.

Only moves within a block, passes that follow each other without a gap on one worker and on the longest path, can make
the whole shorter. Nowicki and Smutnicki, "A Fast Taboo Search Algorithm for the Job Shop Problem", 1996, and Balas and
Vazacopoulos, "Guided Local Search with Shifting Bottleneck for Job Shop Scheduling", 1998, for moves to a block's ends.
Where halves of a backward pass take longer than the whole, a move may also halve a pass, or join its halves.
"""

from __future__ import annotations

from collections.abc import Iterator

from polylane.schedule.halving_moves import OrderMove, halving_moves
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
    best, best_orders = played.makespan, [list(order) for order in current]
    forbidden: dict[tuple[int, int], int] = {}  # (task, task) that must not get into this order until that step
    since = 0
    for step in range(steps):
        if best <= problem.lower_bound * (1 + SLACK) or since > STUCK:
            break
        move = _best_move(problem, current, played, forbidden, step, best)
        if move is None:
            break
        order = current[move.worker]
        old_tasks, order[move.low : move.high] = order[move.low : move.high], move.tasks
        for pair in move.pairs:
            forbidden[pair[::-1]] = step + TABU
        candidate = play_orders(problem, current)
        since += 1
        if candidate is None:
            # They would wait for each other through another worker: taken back, and not tried again soon.
            order[move.low : move.low + len(move.tasks)] = old_tasks
            for pair in move.pairs:
                forbidden[pair] = step + 10 * TABU
            continue
        played = candidate
        if played.makespan < best * (1 - SLACK):
            best, best_orders, since = played.makespan, [list(order) for order in current], 0
    return best, best_orders


def _best_move(
    problem: ScheduleProblem,
    orders: Orders,
    played: PlayedOrders,
    forbidden: dict[tuple[int, int], int],
    step: int,
    best: float,
) -> OrderMove | None:
    """Return the move with the smallest estimate that is not forbidden, or that would be the best so far."""
    chosen: tuple[float, OrderMove] | None = None
    oldest: tuple[int, float, OrderMove] | None = None
    whole_passes = problem.whole_in(orders)
    for move in _moves(problem, orders, played, whole_passes):
        order = orders[move.worker]
        if not _window_fits(problem, order, move, whole_passes):
            continue
        estimate = _estimate(problem, order, played, move)
        until = max(forbidden.get(pair, -1) for pair in move.pairs)
        if until >= step and estimate >= best * (1 - SLACK):
            # Where all moves are forbidden, the one that has been so for longest leads on.
            if oldest is None or (until, estimate) < oldest[:2]:
                oldest = (until, estimate, move)
            continue
        if chosen is None or estimate < chosen[0]:
            chosen = (estimate, move)
    if chosen is None:
        return None if oldest is None else oldest[2]
    return chosen[1]


def _moves(
    problem: ScheduleProblem, orders: Orders, played: PlayedOrders, whole_passes: frozenset[int]
) -> Iterator[OrderMove]:
    """Yield moves of tasks within the blocks of a critical path, and passes of it to be halved or joined."""
    positions = {task: (worker, at) for worker, order in enumerate(orders) for at, task in enumerate(order)}
    for worker, start, end in _critical_blocks(problem, orders, played, positions):
        order = orders[worker]
        for source, target in _shifts(start, end):
            task = order[source]
            if target > source:
                stays = any(
                    must_precede(problem, task, neighbour, whole_passes) for neighbour in order[source + 1 : target + 1]
                )
            else:
                stays = any(must_precede(problem, neighbour, task, whole_passes) for neighbour in order[target:source])
            if not stays:
                yield _shift(order, worker, source, target)
        if problem.is_mixed:
            yield from halving_moves(problem, order, worker, range(start, end + 1), whole_passes)


def _shifts(start: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield (from, to) of moves to a block's ends and past their neighbours."""
    if start == end:
        return
    yield start, start + 1
    if end - 1 > start:
        yield end - 1, end
    for at in range(start + 1, end):
        yield at, start
        yield at, end
    if end - start > 1:
        yield start, end
        yield end, start


def _shift(order: list[int], worker: int, source: int, target: int) -> OrderMove:
    task, low, high = order[source], min(source, target), max(source, target) + 1
    if target > source:
        neighbours = order[low + 1 : high]
        return OrderMove(worker, low, high, [*neighbours, task], [(neighbour, task) for neighbour in neighbours])
    neighbours = order[low : high - 1]
    return OrderMove(worker, low, high, [task, *neighbours], [(task, neighbour) for neighbour in neighbours])


def _critical_blocks(
    problem: ScheduleProblem, orders: Orders, played: PlayedOrders, positions: dict[int, tuple[int, int]]
) -> Iterator[tuple[int, int, int]]:
    """Yield (worker, first place, last place) of the blocks of one longest path, from its end to its start."""
    heads, seconds = played.heads, played.seconds
    slack = played.makespan * SLACK
    task = max(positions, key=lambda candidate: (heads[candidate] + seconds[candidate], -candidate))
    worker, at = positions[task]
    end = at
    while True:
        worker, at = positions[task]
        previous = orders[worker][at - 1] if at else None
        if previous is not None and heads[previous] + seconds[previous] >= heads[task] - slack and heads[task] > slack:
            task = previous
            continue
        yield worker, at, end
        # The block began when a value arrived.
        sources = [
            read for read, hop in problem.predecessors[task] if heads[read] + seconds[read] + hop >= heads[task] - slack
        ]
        if heads[task] <= slack or not sources:
            return
        task = sources[0]
        end = positions[task][1]


def _window_fits(problem: ScheduleProblem, order: list[int], move: OrderMove, whole_passes: frozenset[int]) -> bool:
    if not problem.memory:
        return True
    changes, earlier_tasks = problem.live_change, order[: move.low]
    alive = sum(changes[task] if task not in whole_passes else changes[task + 1] for task in earlier_tasks)
    window_passes = (whole_passes | move.joined) - move.halved
    return alive + peak_bytes(problem, move.tasks, window_passes) <= problem.bound_of(move.worker) * (1 + SLACK)


def _estimate(problem: ScheduleProblem, order: list[int], played: PlayedOrders, move: OrderMove) -> float:
    """Estimate the makespan with a window of an order replaced: exact where no path leaves the window and returns."""
    seconds, heads, tails, low = played.seconds, played.heads, played.tails, move.low
    if move.halved or move.joined:
        seconds = list(seconds)
        for tasks, ticks in ((move.halved, problem.seconds), (move.joined, problem.whole_seconds)):
            for task in tasks:
                seconds[task], seconds[task + 1] = ticks[task], ticks[task + 1]
    clock = heads[order[low - 1]] + seconds[order[low - 1]] if low else 0
    starts: list[float] = []
    for task in move.tasks:
        for read, hop in problem.predecessors[task]:
            clock = max(clock, heads[read] + seconds[read] + hop)
        starts.append(clock)
        clock += seconds[task]
    behind = seconds[order[move.high]] + tails[order[move.high]] if move.high < len(order) else 0
    makespan = 0.0
    for task, start in zip(reversed(move.tasks), reversed(starts), strict=True):
        for reader, hop in problem.successors[task]:
            behind = max(behind, hop + seconds[reader] + tails[reader])
        behind += seconds[task]
        makespan = max(makespan, start + behind)
    return makespan
