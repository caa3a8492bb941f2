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

# What may differ where the computation at a node does not: which accelerator, the address of an object, who reads it.
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
        return cls(**{field.name: getattr(problem, field.name) for field in fields(problem)})

    def capture(self, samples: int | None = None, objective: Objective | None = None) -> Graph:
        """Return the graph of one loss; see :meth:`TrainingProblem.capture`."""
        graph = super().capture(samples, objective)
        self.described[(objective or self.objective).name] = graph.samples, describe_nodes(graph), graph.notes
        return graph


def describe_nodes(graph: Graph) -> tuple[Line, ...]:
    """Return what every node of a graph computes, constants included, as text that is equal on equal workers."""
    nodes, lines = {node.id: node for node in graph.nodes}, list[Line]()
    for fx_node in graph.code.fx.nodes:
        role: Any = fx_node.meta.get("role")
        constant = digest_tensor(graph.code.constants[role[1]]) if role is not None and role[0] == "constant" else ""
        node = nodes.get(fx_node.name)
        name = "" if node is None else f"{node.name} ({node.source})" if node.source else node.name
        lines.append((name, _OF_A_PROCESS.sub("", f"{fx_node.format_node()} {role} {constant}")))
    return tuple(lines)


def find_difference(world: World, described: Described) -> str | None:
    """Return a sentence on a worker that has captured another computation than rank 0; a collective of all workers.

    Args:
        world: the workers of a script, each of which calls this.
        described: what this worker's :class:`RecordedProblem` has recorded.

    Returns:
        The same on all workers; None if all are alike, or captured batches of different sizes.
    """
    own_digests = {
        name: (samples, hashlib.sha256(repr(_texts(nodes)).encode()).hexdigest())
        for name, (samples, nodes, _) in described.items()
    }
    digests = world.all_gather_object(own_digests)
    parting = [(rank, name) for rank, entry in enumerate(digests) for name in entry if _parts(digests[0], entry, name)]
    if not parting:
        return None
    rank, name = parting[0]
    texts = world.all_gather_object(described[name] if world.rank in (0, rank) else None)  # only now: they may be long
    detail = _describe(*texts[0][1:], *texts[rank][1:])
    return (
        f"rank {rank} has another model or loss than rank 0: {detail}; build both alike on every worker, and let code "
        "that asks for the rank only print or log"
    )


def _texts(lines: Sequence[Line]) -> list[str]:
    """Return what nodes compute, without their lines: a host may have its files elsewhere."""
    return [text for _, text in lines]


def _parts(reference: Mapping[str, tuple[int, str]], digests: Mapping[str, tuple[int, str]], name: str) -> bool:
    return name in reference and reference[name][0] == digests[name][0] and reference[name] != digests[name]


def _describe(lines: Sequence[Line], notes: Sequence[str], second: Sequence[Line], others_notes: Sequence[str]) -> str:
    """Return where two graphs part: by a note on the user's Python that only one has, or else by a node."""
    for who, note in (*(("on rank 0", note) for note in notes if note not in others_notes),
                      *(("there", note) for note in others_notes if note not in notes)):  # fmt: skip
        return f"{who} {note}"
    pairs = [pair for pair in zip_longest(lines, second, fillvalue=("", "")) if pair[0][1] != pair[1][1]]
    names = [next((name for name, _ in (line, other_line) if name), "") for line, other_line in pairs]
    return f"they part at {next(filter(None, names), 'a constant')}"
