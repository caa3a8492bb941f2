"""Action: one forward, backward, send, receive, reduce or step of a worker; a cell, or an arrow, of a swimlane."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class ActionKind(StrEnum):
    """The kinds of action."""

    FORWARD = "forward"  # a stage's forward pass over one microbatch
    BACKWARD = "backward"  # its backward pass: input gradients and weight gradients together
    BACKWARD_INPUT = "backward_input"  # the first half of a backward pass in two: gradients of incoming values
    BACKWARD_WEIGHT = "backward_weight"  # its second half: gradients of parameters
    SEND = "send"  # hand a value, or a value's gradient, to a peer
    RECEIVE = "receive"  # wait for a value, or a value's gradient, from a peer
    REDUCE = "reduce"  # sum gradients over the replicas, or over the stages that share a tied weight
    STEP = "step"  # clip, apply the optimizer, step the scheduler


# Compute keeps a device busy; communication keeps links busy, and may overlap with it.
PASSES = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT})
# Passes after which gradients of parameters are complete for their microbatch.
WEIGHT_PASSES = frozenset({ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT})
COMPUTE = PASSES | {ActionKind.STEP}
COMMUNICATION = frozenset({ActionKind.SEND, ActionKind.RECEIVE, ActionKind.REDUCE})


@dataclass(frozen=True, slots=True)
class Action:
    """One action of one worker.

    Attributes:
        kind: what the worker does, see :class:`ActionKind`.
        stage: the stage it is done for, from 0.
        microbatch: number of the microbatch, from 0; None for what is done once a step (reduce, step).
        value: name of the node whose value is sent or received, or of the bucket that is reduced.
        peer: the rank at the other end of a send or a receive.
        gradient: whether the gradient of ``value`` is sent rather than the value itself.
        steps_back: how many steps before the running one its batch was begun; more than 0 only in asynchronous
            pipelines, whose batches are under way through several steps.
    """

    kind: ActionKind
    stage: int
    microbatch: int | None = None
    value: str | None = None
    peer: int | None = None
    gradient: bool = False
    steps_back: int = 0

    def to_row(self) -> list[Any]:
        """Return plain data for JSON: the attributes in their order."""
        return [str(self.kind), self.stage, self.microbatch, self.value, self.peer, self.gradient, self.steps_back]

    @staticmethod
    def from_row(row: Sequence[Any]) -> Action:
        """Return the action that :meth:`to_row` wrote.

        Raises:
            ValueError, TypeError: this is no such row.
        """
        kind, *fields = row
        return Action(ActionKind(kind), *fields)
