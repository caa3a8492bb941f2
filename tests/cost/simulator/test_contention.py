"""Playing tasks on shared cores."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from tests.support.simulated_tasks import BACKWARD, alone, backward, ends, forward, receive, reduce, send, step, times


@pytest.mark.parametrize(("lanes", "cores", "expected"), [(2, 2, 3), (4, 2, 6), (3, 2, 4.5), (3, 1, 9), (2, 0.5, 12)])
def test_lanes_share_cores_evenly(lanes: int, cores: float, expected: float) -> None:
    timeline = simulate_tasks(alone(lanes, 3.0), [SharedCores(tuple(range(lanes)), cores)])
    assert ends(timeline) == pytest.approx([expected] * lanes, rel=1e-12)


def test_who_is_done_leaves_the_cores_to_the_others() -> None:
    assert ends(simulate_tasks(alone(2, [1.0, 3.0]), [SharedCores((0, 1), 1)])) == pytest.approx([2, 4])


def test_hosts_do_not_disturb_each_other() -> None:
    assert ends(simulate_tasks(alone(5), [SharedCores((0, 1), 1), SharedCores((2, 3), 2)])) == [2, 2, 1, 1, 1]


def test_memory_is_shared_even_with_cores_enough() -> None:
    table = SharedCores((0, 1, 2, 3), 4, {2: 0.9, 4: 0.7})
    assert [table.slowdown(k) for k in (1, 2, 3, 4, 5)] == pytest.approx([1, 0.9, 0.8, 0.7, 0.7])
    assert ends(simulate_tasks(alone(2), [SharedCores((0, 1), 2, {2: 0.8})])) == pytest.approx([1.25, 1.25])
    assert ends(simulate_tasks(alone(2), [SharedCores((0, 1), 1, {2: 0.8})])) == pytest.approx([2.5, 2.5])


def test_waits_inside_an_action_are_not_slowed() -> None:
    timeline = simulate_tasks([[forward(3, waited=1)]] * 2, [SharedCores((0, 1), 1)])
    assert ends(timeline) == pytest.approx([5, 5])
    assert timeline.busy() == pytest.approx((4, 4))


def test_a_lane_that_waits_leaves_its_core() -> None:
    lanes = [[forward(2), send("a", TransferTime(2))], [receive("a"), forward(2)], [forward(5)]]
    assert ends(simulate_tasks(lanes, [SharedCores((0, 1, 2), 1)])) == pytest.approx([4, 9, 8])


def test_a_transfer_costs_cores_at_both_ends() -> None:
    def lanes(cpu: float) -> list[list[Task]]:
        return [[send("a", TransferTime(10, cpu=cpu)), forward(3)], [forward(3), receive("a")]]

    # Of one core the two ends of the message have 1/4 each, and the two lanes the rest, until it has left.
    assert ends(simulate_tasks(lanes(0.25), [SharedCores((0, 1), 1)])) == pytest.approx([11, 11])
    assert ends(simulate_tasks(lanes(0.25), [SharedCores((0,), 1), SharedCores((1,), 1)])) == pytest.approx([4, 10])
    assert ends(simulate_tasks(lanes(0.25), [SharedCores((0, 1), 2)])) == pytest.approx([4, 10])
    assert ends(simulate_tasks(lanes(0.25), [SharedCores((0, 1), 3)])) == [3, 10]


def test_a_transfer_that_wants_more_than_its_share_of_the_cores_is_slowed() -> None:
    lanes = [[send("a", TransferTime(2, cpu=1)), forward(2)], [receive("a")]]
    assert ends(simulate_tasks(lanes, [SharedCores((0,), 1)])) == pytest.approx([4, 4])


def test_buckets_leave_later_where_cores_are_shared() -> None:
    bucket = reduce("w", 1, (0, 1), after=BACKWARD, fraction=0.5, overlapped=True)
    timeline = simulate_tasks([[backward(4), bucket, step()]] * 2, [SharedCores((0, 1), 1)])
    for rank in (0, 1):
        assert [(s, e) for kind, s, e in times(timeline, rank) if kind == "reduce"] == [pytest.approx((4, 5))]
        assert times(timeline, rank)[-1] == ("step", pytest.approx(8), pytest.approx(8))
