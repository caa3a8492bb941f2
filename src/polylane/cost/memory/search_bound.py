"""Memory bound of the search: bytes that a worker needs, as one formula over arrays of stages."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cost.memory.peak import TrainedBytes, shard_trained_bytes
from polylane.cost.operators.training_options import TrainingOptions

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Footprint:
    """Memory of a worker from its trained elements and saved activations.

    Attributes:
        state_bytes: bytes of optimizer states for each trained element.
        itemsize: bytes per parameter element in the model.
        margin_share: fraction of the tensors' bytes that the allocator loses.
        fixed_bytes: bytes that every worker takes before it has any tensor.
    """

    state_bytes: float
    itemsize: int = 4
    margin_share: float = 0.05
    fixed_bytes: float = 0.0

    def __call__(self, elements: Array, held: Array, data: int, method: TrainingOptions) -> Array:
        """Return the bytes of workers, one for each stage of the arrays.

        Args:
            elements: trained elements of one rank.
            held: activation bytes of all microbatches in flight.
            data: number of replicas of the stage.
            method: precision and sharding of the training.
        """
        weights, gradients, states = self.bytes_per_element(data, method)
        return (elements * (weights + gradients + states) + held) * (1 + self.margin_share) + self.fixed_bytes

    def available_bytes(self, limit: float) -> float:
        """Return the bytes that parameters, gradients, states and activations may take on a worker with this memory."""
        return (limit - self.fixed_bytes) / (1 + self.margin_share)

    def bytes_per_element(self, data: int, method: TrainingOptions) -> tuple[float, float, float]:
        """Return bytes of parameters, gradients and optimizer states per trained element of a rank."""
        own = shard_trained_bytes(TrainedBytes(self.itemsize, self.itemsize, self.state_bytes), method, data)
        return own.parameters, own.gradients, own.states
