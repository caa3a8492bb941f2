"""Messages of one worker and one parameter server: which gradients it sends, and which weights it receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.program.lower import differentiable_parameters
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.sync.flat_packing import FlatPacking, PackedTensor


@dataclass(frozen=True)
class ServerShard:
    """What one worker and one server give each other.

    Attributes:
        rank, replica: of the worker, and the number of its replica.
        shard_key: what it has in common with its counterparts in other replicas, and with nobody else.
        shard_spec: which parts it holds.
        gradient_packings: by objective, the gradients that it sends: of a replica's workers that hold the same part,
            one does.
        weight_packings: by objective, the weights that it receives.
        full_packings: of all objectives, what it sends (to set the weights) and what it receives.
    """

    rank: int
    replica: int
    shard_key: tuple[int, ...]
    shard_spec: ShardSpec
    gradient_packings: Mapping[str, FlatPacking]
    weight_packings: Mapping[str, FlatPacking]
    full_packings: tuple[FlatPacking, FlatPacking]

    def weights_of(self, objectives: Collection[str]) -> FlatPacking:
        """The weights of these objectives."""
        if len(objectives) == 1:
            return self.weight_packings[next(iter(objectives))]
        names = {name for objective in objectives for name in self.weight_packings[objective].names}
        return FlatPacking(slot for row in self.full_packings[1].rows.values() for slot in row if slot.name in names)

    @property
    def max_flags(self) -> int:
        """The most parameters that it and the server tell each other of at once."""
        return max(
            len(packing.names)
            for packing in (*self.gradient_packings.values(), *self.weight_packings.values(), *self.full_packings)
        )


def plan_server_shards(
    prepared: CompiledTraining,
    share: Collection[str],
    holders: Mapping[str, Collection[int]],
    parameters: Mapping[str, nn.Parameter],
) -> tuple[ServerShard, ...]:
    """What a server that holds ``share`` and every worker give each other; without those that have nothing to give.

    Of weights that several stages hold, which they sum among themselves, the lowest one speaks.
    """
    plan = prepared.plan
    trained = {name: differentiable_parameters(each.graph) & set(share) for name, each in prepared.partitions.items()}
    order = [name for name in parameters if name in share]
    found = []
    for rank in range(plan.workers):
        stage, replica = plan.stage_and_replica(rank)
        pieces = ShardSpec(prepared, stage, plan.coordinates(rank))
        held = {n: PackedTensor(n, pieces.local_shape(n), parameters[n].dtype) for n in order if stage in holders[n]}
        speaks = [n for n in held if stage == min(holders[n]) and pieces.is_counted("parameter", n)]
        if not held:
            continue
        gives = {o: FlatPacking(held[n] for n in speaks if n in names) for o, names in trained.items()}
        gets = {o: FlatPacking(held[n] for n in held if n in names) for o, names in trained.items()}
        every = FlatPacking(held[n] for n in speaks), FlatPacking(held.values())
        place = stage, *plan.coordinates(rank).values()
        found.append(ServerShard(rank, replica, place, pieces, gives, gets, every))
    return tuple(found)
