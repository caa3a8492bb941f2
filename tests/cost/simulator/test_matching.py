"""Tasks that cannot be played are refused, and named."""

from __future__ import annotations

import pytest

from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.schedule.action import Action, ActionKind
from tests.support.simulated_tasks import BACKWARD, FORWARD, alone, backward, receive, reduce, send, step


def test_a_deadlock_names_who_waits_for_what() -> None:
    lanes = [
        [receive("b"), send("a", TransferTime(1))],
        [receive("a"), send("b", TransferTime(1), peer=0)],
    ]
    sentence = (
        "deadlock: the receive of b of microbatch 0 on stage 0 from 0 in lane 0 waits for "
        "the send of b of microbatch 0 on stage 0 to 0 in lane 1, which is itself blocked, or comes later there"
    )
    for hosts in ([], [SharedCores((0, 1), 1)]):
        with pytest.raises(ValueError) as error:
            simulate_tasks(lanes, hosts)
        assert str(error.value) == sentence


def test_reductions_in_different_orders_are_a_deadlock() -> None:
    one, other = reduce("a", 1, (0, 1)), reduce("b", 1, (0, 1))
    with pytest.raises(ValueError, match="deadlock: the reduce of a on stage 0 in lane 0 waits for the reduce of a"):
        simulate_tasks([[one, other], [other, one]])
    with pytest.raises(ValueError, match="deadlock: the step on stage 0 in lane 0 waits for the reduce of a"):
        simulate_tasks([[reduce(n, 1, (0, 1), overlapped=True) for n in names] + [step()] for names in ("ab", "ba")])


def test_a_receive_whose_message_its_own_lane_holds_back_is_a_deadlock() -> None:
    with pytest.raises(ValueError, match="which is itself blocked, or comes later there"):
        simulate_tasks([[receive("a"), send("a", TransferTime(1))]])


def test_a_message_that_nobody_sends_is_named() -> None:
    with pytest.raises(ValueError, match=r"deadlock: the receive of a .* in lane 1 waits for what no lane sends"):
        simulate_tasks([[], [receive("a")]])
    with pytest.raises(ValueError, match="waits for what no lane sends"):
        simulate_tasks([[send("a", TransferTime())], [receive("a"), receive("a")]])


def test_ends_of_a_message_are_one_lane_each() -> None:
    with pytest.raises(ValueError, match=r"the send of a .* is sent by lane 0 and by lane 1"):
        simulate_tasks([[send("a", TransferTime())], [send("a", TransferTime())]])
    with pytest.raises(ValueError, match=r"the receive of a .* is received by lane 1 and by lane 2"):
        simulate_tasks([[send("a", TransferTime()), send("a", TransferTime())], [receive("a")], [receive("a")]])


def test_a_reduction_that_some_of_its_lanes_leave_out_is_refused() -> None:
    with pytest.raises(ValueError, match="the reduce of w on stage 0 is of lanes 0, 1: 1 times in some, 0 times in l"):
        simulate_tasks([[reduce("w", 1, (0, 1))], []])
    with pytest.raises(ValueError, match="in lane 0 cannot be of lanes 1, 2"):
        simulate_tasks([[reduce("w", 1, (1, 2))], [], []])
    with pytest.raises(ValueError, match="in lane 0 cannot be of lanes 0, 7"):
        simulate_tasks([[reduce("w", 1, (0, 7))]])


def test_lanes_must_agree_on_a_reduction() -> None:
    def task(seconds: float, lanes: tuple[int, ...]) -> Task:
        return Task(Action(ActionKind.REDUCE, 0, value="w"), key="w", lanes=lanes, transfer=TransferTime(seconds))

    with pytest.raises(ValueError, match="has another transfer in lane 1 than in others"):
        simulate_tasks([[task(1, (0, 1))], [task(2, (0, 1))]])
    with pytest.raises(ValueError, match="is of lanes 0, 1 and of lanes 1, 2"):
        simulate_tasks([[task(1, (0, 1))], [task(1, (1, 2))], []])


def test_keys_are_needed_where_nothing_stands_for_them() -> None:
    with pytest.raises(ValueError, match="the send of microbatch 0 on stage 0 in lane 0 needs a key, or a peer"):
        simulate_tasks([[Task(Action(ActionKind.SEND, 0, 0))]])
    with pytest.raises(ValueError, match="the reduce on stage 0 in lane 0 needs a key, or a value"):
        simulate_tasks([[Task(Action(ActionKind.REDUCE, 0))]])


def test_what_comes_after_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="lane 0: the reduce of w on stage 0 comes after no backward of microbatch 0"):
        simulate_tasks([[reduce("w", 1, (0,), after=BACKWARD, overlapped=True), backward(1)]])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": -1}, "must take at least 0 seconds"),
        ({"seconds": float("nan")}, "must take at least 0 seconds"),
        ({"seconds": 1, "waited": 2}, "wait for no more than all of them, not 1 and 2"),
        ({"fraction": 1.5}, "fraction must lie between 0 and 1, not 1.5"),
        ({"overlapped": True}, "only a reduction that does not keep its lane can be overlapped"),
        ({"after": BACKWARD}, "the forward of microbatch 0 on stage 0 transfers nothing"),
    ],
)
def test_tasks_that_mean_nothing_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Task(FORWARD, **arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"seconds": -1}, "seconds of a transfer must be at least 0, not -1"),
        ({"latency": float("inf")}, "latency of a transfer must be at least 0, not inf"),
        ({"cpu": -0.5}, "cpu of a transfer"),
    ],
)
def test_transfers_that_mean_nothing_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TransferTime(**arguments)  # type: ignore[arg-type]


def test_hosts_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="cores of a host must be more than 0, not 0"):
        SharedCores((0,), 0)
    with pytest.raises(ValueError, match="lanes of a host must differ"):
        SharedCores((0, 0), 1)
    with pytest.raises(ValueError, match="contention of 2 lanes must be more than 0, not 0"):
        SharedCores((0, 1), 1, {2: 0})
    with pytest.raises(ValueError, match="a host cannot have lane 1, which is none of 1 lanes"):
        simulate_tasks(alone(1), [SharedCores((0, 1), 1)])
    with pytest.raises(ValueError, match="a host cannot have lane 0, which has another host"):
        simulate_tasks(alone(1), [SharedCores((0,), 1), SharedCores((0,), 1)])
