"""Facts of an observed step: what each worker says of it, in slots of its own of the vector that is all-reduced.

Every worker fills in its slots, and leaves zeros for the others, so that the sum is a gather.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class WorkerFacts:
    """What one worker says of an observed step; each field is a slot of the step's vector.

    Attributes:
        loss_total, loss_count: the loss that this worker computed, summed over what it counts; 0 where another stage
            computes it.
        squared_norm: this worker's share of the squared 2-norm of the gradients, before they are clipped; NaN where
            the step has none of a batch of its own.
        loss_scale: factor of the loss in the step's passes; 0 where there is none.
        memory: most bytes that it has held since the training began: on an accelerator those of its allocator, else
            the growth of the process's resident memory, with the tensors that it began with.
        loading: seconds of a step in which it waits for data, over those since the last observed one.
        seconds: duration of a step, all in all, over the same steps, without tests, checkpoints and audits between.
        steps: number of these steps.
        cost: seconds that measuring has cost it since then.
        computing, communicating, extent: seconds of one step in which it computed, in which it waited for others or for
            bytes and did not compute, and from its first action to its last. On an accelerator of an earlier step,
            which that has ended.
    """

    loss_total: float
    loss_count: float
    squared_norm: float
    loss_scale: float
    memory: float
    loading: float
    seconds: float
    steps: float
    cost: float
    computing: float
    communicating: float
    extent: float


SLOTS = len(fields(WorkerFacts))


def read_facts(numbers: Sequence[float]) -> tuple[WorkerFacts, ...]:
    """Return the facts of all workers, by rank, from their slots of a vector."""
    return tuple(WorkerFacts(*numbers[at : at + SLOTS]) for at in range(0, len(numbers), SLOTS))
