"""Audit schedule: which steps are audited, so that a long training is audited often enough at a bounded cost.

Due are the steps 1, 2, 4, 8, ... of a run, and the first one of each epoch. Without a budget a step that is due waits
until the one before has been replayed. With one, a later step is audited in its place, once the training has gone on
for long enough.
"""

from __future__ import annotations

import math

from polylane.runtime.data.loader import find_next_whole

BUDGET = 0.01  # part of the training's time that audits may take; the first one is made whatever it costs
LOOK_STEPS = 4  # steps after which a first verdict is looked for


class AuditSchedule:
    """The choice of steps on rank 0, whose times count.

    Args:
        first_step: number of the first step of the run, from 0.
        is_bounded: whether audits keep within the budget.
        busy_share: seconds by which a second of the replay's CPU time delays the training: 0 where a core is idle.

    Attributes:
        stall_seconds: time that audits have cost the training so far.
    """

    def __init__(self, first_step: int, is_bounded: bool, busy_share: float = 0.0) -> None:
        self._first, self._is_bounded, self._busy_share = first_step, is_bounded, busy_share
        self._due, self._audits, self._look = 1, 0, LOOK_STEPS
        self._stall = self._longest = self._replay = 0.0
        self.stall_seconds = 0.0

    def count_stall(self, seconds: float, of_audit: bool) -> None:
        """Count time that the training has waited for.

        Args:
            seconds: how long the training stood still.
            of_audit: whether a step was audited in it, and not only looked for a verdict.
        """
        self.stall_seconds += seconds
        if of_audit:  # before the step, and once more after it
            self._stall += seconds
            self._longest = max(self._longest, self._stall)

    def count_replay(self, seconds: float) -> None:
        """Count the CPU time that a replay took beside the training."""
        self._replay = self._busy_share * seconds
        self.stall_seconds += self._replay

    def is_reached(self, step: int, begins_epoch: bool) -> bool:
        """Return whether a step is one that is to be audited, whatever that costs."""
        return step - self._first + 1 >= self._due or begins_epoch

    def waits(self, step: int, begins_epoch: bool) -> bool:
        """Return whether a step waits until the one before has been replayed."""
        return not self._is_bounded and self.is_reached(step, begins_epoch)

    def is_due(self, step: int, begins_epoch: bool, elapsed_seconds: float) -> bool:
        """Return whether a step is to be audited now.

        Args:
            step: number of the step, from 0.
            begins_epoch: whether it is the first of its epoch.
            elapsed_seconds: duration of the run so far.
        """
        if not self.is_reached(step, begins_epoch):
            return False
        if not self._is_bounded or not self._audits:
            return True
        return self.stall_seconds + self._longest + self._replay <= BUDGET * elapsed_seconds

    def begin_audit(self, step: int) -> int:
        """Note that a step is audited now; return the step at which its verdict is to be looked for."""
        step_count = step - self._first + 1
        self._audits, self._stall = self._audits + 1, 0.0
        while self._due <= step_count:
            self._due *= 2
        return step + 1 if step_count == 1 else min(step + self._look, self._first + self._due - 1)

    def pass_over(self, step: int, begins_epoch: bool) -> int:
        """Return the next step whose batch may be here as a whole.

        Workers read the batches 1, 3, 6, 12, ... whole, and the second of each later epoch and of a resumed one.

        Args:
            step: number of the step that is passed over, from 0.
            begins_epoch: whether it is the first of its epoch, or of this run.
        """
        return step + 1 if begins_epoch and step else find_next_whole(step)

    def look_again(self, step: int) -> int:
        """Return the step at which a verdict is looked for that is not there yet."""
        self._look *= 2
        return step + self._look

    def next_step(self, step: int, elapsed_seconds: float) -> int:
        """Return the next step at which something is to be decided, while no verdict is awaited.

        Args:
            step: number of the step that begins now, from 0.
            elapsed_seconds: duration of the run so far.
        """
        due = self._first + self._due - 1
        if due > step:
            return due
        # It is due and does not fit into the budget yet: as many steps later as that takes.
        step_count = max(step - self._first, 1)
        missing = (self.stall_seconds + self._longest + self._replay) / BUDGET - elapsed_seconds
        return step + max(1, math.ceil(missing / (elapsed_seconds / step_count)) if elapsed_seconds > 0 else 1)
