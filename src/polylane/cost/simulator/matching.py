"""Matching: which send meets which receive, and which tasks of which lanes are one reduction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from polylane.cost.simulator.task import Task, TransferTime, describe_action
from polylane.schedule.action import Action, ActionKind


class Role(IntEnum):
    """What a task means for its lane."""

    COMPUTE = 0  # after the reductions it waits for
    SEND = 1  # keeps the lane, then asks for its transfer
    AWAIT = 2  # waits for a transfer, then keeps the lane
    REDUCE = 3  # asks for its transfer, waits for it, then keeps the lane
    ASK = 4  # asks for its transfer


@dataclass(slots=True, eq=False)
class Transmission:
    """A message, or a reduction, with what is known of it while the lanes are played.

    Attributes:
        action: the send, or the first lane's reduce.
        lanes: who asks for it.
        end_lanes: all lanes at its ends.
        missing_count: how many still have to be ready for it: lanes, and travels before it on a lane's channel.
        requested_at: when the last lane was ready for it, as far as is known.
        channel_free_at: when the last channel was free for it, likewise.
        start, end, arrival: when it moved, and was there; None as long as that is not known.
        next_on_channel: the travels that follow it on a channel.
        waiting_lanes: lanes to try again once it has arrived.
        exclusive_key: travels of the same chain never move at the same time.
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
    """A task in its lane, with the travel it is about and when it ran.

    Attributes:
        requests_on_arrival: whether the lane is ready for the travel when it has reached the task, and not by an
            earlier one.
        awaited: reductions that must be done before it.
        released: travels that it makes the lane ready for, each with the fraction of it that must be done; ascending.
        start, end: when the lane came to it (or, of a wait, when there was a message to wait for) and was done with it.
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
    """All lanes with their travels."""

    lanes: list[list[ScheduledTask]]
    messages: list[Transmission]


def match_lanes(lanes: Sequence[Sequence[Task]]) -> MatchedLanes:
    """Bring the tasks of all lanes together.

    Raises:
        ValueError: a message that is received and never sent, or has several lanes at one end; a reduction on whose
            lanes, or transfer, its lanes do not agree; a task that is ready after one that is not there.
    """
    matching = _LaneMatcher(len(lanes))
    ops = [matching.match_lane(lane, tasks) for lane, tasks in enumerate(lanes)]
    matching.match_receives()
    matching.check_reductions()
    matching.set_released()
    return MatchedLanes(ops, matching.messages)


class _LaneMatcher:
    """What is known of the keys while the lanes are gone through."""

    def __init__(self, lanes: int) -> None:
        self.count = lanes
        self.messages: list[Transmission] = []
        self.sent: defaultdict[Hashable, list[Transmission]] = defaultdict(list)
        self.reduced: dict[Hashable, list[Transmission]] = {}
        self.seen: dict[tuple[int, Hashable], int] = {}  # of a reduction, how often a lane takes part
        self.received: dict[tuple[int, Hashable], list[ScheduledTask]] = {}
        self.early: list[tuple[ScheduledTask, ScheduledTask]] = []  # a task, and one that it makes the lane ready for

    def match_lane(self, lane: int, tasks: Sequence[Task]) -> list[ScheduledTask]:
        """The tasks of a lane, its sends and reductions with their travels."""
        ops: list[ScheduledTask] = []
        channels: dict[Hashable, Transmission] = {}
        pending: list[Transmission] = []
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
        travel = Transmission(
            task.action, task.transfer, (lane,), (lane, _channel_key(task)), end_lanes=(lane,), missing_count=1
        )
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
        number = self.seen.get((lane, key), 0)
        self.seen[lane, key] = number + 1
        same = self.reduced.setdefault(key, [])
        if number == len(same):
            chain = lane, _channel_key(task)
            same.append(
                Transmission(task.action, task.transfer, lanes, chain, end_lanes=lanes, missing_count=len(lanes))
            )
            self.messages.append(same[-1])
        travel = same[number]
        if travel.lanes != lanes:
            raise ValueError(
                f"{describe_action(task.action)} is of lanes {_format_lanes(travel.lanes)} and of lanes "
                f"{_format_lanes(lanes)}"
            )
        if travel.transfer is not task.transfer and travel.transfer != task.transfer:
            raise ValueError(f"{describe_action(task.action)} has another transfer in lane {lane} than in others")
        return travel

    def match_receives(self) -> None:
        """Give each receive its travel."""
        ends: dict[Hashable, int] = {}
        for (lane, key), ops in self.received.items():
            own = (lane, key) in self.seen
            travels = self.reduced[key] if own else self.sent.get(key, [])
            if len(ops) > len(travels):
                action = ops[len(travels)].task.action
                raise ValueError(f"deadlock: {describe_action(action)} in lane {lane} waits for what no lane sends")
            if not own and ends.setdefault(key, lane) != lane:
                raise ValueError(
                    f"{describe_action(ops[0].task.action)} is received by lane {ends[key]} and by lane {lane}"
                )
            for op, travel in zip(ops, travels, strict=False):
                op.message = travel
                if not own:
                    travel.end_lanes = (*travel.lanes, lane)

    def check_reductions(self) -> None:
        """Refuse reductions in which not all their lanes take part."""
        for key, travels in self.reduced.items():
            for travel in travels:
                for lane in travel.lanes:
                    if self.seen.get((lane, key), 0) != len(travels):
                        raise ValueError(
                            f"{describe_action(travel.action)} is of lanes {_format_lanes(travel.lanes)}: "
                            f"{len(travels)} times in some, {self.seen.get((lane, key), 0)} times in lane {lane}"
                        )

    def set_released(self) -> None:
        """Tell tasks which travels they make their lane ready for."""
        for earlier, op in self.early:
            assert op.message is not None
            op.message.missing_count += op.role is Role.AWAIT
            earlier.released = (*earlier.released, (op.task.fraction, op.message))
        for earlier in dict.fromkeys(earlier for earlier, _ in self.early):
            earlier.released = tuple(sorted(earlier.released, key=itemgetter(0)))


def _queue_on_channel(channels: dict[Hashable, Transmission], task: Task, travel: Transmission) -> Transmission:
    """Put a travel behind the last one on its channel of this lane."""
    channel = _channel_key(task)
    if channel in channels:
        channels[channel].next_on_channel += (travel,)
        travel.missing_count += 1
    channels[channel] = travel
    return travel


def _channel_key(task: Task) -> Hashable:
    return (task.action.kind, task.action.peer) if task.channel is None else task.channel


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
