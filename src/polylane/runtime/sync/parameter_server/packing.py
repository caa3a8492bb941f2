"""Packing between one worker and one parameter server: which gradients it sends, and which weights it receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.sync.flat_packing import FlatPacking, PackedTensor


@dataclass(frozen=True)
class ServerShard:
    """What one worker and one server exchange.

    Attributes:
        rank: rank of the worker.
        replica: number of the worker's replica.
        shard_key: (stage, mesh coordinates) of the worker, equal for its counterparts in other replicas only.
        shard_spec: tensor-parallel shards that the worker holds.
        gradient_packings: gradients that the worker sends, by objective; of the workers of a replica that hold the same
            shard, one sends it.
        weight_packings: weights that the worker receives, by objective.
        full_packings: over all objectives, (initial weights that the worker sends, weights that it receives).
    """

    rank: int
    replica: int
    shard_key: tuple[int, ...]
    shard_spec: ShardSpec
    gradient_packings: Mapping[str, FlatPacking]
    weight_packings: Mapping[str, FlatPacking]
    full_packings: tuple[FlatPacking, FlatPacking]

    def weights_of(self, objectives: Collection[str]) -> FlatPacking:
        """Return the packing of the weights of some objectives, each parameter once."""
        if len(objectives) == 1:
            return self.weight_packings[next(iter(objectives))]
        names = {name for objective in objectives for name in self.weight_packings[objective].names}
        return FlatPacking(slot for row in self.full_packings[1].rows.values() for slot in row if slot.name in names)

    @property
    def max_flags(self) -> int:
        """Largest number of parameters in one message, so the number of flags in a head."""
        return max(
            len(packing.names)
            for packing in (*self.gradient_packings.values(), *self.weight_packings.values(), *self.full_packings)
        )


def plan_server_shards(
    prepared: CompiledTraining, share: Collection[str], parameters: Mapping[str, nn.Parameter]
) -> tuple[ServerShard, ...]:
    """Return what a server and every worker exchange, without workers that have no part of the server's parameters.

    Gradients of weights that several stages hold are summed between the stages; the lowest stage sends the sum.

    Args:
        prepared: the compiled training, equal on every worker.
        share: canonical names of the parameters on this server.
        parameters: all parameters of the model by name, in its order.
    """
    plan, holders = prepared.plan, prepared.owning_stages
    trained = {name: set(prepared.trained_names(name)) & set(share) for name in prepared.graphs}
    order = [name for name in parameters if name in share]
    shards = []
    for rank in range(plan.workers):
        stage, replica = plan.stage_and_replica(rank)
        pieces = ShardSpec(prepared, rank)
        # Both ends build these packings from the same plan: no names or shapes are sent.
        tensors = {n: PackedTensor(n, pieces.local_shape(n), parameters[n].dtype) for n in order if stage in holders[n]}
        speaks = list(filter(pieces.speaks_for, tensors))
        if not tensors:
            continue
        gives = {o: FlatPacking(tensors[n] for n in speaks if n in names) for o, names in trained.items()}
        gets = {o: FlatPacking(tensors[n] for n in tensors if n in names) for o, names in trained.items()}
        full_packings = FlatPacking(tensors[n] for n in speaks), FlatPacking(tensors.values())
        shard_key = stage, *plan.coordinates(rank).values()
        shards.append(ServerShard(rank, replica, shard_key, pieces, gives, gets, full_packings))
    return tuple(shards)
