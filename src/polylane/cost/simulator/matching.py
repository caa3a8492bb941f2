"""Matching: pair sends with receives, and the tasks of all lanes that take part in one reduction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from polylane.cost.simulator.task import Task, TransferTime, describe_action
from polylane.schedule.action import Action, ActionKind


class Role(IntEnum):
    """How a task occupies its lane and its transfer."""

    COMPUTE = 0  # waits for the awaited reductions, then keeps the lane
    SEND = 1  # keeps the lane, then requests its transfer
    AWAIT = 2  # waits for a transfer, then keeps the lane
    REDUCE = 3  # requests its transfer, waits for it, then keeps the lane
    ASK = 4  # requests its transfer and goes on (an overlapped reduction)


@dataclass(slots=True, eq=False)
class Transmission:
    """A message or a reduction, with its state during the simulation.

    Attributes:
        action: the send, or the reduce of the first lane.
        transfer: undisturbed duration, latency and cores.
        lanes: lanes that request it: the sender's, or all of a reduction.
        end_lanes: all lanes at its ends, the receiver's included.
        missing_count: number of lanes not yet ready for it, plus transfers still ahead of it on its channels.
        requested_at: latest time so far at which a lane was ready for it.
        channel_free_at: latest time so far at which a transfer ahead of it ended.
        start, end, arrival: when it begins to move, frees its channel, and has arrived; None while unknown.
        next_on_channel: transfers queued directly behind it on its channels.
        waiting_lanes: lanes to resume once it has arrived.
        exclusive_key: transfers with the same key are queued on one channel and never overlap.
    """

    action: Action
    transfer: TransferTime
    lanes: tuple[int, ...]
    exclusive_key: Hashable
    end_lanes: tuple[int, ...] = ()
    missing_count: int = 0
    requested_at: float = 0
    channel_free_at: float = 0
    start: float | None = None
    end: float | None = None
    arrival: float | None = None
    next_on_channel: tuple[Transmission, ...] = ()
    waiting_lanes: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class ScheduledTask:
    """A task in its lane, with its transfer, start and end.

    Attributes:
        requests_on_arrival: whether the lane becomes ready for the transfer when it reaches this task, not at an
            earlier one.
        awaited: overlapped reductions that must be done before it.
        released: (fraction of the task, transfer) pairs, ascending: from that fraction on the lane is ready for the
            transfer.
        start, end: when the lane reached it (a wait: when its message was requested, if later) and was done with it.
    """

    task: Task
    role: Role
    message: Transmission | None = None
    requests_on_arrival: bool = True
    awaited: tuple[Transmission, ...] = ()
    released: tuple[tuple[float, Transmission], ...] = ()
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class MatchedLanes:
    """The tasks of all lanes, and their transfers."""

    lanes: list[list[ScheduledTask]]
    messages: list[Transmission]


def match_lanes(lanes: Sequence[Sequence[Task]]) -> MatchedLanes:
    """Match the messages and reductions of all lanes.

    Raises:
        ValueError: a message that is received and never sent, or has several lanes at one end; a reduction whose lanes
            or transfer differ between its lanes; a task whose ``after`` is no earlier task of its lane.
    """
    matching = _LaneMatcher(len(lanes))
    ops = [matching.match_lane(lane, tasks) for lane, tasks in enumerate(lanes)]
    matching.match_receives()
    matching.check_reductions()
    matching.set_released()
    return MatchedLanes(ops, matching.messages)


class _LaneMatcher:
    """Collects sends, receives and reductions by key while the lanes are read."""

    def __init__(self, lanes: int) -> None:
        self.count = lanes
        self.messages: list[Transmission] = []
        self.sent: defaultdict[Hashable, list[Transmission]] = defaultdict(list)
        self.reduced: dict[Hashable, list[Transmission]] = {}
        self.seen: dict[tuple[int, Hashable], int] = {}  # (lane, reduction) -> times it takes part
        self.received: dict[tuple[int, Hashable], list[ScheduledTask]] = {}
        self.early: list[tuple[ScheduledTask, ScheduledTask]] = []  # (computing task, transfer that it releases)

    def match_lane(self, lane: int, tasks: Sequence[Task]) -> list[ScheduledTask]:
        """Return the tasks of a lane with the transfers of its sends and reductions."""
        ops: list[ScheduledTask] = []
        channels: dict[Hashable, Transmission] = {}
        pending: list[Transmission] = []
        # Last task of each action, to resolve ``after``; None in lanes where no task has it.
        latest: dict[Action, ScheduledTask] | None = {} if any(task.after is not None for task in tasks) else None
        for task in tasks:
            kind = task.action.kind
            if kind is ActionKind.SEND:
                op = ScheduledTask(task, Role.SEND, _queue_on_channel(channels, task, self._message(lane, task)))
            elif kind is ActionKind.RECEIVE:
                op = ScheduledTask(task, Role.AWAIT, requests_on_arrival=False)
                self.received.setdefault((lane, _task_key(task, lane)), []).append(op)
            elif kind is ActionKind.REDUCE:
                travel = _queue_on_channel(channels, task, self._reduction(lane, task))
                op = ScheduledTask(task, Role.ASK if task.overlapped else Role.REDUCE, travel)
                pending += [travel] * task.overlapped
            else:
                op = ScheduledTask(task, Role.COMPUTE)
                if kind is ActionKind.STEP:
                    op.awaited, pending = tuple(pending), []
                if latest is not None:
                    latest[task.action] = op
            if latest is not None and task.after is not None:
                if task.after not in latest:
                    raise ValueError(
                        f"lane {lane}: {describe_action(task.action)} comes after no {describe_action(task.after)[4:]}"
                    )
                op.requests_on_arrival = False
                self.early.append((latest[task.after], op))
            ops.append(op)
        return ops

    def _message(self, lane: int, task: Task) -> Transmission:
        key = _task_key(task, lane)
        chain = lane, task.action.kind, task.action.peer
        travel = Transmission(task.action, task.transfer, (lane,), chain, end_lanes=(lane,), missing_count=1)
        if self.sent[key] and self.sent[key][0].lanes != (lane,):
            raise ValueError(
                f"{describe_action(task.action)} is sent by lane {self.sent[key][0].lanes[0]} and by lane {lane}"
            )
        self.sent[key].append(travel)
        self.messages.append(travel)
        return travel

    def _reduction(self, lane: int, task: Task) -> Transmission:
        key, lanes = _task_key(task, lane), tuple(sorted({*(task.lanes or (lane,))}))
        if lane not in lanes or not 0 <= lanes[0] <= lanes[-1] < self.count:
            raise ValueError(f"{describe_action(task.action)} in lane {lane} cannot be of lanes {_format_lanes(lanes)}")
        # The n-th reduction of a key in one lane is the n-th in all others.
        number = self.seen.get((lane, key), 0)
        self.seen[lane, key] = number + 1
        reductions = self.reduced.setdefault(key, [])
        if number == len(reductions):
            chain = lane, task.action.kind, task.action.peer
            reductions.append(
                Transmission(task.action, task.transfer, lanes, chain, end_lanes=lanes, missing_count=len(lanes))
            )
            self.messages.append(reductions[-1])
        travel = reductions[number]
        if travel.lanes != lanes:
            raise ValueError(
                f"{describe_action(task.action)} is of lanes {_format_lanes(travel.lanes)} and of lanes "
                f"{_format_lanes(lanes)}"
            )
        if travel.transfer is not task.transfer and travel.transfer != task.transfer:
            raise ValueError(f"{describe_action(task.action)} has another transfer in lane {lane} than in others")
        return travel

    def match_receives(self) -> None:
        """Give each receive its transfer: its own lane's reduction with the same key, or else the send."""
        ends: dict[Hashable, int] = {}
        for (lane, key), ops in self.received.items():
            is_reduction = (lane, key) in self.seen
            travels = self.reduced[key] if is_reduction else self.sent.get(key, [])
            if len(ops) > len(travels):
                action = ops[len(travels)].task.action
                raise ValueError(f"deadlock: {describe_action(action)} in lane {lane} waits for what no lane sends")
            if not is_reduction and ends.setdefault(key, lane) != lane:
                raise ValueError(
                    f"{describe_action(ops[0].task.action)} is received by lane {ends[key]} and by lane {lane}"
                )
            for op, travel in zip(ops, travels, strict=False):
                op.message = travel
                if not is_reduction:
                    travel.end_lanes = (*travel.lanes, lane)

    def check_reductions(self) -> None:
        """Check that all lanes of every reduction take part equally often."""
        for key, travels in self.reduced.items():
            for travel in travels:
                for lane in travel.lanes:
                    if self.seen.get((lane, key), 0) != len(travels):
                        raise ValueError(
                            f"{describe_action(travel.action)} is of lanes {_format_lanes(travel.lanes)}: "
                            f"{len(travels)} times in some, {self.seen.get((lane, key), 0)} times in lane {lane}"
                        )

    def set_released(self) -> None:
        """Set which transfers every computing task releases, ascending by fraction."""
        for earlier, op in self.early:
            assert op.message is not None
            # A receive with ``after`` must be ready before its message moves; other receives always are.
            op.message.missing_count += op.role is Role.AWAIT
            earlier.released = (*earlier.released, (op.task.fraction, op.message))
        for earlier in dict.fromkeys(earlier for earlier, _ in self.early):
            earlier.released = tuple(sorted(earlier.released, key=itemgetter(0)))


def _queue_on_channel(channels: dict[Hashable, Transmission], task: Task, travel: Transmission) -> Transmission:
    """Queue a transfer behind the last one on its channel of this lane: one for each peer, one for all reductions."""
    channel = (task.action.kind, task.action.peer)
    if channel in channels:
        channels[channel].next_on_channel += (travel,)
        travel.missing_count += 1
    channels[channel] = travel
    return travel


def _task_key(task: Task, lane: int) -> Hashable:
    action = task.action
    if task.key is not None:
        return task.key
    if action.kind is ActionKind.REDUCE:
        if action.value is None:
            raise ValueError(f"{describe_action(action)} in lane {lane} needs a key, or a value to be known by")
        return action.value, tuple(sorted(task.lanes)) or (lane,)
    if action.peer is None:
        raise ValueError(f"{describe_action(action)} in lane {lane} needs a key, or a peer to be known by")
    sender, receiver = (lane, action.peer) if action.kind is ActionKind.SEND else (action.peer, lane)
    return sender, receiver, action.value, action.microbatch, action.gradient


def _format_lanes(lanes: Sequence[int]) -> str:
    return ", ".join(map(str, lanes))
