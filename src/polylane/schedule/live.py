"""Live microbatches: how many a worker holds at once, counted from the order of its lane, for any schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from polylane.schedule.action import Action, ActionKind


def peak_live(lanes: Iterable[Sequence[Action]], stage: int | None = None) -> tuple[int, ...]:
    """Return for each lane the most microbatches that are live at once: forward begun, backward not ended.

    A backward in two halves ends with its weight half, which reads the activations last. A lane runs one pass at a
    time, so that its order alone decides: no durations are needed. On a lane with several stages a microbatch counts
    once for each stage; such a peak over the number of its stages is in whole microbatches of the worker.

    Args:
        lanes: passes of every worker, first to last; actions of other kinds are passed over.
        stage: count this stage's microbatches only; None counts those of all stages.
    """
    return tuple(_peak(action for action in lane if stage is None or action.stage == stage) for lane in lanes)


def _peak(lane: Iterable[Action]) -> int:
    alive = peak = 0
    for action in lane:
        if action.kind is ActionKind.FORWARD:
            alive += 1
            peak = max(peak, alive)
        elif action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT):
            alive -= 1
    return peak
