"""Schedules that are found: exact figures, what is refused, and the integer program that proves them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import ActionKind
from polylane.schedule.exact_order import optimal_orders
from polylane.schedule.problem import (
    NoScheduleFits,
    ScheduleProblem,
    fits_memory,
    must_precede,
    peak_bytes,
    play_orders,
)
from polylane.schedule.schedules import assign_stages, schedule_lanes
from polylane.schedule.search import find_schedule
from polylane.schedule.stage_graph import StageGraph


def problem(workers: int | tuple[int, ...], microbatches: int, **more: Any) -> ScheduleProblem:
    """A chain whose passes take one tick each."""
    owners = tuple(range(workers)) if isinstance(workers, int) else workers
    ticks = (1,) * len(owners)
    given = {"forward": ticks, "input_gradient": ticks, "weight_gradient": ticks, **more}
    return ScheduleProblem(graph=StageGraph.chain(len(owners)), workers=owners, microbatches=microbatches, **given)


def test_a_warm_up_is_chosen_by_latency() -> None:
    """k=4, N=8, F=1, B=2, c=1: 1F1B takes 49 with 4 live microbatches, AFAB 39 with 8; 39 needs no more than 7."""
    for bound, least in (((8,) * 4, 39), ((7,) * 4, 39), ((4,) * 4, 46)):
        found = find_schedule(problem(4, 8, hop=1, split=False, memory=bound))
        assert found.makespan <= least
        assert max(found.peak_bytes) <= bound[0]
        assert simulate_schedule(found.lanes, 1, 2, 1).makespan() == found.makespan
    free = find_schedule(problem(4, 8, hop=1, split=False))
    assert (free.makespan, free.optimal) == (39, True)
    assert free.peak_bytes == (7, 5, 3, 1)  # of orders that end together, one that holds less


def test_a_named_schedule_that_is_the_best_is_found_by_its_name() -> None:
    found = find_schedule(problem(4, 8))
    assert (found.origin, found.makespan, found.optimal) == ("zb-h1", 27, True)
    assert found.lanes == schedule_lanes("zb-h1", 4, 8)
    found = find_schedule(problem(assign_stages("zb-v", 3, 2), 6, memory=(6,) * 3))
    assert (found.origin, found.makespan, found.optimal) == ("zb-v", 38, True)


def test_round_robin_chunks_with_halves_end_earlier_than_interleaved() -> None:
    found = find_schedule(problem((0, 1, 2, 3) * 2, 8, memory=(12,) * 4))
    assert (
        found.makespan
        == 51
        < simulate_schedule(
            schedule_lanes("interleaved", 8, 8, (0, 1, 2, 3) * 2), 1, 2, graph=StageGraph.chain(8)
        ).makespan()
    )


def test_whole_backward_passes() -> None:
    found = find_schedule(problem(3, 5, split=False))
    assert {action.kind for lane in found.lanes for action in lane} == {ActionKind.FORWARD, ActionKind.BACKWARD}
    assert found.makespan == (5 + 3 - 1) * 3


def test_hops_of_their_own() -> None:
    hops = {(0, 1): 5.0, (1, 2): 0.0}
    found = find_schedule(problem(3, 4, hop=hops))
    assert simulate_schedule(found.lanes, 1, 2, hops).makespan() == found.makespan
    slower = {(0, 1): 5.0, (1, 2): 5.0}
    assert find_schedule(problem(3, 4, hop=slower)).makespan > found.makespan


def test_one_microbatch_at_a_time_fits_where_anything_does() -> None:
    owners = assign_stages("zb-v", 3, 2)
    found = find_schedule(problem(owners, 4, memory=(2,) * 3))
    assert max(found.peak_bytes) <= 2
    with pytest.raises(NoScheduleFits, match="no order of passes fits on worker 1: one microbatch takes 2 bytes"):
        problem(owners, 4, memory=(2, 1.5, 2))


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"forward": (1, 1)}, "forward has 2 figures for 3 stages"),
        ({"weight_gradient": (1, -1, 1)}, "weight_gradient must be at least 0 for every stage"),
        ({"memory": (3,)}, "memory has 1 bounds for 3 workers"),
        ({"workers": (0, 2, 2)}, "every worker from 0 to 2 must have a stage"),
        ({"microbatches": 0}, "microbatches must be a whole number of at least 1, not 0"),
    ],
)
def test_what_is_refused(more: dict[str, Any], says: str) -> None:
    given: dict[str, Any] = {
        "graph": StageGraph.chain(3),
        "workers": (0, 1, 2),
        "microbatches": 4,
        "forward": (1,) * 3,
        "input_gradient": (1,) * 3,
        "weight_gradient": (1,) * 3,
    }
    with pytest.raises(ValueError, match=says):
        ScheduleProblem(**{**given, **more})


def test_an_optimum_of_a_small_problem() -> None:
    """The integer program may find less than any rule, and what it finds is an order that runs and fits."""
    small = problem(2, 3, forward=(3, 1), input_gradient=(1, 4), weight_gradient=(2, 2), hop=1, memory=(2.0, 2.0))
    exact = optimal_orders(small, find_schedule(small, exact=False).makespan)
    assert exact is not None
    played = play_orders(small, exact[1])
    assert played is not None and played.makespan == exact[0] and fits_memory(small, exact[1])
    assert optimal_orders(small, exact[0], most_pairs=0) is None


def random_problem(numbers: random.Random, microbatches: tuple[int, int], workers: tuple[int, int]) -> ScheduleProblem:
    k = numbers.randint(*workers)
    split, count = numbers.random() < 0.75, numbers.randint(*microbatches)
    return problem(
        k,
        count,
        forward=tuple(numbers.randint(1, 9) for _ in range(k)),
        input_gradient=tuple(numbers.randint(1, 9) for _ in range(k)),
        weight_gradient=tuple(numbers.randint(0, 9) for _ in range(k)),
        hop=numbers.choice([0, 0, 1, 3]),
        memory=() if numbers.random() < 0.4 else tuple(float(numbers.randint(1, count)) for _ in range(k)),
        split=split,
    )


def gap(each: ScheduleProblem, most_pairs: int) -> float | None:
    """How much longer than the optimum the search without its integer program takes; None where that is not proven."""
    found = find_schedule(each, exact=False, effort=60_000)
    if found.optimal:
        return 0.0
    exact = optimal_orders(each, found.makespan, most_pairs)
    return None if exact is None else found.makespan / exact[0] - 1


def test_within_two_percent_of_the_optimum_of_small_problems() -> None:
    numbers = random.Random(0)
    gaps = [gap(random_problem(numbers, (2, 3), (2, 3)), most_pairs=60) for _ in range(25)]
    proven = [each for each in gaps if each is not None]
    assert len(proven) >= 20 and max(proven) <= 0.02


@pytest.mark.slow
def test_within_two_percent_of_the_optimum_of_many_problems() -> None:
    numbers = random.Random(1)
    gaps = [gap(random_problem(numbers, (2, 5), (2, 4)), most_pairs=110) for _ in range(150)]
    proven = [each for each in gaps if each is not None]
    assert len(proven) >= 75 and max(proven) <= 0.02


@pytest.mark.slow
def test_eight_workers_and_sixty_four_microbatches_take_seconds() -> None:
    large = problem(8, 64, forward=(1.1,) * 8, input_gradient=(1.3,) * 8, weight_gradient=(0.8,) * 8, hop=0.3)
    start = time.process_time()
    found = find_schedule(large)
    assert time.process_time() - start < 10
    assert found.makespan <= 1.03 * large.lower_bound


def every_order(each: ScheduleProblem, worker: int) -> Iterator[list[int]]:
    """All orders of a worker's tasks in which those of a stage ascend, one after the other."""

    def extend(order: list[int], left: list[int]) -> Iterator[list[int]]:
        if not left:
            yield order
        for task in left:
            if not any(must_precede(each, other, task) for other in left if other != task):
                yield from extend([*order, task], [other for other in left if other != task])

    return extend([], [t for t in range(each.tasks) if each.workers[each.split_task(t)[0]] == worker])


def least_makespan(each: ScheduleProblem) -> float:
    """The optimum by playing every order that fits."""
    fitting = [
        [order for order in every_order(each, worker) if peak_bytes(each, order) <= each.bound_of(worker)]
        for worker in range(each.count)
    ]
    played = (play_orders(each, orders) for orders in product(*fitting))
    return min(one.makespan for one in played if one is not None)


@pytest.mark.parametrize(
    ("owners", "microbatches", "memory"),
    [
        ((0, 1), 2, ()),
        ((0, 1), 2, (1.0, 1.0)),
        ((0, 1), 3, (2.0, 2.0)),
        ((0, 1), 3, (2.0, 3.0)),
        ((0, 1, 1, 0), 1, ()),
        ((0, 1, 1, 0), 2, (2.0, 3.0)),
        ((0, 1, 0, 1), 2, (3.0, 2.0)),
    ],
)
def test_the_integer_program_is_exact(owners: tuple[int, ...], microbatches: int, memory: tuple[float, ...]) -> None:
    numbers = random.Random(microbatches)
    for _ in range(3):
        # Whole backward passes where there would be too many orders to play.
        split = len(owners) == 2 or microbatches == 1
        ticks = [tuple(numbers.randint(1, 5) for _ in owners) for _ in range(3)]
        small = problem(
            owners,
            microbatches,
            forward=ticks[0],
            input_gradient=ticks[1],
            weight_gradient=ticks[2],
            hop=numbers.randint(0, 2),
            memory=memory,
            split=split,
        )
        # From a makespan that any order reaches, so that nothing is ordered in advance by a good one.
        exact = optimal_orders(small, sum(small.seconds) + 2 * len(owners) * microbatches * 4, most_pairs=200)
        assert exact is not None and exact[0] == least_makespan(small)
        assert fits_memory(small, exact[1])
