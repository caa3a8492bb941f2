"""Holding: what one worker holds of the model, from its first values to whole weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import named_parameters
from polylane.program.program import Program
from polylane.runtime.parameters import broadcast as weights
from polylane.runtime.parameters.full_tensors import FullTensors
from polylane.runtime.parameters.materialize import is_on_meta, materialize
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.parameters.shared_buffers import SharedBuffers
from polylane.runtime.pipeline.bound_program import ModelTensors
from polylane.runtime.pipeline.connections import column_ranks
from polylane.runtime.sync.zero.flat_shards import Shards, empty_storage, flat_buffer_of
from polylane.runtime.sync.zero.optimizer_parts import find_unshardable
from polylane.runtime.sync.zero.units import WHOLE, ShardUnits, build_all_units, shard_group
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.workers.world import World

Holders = Mapping[str, tuple[int, ...]]


def owning_stages(prepared: CompiledTraining) -> dict[str, tuple[int, ...]]:
    """Stages that use a parameter in any objective: all of them keep it up to date."""
    result: dict[str, set[int]] = {}
    for partition in prepared.partitions.values():
        for stage in range(partition.stages):
            for name in partition.parameters(stage):
                result.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in result.items()}


def plan_shard_units(prepared: CompiledTraining, programs: Mapping[str, Sequence[Program]]) -> ShardUnits:
    """What replicas hold parts of, for the programs of all workers, by objective.

    Raises:
        PolylaneError: an optimizer cannot be run on parts.
    """
    plan, objectives = prepared.plan, prepared.objectives.values()
    if plan.sync.shard == "none":
        return WHOLE
    named = named_parameters(prepared.model, [objective.loss for objective in objectives])
    whole = find_unshardable(named, [objective.optimizer for objective in objectives])
    infos = {name: info for each in prepared.partitions.values() for name, info in each.graph.parameters.items()}
    return build_all_units(plan, programs, infos, whole)


class LocalModel:
    """The parameters and buffers of one worker's stage, or its parts of them.

    Until :meth:`keep_parts` is called they are whole, for the optimizers are made of whole parameters. Then operators
    hold their parts, where they are split; and of those replicas hold parts, where the plan says so.

    Args:
        prepared: the training.
        world: this worker among all.
        holders: stages that keep a parameter up to date.
        transport: between the workers.
        seed: of the values of a model on the meta device.
        same_weights: every worker's model has the same weights already.
        layout: what replicas hold parts of.
        gathers: for parts that are gathered during passes.

    Attributes:
        prepared, world, owning_stages, transport, shard_units: as given.
        stage: this worker's.
        tensors: the model's, by name.
        shard_spec: which part of what its stage holds is this worker's.
        buffers: hands those on that several stages use.
        full_tensors: puts parts together.
        shards: this worker's parts among the replicas'.
        was_on_meta: whether the model was on the meta device: no worker could hold the whole of it.
    """

    def __init__(
        self,
        prepared: CompiledTraining,
        world: World,
        holders: Holders,
        transport: Transport,
        *,
        seed: int,
        same_weights: bool,
        layout: ShardUnits = WHOLE,
        gathers: Transport | None = None,
    ) -> None:
        plan, losses = prepared.plan, [o.loss for o in prepared.objectives.values()]
        self.prepared, self.world, self.owning_stages, self.transport = prepared, world, holders, transport
        self.stage, replica = plan.stage_and_replica(world.rank)
        self.tensors = ModelTensors(prepared.model, losses, world.device)
        self.shard_spec = ShardSpec(prepared, self.stage, plan.coordinates(world.rank))
        self.buffers = SharedBuffers(
            self.stage,
            plan.pipeline,
            column_ranks(plan, world.rank),
            not plan.resplits_batch or replica == 0,
            self.tensors.buffers,
            world.device,
            transport,
            None if plan.is_uniform else self.shard_spec,
        )
        self.full_tensors = FullTensors(prepared, world, self.tensors, self.shard_spec, transport, self.local_names())
        self.shard_units, self.shards, self._gather_transport = layout, Shards(), gathers
        self._materialized_parts: dict[str, Tensor] = {}
        self.was_on_meta = self._materialize(seed)
        self.tensors.move_to_device(self.local_names())
        if not (same_weights or self.was_on_meta) and world.size > 1:
            every = {**self.tensors.parameters(), **self.tensors.buffers()}  # those of other stages too
            weights.broadcast_weights(every, transport, world.device)

    def local_names(self) -> set[str]:
        """Of the parameters and buffers that this worker keeps up to date."""
        names = {name for name, stages in self.owning_stages.items() if self.stage in stages}
        for partition in self.prepared.partitions.values():
            names |= set(partition.buffers(self.stage))
        return names

    def _materialize(self, seed: int) -> bool:
        """Give a model on the meta device its values, of which this worker keeps its part. Whether it was there."""
        model = self.prepared.model
        if not is_on_meta(model):
            return False
        held, parts = self.local_names(), self._shard_ranges()
        changed = {*self.owning_stages, *(n for p in self.prepared.partitions.values() for n in p.graph.buffers)}

        def keep(name: str, whole: Tensor) -> Tensor | None:
            if name in changed and name not in held:
                return None  # another stage's
            own = self.shard_spec.local_shard(name, whole)
            if name not in parts:
                return own
            self._materialized_parts[name] = own.reshape(-1)[slice(*parts[name])].clone()
            return empty_storage(own, own.shape)

        materialize(model, self.prepared.init, seed, self.world.device, keep)
        return True

    def _shard_ranges(self) -> dict[str, tuple[int, int]]:
        """Begin and end of what this worker keeps of parameters, where replicas hold parts of them."""
        plan, rank, found = self.prepared.plan, self.world.rank, dict[str, tuple[int, int]]()
        if plan.sync.shard != "parameters":
            return found
        group = shard_group(plan, rank)
        shapes = {name: torch.empty(shape, device="meta") for name, shape in self.shard_spec.shapes.items()}
        shapes |= self.shard_spec.local_shards(shapes)
        for unit in self.shard_units.units[rank] if len(group) > 1 else ():
            elements = [shapes[name].numel() for name in unit.parameters]
            for name in unit.parameters:
                found[name] = unit.part_range(name, elements, len(group), group.index(rank))
        return found

    def shard_parameters(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """From now on hold parts only, and let optimizers do so with what they made for whole parameters."""
        self.tensors.replace_values(self.shard_spec.local_shards(self.local_tensors()))
        optimizers = list(optimizers)
        for built in optimizers:
            self.shard_spec.shard_optimizer_state(built, self.tensors.parameters())
        self.shards = self.full_tensors.shards = self._build_shards()
        self.shards.install_parts(optimizers)

    def _build_shards(self) -> Shards:
        plan, rank = self.prepared.plan, self.world.rank
        if not self.shard_units.units or len(group := shard_group(plan, rank)) == 1:
            return Shards()
        parameters, hidden = self.tensors.parameters(), plan.sync.shard == "parameters"
        flats = []
        for unit in self.shard_units.units[rank]:
            kept = (
                {name: self._materialized_parts.pop(name) for name in unit.parameters}
                if self._materialized_parts
                else None
            )
            flats.append(flat_buffer_of(unit, group, rank, parameters, hidden, kept))
        counts = any(plan.stage_and_replica(each)[1] == 0 for each in group)
        return Shards(flats, hidden, counts, self.transport, self._gather_transport)

    def local_tensors(self) -> dict[str, Tensor]:
        """What this worker keeps up to date, by the model's own names."""
        names = self.local_names()
        every = {**self.tensors.parameters(), **self.tensors.buffers()}
        own = {name: self.shards.local_tensor(name, tensor) for name, tensor in every.items() if name in names}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def shard_label(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds; equal parts have equal labels."""
        return self.shard_spec.shard_label(name) + self.shards.shard_label(name)

    def full_gradients(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Whole gradients of parameters, on every worker's CPU; None where there is none."""
        return self.full_tensors.full_gradients(names, self.owning_stages)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, with its own names, on every worker's CPU."""
        with self.shards.full_parameters():
            return self.full_tensors.state_dict(self.owning_stages, self.buffers.owning_stage)

    def save(self, path: Path) -> None:
        """Write the whole model's weights as safetensors.

        Raises:
            NotFinite: on every worker, where they are no numbers; a file of before is as it was.
        """
        state = self.state_dict()
        weights.require_finite(state, self.tensors.parameters(), path)
        if self.world.rank == 0:
            weights.save_safetensors(state, path)
        self.transport.barrier()
