"""Footprint: bytes that a worker needs, of any number of stages at once, for searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cost.memory.peak import TrainedBytes, shard_trained_bytes
from polylane.cost.operators.training_options import TrainingOptions

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Footprint:
    """Memory of a worker by what it trains and keeps.

    Attributes:
        state_bytes: bytes of optimizer states for each trained element.
        itemsize: bytes of a parameter's element in the model.
        margin_share: share that the allocator loses, on top.
        fixed_bytes: bytes that every worker needs whatever it does.
    """

    state_bytes: float
    itemsize: int = 4
    margin_share: float = 0.05
    fixed_bytes: float = 0.0

    def __call__(self, elements: Array, held: Array, data: int, method: TrainingOptions) -> Array:
        """Bytes.

        Args:
            elements: trained elements of a rank.
            held: bytes kept of all microbatches that it has in flight.
            data: replicas of the stage.
            method: how training is done.
        """
        weights, gradients, states = self.bytes_per_element(data, method)
        return (elements * (weights + gradients + states) + held) * (1 + self.margin_share) + self.fixed_bytes

    def available_bytes(self, limit: float) -> float:
        """Bytes of parameters, gradients, states and of what is kept that a worker with so much memory may have."""
        return (limit - self.fixed_bytes) / (1 + self.margin_share)

    def bytes_per_element(self, data: int, method: TrainingOptions) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer states for each trained element of a rank."""
        own = shard_trained_bytes(TrainedBytes(self.itemsize, self.itemsize, self.state_bytes), method, data)
        return own.parameters, own.gradients, own.states
