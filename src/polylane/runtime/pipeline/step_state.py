"""Step state: values, gradients and transfers of one worker by microbatch, until the step is over."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from polylane.graph.sample_slice import SampleSlice
from polylane.observe.timeline import Span
from polylane.runtime.pipeline.batch_tables import BatchTables
from polylane.runtime.transport.protocol import PendingTransfer
from polylane.schedule.action import Action

# Key of pending sends: microbatch, peer, and whether gradients were sent.
_SendKey = tuple[int, int, bool]


@dataclass
class StepState:
    """The state of one worker in one step; most of it is by number of the microbatch, then by name of the value.

    Attributes:
        sample_slices: description of this worker's samples of each microbatch for the operators.
        tables: shares, message boxes and shapes for batches of this size.
        samples_in_mean: number of samples over which gradients are means.
        values: received values, until their forward pass.
        gradients: received gradients of outgoing values, until their backward pass.
        input_gradients: gradients of incoming values, until they have been sent.
        output_values: outgoing values, until their backward pass.
        pending_receives: receives that were posted ahead, by their action.
        pending_sends: sends whose buffers are still in use.
        loss_totals: loss of each microbatch, summed over its samples.
        loss_counts: number of samples, or sum of weights, of each of these.
        spans: start, end and bytes of every action so far.
    """

    sample_slices: dict[int, SampleSlice]
    tables: BatchTables
    samples_in_mean: int
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
        """Wait until messages have been sent, and release their buffers."""
        for pending in self.pending_sends.pop(key, ()):
            pending.wait()

    def sums(self) -> tuple[float, float]:
        """Return the loss that this worker computed, as (total, count)."""
        return float(sum(map(float, self.loss_totals))), float(sum(map(float, self.loss_counts)))
