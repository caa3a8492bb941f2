"""Local model: one worker's parameters and buffers, from initial values to shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.graph.operators.autocast_reads import find_cast_weights
from polylane.graph.precision import autocast_dtype
from polylane.program.program import Program
from polylane.runtime.connections.connections import Connections, column_ranks
from polylane.runtime.connections.shard_groups import shard_group
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.parameters.materialize import is_on_meta, materialize
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.parameters.shared_buffers import SharedBuffers, stages_of_buffers
from polylane.runtime.parameters.zero_shards import Shards, empty_storage, flat_buffer_of
from polylane.runtime.parameters.zero_units import WHOLE, ShardUnits, build_all_units
from polylane.runtime.workers.world import World


def plan_shard_units(prepared: CompiledTraining, programs: Mapping[str, Sequence[Program]]) -> ShardUnits:
    """Return the ZeRO shard units of all ranks; none where the plan does not shard over replicas.

    Args:
        prepared: the compiled training, equal on every worker.
        programs: the programs of all workers, by objective.
    """
    plan = prepared.plan
    if plan.sync.shard == "none":
        return WHOLE
    infos = {
        name: info for partition in prepared.partitions.values() for name, info in partition.graph.parameters.items()
    }
    graphs, cast = [partition.graph for partition in prepared.partitions.values()], autocast_dtype(plan.precision)
    cast_names = find_cast_weights(graphs, cast) if plan.sync.shard == "parameters" else ()
    return build_all_units(plan, programs, infos, prepared.unshardable, cast_names, cast)


class LocalModel:
    """The parameters and buffers of one worker's stage, or its shards of them.

    Sharding has two levels, applied in this order by :meth:`shard_parameters`; until then parameters are full, because
    the user's optimizers are built on full parameters:

        level              over                   held in        cut along
        tensor parallel    the stage's mesh       shard_spec     dimensions of the tensor
        ZeRO               replicas of a shard    shards         the flat buffer of a unit

    Args:
        prepared: the compiled training, equal on every worker.
        world: this worker among all training workers.
        connections: transports of this worker.
        units: ZeRO shard units of all ranks.
        seed: seed of the initial values of a model on the meta device.
        same_weights: whether every worker's model has equal weights already, so that no broadcast is needed.

    Attributes:
        prepared: the compiled training, equal on every worker.
        world: this worker among all training workers.
        owning_stages: the stages that keep each parameter up to date, by canonical name.
        transport: connects all training workers; collectives outside passes run over it.
        shard_units: ZeRO shard units of all ranks.
        stage: index of this worker's pipeline stage; of several the first.
        tensors: parameters and buffers of this worker's model copy, by name.
        shard_spec: tensor-parallel shards that this worker holds.
        buffers: brings buffers that several stages use up to date.
        shards: ZeRO shards of this worker; none until :meth:`shard_parameters`.
        was_on_meta: whether the model was built on the meta device, so that its full values never existed.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        world: World,
        connections: Connections,
        units: ShardUnits,
        seed: int,
        same_weights: bool,
    ) -> None:
        plan, self.transport = prepared.plan, connections.transport
        self.prepared, self.world, self.owning_stages = prepared, world, prepared.owning_stages
        self.stage, replica = plan.stage_and_replica(world.rank)
        self.tensors = ModelTensors(prepared.model, prepared.losses, world.device)
        self.shard_spec = ShardSpec(prepared, world.rank)
        self.buffers = SharedBuffers(
            self.stage,
            plan.pipeline,
            column_ranks(plan, world.rank),
            not plan.has_uneven_replicas or replica == 0,
            self.tensors.buffers,
            world.device,
            self.transport,
            None if plan.is_uniform else self.shard_spec,
        )
        self.shard_units, self.shards, self._gather_transport = units, Shards(), connections.gather_transport
        self._materialized_parts: dict[str, Tensor] = {}
        self.was_on_meta = self._materialize(seed)
        self.tensors.move_to_device(self.local_names())
        if not (same_weights or self.was_on_meta) and world.size > 1:
            # Tensors of other stages too: the user's own code may read any of them between steps.
            tensors = {**self.tensors.parameters(), **self.tensors.buffers()}
            weights.broadcast_weights(tensors, self.transport, world.device)

    def stages_of_buffers(self) -> dict[str, frozenset[int]]:
        """Return the stages that use each buffer, in any graph so far; several on the same workers are the first."""
        first_chunk, users = self.prepared.plan.first_chunk, dict[str, frozenset[int]]()
        for partition in self.prepared.partitions.values():
            for name, stages in stages_of_buffers(partition).items():
                users[name] = users.get(name, frozenset()).union(map(first_chunk, stages))
        return users

    def local_names(self) -> set[str]:
        """Return names of the parameters and buffers that this worker keeps up to date."""
        plan = self.prepared.plan
        names = {name for name, stages in self.owning_stages.items() if self.stage in stages}
        for partition in self.prepared.partitions.values():
            names |= {name for stage in plan.chunks(self.stage) for name in partition.buffers(stage)}
        return names

    def _materialize(self, seed: int) -> bool:
        """Initialize a model on the meta device, keeping this worker's shards; return whether it was on it."""
        model = self.prepared.model
        if not is_on_meta(model):
            return False
        local_names, parts = self.local_names(), self._shard_ranges()
        changed = {*self.owning_stages, *(n for p in self.prepared.partitions.values() for n in p.graph.buffers)}

        def keep(name: str, full_tensor: Tensor) -> Tensor | None:
            if name in changed and name not in local_names:
                return None  # trained by another stage alone
            # The ZeRO shard is cut at once: the full parameter is freed before the next module is initialized.
            shard = self.shard_spec.local_shard(name, full_tensor)
            if name not in parts:
                return shard
            self._materialized_parts[name] = shard.reshape(-1)[slice(*parts[name])].clone()
            return empty_storage(shard, shard.shape)

        materialize(model, self.prepared.init, seed, self.world.device, keep)
        return True

    def _shard_ranges(self) -> dict[str, tuple[int, int]]:
        """Return (begin, end) of this worker's elements of each parameter that is sharded between uses (ZeRO-3)."""
        plan, rank, ranges = self.prepared.plan, self.world.rank, dict[str, tuple[int, int]]()
        if plan.sync.shard != "parameters":
            return ranges
        group = shard_group(plan, rank)
        # Units are cut after tensor parallelism: their elements are those of the local shards.
        shapes = {name: torch.empty(shape, device="meta") for name, shape in self.shard_spec.shapes.items()}
        shapes |= self.shard_spec.local_shards(shapes)
        for unit in self.shard_units.units[rank] if len(group) > 1 else ():
            elements = [shapes[name].numel() for name in unit.parameters]
            for name in unit.parameters:
                ranges[name] = unit.part_range(name, elements, len(group), group.index(rank))
        return ranges

    def shard_parameters(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Replace full parameters by this worker's shards, in the model and in optimizers with their states."""
        # Tensor parallelism first: ZeRO cuts what is left on this worker.
        self.tensors.replace_values(self.shard_spec.local_shards(self.local_tensors()))
        optimizers = list(optimizers)
        for built in optimizers:
            self.shard_spec.shard_optimizer_state(built, self.tensors.parameters())
        self.shards = self._build_shards()
        self.shards.install_parts(optimizers)

    def _build_shards(self) -> Shards:
        plan, rank = self.prepared.plan, self.world.rank
        if not self.shard_units.units or len(group := shard_group(plan, rank)) == 1:
            return Shards()
        parameters, hidden = self.tensors.parameters(), plan.sync.shard == "parameters"
        flats = []
        for unit in self.shard_units.units[rank]:
            # A model from the meta device was cut while it was initialized: its full values do not exist here.
            materialized = self._materialized_parts
            kept_parts = {name: materialized.pop(name) for name in unit.parameters} if materialized else None
            flats.append(flat_buffer_of(unit, group, rank, parameters, hidden, kept_parts))
        # In sums over all workers each shard counts once: where its group has a worker of replica 0.
        counts = any(plan.stage_and_replica(member)[1] == 0 for member in group)
        return Shards(flats, hidden, counts, self.transport, self._gather_transport)

    def local_tensors(self) -> dict[str, Tensor]:
        """Return the parameters and buffers, or shards, that this worker keeps up to date, by the model's names."""
        names = self.local_names()
        tensors = {**self.tensors.parameters(), **self.tensors.buffers()}
        parts = {name: self.shards.local_tensor(name, tensor) for name, tensor in tensors.items() if name in names}
        return {name: tensor for name, tensor in parts.items() if tensor is not None}

    def is_part(self, name: str) -> bool:
        """Return whether this worker holds only a part of a parameter or buffer, or none, between steps."""
        return self.shard_spec.is_sharded(name) or (self.shards.keeps_only_shards and name in self.shards.buffer_of)

    def local_part(self, name: str, full_tensor: Tensor) -> Tensor | None:
        """Return what :meth:`local_tensors` has of a whole parameter or buffer; None for nothing of it."""
        part = self.shard_spec.local_shard(name, full_tensor)
        return self.shards.local_part(name, part) if self.shards.keeps_only_shards else part

    def shard_label(self, name: str) -> str:
        """Return a label of the shard that this worker holds of a parameter or buffer; equal shards, equal labels."""
        return self.shard_spec.shard_label(name) + self.shards.shard_label(name)
