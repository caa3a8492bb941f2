"""Traffic report: which bytes of a worker are counted for which purpose, and the closed forms to compare them with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.cost.network import sync_volume as agreement
from polylane.cost.network.sync_volume import TrainedTensor
from polylane.graph.sparse_gradients import count_exchanged_rows
from polylane.plan.sync import PowerSGDOptions
from polylane.program.program import GradientBucket, Program
from polylane.program.server_assignment import assign_parameters, server_rank
from polylane.runtime.connections.byte_counters import AGREEMENT, ByteCounters
from polylane.runtime.connections.connections import Connections
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.parameters.shards import ShardSpec
from polylane.runtime.sync.gradient_sync import GradientSync
from polylane.runtime.transport.protocol import TransportCounters


def count_traffic(
    connections: Connections, rule: GradientSync, local_model: LocalModel, programs: Mapping[str, Sequence[Program]]
) -> ByteCounters:
    """Count a worker's traffic from now on.

    Args:
        connections: this worker's transports and mesh.
        rule: how replicas synchronize gradients or weights.
        local_model: this worker's part of the model.
        programs: by objective, the programs of all workers.
    """
    hosts, rank = _server_ranks(local_model), local_model.world.rank
    within = rank in hosts.values()  # whether a parameter server lives in this process
    # A server in this process answers other workers at any time, between steps as well: its channels are then counted
    # as a whole, not step by step.
    other_counters: dict[str, list[TransportCounters]] = {AGREEMENT: [] if within else list(rule.server_counters())}
    for purpose, transport in connections.extra_groups.items():
        other_counters.setdefault(purpose, []).append(transport.counters)
    trained_tensors = {
        name: _trained_tensors(local_model, objective_programs[rank], hosts)
        for name, objective_programs in programs.items()
    }
    answers = {
        name: _server_answer_bytes(local_model, objective_programs, hosts) if within else 0.0
        for name, objective_programs in programs.items()
    }
    plan = local_model.prepared.plan

    # Counters stay plain numbers, independent of plans: what should be sent is passed in as a function.
    def theory(name: str, step: int, microbatches: int) -> float:
        return agreement.compute_sync_bytes(plan.sync, trained_tensors[name], step, microbatches, answers[name])

    if not plan.sync.has_servers:
        # Steps before the first compressed one are no part of the cycle either.
        plain = plan.sync.compress.start if isinstance(plan.sync.compress, PowerSGDOptions) else 0
        cycle = max(plan.sync.warmup, plain), plan.sync.every
        return ByteCounters(connections.transport.counters, other_counters, theory, cycle=cycle)
    served, settle = rule.server_counters() if within else (), connections.transport.barrier
    return ByteCounters(connections.transport.counters, other_counters, theory, served, settle)


def _server_ranks(local_model: LocalModel) -> dict[str, int]:
    """Return, by parameter, the rank whose process runs its server; empty where there are no servers."""
    prepared = local_model.prepared
    if not prepared.plan.sync.has_servers:
        return {}
    shares = assign_parameters(prepared.partitions, prepared.plan)
    return {name: server_rank(prepared.plan, server) for server, share in enumerate(shares) for name in share}


def _trained_tensors(local_model: LocalModel, program: Program, hosts: Mapping[str, int]) -> list[TrainedTensor]:
    """List the trained parameters of a worker, or its shards of them, with how many workers sum each gradient.

    Args:
        local_model: the part of the model of the worker whose sent bytes are counted.
        program: program of the worker whose parameters are listed.
        hosts: by parameter, the rank whose process runs its server.
    """
    parameters, replicas, tensors = local_model.tensors.parameters(), set(program.replicas), list[TrainedTensor]()
    pieces = ShardSpec(local_model.prepared, program.rank)
    for bucket in program.buckets:
        for name in bucket.parameters:
            shape = pieces.local_shape(name)
            # A tied or replicated parameter is sent by one of the ranks that have it. Bytes to a server in the sender's
            # own process do not leave it.
            leaves = hosts.get(name) != local_model.world.rank and pieces.speaks_for(name)
            only_replicas = set(bucket.ranks) == replicas
            item, ranks = parameters[name].itemsize, len(bucket.ranks)
            flat, rows = local_model.shards.buffer_of.get(name), _sparse_rows(local_model, program, bucket)
            gathered_item = item if flat is None or flat.unit.cast is None else flat.unit.cast.itemsize
            tensors.append(TrainedTensor(shape, item, ranks, only_replicas, leaves, rows, gathered_item))
    return tensors


def _sparse_rows(local_model: LocalModel, program: Program, bucket: GradientBucket) -> int | None:
    """Return how many rows of a sparse gradient a worker sends at most in a step; None for an ordinary gradient."""
    if not bucket.is_sparse:
        return None
    # Where samples are combined, an operator that cannot be split looks up all of them on every worker.
    replicas = 1 if local_model.prepared.batch_is_sharded else len(program.replicas)
    samples = -(-local_model.prepared.samples // replicas)
    return count_exchanged_rows(program.partition.graph, bucket.parameters[0], samples)


def _server_answer_bytes(local_model: LocalModel, programs: Sequence[Program], hosts: Mapping[str, int]) -> float:
    """Return the bytes of weights that servers in this process send to all other workers in a step."""
    rank, total = local_model.world.rank, 0
    local_names = {name for name, host in hosts.items() if host == rank}
    for program in programs:
        if program.rank != rank:
            names = [name for bucket in program.buckets for name in bucket.parameters]
            tensors = _trained_tensors(local_model, program, hosts)
            total += sum(tensor.nbytes for name, tensor in zip(names, tensors, strict=True) if name in local_names)
    return total
