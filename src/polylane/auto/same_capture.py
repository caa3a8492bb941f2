"""Same capture: whether all workers of a script have captured one computation, and where it first differs.

Every worker runs the user's script, and captures what it has built there. Weights that differ are those of rank 0; a
number, a branch or a layer that differs (``if rank == 0``, a value drawn without a seed) has no such remedy: replicas
would train by two losses, each without a word.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any

from polylane.compile.objectives import Objective
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.graph import Graph
from polylane.runtime.parameters.broadcast import digest_tensor
from polylane.runtime.workers.world import World

# What may differ where the computation at a node does not: which accelerator, where an object lies, who reads it.
_OF_A_PROCESS = re.compile(r"(?<=\w):\d+(?=')|0x[0-9a-f]+|\[num_users=\d+\] = ")

Line = tuple[str, str]  # of one node: its name with the user's line, and all that it computes
Described = dict[str, tuple[int, tuple[Line, ...], tuple[str, ...]]]


@dataclass(frozen=True)
class RecordedProblem(TrainingProblem):
    """A training problem that records what it captures.

    Attributes:
        described: of each objective's graph, the samples that it was captured with, its nodes, and its notes.
    """

    described: Described = field(default_factory=dict)

    @classmethod
    def of(cls, problem: TrainingProblem) -> RecordedProblem:
        """Return a problem that records its captures."""
        return cls(**{each.name: getattr(problem, each.name) for each in fields(problem)})

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        """Return the graph of one loss; see :meth:`TrainingProblem.capture`."""
        graph = super().capture(samples, objective)
        self.described[(objective or self.objective).name] = graph.samples, describe_nodes(graph), graph.notes
        return graph


def describe_nodes(graph: Graph) -> tuple[Line, ...]:
    """Return what every node of a graph computes, constants included, as text that is equal on equal workers."""
    nodes, found = {node.id: node for node in graph.nodes}, list[Line]()
    for each in graph.code.fx.nodes:
        role: Any = each.meta.get("role")
        constant = digest_tensor(graph.code.constants[role[1]]) if role is not None and role[0] == "constant" else ""
        node = nodes.get(each.name)
        name = "" if node is None else f"{node.name} ({node.source})" if node.source else node.name
        found.append((name, _OF_A_PROCESS.sub("", f"{each.format_node()} {role} {constant}")))
    return tuple(found)


def find_difference(world: World, described: Described) -> str | None:
    """Return a sentence on a worker that has captured another computation than rank 0; a collective of all workers.

    Args:
        world: the workers of a script, each of which calls this.
        described: what this worker's :class:`RecordedProblem` has recorded.

    Returns:
        The same on all workers; None if all are alike, or captured batches of different sizes.
    """
    own = {
        name: (samples, hashlib.sha256(repr(nodes).encode()).hexdigest())
        for name, (samples, nodes, _) in described.items()
    }
    every = world.all_gather_object(own)
    parting = [(rank, name) for rank, theirs in enumerate(every) for name in theirs if _parts(every[0], theirs, name)]
    if not parting:
        return None
    rank, name = parting[0]
    told = world.all_gather_object(described[name] if world.rank in (0, rank) else None)  # only now: they may be long
    where = _describe(*told[0][1:], *told[rank][1:])
    return (
        f"rank {rank} has another model or loss than rank 0: {where}; build both alike on every worker, and let code "
        "that asks for the rank only print or log"
    )


def _parts(first: Mapping[str, tuple[int, str]], other: Mapping[str, tuple[int, str]], name: str) -> bool:
    return name in first and first[name][0] == other[name][0] and first[name] != other[name]


def _describe(first: Sequence[Line], notes: Sequence[str], second: Sequence[Line], others_notes: Sequence[str]) -> str:
    """Return where two graphs part: by a note on the user's Python that only one has, or else by a node."""
    for who, note in (*(("on rank 0", each) for each in notes if each not in others_notes),
                      *(("there", each) for each in others_notes if each not in notes)):  # fmt: skip
        return f"{who} {note}"
    pairs = [pair for pair in zip_longest(first, second, fillvalue=("", "")) if pair[0] != pair[1]]
    names = [next((name for name, _ in (mine, others) if name), "") for mine, others in pairs]
    return f"they part at {next(filter(None, names), 'a constant')}"
