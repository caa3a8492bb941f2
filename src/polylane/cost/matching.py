"""Matching: which send meets which receive, and which tasks of which lanes are one reduction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter

from polylane.cost.task import Task, Transfer, named
from polylane.schedule.action import Action, Kind


class Does(IntEnum):
    """What a task means for its lane."""

    COMPUTE = 0  # after the reductions it waits for
    SEND = 1  # keeps the lane, then asks for its transfer
    AWAIT = 2  # waits for a transfer, then keeps the lane
    REDUCE = 3  # asks for its transfer, waits for it, then keeps the lane
    ASK = 4  # asks for its transfer


@dataclass(slots=True, eq=False)
class Travel:
    """A message, or a reduction, with what is known of it while the lanes are played.

    Attributes:
        action: the send, or the first lane's reduce.
        lanes: who asks for it.
        concerns: all lanes at its ends.
        missing: how many still have to be ready for it: lanes, and travels before it on a lane's channel.
        asked: when the last lane was ready for it, as far as is known.
        free: when the last channel was free for it, likewise.
        start, end, arrival: when it moved, and was there; None as long as that is not known.
        next: the travels that follow it on a channel.
        waiting: lanes to try again once it has arrived.
        chain: travels of the same chain never move at the same time.
    """

    action: Action
    transfer: Transfer
    lanes: tuple[int, ...]
    chain: Hashable
    concerns: tuple[int, ...] = ()
    missing: int = 0
    asked: float = 0
    free: float = 0
    start: float | None = None
    end: float | None = None
    arrival: float | None = None
    next: tuple[Travel, ...] = ()
    waiting: tuple[int, ...] = ()


@dataclass(slots=True, eq=False)
class Op:
    """A task in its lane, with the travel it is about and when it ran.

    Attributes:
        asks: whether the lane is ready for the travel when it has reached the task, and not by an earlier one.
        waits: reductions that must be done before it.
        frees: travels that it makes the lane ready for, each with the fraction of it that must be done; ascending.
        start, end: when the lane came to it (or, of a wait, when there was a message to wait for) and was done with it.
    """

    task: Task
    does: Does
    travel: Travel | None = None
    asks: bool = True
    waits: tuple[Travel, ...] = ()
    frees: tuple[tuple[float, Travel], ...] = ()
    start: float | None = None
    end: float | None = None


@dataclass(frozen=True)
class Matched:
    """All lanes with their travels."""

    lanes: list[list[Op]]
    travels: list[Travel]


def match(lanes: Sequence[Sequence[Task]]) -> Matched:
    """Bring the tasks of all lanes together.

    Raises:
        ValueError: a message that is received and never sent, or has several lanes at one end; a reduction on whose
            lanes, or transfer, its lanes do not agree; a task that is ready after one that is not there.
    """
    matching = _Matching(len(lanes))
    ops = [matching.lane(lane, tasks) for lane, tasks in enumerate(lanes)]
    matching.receives_meet_sends()
    matching.reductions_are_whole()
    matching.frees()
    return Matched(ops, matching.travels)


class _Matching:
    """What is known of the keys while the lanes are gone through."""

    def __init__(self, lanes: int) -> None:
        self.count = lanes
        self.travels: list[Travel] = []
        self.sent: defaultdict[Hashable, list[Travel]] = defaultdict(list)
        self.reduced: dict[Hashable, list[Travel]] = {}
        self.seen: dict[tuple[int, Hashable], int] = {}  # of a reduction, how often a lane takes part
        self.received: dict[tuple[int, Hashable], list[Op]] = {}
        self.early: list[tuple[Op, Op]] = []  # a task, and one that it makes the lane ready for

    def lane(self, lane: int, tasks: Sequence[Task]) -> list[Op]:
        """The tasks of a lane, its sends and reductions with their travels."""
        ops: list[Op] = []
        channels: dict[Hashable, Travel] = {}
        pending: list[Travel] = []
        latest: dict[Action, Op] | None = {} if any(task.after is not None for task in tasks) else None
        for task in tasks:
            kind = task.action.kind
            if kind is Kind.SEND:
                op = Op(task, Does.SEND, _follow(channels, task, self._message(lane, task)))
            elif kind is Kind.RECEIVE:
                op = Op(task, Does.AWAIT, asks=False)
                self.received.setdefault((lane, _key(task, lane)), []).append(op)
            elif kind is Kind.REDUCE:
                travel = _follow(channels, task, self._reduction(lane, task))
                op = Op(task, Does.ASK if task.overlapped else Does.REDUCE, travel)
                pending += [travel] * task.overlapped
            else:
                op = Op(task, Does.COMPUTE)
                if kind is Kind.STEP:
                    op.waits, pending = tuple(pending), []
                if latest is not None:
                    latest[task.action] = op
            if latest is not None and task.after is not None:
                if task.after not in latest:
                    raise ValueError(f"lane {lane}: {named(task.action)} comes after no {named(task.after)[4:]}")
                op.asks = False
                self.early.append((latest[task.after], op))
            ops.append(op)
        return ops

    def _message(self, lane: int, task: Task) -> Travel:
        key = _key(task, lane)
        travel = Travel(task.action, task.transfer, (lane,), (lane, _channel(task)), concerns=(lane,), missing=1)
        if self.sent[key] and self.sent[key][0].lanes != (lane,):
            raise ValueError(f"{named(task.action)} is sent by lane {self.sent[key][0].lanes[0]} and by lane {lane}")
        self.sent[key].append(travel)
        self.travels.append(travel)
        return travel

    def _reduction(self, lane: int, task: Task) -> Travel:
        key, lanes = _key(task, lane), tuple(sorted({*(task.lanes or (lane,))}))
        if lane not in lanes or not 0 <= lanes[0] <= lanes[-1] < self.count:
            raise ValueError(f"{named(task.action)} in lane {lane} cannot be of lanes {_listed(lanes)}")
        number = self.seen.get((lane, key), 0)
        self.seen[lane, key] = number + 1
        same = self.reduced.setdefault(key, [])
        if number == len(same):
            chain = lane, _channel(task)
            same.append(Travel(task.action, task.transfer, lanes, chain, concerns=lanes, missing=len(lanes)))
            self.travels.append(same[-1])
        travel = same[number]
        if travel.lanes != lanes:
            raise ValueError(f"{named(task.action)} is of lanes {_listed(travel.lanes)} and of lanes {_listed(lanes)}")
        if travel.transfer is not task.transfer and travel.transfer != task.transfer:
            raise ValueError(f"{named(task.action)} has another transfer in lane {lane} than in others")
        return travel

    def receives_meet_sends(self) -> None:
        """Give each receive its travel."""
        ends: dict[Hashable, int] = {}
        for (lane, key), ops in self.received.items():
            own = (lane, key) in self.seen
            travels = self.reduced[key] if own else self.sent.get(key, [])
            if len(ops) > len(travels):
                action = ops[len(travels)].task.action
                raise ValueError(f"deadlock: {named(action)} in lane {lane} waits for what no lane sends")
            if not own and ends.setdefault(key, lane) != lane:
                raise ValueError(f"{named(ops[0].task.action)} is received by lane {ends[key]} and by lane {lane}")
            for op, travel in zip(ops, travels, strict=False):
                op.travel = travel
                if not own:
                    travel.concerns = (*travel.lanes, lane)

    def reductions_are_whole(self) -> None:
        """Refuse reductions in which not all their lanes take part."""
        for key, travels in self.reduced.items():
            for travel in travels:
                for lane in travel.lanes:
                    if self.seen.get((lane, key), 0) != len(travels):
                        raise ValueError(
                            f"{named(travel.action)} is of lanes {_listed(travel.lanes)}: "
                            f"{len(travels)} times in some, {self.seen.get((lane, key), 0)} times in lane {lane}"
                        )

    def frees(self) -> None:
        """Tell tasks which travels they make their lane ready for."""
        for earlier, op in self.early:
            assert op.travel is not None
            op.travel.missing += op.does is Does.AWAIT
            earlier.frees = (*earlier.frees, (op.task.fraction, op.travel))
        for earlier in dict.fromkeys(earlier for earlier, _ in self.early):
            earlier.frees = tuple(sorted(earlier.frees, key=itemgetter(0)))


def _follow(channels: dict[Hashable, Travel], task: Task, travel: Travel) -> Travel:
    """Put a travel behind the last one on its channel of this lane."""
    channel = _channel(task)
    if channel in channels:
        channels[channel].next += (travel,)
        travel.missing += 1
    channels[channel] = travel
    return travel


def _channel(task: Task) -> Hashable:
    return (task.action.kind, task.action.peer) if task.channel is None else task.channel


def _key(task: Task, lane: int) -> Hashable:
    action = task.action
    if task.key is not None:
        return task.key
    if action.kind is Kind.REDUCE:
        if action.value is None:
            raise ValueError(f"{named(action)} in lane {lane} needs a key, or a value to be known by")
        return action.value, tuple(sorted(task.lanes)) or (lane,)
    if action.peer is None:
        raise ValueError(f"{named(action)} in lane {lane} needs a key, or a peer to be known by")
    sender, receiver = (lane, action.peer) if action.kind is Kind.SEND else (action.peer, lane)
    return sender, receiver, action.value, action.microbatch, action.gradient


def _listed(lanes: Sequence[int]) -> str:
    return ", ".join(map(str, lanes))
