"""A schedule found, not written: the order of passes that ends first for given times, latencies and memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from polylane.schedule.exact_order import optimal_orders
from polylane.schedule.halving_moves import join_halves
from polylane.schedule.list_scheduling import list_rules, schedule_list
from polylane.schedule.local_search import improve_orders
from polylane.schedule.problem import (
    SLACK,
    Orders,
    ScheduleProblem,
    fits_memory,
    lanes_to_orders,
    orders_to_lanes,
    peak_bytes,
    play_orders,
)
from polylane.schedule.schedules import NAMES, schedule_lanes, splits_backward
from polylane.schedule.synchronous import Lanes, warmed_up

EFFORT = 600_000  # tasks that the rules, and then the local improvement, play in all
STARTS = 12  # orders that it starts from, at most
LEAST_STEPS = 60  # of the improvement from one of them: large problems have fewer starts
LEAST_RULES = 4  # of list scheduling that are tried


@dataclass(frozen=True)
class FoundSchedule:
    """An order of passes, and how good it is.

    Attributes:
        lanes: the passes of every worker, first to last.
        makespan: seconds of a step of these lanes.
        peak_bytes: for each worker, the most bytes of live activations.
        origin: what the search started from: a schedule's name, 1F1B with a longer warm-up, a rule, or the integer
            program.
        optimal: whether no order ends earlier: it equals a lower bound, or the integer program has proven it.
    """

    lanes: Lanes
    makespan: float
    peak_bytes: tuple[float, ...]
    origin: str
    optimal: bool


def find_schedule(problem: ScheduleProblem, *, exact: bool = True, effort: int = EFFORT) -> FoundSchedule:
    """Find the order of passes that ends first; of orders that end together, one that holds less.

    Named schedules that fit into the memory, 1F1B with longer warm-ups and orders made by several rules are played; the
    best of them are improved, and a small problem is given to an integer program. The same problem always gives the
    same order. Where halves of a backward pass take longer than the whole, it starts from the best orders with all
    passes whole and with none, and ends no later than either.

    Args:
        problem: times, latencies and memory; see :class:`polylane.schedule.problem.ScheduleProblem`.
        exact: whether the integer program is tried where the problem is small.
        effort: number of tasks that list scheduling plays at most, and then the local improvement, in all.

    Raises:
        ValueError: stages that are numbered so that one reads a later one's values, and share a worker.
    """
    starts = (_mixed_starts if problem.is_mixed else _starts)(problem, exact, effort)
    best = starts[0]
    # A large problem has fewer starts, and in the end fewer steps.
    count = min(STARTS, max(1, effort // (problem.tasks * LEAST_STEPS)))
    # Those of mixed passes are improved already, as far as passes of one kind can be.
    for start in starts[: (count + 1) // 2 if problem.is_mixed else count]:
        if best.makespan <= problem.lower_bound * (1 + SLACK):
            break
        makespan, orders = improve_orders(problem, start.orders, effort // (problem.tasks * count))
        best = min(best, _played(problem, orders, makespan, start.origin), key=lambda candidate: candidate.rank)
    optimal = best.makespan <= problem.lower_bound * (1 + SLACK)
    if exact and not optimal and (proven := optimal_orders(problem, best.makespan)) is not None:
        optimal = True
        if proven[0] < best.makespan * (1 - SLACK):
            best = _played(problem, proven[1], proven[0], "integer program")
    if problem.is_mixed:
        joined = _candidate(problem, join_halves(problem, best.orders, effort), best.origin)
        best = min(best, *([] if joined is None else [joined]), key=lambda candidate: candidate.rank)
    peaks = tuple(peak_bytes(problem, order) for order in best.orders)
    return FoundSchedule(orders_to_lanes(problem, best.orders), best.makespan, peaks, best.origin, optimal)


@dataclass(frozen=True)
class _Candidate:
    """Orders that were played.

    Attributes:
        orders: the tasks of every worker.
        makespan: seconds of a step.
        work: seconds of all passes, where orders differ in it; else 0.
        held: bytes that the workers hold at most, in all.
        origin: the schedule or rule that made them.
    """

    orders: Orders
    makespan: float
    work: float
    held: float
    origin: str

    @property
    def rank(self) -> tuple[float, float, float]:
        """Earlier ends first, then less work, then less memory."""
        return round(self.makespan, 12), round(self.work, 12), self.held


def _played(problem: ScheduleProblem, orders: Orders, makespan: float, origin: str) -> _Candidate:
    seconds = problem.seconds_in(orders)
    load = sum(seconds[task] for order in orders for task in order) if problem.is_mixed else 0.0
    return _Candidate(orders, makespan, load, sum(peak_bytes(problem, order) for order in orders), origin)


def _candidate(problem: ScheduleProblem, orders: Orders, origin: str) -> _Candidate | None:
    """Return orders as they play; None where they do not fit into the memory, or wait in a circle."""
    if not fits_memory(problem, orders) or (played := play_orders(problem, orders)) is None:
        return None
    return _played(problem, orders, played.makespan, origin)


def _starts(problem: ScheduleProblem, exact: bool, effort: int) -> list[_Candidate]:
    """Return the orders that fit into the memory, best first, of several that end together only one."""
    candidates: dict[tuple[float, ...], _Candidate] = {}

    def play(origin: str, orders: Orders) -> None:
        if (candidate := _candidate(problem, orders, origin)) is not None:
            candidates.setdefault(candidate.rank, candidate)

    for origin, orders in _written_orders(problem):
        play(origin, orders)
    for origin, orders in islice(_listed_orders(problem), max(LEAST_RULES, effort // problem.tasks)):
        if min(candidates)[0] <= problem.lower_bound * (1 + SLACK):
            break  # no further rule can end earlier
        play(origin, orders)
    return [candidates[rank] for rank in sorted(candidates)]


def _mixed_starts(problem: ScheduleProblem, exact: bool, effort: int) -> list[_Candidate]:
    """Return the best orders with all backward passes whole, with none, and what joining halves makes of others."""
    halves = replace(problem, backward=())
    lanes = [
        (schedule.origin, schedule.lanes)
        for variant in (replace(problem, split=False), halves)
        for schedule in [find_schedule(variant, exact=exact, effort=effort)]
    ]
    lanes += [
        (start.origin, orders_to_lanes(halves, start.orders)) for start in _starts(halves, exact, effort)[:STARTS]
    ]
    orders = [(origin, lanes_to_orders(problem, worker_lanes)) for origin, worker_lanes in lanes]
    orders += islice(_listed_orders(problem), max(LEAST_RULES, effort // problem.tasks))
    candidates: dict[tuple[float, ...], _Candidate] = {}
    for origin, worker_orders in orders:
        if (candidate := _candidate(problem, worker_orders, origin)) is not None:
            candidates.setdefault(candidate.rank, candidate)
    for _, start in sorted(candidates.items())[:STARTS]:
        joined = _candidate(problem, join_halves(problem, start.orders, effort // STARTS), start.origin)
        if joined is not None:
            candidates.setdefault(joined.rank, joined)
    return [candidates[rank] for rank in sorted(candidates)]


def _written_orders(problem: ScheduleProblem) -> Iterator[tuple[str, Orders]]:
    """Yield orders with their names: schedules first, so that a name stands for what it is as good as."""
    for name in NAMES:
        if splits_backward(name) and not problem.split:
            continue
        try:
            lanes = schedule_lanes(name, problem.graph, problem.microbatches, problem.workers)
        except ValueError:
            continue  # not the stages, or not the chunks, that this schedule has
        yield name, lanes_to_orders(problem, lanes)
    if problem.count == problem.graph.stages and problem.workers == tuple(range(problem.count)):
        for extra, lanes in _longer_warm_ups(problem):
            yield f"1f1b with {extra} more forwards for each stage behind", lanes_to_orders(problem, lanes)
    yield "one microbatch at a time", _one_at_a_time(problem)


def _listed_orders(problem: ScheduleProblem) -> Iterator[tuple[str, Orders]]:
    """Yield the orders of list scheduling, with the names of their rules."""
    for rule in list_rules(problem):
        orders = schedule_list(problem, rule)
        if orders is not None:
            yield rule.name, orders


def _longer_warm_ups(problem: ScheduleProblem) -> Iterator[tuple[str, Lanes]]:
    """Yield 1F1B with longer warm-ups: they take back the latency of 1F1B's steady state, for more live microbatches.

    Between a microbatch's forward and its backward on stage s are 2(k - 1 - s) hops: F + B + 2c(k - 1)/k for each
    microbatch of 1F1B, in which the stage has nothing else to do.
    """
    depths = problem.graph.depth_to_end
    for quarters in (1, 2, 3, 4, 6, 8):
        warm_up = [(ahead - 1) + ((ahead - 1) * quarters + 3) // 4 for ahead in depths]
        yield f"{quarters / 4:g}", warmed_up(problem.graph, problem.microbatches, warm_up)


def _one_at_a_time(problem: ScheduleProblem) -> Orders:
    """Return the order that holds least: each microbatch through all stages and back before the next one."""
    # Deeper stages first on the way back; depths also order the stages of a worker on the way there.
    depths, kinds = problem.graph.depth_to_end, len(problem.kinds)
    orders: Orders = []
    for worker in range(problem.count):
        stages = sorted((s for s, w in enumerate(problem.workers) if w == worker), key=lambda s: -depths[s])
        passes = [(s, 0) for s in stages] + [(s, kind) for s in reversed(stages) for kind in range(1, kinds)]
        orders.append([problem.task(s, m, kind) for m in range(problem.microbatches) for s, kind in passes])
    return orders
