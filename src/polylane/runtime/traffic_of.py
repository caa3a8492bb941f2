"""What is counted of a job's traffic, and what theory says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from polylane.cost import agreement
from polylane.cost.agreement import Held
from polylane.program.program import Program
from polylane.runtime.connections import Connections
from polylane.runtime.holding import Holding
from polylane.runtime.sync.rule import Rule
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
    others: dict[str, list[Counters]] = {AGREEMENT: list(rule.counters())}
    for purpose, transport in connections.apart.items():
        others.setdefault(purpose, []).append(transport.counters)
    held = {name: _held(holding, each[holding.world.rank]) for name, each in programs.items()}
    sync = holding.prepared.plan.sync
    return Traffic(connections.transport.counters, others, lambda name, step: agreement.sent(sync, held[name], step))


def _held(holding: Holding, program: Program) -> list[Held]:
    """The trained parameters of a worker, or its parts of them, with how many workers sum each gradient."""
    parameters, replicas, found = holding.tensors.parameters(), set(program.replicas), list[Held]()
    for bucket in program.buckets:
        for name in bucket.parameters:
            whole = torch.empty(holding.pieces.shapes[name], device="meta")
            part = holding.pieces.of({name: whole}).get(name, whole)
            alike = set(bucket.ranks) == replicas
            found.append(Held(tuple(part.shape), parameters[name].itemsize, len(bucket.ranks), alike))
    return found
