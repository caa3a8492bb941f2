"""Holding: what one worker holds of the model, from its first values to whole weights and gradients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polylane.program.program import Program
from polylane.runtime import weights
from polylane.runtime.buffers import Buffers
from polylane.runtime.connections import column_of
from polylane.runtime.lane import Tensors
from polylane.runtime.materialize import materialize, on_meta
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import Prepared, named_parameters
from polylane.runtime.sync.sharded import Shards, blank, flat_of
from polylane.runtime.sync.sharded_layout import WHOLE, Layout, shard_group, units_of_all
from polylane.runtime.sync.sharded_pieces import kept_whole
from polylane.runtime.transport.protocol import Transport
from polylane.runtime.wholes import Wholes
from polylane.runtime.world import World

Holders = Mapping[str, tuple[int, ...]]


def holders_of(prepared: Prepared) -> dict[str, tuple[int, ...]]:
    """Stages that use a parameter in any objective: all of them keep it up to date."""
    result: dict[str, set[int]] = {}
    for partition in prepared.partitions.values():
        for stage in range(partition.stages):
            for name in partition.parameters(stage):
                result.setdefault(name, set()).add(stage)
    return {name: tuple(sorted(stages)) for name, stages in result.items()}


def layout_of(prepared: Prepared, programs: Mapping[str, Sequence[Program]]) -> Layout:
    """What replicas hold parts of, for the programs of all workers, by objective.

    Raises:
        PolylaneError: an optimizer cannot be run on parts.
    """
    plan, objectives = prepared.plan, prepared.objectives.values()
    if plan.sync.shard == "none":
        return WHOLE
    named = named_parameters(prepared.model, [objective.loss for objective in objectives])
    whole = kept_whole(named, [objective.optimizer for objective in objectives])
    infos = {name: info for each in prepared.partitions.values() for name, info in each.graph.parameters.items()}
    return units_of_all(plan, programs, infos, whole)


class Holding:
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
        prepared, world, holders, transport, layout: as given.
        stage: this worker's.
        tensors: the model's, by name.
        pieces: which part of what its stage holds is this worker's.
        buffers: hands those on that several stages use.
        wholes: puts parts together.
        shards: this worker's parts among the replicas'.
        materialized: whether the model was on the meta device: no worker could hold the whole of it.
    """

    def __init__(
        self,
        prepared: Prepared,
        world: World,
        holders: Holders,
        transport: Transport,
        *,
        seed: int,
        same_weights: bool,
        layout: Layout = WHOLE,
        gathers: Transport | None = None,
    ) -> None:
        plan, losses = prepared.plan, [o.loss for o in prepared.objectives.values()]
        self.prepared, self.world, self.holders, self.transport = prepared, world, holders, transport
        self.stage, replica = plan.place(world.rank)
        self.tensors = Tensors(prepared.model, losses, world.device)
        self.pieces = Pieces(prepared, self.stage, plan.coordinates(world.rank))
        self.buffers = Buffers(
            self.stage,
            plan.pipeline,
            column_of(plan, world.rank),
            not plan.redivides or replica == 0,
            self.tensors.buffers,
            world.device,
            transport,
            None if plan.uniform else self.pieces,
        )
        self.wholes = Wholes(prepared, world, self.tensors, self.pieces, transport, self.names())
        self.layout, self.shards, self._gathers = layout, Shards(), gathers
        self._kept: dict[str, Tensor] = {}
        self.materialized = self._materialize(seed)
        self.tensors.hold(self.names())
        if not (same_weights or self.materialized) and world.size > 1:
            every = {**self.tensors.parameters(), **self.tensors.buffers()}  # those of other stages too
            weights.same_everywhere(every, transport, world.device)

    def names(self) -> set[str]:
        """Of the parameters and buffers that this worker keeps up to date."""
        names = {name for name, stages in self.holders.items() if self.stage in stages}
        for partition in self.prepared.partitions.values():
            names |= set(partition.buffers(self.stage))
        return names

    def _materialize(self, seed: int) -> bool:
        """Give a model on the meta device its values, of which this worker keeps its part. Whether it was there."""
        model = self.prepared.model
        if not on_meta(model):
            return False
        held, parts = self.names(), self._parts()
        changed = {*self.holders, *(n for p in self.prepared.partitions.values() for n in p.graph.buffers)}

        def keep(name: str, whole: Tensor) -> Tensor | None:
            if name in changed and name not in held:
                return None  # another stage's
            own = self.pieces.local_shard(name, whole)
            if name not in parts:
                return own
            self._kept[name] = own.reshape(-1)[slice(*parts[name])].clone()
            return blank(own, own.shape)

        materialize(model, self.prepared.init, seed, self.world.device, keep)
        return True

    def _parts(self) -> dict[str, tuple[int, int]]:
        """Begin and end of what this worker keeps of parameters, where replicas hold parts of them."""
        plan, rank, found = self.prepared.plan, self.world.rank, dict[str, tuple[int, int]]()
        if plan.sync.shard != "parameters":
            return found
        group = shard_group(plan, rank)
        shapes = {name: torch.empty(shape, device="meta") for name, shape in self.pieces.shapes.items()}
        shapes |= self.pieces.of(shapes)
        for unit in self.layout.units[rank] if len(group) > 1 else ():
            elements = [shapes[name].numel() for name in unit.parameters]
            for name in unit.parameters:
                found[name] = unit.part(name, elements, len(group), group.index(rank))
        return found

    def keep_parts(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """From now on hold parts only, and let optimizers do so with what they made for whole parameters."""
        self.tensors.keep(self.pieces.of(self.held()))
        optimizers = list(optimizers)
        for built in optimizers:
            self.pieces.cut_state(built, self.tensors.parameters())
        self.shards = self.wholes.shards = self._sharded()
        self.shards.put_in(optimizers)

    def _sharded(self) -> Shards:
        plan, rank = self.prepared.plan, self.world.rank
        if not self.layout.units or len(group := shard_group(plan, rank)) == 1:
            return Shards()
        parameters, hidden = self.tensors.parameters(), plan.sync.shard == "parameters"
        flats = []
        for unit in self.layout.units[rank]:
            kept = {name: self._kept.pop(name) for name in unit.parameters} if self._kept else None
            flats.append(flat_of(unit, group, rank, parameters, hidden, kept))
        counts = any(plan.place(each)[1] == 0 for each in group)
        return Shards(flats, hidden, counts, self.transport, self._gathers)

    def held(self) -> dict[str, Tensor]:
        """What this worker keeps up to date, by the model's own names."""
        names = self.names()
        every = {**self.tensors.parameters(), **self.tensors.buffers()}
        own = {name: self.shards.held(name, tensor) for name, tensor in every.items() if name in names}
        return {name: tensor for name, tensor in own.items() if tensor is not None}

    def label(self, name: str) -> str:
        """Which part of a parameter or buffer this worker holds; equal parts have equal labels."""
        return self.pieces.label(name) + self.shards.label(name)

    def whole_gradients(self, names: Iterable[str]) -> dict[str, Tensor | None]:
        """Whole gradients of parameters, on every worker's CPU; None where there is none."""
        return self.wholes.gradients(names, self.holders)

    def state_dict(self) -> dict[str, Tensor]:
        """The whole model's weights and buffers, with its own names, on every worker's CPU."""
        with self.shards.shown():
            return self.wholes.state_dict(self.holders, self.buffers.owner)

    def save(self, path: Path) -> None:
        """Write the whole model's weights as safetensors.

        Raises:
            NotFinite: on every worker, where they are no numbers; a file of before is as it was.
        """
        state = self.state_dict()
        weights.require_finite(state, self.tensors.parameters(), path)
        if self.world.rank == 0:
            weights.save(state, path)
        self.transport.barrier()
