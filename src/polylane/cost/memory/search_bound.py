"""Memory bound of the search: bytes that a worker needs, as one formula over arrays of stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cost.memory.peak import MemoryMargin, TrainedBytes, shard_trained_bytes
from polylane.cost.operators.training_options import TrainingOptions

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Footprint:
    """Memory of a worker from its trained elements and saved activations.

    Attributes:
        state_bytes: bytes of optimizer states for each trained element.
        itemsize: bytes per parameter element in the model.
        margin: memory that a worker takes beyond its tensors.
        method: precision and sharding of the training.
    """

    state_bytes: float
    itemsize: int
    margin: MemoryMargin
    method: TrainingOptions

    def __call__(self, elements: Array, held: Array, data: int) -> Array:
        """Return the bytes of workers, one for each stage of the arrays.

        Args:
            elements: trained elements of one rank.
            held: activation bytes of all microbatches in flight.
            data: number of replicas of the stage.
        """
        tensors = elements * self.bytes_per_element(data) + held
        return tensors * (1 + self.margin.share) + self.margin.fixed_bytes

    def available_bytes(self, limit: float) -> float:
        """Return the bytes that parameters, gradients, states and activations may take on a worker with this memory."""
        return (limit - self.margin.fixed_bytes) / (1 + self.margin.share)

    def bytes_per_element(self, data: int) -> float:
        """Return the bytes of parameters, gradients and optimizer states per trained element of a rank."""
        own = shard_trained_bytes(TrainedBytes(self.itemsize, self.itemsize, self.state_bytes), self.method, data)
        return own.parameters + own.gradients + own.states
