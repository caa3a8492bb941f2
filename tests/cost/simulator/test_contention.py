"""Playing tasks on shared cores and links."""

from __future__ import annotations

import pytest

from playing import BACKWARD, alone, backward, ends, forward, receive, reduce, send, step, times
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.schedule.action import Action, ActionKind


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
    assert ends(simulate_tasks(alone(2), [SharedCores((0, 1), 2, lambda k: 1 / k)])) == pytest.approx([2, 2])


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


# Shared links


def over(link: str, seconds: float = 2, amount: float = 1) -> TransferTime:
    return TransferTime(seconds, links={link: amount})


def pairs(*transfers: TransferTime) -> list[list[Task]]:
    """A sender and a receiver for each."""
    return [lane for i, transfer in enumerate(transfers) for lane in ([send(str(i), transfer)], [receive(str(i))])]


def test_two_equal_transfers_on_one_link_take_twice_as_long_each() -> None:
    assert ends(simulate_tasks(pairs(over("x"), over("x"))))[1::2] == pytest.approx([4, 4])
    assert ends(simulate_tasks(pairs(over("x"), over("y"))))[1::2] == [2, 2]
    assert ends(simulate_tasks(pairs(over("x"), over("x")), links={"x": 2}))[1::2] == [2, 2]


def test_who_takes_little_of_a_link_is_not_slowed() -> None:
    assert ends(simulate_tasks(pairs(over("x", amount=0.25), over("x"))))[1::2] == pytest.approx([2, 2.5])


def test_a_link_is_shared_again_when_somebody_has_left() -> None:
    assert ends(simulate_tasks(pairs(over("x", 1), over("x", 3))))[1::2] == pytest.approx([2, 4])


def test_a_transfer_over_several_links_goes_by_the_narrowest() -> None:
    both = TransferTime(2, links={"x": 1, "y": 1})
    # x holds three thirds; what that leaves of y is the fourth's.
    timeline = simulate_tasks(pairs(both, over("x"), over("x"), over("y")))
    assert ends(timeline)[1::2] == pytest.approx([6, 6, 6, 3])


def test_a_link_too_narrow_for_one() -> None:
    assert ends(simulate_tasks(pairs(over("x", 2, 1)), links={"x": 0.5}))[1] == pytest.approx(4)


def test_reductions_and_messages_share_links() -> None:
    everywhere = TransferTime(2, links={"x": 1})
    lanes = [
        [Task(Action(ActionKind.REDUCE, 0, value="w"), lanes=(0, 1), transfer=everywhere), send("a", everywhere)],
        [Task(Action(ActionKind.REDUCE, 0, value="w"), lanes=(0, 1), transfer=everywhere)],
        [send("b", everywhere)],
        [receive("b")],
        [receive("a")],
    ]
    assert ends(simulate_tasks(lanes)) == pytest.approx([4, 4, 0, 4, 6])


def test_a_transfer_slowed_by_cores_leaves_the_link_to_others() -> None:
    lanes = [
        *pairs(TransferTime(2, links={"x": 1}, cpu=1), over("x", 3)),
        [forward(100)],
        [forward(100)],
        [forward(100)],
    ]
    # Four want one core at the first sender's: it moves at 1/4, the other at 3/4.
    timeline = simulate_tasks(lanes, [SharedCores((0, 4, 5, 6), 1)])
    assert ends(timeline)[3] == pytest.approx(4)
    assert ends(timeline)[1] == pytest.approx(8)
