"""Value spec: dtype and shape of the values that cross between stages, for any number of samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from polylane.graph.partition import Partition
from polylane.graph.symbolic_sizes import size_function
from polylane.sharding.layout import Layout


@dataclass(frozen=True)
class ValueSpec:
    """Dtype and shape of a value that crosses between stages, for any number of samples.

    Attributes:
        name: name of the node that computes the value.
        dtype: dtype in which it is computed and sent.
        sizes: for each dimension of the whole value, its size as a function of the number of samples.
        layout: how this worker's stage shards its operators; None where it does not.
        coordinates: this worker's index on each axis of its mesh.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[Callable[[int], int], ...]
    layout: Layout | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)

    def shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of this worker's shard, for that number of samples."""
        whole = tuple(size(samples) for size in self.sizes)
        return whole if self.layout is None else self.layout.local_shape(self.name, whole, samples, self.coordinates)


def value_specs(
    partition: Partition,
    dtypes: Mapping[str, torch.dtype],
    layout: Layout | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> dict[str, ValueSpec]:
    """Describe every crossing value, by name; ``dtypes`` overrides those of the capture (autocast changes them)."""
    values = {n.meta["name"]: n.meta["val"] for n in partition.graph.code.fx.nodes if n.op == "call_function"}
    return {
        c.value: ValueSpec(
            c.value,
            dtypes.get(c.value, values[c.value].dtype),
            tuple(size_function(size) for size in values[c.value].shape),
            layout,
            coordinates or {},
        )
        for c in partition.crossings
    }
