"""Captures with open sizes: one graph for batches whose sizes differ (lengths of texts, sides of images)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from polylane.graph.capture.attempt import CaptureAttempt, attempt_capture, describe_leaves, run_self_check
from polylane.graph.capture.dry_run import DryRun
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.open_dimensions import NotOpened, Opening, close_sizes
from polylane.graph.nodes.user_lines import NotCaptured, format_line
from polylane.graph.readings.batch_readings import are_answered


def capture_opened(
    model_with_loss: ModelWithLoss, leaves: Sequence[Any], dry: DryRun, abstract: bool, opening: Opening
) -> CaptureAttempt:
    """Export with further sizes left open, and check the code on batches of several such sizes.

    Raises:
        NotOpened: export fixes these sizes, the code is not the model's at others, or a part must be kept as a leaf.
    """
    if abstract or dry.effects.found:
        raise NotOpened("a part of it must be kept whole")
    try:
        draft = _attempt_twice(model_with_loss, leaves, opening)
    except NotCaptured as fault:
        raise NotOpened(f"{fault.reason}{format_line(fault.line)}") from fault
    assert draft.opened is not None
    other_batches = [
        batch
        for batch in opening.others
        if draft.opened.sizes.find(batch) not in (None, draft.opened.sizes.nominal)
        and are_answered(draft.readings, batch)
    ]
    if not other_batches:  # nothing that has come shows whether the code holds at another size
        raise NotOpened("what it computes depends on these sizes", is_final=False)
    difference = run_self_check(model_with_loss, draft, leaves, other_batches)
    if difference is not None:
        raise NotOpened(f"{difference.what} came out different at other sizes")
    close_sizes(draft.graph, draft.opened.nominal)
    return replace(draft, notes=describe_leaves(model_with_loss, {}))


def _attempt_twice(model_with_loss: ModelWithLoss, leaves: Sequence[Any], opening: Opening) -> CaptureAttempt:
    """Export without answers to what the loss asks of the batch, or, where it needs some, with these."""
    try:
        return attempt_capture(model_with_loss, leaves, (), opening.dims)
    except NotCaptured as fault:
        # Answers restrict a graph to batches that give the same ones: they are used only where export needs some.
        if not (fault.data_decides and model_with_loss.tracing.answer_questions(leaves)):
            raise
    return attempt_capture(model_with_loss, leaves, (), opening.dims)
