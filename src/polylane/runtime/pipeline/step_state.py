"""State of one step on one worker: values, gradients and transfers by microbatch, until the step is over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polylane.compile.batch_split import SampleShare
from polylane.graph.sample_slice import SampleSlice
from polylane.observe.timeline import Span
from polylane.runtime.pipeline.batch_tables import BatchTables
from polylane.runtime.transport.protocol import PendingTransfer
from polylane.schedule.action import Action

# What was sent: microbatch, peer, and whether it was gradients.
_SendKey = tuple[int, int, bool]


@dataclass
class StepState:
    """What a worker gathers in the course of one step."""

    shares: Mapping[int, SampleShare]
    sample_slices: dict[int, SampleSlice]
    tables: BatchTables
    samples_in_mean: int  # samples over which gradients are means
    values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    input_gradients: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    output_values: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    pending_receives: dict[Action, PendingTransfer] = field(default_factory=dict)
    pending_sends: dict[_SendKey, list[PendingTransfer]] = field(default_factory=dict)
    loss_totals: list[Tensor] = field(default_factory=list)
    loss_counts: list[Tensor | float] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)

    def wait_sent(self, key: _SendKey) -> None:
        """Wait until something has been sent, and let go of it."""
        for pending in self.pending_sends.pop(key, ()):
            pending.wait()

    def sums(self) -> tuple[float, float]:
        """The loss of what this worker computed, as (total, count)."""
        return float(sum(float(total) for total in self.loss_totals)), float(
            sum(float(count) for count in self.loss_counts)
        )
