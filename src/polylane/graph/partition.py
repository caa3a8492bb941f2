"""Cut a graph into stages, and say who sends which value to whom."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node

# How far above the best possible slowest stage a cut may go to save bytes.
SLACK = 0.03


@dataclass(frozen=True)
class Crossing:
    """A value that travels: from the stage that makes it straight to each stage that needs it."""

    value: str
    producer: int
    consumers: tuple[int, ...]
    bytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Partition:
    """A graph cut into contiguous stages.

    Attributes:
        graph: what was cut.
        cuts: position of the first node of every stage but the first, ascending.
    """

    graph: Graph
    cuts: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.cuts) + 1

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of every node, by name; nodes that are free belong where they stand, and are computed anew elsewhere."""
        ends = [*self.cuts, len(self.graph.nodes)]
        stage, result = 0, {}
        for position, node in enumerate(self.graph.nodes):
            while position >= ends[stage]:
                stage += 1
            result[node.name] = stage
        return result

    def nodes(self, stage: int) -> tuple[Node, ...]:
        """The nodes a stage runs, in order, with the free ones it needs from elsewhere; without those that only others need."""
        own = [n for n in self.graph.nodes if self.stage_of[n.name] == stage and not n.free]
        by_name = {n.name: n for n in self.graph.nodes}
        needed = {n.name for n in own}
        pending = list(own)
        if stage == self.stages - 1:
            pending += [n for n in self.graph.nodes[-1:] if n.free]  # a loss that depends on nothing
        while pending:
            for name in pending.pop().inputs:
                if by_name[name].free and name not in needed:
                    needed.add(name)
                    pending.append(by_name[name])
        needed |= {n.name for n in pending}
        return tuple(n for n in self.graph.nodes if n.name in needed)

    @cached_property
    def crossings(self) -> tuple[Crossing, ...]:
        """Every value that crosses between stages, in graph order."""
        consumers: dict[str, set[int]] = {}
        free = {n.name for n in self.graph.nodes if n.free}
        for stage in range(self.stages):
            for node in self.nodes(stage):
                for name in node.inputs:
                    if name not in free and self.stage_of[name] != stage:
                        consumers.setdefault(name, set()).add(stage)
        return tuple(
            Crossing(n.name, self.stage_of[n.name], tuple(sorted(consumers[n.name])), n.bytes, n.requires_grad)
            for n in self.graph.nodes
            if n.name in consumers
        )

    def parameters(self, stage: int) -> tuple[str, ...]:
        """Canonical names of the parameters that a stage reads, in the model's order."""
        used = {name for node in self.nodes(stage) for name in node.parameters}
        return tuple(name for name in self.graph.parameters if name in used)

    def buffers(self, stage: int) -> tuple[str, ...]:
        """Names of the buffers that a stage reads or writes."""
        used = {name for node in self.nodes(stage) for name in node.buffers}
        return tuple(name for name in self.graph.buffers if name in used)


def cut_positions(graph: Graph) -> list[int]:
    """Where a graph may be cut: before which nodes.

    Never inside a group that shares written memory, never where a value would have to travel whose size depends on data,
    and only before nodes that do work of their own.
    """
    count = len(graph.nodes)
    allowed = [True] * (count + 1)
    for first, last in graph.uncut:
        for position in range(first + 1, last + 1):
            allowed[position] = False
    last_use = {}
    for position, node in enumerate(graph.nodes):
        for name in node.inputs:
            last_use[name] = position
    for position, node in enumerate(graph.nodes):
        if not node.crossable and not node.free:
            for inside in range(position + 1, last_use.get(node.name, position) + 1):
                allowed[inside] = False
    return [p for p in range(1, count) if allowed[p] and not graph.nodes[p].free]


def _live_bytes(graph: Graph) -> NDArray[np.float64]:
    """For every position, the bytes that a cut there makes travel: values still needed, and tied weights in use on both sides."""
    count = len(graph.nodes)
    delta = np.zeros(count + 1)
    position = graph.positions
    last: dict[str, int] = {}
    for i, node in enumerate(graph.nodes):
        for name in node.inputs:
            last[name] = i
    for name, end in last.items():
        node = graph.nodes[position[name]]
        if not node.free:
            delta[position[name] + 1] += node.bytes * (2 if node.requires_grad else 1)
            delta[end + 1] -= node.bytes * (2 if node.requires_grad else 1)
    for name, info in graph.parameters.items():
        users = [i for i, node in enumerate(graph.nodes) if name in node.parameters]
        if len(users) > 1:
            delta[users[0] + 1] += 2 * info.bytes
            delta[users[-1] + 1] -= 2 * info.bytes
    return np.cumsum(delta)[: count + 1]


def balanced(graph: Graph, stages: int, seconds: Sequence[float]) -> Partition:
    """Cut into ``stages`` so that the slowest is as fast as can be, and then (within 3% of it) as few bytes cross.

    Args:
        graph: what to cut.
        stages: into how many.
        seconds: time of every node, forward and backward (any unit).

    Raises:
        PolylaneError: the graph cannot be cut into so many.
    """
    if stages == 1:
        return Partition(graph, ())
    positions = cut_positions(graph)
    if stages > len(positions) + 1:
        raise PolylaneError(_too_many(graph, stages, len(positions) + 1))
    ends = np.array([0, *positions, len(graph.nodes)])
    work = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])[ends]
    live = _live_bytes(graph)[ends]
    limit = _slowest(work, stages) * (1 + SLACK)
    return Partition(graph, tuple(int(ends[i]) for i in _fewest_bytes(work, live, stages, limit)))


def _too_many(graph: Graph, stages: int, most: int) -> str:
    if graph.opaque:
        return f"pipeline={stages}: the model is opaque and cannot be cut ({graph.notes[-1]}); use data parallelism"
    return (
        f"pipeline={stages}: the graph can be cut into at most {most} stages; lower pipeline, or use data parallelism"
    )


def _slowest(work: NDArray[np.float64], stages: int) -> float:
    """The smallest possible time of the slowest stage: best[j] = min over i of max(best of the first i, work i..j)."""
    best = work.copy()
    for _ in range(stages - 1):
        previous, best = best, np.full_like(best, np.inf)
        for j in range(1, len(work)):
            best[j] = np.min(np.maximum(previous[:j], work[j] - work[:j]))
    return float(best[-1])


def _fewest_bytes(work: NDArray[np.float64], live: NDArray[np.float64], stages: int, limit: float) -> list[int]:
    """Indices of the cuts with the fewest bytes among those whose stages all stay within ``limit``."""
    count = len(work)
    cost = np.where(work <= limit, 0.0, np.inf)
    cost[0] = np.inf
    choices = []
    for _ in range(stages - 1):
        previous, cost = cost + live, np.full(count, np.inf)
        choice = np.zeros(count, dtype=np.int64)
        for j in range(1, count):
            candidates = np.where(work[j] - work[:j] <= limit, previous[:j], np.inf)
            choice[j] = int(np.argmin(candidates))
            cost[j] = candidates[choice[j]]
        choices.append(choice)
    cuts, at = [], count - 1
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return cuts[::-1]


def aligned(reference: Partition, graph: Graph) -> Partition:
    """Cut another graph of the same model (evaluation, another loss, other shapes) where ``reference`` was cut.

    Nodes correspond by module path, operator and number; a parameter is worth a thousand other nodes, so that it stays on
    the stage that holds it.
    """
    if reference.stages == 1:
        return Partition(graph, ())
    stage_of = reference.stage_of
    holder: dict[str, int] = {}
    for node in reference.graph.nodes:
        for parameter in node.parameters:
            holder.setdefault(parameter, stage_of[node.name])
    modules: dict[str, int] = {}
    for node in reference.graph.nodes:
        modules.setdefault(node.module, stage_of[node.name])
    guesses: list[int | None] = []
    weights = []
    for node in graph.nodes:
        held = [holder[p] for p in node.parameters if p in holder]
        weights.append(1000.0 if held else 0.0 if node.free else 1.0)
        guesses.append(held[0] if held else stage_of.get(node.name, modules.get(node.module)))
    return Partition(graph, _agreeing_cuts(graph, guesses, weights, reference.stages))


def _agreeing_cuts(
    graph: Graph, guesses: Sequence[int | None], weights: Sequence[float], stages: int
) -> tuple[int, ...]:
    allowed = cut_positions(graph)
    if len(allowed) < stages - 1:
        raise PolylaneError(_too_many(graph, stages, len(allowed) + 1))
    cuts: list[int] = []
    for stage in range(1, stages):
        # Disagreement of a cut at p: nodes before it that belong later, and nodes after it that belong earlier.
        late = np.cumsum(
            [0.0] + [w if g is not None and g >= stage else 0.0 for g, w in zip(guesses, weights, strict=True)]
        )
        early = np.cumsum(
            [0.0] + [w if g is not None and g < stage else 0.0 for g, w in zip(guesses, weights, strict=True)]
        )
        low = cuts[-1] if cuts else 0
        room = [p for p in allowed if p > low][: len([p for p in allowed if p > low]) - (stages - 1 - stage)]
        cuts.append(min(room, key=lambda p: late[p] + early[-1] - early[p]))
    return tuple(cuts)
