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
    """What a travelling value looks like: its dtype, and its shape for any number of samples."""

    name: str
    dtype: torch.dtype
    sizes: tuple[Callable[[int], int], ...]
    layout: Layout | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)

    def shape(self, samples: int) -> tuple[int, ...]:
        """Shape of what this worker has, for a part with that number of samples."""
        whole = tuple(size(samples) for size in self.sizes)
        return whole if self.layout is None else self.layout.local_shape(self.name, whole, samples, self.coordinates)


def value_specs(
    partition: Partition,
    dtypes: Mapping[str, torch.dtype],
    layout: Layout | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> dict[str, ValueSpec]:
    """Every crossing value by name; ``dtypes`` overrides what capture saw (autocast changes it)."""
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
