"""Tensor-parallel shards: which slice of every parameter and buffer this worker holds, and how to cut and pad it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.placement.placement import Shard
from polylane.program.boxes import IndexBox, whole_box
from polylane.sharding.layout import local_part, pad_local_part


class ShardSpec:
    """Placements of parameters and buffers on a stage's mesh, and this worker's coordinates in the mesh.

    Args:
        prepared: the compiled training, with the sharding layouts of all graphs.
        rank: rank of the worker, one of those that train.

    Attributes:
        shapes: full shapes of parameters and buffers, by canonical name.
    """

    def __init__(self, prepared: CompiledTraining, rank: int) -> None:
        self._coordinates, self._owning_stages = prepared.plan.coordinates(rank), prepared.owning_stages
        self._stage = prepared.plan.stage_and_replica(rank)[0]
        self.shapes: dict[str, tuple[int, ...]] = {}
        # By name, the axes along which the tensor is cut; a replicated one has none.
        self._cuts: dict[str, dict[str, Shard]] = {}
        for compiled in prepared.graphs.values():
            graph, layout = compiled.partition.graph, compiled.layouts[self._stage]
            for kind, table in (("parameter", graph.parameters), ("buffer", graph.buffers)):
                for name, info in table.items():
                    self.shapes[name] = info.shape
                    if layout is not None and (f"{kind}:{name}", 0) in layout.view.sources and name not in self._cuts:
                        placements = layout.source_placements(kind, name)
                        self._cuts[name] = {axis: p for axis, p in placements.items() if isinstance(p, Shard)}

    def is_sharded(self, name: str) -> bool:
        """Return whether this worker holds only a shard of a parameter or buffer."""
        return bool(self._cuts.get(name))

    def local_shards(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return this worker's shards of full parameters and buffers; names that are not sharded are left out."""
        return {
            name: local_part(tensor.detach(), self._cuts[name], self._coordinates)
            for name, tensor in tensors.items()
            # Another shape than the full one: the tensor is a shard already.
            if self.is_sharded(name) and tuple(tensor.shape) == self.shapes[name]
        }

    def local_shard(self, name: str, full_tensor: Tensor) -> Tensor:
        """Return this worker's shard of a tensor in a parameter's full shape; the tensor itself if it is not sharded.

        Args:
            name: canonical name of the parameter or buffer.
            full_tensor: a tensor of its full shape, such as its value or its gradient.
        """
        return self.local_shards({name: full_tensor}).get(name, full_tensor)

    def local_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of this worker's shard of a parameter or buffer."""
        return tuple(self.local_shard(name, torch.empty(self.shapes[name], device="meta")).shape)

    def index_box(self, name: str) -> IndexBox:
        """Return the indices of a parameter or buffer that this worker's shard has."""
        box = list(whole_box(self.shapes[name]))
        for axis, cut in self._cuts.get(name, {}).items():
            box[cut.dim] = cut.ranges(self._coordinates[axis])
        return tuple(box)

    def shard_optimizer_state(self, optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> None:
        """Cut optimizer states of the full shape, which the optimizer allocated before its parameters were sharded.

        Args:
            optimizer: built on full parameters; its states are replaced by shards.
            parameters: this worker's parameters by canonical name, the keys of the states.
        """
        for name, parameter in parameters.items():
            cuts = self._cuts.get(name)
            for key, value in optimizer.state.get(parameter, {}).items():
                if cuts and isinstance(value, Tensor) and tuple(value.shape) == self.shapes[name]:
                    optimizer.state[parameter][key] = local_part(value, cuts, self._coordinates)

    def is_counted(self, name: str) -> bool:
        """Return whether this worker's shard counts in a sum over the mesh: a replicated shard counts once."""
        cuts = self._cuts.get(name, {})
        # Along an axis that does not cut the tensor all workers hold the same shard: only index 0 counts.
        return not any(index for axis, index in self._coordinates.items() if axis not in cuts)

    def speaks_for(self, name: str) -> bool:
        """Return whether this worker sends its shard of a parameter: no other of its replica has the same one to send.

        Of the stages that hold a tied parameter the lowest one sends it.
        """
        return self._stage == min(self._owning_stages[name]) and self.is_counted(name)

    def pad_to_full(self, name: str, part: Tensor) -> Tensor:
        """Return a copy of this worker's shard padded with zeros to the full shape; all zeros if it is not counted."""
        if not self.is_counted(name):
            return part.new_zeros(self.shapes[name])
        part = part.detach()
        full_tensor = pad_local_part(part, self._cuts.get(name, {}), self._coordinates)
        # Sums are made in place: they must not write over the worker's own values.
        return full_tensor.clone(memory_format=torch.contiguous_format) if full_tensor is part else full_tensor

    def full_summand(self, name: str, part: Tensor | None, like: Tensor) -> Tensor:
        """Return this worker's partial sum of a full parameter or buffer: the sum over all workers is the full value.

        Args:
            name: canonical name of the parameter or buffer.
            part: the local shard, or None where this worker contributes nothing.
            like: any tensor with the result's dtype and device.
        """
        if part is None:
            return like.new_zeros(self.shapes[name])
        return self.pad_to_full(name, part)

    def shard_label(self, name: str) -> str:
        """Return a label of the shard that this worker holds, as ``"[tensor 1]"``; equal shards have equal labels."""
        return "".join(f"[{axis} {self._coordinates[axis]}]" for axis in self._cuts.get(name, ()))
