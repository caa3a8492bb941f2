"""Late sends: messages that workers wait for later than usual, so that they never wait for each other in a circle.

A backward pass waits for messages of two microbatches ago, to release their buffers, and a message is taken once its
receive is posted, two passes before it is needed. In a chain of stages it always has been by then. But a value may skip
stages, or a worker with several stages may have many passes of one before it turns to the next: then the receiver may
post so late that a pass before it needs what the waiting one has not computed yet.

Passes and messages alone have no circle, for every schedule is an order of the stages' graph. So the programs can be
played, and what is added is made to fit: wherever all workers stand still, one that waits for its sends goes on and
waits for them at its stage's next backward pass, or at the end of the step. The order in which the play runs the
actions is then one that all programs and all waits agree with, which proves that they run to their end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter

from polylane.program.check import Place, backward_passes, match_messages
from polylane.program.program import Program
from polylane.program.waits import posting_places, waiting_microbatch
from polylane.schedule.action import Action


@dataclass(frozen=True, slots=True)
class _SendWait:
    """A backward pass's wait for one send.

    Attributes:
        send: the action that sends the message.
        before: rank of the receiver, and position of the action behind which it posts the receive.
        turn: number of the backward pass among those of its stage.
    """

    send: Action
    before: Place
    turn: int


def defer_sends(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs of all workers with their late sends, see :class:`Program`; mostly there are none."""
    play = _Play(programs)
    while (rank := play.run()) is not None:
        play.defer(rank)
    return tuple(
        replace(program, late_sends=late) if (late := play.late[program.rank]) else program for program in programs
    )


class _Play:
    """Runs programs action by action, each worker as far as it gets."""

    def __init__(self, programs: Sequence[Program]) -> None:
        self.late: dict[int, dict[Action, int]] = {program.rank: {} for program in programs}
        self._programs = {program.rank: program for program in programs}
        self._passes = backward_passes(programs)
        self._at = dict.fromkeys(self._programs, 0)
        self._todo = deque(self._programs)
        # By rank, the workers that stand still until it goes on.
        self._stopped: dict[int, list[int]] = {rank: [] for rank in self._programs}
        self._sent_at: dict[Place, Place] = {}
        self._send_waits: dict[Place, list[_SendWait]] = {}
        posted = {program.rank: posting_places(program.actions) for program in programs}
        for (sender, sent), (receiver, received) in match_messages(programs):
            self._sent_at[receiver, received] = sender, sent
            program = self._programs[sender]
            send, predecessor = program.actions[sent], (receiver, posted[receiver][received] - 1)
            passes = self._passes.get((sender, send.stage), [])
            self._wait_at(sender, _SendWait(send, predecessor, _turn_of(passes, waiting_microbatch(program, send))))

    def run(self) -> int | None:
        """Run until all stand still; return a worker that waits for a send only, or None: no such worker is left."""
        while self._todo:
            rank = self._todo.popleft()
            start = self._at[rank]
            while self._at[rank] < len(self._programs[rank].actions):
                blocker = self._waits_for((rank, self._at[rank]))
                if blocker is not None:
                    self._stopped[blocker].append(rank)
                    break
                self._at[rank] += 1
            if self._at[rank] > start:
                self._todo.extend(self._stopped[rank])
                self._stopped[rank].clear()
        return next((rank for rank in sorted(self._at) if (rank, self._at[rank]) in self._send_waits), None)

    def defer(self, rank: int) -> None:
        """Have a worker that stands still wait later for the sends that it waits for."""
        program, location = self._programs[rank], (rank, self._at[rank])
        # Only waits whose message has not been taken yet: the others of the same pass are over.
        for wait in self._send_waits.pop(location):
            if not self._is_done(wait.before):
                passes = self._passes[rank, wait.send.stage]
                following = passes[wait.turn + 1 : wait.turn + 2]
                self.late[rank][wait.send] = following[0][1] if following else program.microbatches
                self._wait_at(rank, replace(wait, turn=wait.turn + 1))
        self._todo.append(rank)

    def _wait_at(self, rank: int, wait: _SendWait) -> None:
        passes = self._passes.get((rank, wait.send.stage), [])
        if wait.turn < len(passes):
            self._send_waits.setdefault((rank, passes[wait.turn][0]), []).append(wait)

    def _waits_for(self, location: Place) -> int | None:
        """Return the rank that must go on before an action can run; None: it can run."""
        sent_at = self._sent_at.get(location)
        if sent_at is not None and not self._is_done(sent_at):
            return sent_at[0]
        waits = self._send_waits.get(location, ())
        blocker = next((wait.before[0] for wait in waits if not self._is_done(wait.before)), None)
        if blocker is None:
            self._send_waits.pop(location, None)
        return blocker

    def _is_done(self, location: Place) -> bool:
        rank, position = location
        return self._at[rank] > position


def _turn_of(passes: Sequence[tuple[int, int]], microbatch: int) -> int:
    """Return the number, among a stage's backward passes, of the first one of a microbatch or a later one."""
    return bisect_left(passes, microbatch, key=itemgetter(1))
