"""What is counted of a job's traffic, and what theory says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.cost import agreement
from polylane.cost.agreement import Held
from polylane.program.program import Program
from polylane.runtime.connections import Connections
from polylane.runtime.holding import Holding
from polylane.runtime.pieces import Pieces
from polylane.runtime.sync.rule import Rule
from polylane.runtime.sync.server_split import host_of, shared_out
from polylane.runtime.traffic import AGREEMENT, Traffic
from polylane.runtime.transport.protocol import Counters


def traffic_of(
    connections: Connections, rule: Rule, holding: Holding, programs: Mapping[str, Sequence[Program]]
) -> Traffic:
    """A worker's traffic, from now on.

    Args:
        connections: what it talks by.
        rule: by which replicas agree.
        holding: what it holds.
        programs: by objective, of all workers.
    """
    hosts, rank = _hosts(holding), holding.world.rank
    within = rank in hosts.values()  # of this process
    others: dict[str, list[Counters]] = {AGREEMENT: [] if within else list(rule.counters())}
    for purpose, transport in connections.apart.items():
        others.setdefault(purpose, []).append(transport.counters)
    held = {name: _held(holding, each[rank], hosts, rank) for name, each in programs.items()}
    answers = {name: _answers(holding, each, hosts) if within else 0.0 for name, each in programs.items()}
    plan = holding.prepared.plan

    def theory(name: str, step: int, microbatches: int) -> float:
        return agreement.sent(plan.sync, held[name], step, microbatches, answers[name])

    if not plan.sync.serves:
        cycle = plan.sync.warmup, plan.sync.every
        return Traffic(connections.transport.counters, others, theory, cycle=cycle)
    served, settle = rule.counters() if within else (), connections.transport.barrier
    return Traffic(connections.transport.counters, others, theory, served, settle)


def _hosts(holding: Holding) -> dict[str, int]:
    """By parameter, the rank in whose process its server lives; nothing where there are no servers."""
    prepared = holding.prepared
    if not prepared.plan.sync.serves:
        return {}
    shares = shared_out(prepared.partitions, prepared.plan)
    return {name: host_of(prepared.plan, server) for server, share in enumerate(shares) for name in share}


def _held(holding: Holding, program: Program, hosts: Mapping[str, int], sender: int) -> list[Held]:
    """The trained parameters of a worker, or its parts of them, with how many workers sum each gradient.

    Args:
        holding: of this worker.
        program: the worker's.
        hosts: by parameter, the rank in whose process its server lives.
        sender: the rank from where bytes leave.
    """
    plan, parameters = holding.prepared.plan, holding.tensors.parameters()
    stage, replicas, found = plan.place(program.rank)[0], set(program.replicas), list[Held]()
    pieces = Pieces(holding.prepared, stage, plan.coordinates(program.rank))
    for bucket in program.buckets:
        for name in bucket.parameters:
            shape = pieces.local_shape(name)
            speaks = stage == min(holding.holders[name]) and pieces.counts("parameter", name)
            leaves = hosts.get(name) != sender and speaks
            alike = set(bucket.ranks) == replicas
            found.append(Held(shape, parameters[name].itemsize, len(bucket.ranks), alike, leaves))
    return found


def _answers(holding: Holding, programs: Sequence[Program], hosts: Mapping[str, int]) -> float:
    """Bytes of the weights that servers in this process send to all other workers."""
    rank, total = holding.world.rank, 0
    mine = {name for name, host in hosts.items() if host == rank}
    for program in programs:
        if program.rank != rank:
            names = [name for bucket in program.buckets for name in bucket.parameters]
            held = _held(holding, program, hosts, rank)
            total += sum(each.nbytes for name, each in zip(names, held, strict=True) if name in mine)
    return total
