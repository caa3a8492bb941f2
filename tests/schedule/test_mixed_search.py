"""Orders that mix whole and halved backward passes, found where halves take longer than the whole pass."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.plan.order import check_order, check_order_runs, format_order
from polylane.schedule.action import ActionKind
from polylane.schedule.exact_order import optimal_orders
from polylane.schedule.halving_moves import join_halves
from polylane.schedule.live import peak_live
from polylane.schedule.problem import (
    ScheduleProblem,
    fits_memory,
    lanes_to_orders,
    must_precede,
    orders_to_lanes,
    peak_bytes,
    play_orders,
)
from polylane.schedule.schedules import NAMES, schedule_lanes
from polylane.schedule.search import find_schedule
from polylane.schedule.stage_graph import StageGraph


def mixed_problem(workers: int | tuple[int, ...], microbatches: int, halving: float, **more: Any) -> ScheduleProblem:
    """A chain of equal stages: forwards of one tick, backwards of two, whose halves take a part of that longer."""
    owners = tuple(range(workers)) if isinstance(workers, int) else workers
    ones = (1.0,) * len(owners)
    given = {
        "forward": ones,
        "input_gradient": ones,
        "weight_gradient": (1.0 + 2 * halving,) * len(owners),
        "backward": (2.0,) * len(owners),
        **more,
    }
    return ScheduleProblem(graph=StageGraph.chain(len(owners)), workers=owners, microbatches=microbatches, **given)


def random_mixed(numbers: random.Random, microbatches: tuple[int, int], workers: tuple[int, int]) -> ScheduleProblem:
    k, count = numbers.randint(*workers), numbers.randint(*microbatches)
    first = [numbers.randint(1, 9) for _ in range(k)]
    second = [numbers.randint(1, 9) for _ in range(k)]
    part = numbers.choice((0.05, 0.1, 0.3))
    return mixed_problem(
        k,
        count,
        0,
        forward=tuple(numbers.randint(1, 9) for _ in range(k)),
        input_gradient=tuple(first),
        weight_gradient=tuple(w + min(part * (i + w), i) for i, w in zip(first, second, strict=True)),
        backward=tuple(i + w for i, w in zip(first, second, strict=True)),
        hop=numbers.choice((0, 0, 1, 3)),
        memory=() if numbers.random() < 0.4 else tuple(float(numbers.randint(1, count)) for _ in range(k)),
    )


def simulated(each: ScheduleProblem, lanes: Any) -> float:
    """The makespan of lanes by the simulator of schedules."""
    late = [whole - first for whole, first in zip(each.whole, each.input_gradient, strict=True)]
    halving = [
        (first + second - whole) / whole
        for whole, first, second in zip(each.whole, each.input_gradient, each.weight_gradient, strict=True)
    ]
    played = simulate_schedule(lanes, each.forward, each.whole, each.hop, each.graph, late, halving)
    return float(played.makespan())


def test_what_is_found_is_valid_and_no_later_than_anything_of_one_kind() -> None:
    numbers = random.Random(0)
    for _ in range(12):
        each = random_mixed(numbers, (2, 6), (2, 4))
        found = find_schedule(each, exact=False, effort=60_000)
        lines = format_order(found.lanes)
        check_order(lines, each.workers, each.microbatches)
        check_order_runs(lines, each.graph)
        assert simulated(each, found.lanes) == pytest.approx(found.makespan)
        if each.memory:
            assert all(peak <= bound for peak, bound in zip(peak_live(found.lanes), each.memory, strict=True))
            assert found.peak_bytes == peak_live(found.lanes)
        for alike in (replace(each, split=False), replace(each, backward=())):
            assert found.makespan <= find_schedule(alike, exact=False, effort=60_000).makespan * (1 + 1e-9)
        for name in NAMES:
            try:
                lanes = schedule_lanes(name, each.graph, each.microbatches, each.workers)
            except ValueError:
                continue
            if fits_memory(each, lanes_to_orders(each, lanes)):
                assert found.makespan <= simulated(each, lanes) * (1 + 1e-9), name


def test_a_half_is_worth_its_price_where_it_fills_a_bubble() -> None:
    """k=2, N=8 in the memory of 1F1B: 27 ticks whole, 25 + 8 · 2 · 0.08 all halved, 26 with one pass halved."""
    each = mixed_problem(2, 8, 0.08, memory=(2.0, 2.0))
    found = find_schedule(each)
    assert found.makespan == pytest.approx(26)
    assert [a for lane in found.lanes for a in lane if a.kind is ActionKind.BACKWARD_INPUT] == [
        found.lanes[1][-2]  # the last pass of the last stage, for which the first stage waits
    ]
    chunks = mixed_problem((0, 1, 0, 1), 8, 0.08, memory=(4.0, 4.0))
    assert find_schedule(chunks).makespan < 50.1 < find_schedule(replace(chunks, split=False)).makespan == 51


def test_free_halving_is_as_before() -> None:
    for owners in ((0, 1, 2), (0, 1, 1, 0)):
        each = mixed_problem(owners, 5, 0.0)
        assert not each.is_mixed
        assert find_schedule(each) == find_schedule(replace(each, backward=()))


def test_halves_that_are_too_dear_are_not_taken() -> None:
    found = find_schedule(mixed_problem(3, 5, 0.4, memory=(3.0,) * 3))
    assert found.makespan <= 21
    dear = find_schedule(mixed_problem(1, 5, 0.3))
    assert dear.makespan == 15 and dear.optimal
    assert {a.kind for a in dear.lanes[0]} == {ActionKind.FORWARD, ActionKind.BACKWARD}


def test_joining_halves_never_ends_later() -> None:
    numbers = random.Random(3)
    for _ in range(6):
        each = random_mixed(numbers, (3, 6), (2, 3))
        orders = lanes_to_orders(each, schedule_lanes("zb-h1", each.graph, each.microbatches))
        joined = join_halves(each, orders, 10**6)
        before, after = play_orders(each, orders), play_orders(each, joined)
        assert before is not None and after is not None and after.makespan <= before.makespan * (1 + 1e-9)
        check_order(format_order(orders_to_lanes(each, joined)), each.workers, each.microbatches)
        assert lanes_to_orders(each, orders_to_lanes(each, joined)) == joined


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"backward": (2.0, 2.3)}, "the whole backward pass of stage 1 takes 2.3 seconds, its halves 1 and 1.2: it"),
        ({"backward": (0.9, 2.0)}, "the whole backward pass of stage 0 takes 0.9 seconds"),
        ({"backward": (2.0,)}, "backward has 1 figures for 2 stages"),
    ],
)
def test_whole_passes_that_are_refused(more: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        mixed_problem(2, 4, 0.1, **more)


def gap(each: ScheduleProblem, most_pairs: int) -> float | None:
    """How much longer than the optimum the search without its integer program takes; None where that is not proven."""
    found = find_schedule(each, exact=False, effort=60_000)
    if found.optimal:
        return 0.0
    exact = optimal_orders(each, found.makespan, most_pairs)
    if exact is not None:
        check_order(format_order(orders_to_lanes(each, exact[1])), each.workers, each.microbatches)
        assert fits_memory(each, exact[1])
    return None if exact is None else found.makespan / exact[0] - 1


def test_mixed_orders_are_within_two_percent_of_the_optimum_of_small_problems() -> None:
    numbers = random.Random(0)
    gaps = [gap(random_mixed(numbers, (2, 3), (2, 3)), most_pairs=60) for _ in range(12)]
    proven = [each for each in gaps if each is not None]
    assert len(proven) >= 10 and max(proven) <= 0.02


@pytest.mark.slow
def test_mixed_orders_are_within_two_percent_of_the_optimum_of_many_problems() -> None:
    numbers = random.Random(1)
    gaps = [gap(random_mixed(numbers, (2, 5), (2, 4)), most_pairs=110) for _ in range(60)]
    proven = [each for each in gaps if each is not None]
    assert len(proven) >= 30 and max(proven) <= 0.02


def every_mixed_order(each: ScheduleProblem, worker: int) -> Iterator[list[int]]:
    """All orders of a worker's tasks, with every choice of passes that are whole."""
    own = [t for t in range(each.tasks) if each.workers[each.split_task(t)[0]] == worker]
    firsts = [t for t in own if t % 3 == 1]
    for whole in (set(chosen) for n in range(len(firsts) + 1) for chosen in combinations(firsts, n)):

        def extend(order: list[int], left: list[int], whole: set[int]) -> Iterator[list[int]]:
            if not left:
                yield order
            for task in left:
                if not any(must_precede(each, other, task, whole) for other in left if other != task):
                    yield from extend([*order, task], [other for other in left if other != task], whole)

        yield from extend([], [t for t in own if t - 1 not in whole], whole)


@pytest.mark.parametrize("memory", [(), (1.0, 1.0), (2.0, 1.0)])
def test_the_integer_program_chooses_exactly(memory: tuple[float, ...]) -> None:
    numbers = random.Random(len(memory))
    for _ in range(3):
        small = replace(random_mixed(numbers, (2, 2), (2, 2)), memory=memory)
        fitting = [
            [order for order in every_mixed_order(small, worker) if peak_bytes(small, order) <= small.bound_of(worker)]
            for worker in range(2)
        ]
        played = (play_orders(small, orders) for orders in product(*fitting))
        least = min(one.makespan for one in played if one is not None)
        exact = optimal_orders(small, sum(small.seconds) + 50, most_pairs=200)
        assert exact is not None and exact[0] == pytest.approx(least)
        assert find_schedule(small, exact=False).makespan == pytest.approx(least)
