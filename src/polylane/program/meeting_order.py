"""Meeting order: where workers post their receives if every launch may hold up all later ones of its worker.

A message over NCCL is a kernel on both sides, which spins until the other side's has begun. Nothing promises that other
kernels of the same device run beside it: a host that waits for the device holds back all that it would launch next. So
the launches must have one order that all workers agree with, in which a message is one event: its send, and the posting
of its receive.

    stage 0    F0  send 0  F1  send 1  recv g0  B0         In the order of need stage 1 would post message 1 behind its
    stage 1    recv 0  F0  B0  recv 1  send g0  F1         send of gradient 0, which stage 0 posts behind its send of
                                                           message 1: a circle. Posted when message 1 is sent, no one
                                                           waits for the other.

The programs are played with a forward pass as the unit of time, half of a backward pass. A message meets its receiver
when it is sent: the receive is posted before what the receiver has not begun by then. The order of the play's events is
the common order, whatever the real durations are: what is late on one side is waited for on the other, never in a
circle. Ranks of a stage begin a pass as one event, since their operators and gradients may have collectives in it.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

from polylane.plan.plan import Plan
from polylane.program.check import Place, match_messages
from polylane.program.program import Posting, Program
from polylane.program.unroll import place_unrolled, unroll
from polylane.schedule.action import PASSES, Action, ActionKind

# Durations of passes in the play.
DURATIONS = {kind: 2.0 if kind is ActionKind.BACKWARD else 1.0 for kind in PASSES}

# Steps of an asynchronous pipeline that are played before the one that stands for all: so many, and twice as many as a
# batch is under way. Steps are alike by then: each takes the time of the stage with the most passes, and a stage that
# is ahead has come to wait for it. That each message is posted once in the step is checked.
STEADY_STEPS = 8
END_OF_STEP = "end of step"
# What ranks begin together: passes, and the sums of gradients behind them.
TOGETHER = frozenset({*PASSES, ActionKind.REDUCE})

EventKey = tuple[ActionKind, int, int | None, str | None]


def order_meetings(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs of all workers with their meetings, see :class:`Program`.

    Raises:
        RuntimeError: messages that do not match, or actions that wait for each other.
    """
    play = _MeetingPlay(programs)
    play.run()
    places = {program.rank: [(0, index) for index in range(len(program.actions))] for program in programs}
    return tuple(_fold_meetings(program, places[program.rank], play.posted[program.rank], 0) for program in programs)


def order_steady_meetings(programs: Sequence[Program], plan: Plan) -> tuple[Program, ...]:
    """Return the programs of an asynchronous pipeline with the meetings of a step in a full pipeline.

    They hold for its first and last steps, too: what is left of an order without some events is an order. A receive may
    be posted in an earlier step than its own, since all ranks sum their losses between two steps, but not before the
    step in which its batch begins.

    Args:
        programs: the programs of all workers for one step.
        plan: the plan that they were lowered from.

    Raises:
        RuntimeError: messages that do not match, actions that wait for each other, or a message of a full pipeline
            that is not posted once in a step.
    """
    delay = max(action.steps_back for program in programs for action in program.actions)
    steady = STEADY_STEPS + 2 * delay
    places, unrolled, earliest = place_unrolled(programs, plan, steady + 1), list[Program](), dict[Place, int]()
    last_step = max(step for of_rank in places.values() for step, _ in of_rank)
    for program, long_program in zip(programs, unroll(programs, plan, steady + 1), strict=True):
        # The actions of each step, each with where it comes from, and the sum of all ranks' losses at its end.
        rows: list[list[tuple[Action, tuple[int, int]]]] = [[] for _ in range(last_step + 1)]
        for action, (step, index) in zip(long_program.actions, places[program.rank], strict=True):
            rows[step].append((action, (step, index)))
        begins = list[int]()
        for step, row in enumerate(rows):
            begins.append(sum(map(len, rows[:step])))
            row.append((Action(ActionKind.REDUCE, program.stage, step, END_OF_STEP), (step, len(program.actions))))
        unrolled.append(replace(program, actions=tuple(action for row in rows for action, _ in row)))
        places[program.rank] = [origin for row in rows for _, origin in row]
        # The executor posts what belongs to a batch that has begun.
        for position, (step, index) in enumerate(places[program.rank]):
            if index < len(program.actions):
                earliest[program.rank, position] = begins[step - program.actions[index].steps_back]
    play = _MeetingPlay(unrolled, earliest)
    play.run()
    return tuple(
        _fold_meetings(program, places[program.rank], play.posted[program.rank], steady) for program in programs
    )


def _fold_meetings(
    program: Program, places: Sequence[tuple[int, int]], posted: Mapping[int, tuple[int, int]], step: int
) -> Program:
    """Return one step's program with the meetings of a step of the unrolled one.

    Args:
        program: the program of one step.
        places: step and place in its program of every action of the unrolled program.
        posted: by position of a receive in the unrolled program, the position before which it is posted, and its
            number among all meetings of the play.
        step: the step to take them from.
    """
    meetings: list[list[Posting]] = [[] for _ in (*program.actions, None)]
    for position, (at, _) in sorted(posted.items(), key=lambda item: item[1][1]):
        if places[at][0] == step:
            receive_step, index = places[position]
            meetings[places[at][1]].append(Posting(program.actions[index], receive_step - step))
    receives = Counter(action for action in program.actions if action.kind is ActionKind.RECEIVE)
    if receives != Counter(posting.receive for row in meetings for posting in row):
        raise RuntimeError(f"the messages of rank {program.rank} do not come once in each step: {meetings}")
    return replace(program, meetings=tuple(map(tuple, meetings)))


class _MeetingPlay:
    """Plays programs in the order of time.

    Args:
        programs: the programs of all workers.
        earliest: for every rank and position of a receive, the first position before which it can be posted.

    Attributes:
        posted: for every rank and position of a receive, the position before which it is posted, and its number among
            all meetings.
    """

    def __init__(self, programs: Sequence[Program], earliest: Mapping[Place, int] | None = None) -> None:
        self._actions = {program.rank: program.actions for program in programs}
        self._earliest = earliest or {}
        self.posted: dict[int, dict[int, tuple[int, int]]] = {rank: {} for rank in self._actions}
        self._receive_of: dict[Place, Place] = dict(match_messages(programs))
        self._meetings = 0
        self._receivers = set[int]()  # ranks that wait for a message
        self._positions = dict.fromkeys(self._actions, 0)
        # By rank, the ranks that wait until it has come to where it can post their message's receive.
        self._senders: dict[int, list[int]] = {rank: [] for rank in self._actions}
        self._members: dict[EventKey, list[int]] = {}
        for rank, actions in self._actions.items():
            for action in actions:
                if action.kind in TOGETHER:
                    self._members.setdefault(event_key(action), []).append(rank)
        self._arrived = Counter[EventKey]()
        self._ready = [(0.0, rank) for rank in sorted(self._actions)]

    def run(self) -> None:
        """Play to the end of all programs."""
        while self._ready:
            time, rank = heapq.heappop(self._ready)
            self._advance(rank, time)
        for rank, actions in self._actions.items():
            if self._positions[rank] < len(actions):
                raise RuntimeError(f"rank {rank} cannot go on with {actions[self._positions[rank]]}")

    def _advance(self, rank: int, time: float) -> None:
        """Run a rank's actions that begin at a time, up to one that takes time or must wait."""
        actions = self._actions[rank]
        while (position := self._positions[rank]) < len(actions):
            action = actions[position]
            if action.kind in TOGETHER:
                self._begin_together(action, time)
                return
            if action.kind is ActionKind.RECEIVE and position not in self.posted[rank]:
                self._receivers.add(rank)
                return  # its sender wakes this rank
            if action.kind is ActionKind.SEND and not self._meet(rank, position, time):
                return  # the receiver wakes this rank
            self._move(rank, time)

    def _move(self, rank: int, time: float) -> None:
        """Go on to a rank's next action, and wake those that send to it."""
        self._positions[rank] += 1
        for sender in self._senders[rank]:
            heapq.heappush(self._ready, (time, sender))
        self._senders[rank].clear()

    def _meet(self, rank: int, position: int, time: float) -> bool:
        """Post a message's receive where its rank is, and return whether it can be posted there yet."""
        peer, receive_position = receive = self._receive_of[rank, position]
        at = self._positions[peer]
        if at < self._earliest.get(receive, 0):
            self._senders[peer].append(rank)
            return False
        self.posted[peer][receive_position] = at, self._meetings
        self._meetings += 1
        if at == receive_position and peer in self._receivers:
            self._receivers.remove(peer)
            heapq.heappush(self._ready, (time, peer))
        return True

    def _begin_together(self, action: Action, time: float) -> None:
        """Begin what several ranks begin together, once all have come to it: the last one does at this time."""
        key = event_key(action)
        self._arrived[key] += 1
        if self._arrived[key] == len(self._members[key]):
            for member in self._members[key]:
                self._move(member, time)
                heapq.heappush(self._ready, (time + DURATIONS.get(action.kind, 0.0), member))


def event_key(action: Action) -> EventKey:
    """Return what the ranks that begin an action together have in common."""
    # Ranks of several stages sum the gradients of a weight that these have in common.
    stage = -1 if action.kind is ActionKind.REDUCE else action.stage
    return action.kind, stage, action.microbatch, action.value
