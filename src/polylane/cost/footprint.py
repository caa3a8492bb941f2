"""Footprint: bytes that a worker needs, of any number of stages at once, for searches."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from polylane.cost.memory import Load, sharded
from polylane.cost.method import Method

Array = NDArray[np.float64]


@dataclass(frozen=True)
class Footprint:
    """Memory of a worker by what it trains and keeps.

    Attributes:
        state: bytes of optimizer states for each trained element.
        item: bytes of a parameter's element in the model.
        margin: share that the allocator loses, on top.
        fixed: bytes that every worker needs whatever it does.
    """

    state: float
    item: int = 4
    margin: float = 0.05
    fixed: float = 0.0

    def __call__(self, elements: Array, held: Array, data: int, method: Method) -> Array:
        """Bytes.

        Args:
            elements: trained elements of a rank.
            held: bytes kept of all microbatches that it has in flight.
            data: replicas of the stage.
            method: how training is done.
        """
        weights, gradients, states = self.per_element(data, method)
        return (elements * (weights + gradients + states) + held) * (1 + self.margin) + self.fixed

    def room(self, limit: float) -> float:
        """Bytes of parameters, gradients, states and of what is kept that a worker with so much memory may have."""
        return (limit - self.fixed) / (1 + self.margin)

    def per_element(self, data: int, method: Method) -> tuple[float, float, float]:
        """Bytes of parameters, gradients and optimizer states for each trained element of a rank."""
        own = sharded(Load(self.item, self.item, self.state), method, data)
        return own.parameters, own.gradients, own.states
