"""Shards of split operators: which part of every parameter and buffer this worker holds."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.placement.placement import Placement, Shard
from polylane.sharding.layout import local_part, write_local_part


class ShardSpec:
    """Placements of parameters and buffers on a stage's mesh, and this worker's place in it.

    Args:
        prepared: with the layouts of all graphs.
        stage: of the worker, from 0.
        coordinates: its index on each axis that cuts parameters.

    Attributes:
        shapes: of whole parameters and buffers, by name.
    """

    def __init__(self, prepared: CompiledTraining, stage: int, coordinates: Mapping[str, int]) -> None:
        self._coordinates = coordinates
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._placements: dict[tuple[str, str], dict[str, Placement]] = {}
        for partition in prepared.partitions.values():
            graph, layout = partition.graph, prepared.layouts_of(partition)[stage]
            for kind, table in (("parameter", graph.parameters), ("buffer", graph.buffers)):
                for key, info in table.items():
                    self.shapes[key] = info.shape
                    if layout is not None and (f"{kind}:{key}", 0) in layout.view.sources:
                        self._placements.setdefault((kind, key), layout.source_placements(kind, key))

    def _shard_placements(self, kind: str, name: str) -> dict[str, Shard]:
        placements = self._placements.get((kind, name), {})
        return {axis: p for axis, p in placements.items() if isinstance(p, Shard)}

    def is_sharded(self, kind: str, name: str) -> bool:
        """Whether this worker holds only a part."""
        return bool(self._shard_placements(kind, name))

    def kind_of(self, name: str) -> str:
        """Parameter or buffer."""
        return "buffer" if ("buffer", name) in self._placements else "parameter"

    def local_shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This worker's parts of whole parameters and buffers, of those that are cut."""
        cuts = {name: self._shard_placements(self.kind_of(name), name) for name in tensors}
        return {
            name: local_part(tensor.detach(), cuts[name], self._coordinates)
            for name, tensor in tensors.items()
            if cuts[name] and tuple(tensor.shape) == self.shapes[name]
        }

    def local_shard(self, name: str, whole: Tensor) -> Tensor:
        """This worker's part of a tensor in a parameter's or buffer's whole shape; the tensor itself where it is whole.

        Args:
            name: canonical name of the parameter or buffer.
            whole: a tensor of its whole shape, such as its value or its gradient.
        """
        return self.local_shards({name: whole}).get(name, whole)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Shape of this worker's part of a parameter or buffer."""
        return tuple(self.local_shard(name, torch.empty(self.shapes[name], device="meta")).shape)

    def shard_optimizer_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Cut what an optimizer made for whole parameters at once, before they were cut."""
        for name, parameter in parameters.items():
            cuts = self._shard_placements("parameter", name)
            for key, value in optimizer.state.get(parameter, {}).items():
                if cuts and isinstance(value, Tensor) and tuple(value.shape) == self.shapes[name]:
                    optimizer.state[parameter][key] = local_part(value, cuts, self._coordinates)

    def is_counted(self, kind: str, name: str) -> bool:
        """Whether this worker's part counts in a sum over the mesh: what several hold alike counts once."""
        cuts = self._shard_placements(kind, name)
        return not any(index for axis, index in self._coordinates.items() if axis not in cuts)

    def pad_to_full(self, kind: str, name: str, part: Tensor) -> Tensor:
        """This worker's part in the whole shape, with zeros around; zeros alone where another one's counts."""
        whole = part.new_zeros(self.shapes[name])
        if self.is_counted(kind, name):
            write_local_part(whole, part.detach(), self._shard_placements(kind, name), self._coordinates)
        return whole

    def full_summand(self, name: str, part: Tensor | None, like: Tensor) -> Tensor:
        """What this worker adds to the sum over all workers that makes a parameter or buffer whole.

        Args:
            part: what it holds, or None for nothing.
            like: gives dtype and device.
        """
        if part is None:
            return like.new_zeros(self.shapes[name])
        return self.pad_to_full(self.kind_of(name), name, part)

    def shard_label(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds; equal parts have equal labels."""
        cuts = self._shard_placements(self.kind_of(name), name)
        return "".join(f"[{axis} {self._coordinates[axis]}]" for axis in cuts)
