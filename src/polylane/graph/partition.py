"""Cut a graph into stages, and say who sends which value to whom."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, Node

# How far above the best possible slowest stage a cut may go to save bytes.
SLACK = 0.03


@dataclass(frozen=True)
class StageCrossing:
    """A value that travels: from the stage that makes it straight to each stage that needs it."""

    value: str
    producer: int
    consumers: tuple[int, ...]
    bytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Partition:
    """A graph cut into pieces, which make up the stages.

    Attributes:
        graph: what was cut.
        cuts: position of the first node of every piece but the first, ascending.
        stage_of_piece: the stage of every piece; none given: each piece is a stage of its own. Every stage owns at
            least one; pieces, and so stages, may be empty.
    """

    graph: Graph
    cuts: tuple[int, ...]
    stage_of_piece: tuple[int, ...] = ()

    @property
    def pieces(self) -> tuple[tuple[int, int, int], ...]:
        """Every piece as (first position, position after its last, stage), in the graph's order."""
        ends = (0, *self.cuts, len(self.graph.nodes))
        owners = self.stage_of_piece or range(len(self.cuts) + 1)
        return tuple(zip(ends[:-1], ends[1:], owners, strict=True))

    @property
    def stages(self) -> int:
        """Number of stages."""
        return max(self.stage_of_piece) + 1 if self.stage_of_piece else len(self.cuts) + 1

    @property
    def loss_stage(self) -> int:
        """The stage that has the end of the graph, and gives the loss."""
        return self.pieces[-1][2]

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of every node, by name; free ones belong where they stand, and are computed anew elsewhere."""
        nodes = self.graph.nodes
        return {nodes[i].name: stage for first, end, stage in self.pieces for i in range(first, end)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Which stage's values which other stage reads, sorted."""
        return tuple(sorted({(c.producer, consumer) for c in self.crossings for consumer in c.consumers}))

    @cached_property
    def _outputs(self) -> tuple[str, ...]:
        return self.graph.outputs or tuple(node.name for node in self.graph.nodes[-1:])

    @cached_property
    def _nodes(self) -> tuple[tuple[Node, ...], ...]:
        position, nodes = self.graph.positions, self.graph.nodes
        result = []
        for stage in range(self.stages):
            needed = {i for i, n in enumerate(nodes) if not n.recomputable and self.stage_of[n.name] == stage}
            reads = [name for i in needed for name in nodes[i].inputs]
            reads += self._outputs if stage == self.loss_stage else ()
            while reads:
                at = position[reads.pop()]
                if nodes[at].recomputable and at not in needed:
                    needed.add(at)
                    reads += nodes[at].inputs
            result.append(tuple(nodes[i] for i in sorted(needed)))
        return tuple(result)

    def nodes(self, stage: int) -> tuple[Node, ...]:
        """The nodes a stage runs, in order, with the free ones it needs; without free ones that only others need."""
        return self._nodes[stage]

    @cached_property
    def crossings(self) -> tuple[StageCrossing, ...]:
        """Every value that crosses between stages, in graph order; what gives the loss goes where the graph ends."""
        free = {n.name for n in self.graph.nodes if n.recomputable}
        reads = [(stage, name) for stage in range(self.stages) for n in self.nodes(stage) for name in n.inputs]
        reads += [(self.loss_stage, name) for name in self._outputs]
        consumers: dict[str, set[int]] = {}
        for stage, name in reads:
            if name not in free and self.stage_of[name] != stage:
                consumers.setdefault(name, set()).add(stage)
        return tuple(
            StageCrossing(n.name, self.stage_of[n.name], tuple(sorted(consumers[n.name])), n.bytes, n.requires_grad)
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


def cut_positions(graph: Graph, staying: Collection[str] = ()) -> list[int]:
    """Where a graph may be cut: before which nodes.

    Never inside a group that shares written memory, never where a value would have to travel whose size depends on
    data, or one of those that are to stay on their stage, and only before nodes that do work of their own.
    """
    closed = np.zeros(len(graph.nodes) + 1, dtype=np.int64)  # changes from one position to the next
    last = last_uses(graph)
    spans = [*graph.unsplittable_ranges]
    stuck = {n.name for n in graph.nodes if not n.can_cross_stages} | set(staying)
    spans += [(i, last.get(n.name, i)) for i, n in enumerate(graph.nodes) if n.name in stuck and not n.recomputable]
    for first, end in spans:
        closed[first + 1] += 1
        closed[end + 1] -= 1
    inside = np.cumsum(closed)
    work = [p for p, node in enumerate(graph.nodes) if not node.recomputable]
    return [p for p in work[1:] if not inside[p]]  # a stage of nothing but free nodes would be none


def last_uses(graph: Graph) -> dict[str, int]:
    """Position of the last node that reads each value; what gives the loss is read at the very end."""
    last = {name: position for position, node in enumerate(graph.nodes) for name in node.inputs}
    return last | dict.fromkeys(graph.outputs, len(graph.nodes) - 1)


def _live_bytes(graph: Graph) -> NDArray[np.float64]:
    """For every position, the bytes that a cut there makes travel: values still needed, tied weights in use after."""
    delta = np.zeros(len(graph.nodes) + 1)
    for name, end in last_uses(graph).items():
        start = graph.positions[name]
        node = graph.nodes[start]
        if not node.recomputable and end > start:
            moved = node.bytes * (2 if node.requires_grad else 1)  # there, and its gradient back
            delta[start + 1] += moved
            delta[end + 1] -= moved
    first, final = dict[str, int](), dict[str, int]()
    for position, node in enumerate(graph.nodes):
        for name in node.parameters:
            first.setdefault(name, position)
            final[name] = position
    for name, start in first.items():
        if final[name] > start:
            delta[start + 1] += 2 * graph.parameters[name].bytes
            delta[final[name] + 1] -= 2 * graph.parameters[name].bytes
    return np.cumsum(delta)


def balance_stages(
    graph: Graph,
    stages: int,
    seconds: Sequence[float],
    workers: Sequence[int] | None = None,
    staying: Collection[str] = (),
) -> Partition:
    """Cut into ``stages`` so that the slowest is as fast as can be, and then (within 3% of it) as few bytes cross.

    Args:
        graph: what to cut.
        stages: into how many.
        seconds: time of every node, forward and backward (any unit).
        workers: of every stage, how many share its work; default: as many on each.
        staying: values that must not cross.

    Raises:
        PolylaneError: the graph cannot be cut into so many.
    """
    if stages == 1:
        return Partition(graph, ())
    positions = cut_positions(graph, staying)
    if stages > len(positions) + 1:
        raise PolylaneError(_too_many_stages(graph, stages, len(positions) + 1))
    ends = np.array([0, *positions, len(graph.nodes)])
    work = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])[ends]
    live = _live_bytes(graph)[ends]
    return Partition(graph, tuple(int(ends[i]) for i in _best_cuts(work, live, tuple(workers or (1,) * stages))))


def _best_cuts(work: NDArray[np.float64], live: NDArray[np.float64], workers: Sequence[int]) -> list[int]:
    """The cuts with the fewest bytes that the slack allows; among those the ones with the fastest slowest stage."""
    low = _min_slowest(work, workers)
    high = low * (1 + SLACK)
    cuts = _min_bytes_cuts(work, live, workers, high)
    fewest = live[cuts].sum()
    for _ in range(6):
        middle = (low + high) / 2
        tighter = _min_bytes_cuts(work, live, workers, middle)
        if live[tighter].sum() <= fewest:
            cuts, high = tighter, middle
        else:
            low = middle
    return cuts


def _too_many_stages(graph: Graph, stages: int, most: int) -> str:
    if graph.is_opaque:
        return f"pipeline={stages}: the model is opaque and cannot be cut ({graph.notes[-1]}); use data parallelism"
    return (
        f"pipeline={stages}: the graph can be cut into at most {most} stages; lower pipeline, or use data parallelism"
    )


def _min_slowest(work: NDArray[np.float64], workers: Sequence[int]) -> float:
    """The smallest possible time of the slowest stage, by halving."""
    low, high = work[-1] / sum(workers), work[-1] / min(workers)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_feasible(work, workers, middle) else (middle, high)
    return float(high)


def _is_feasible(work: NDArray[np.float64], workers: Sequence[int], limit: float) -> bool:
    """Whether there are cuts with which every stage has something to do and stays within ``limit``."""
    reached = np.zeros(len(work), dtype=bool)
    reached[0] = True
    for own in workers:
        before = np.concatenate([[0], np.cumsum(reached)])  # how many of the first positions can be reached
        reached = before[np.arange(len(work))] > before[_earliest_starts(work, limit * own)]
    return bool(reached[-1])


def _earliest_starts(work: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
    """For every end of a stage the first start with which it stays within ``limit``."""
    starts: NDArray[np.int64] = np.searchsorted(work, work - limit - 1e-12 * work[-1], side="left")
    return starts


def _min_bytes_cuts(
    work: NDArray[np.float64], live: NDArray[np.float64], workers: Sequence[int], limit: float
) -> list[int]:
    """Indices of the cuts with the fewest bytes among those whose stages all stay within ``limit``.

    Dynamic programming over stages; the best start of a stage that ends at j is a minimum over a window that slides.
    """
    count = len(work)
    earliest = _earliest_starts(work, limit * workers[0])
    cost = np.where(earliest == 0, 0.0, np.inf)
    cost[0] = np.inf
    choices = []
    for own in workers[1:]:
        earliest = _earliest_starts(work, limit * own)
        previous, cost = cost + live, np.full(count, np.inf)
        choice = np.zeros(count, dtype=np.int64)
        window: deque[int] = deque()
        for j in range(1, count):
            while window and previous[window[-1]] > previous[j - 1]:
                window.pop()
            window.append(j - 1)
            while window[0] < earliest[j]:
                window.popleft()
                if not window:
                    break
            if window:
                choice[j], cost[j] = window[0], previous[window[0]]
        choices.append(choice)
    cuts, at = [], count - 1
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return cuts[::-1]


def align_partition(reference: Partition, graph: Graph) -> Partition:
    """Cut another graph of the same model (evaluation, another loss, other shapes) where ``reference`` was cut.

    Nodes correspond by module path, operator and number; a parameter is worth a thousand other nodes, so that it stays
    on the stage that holds it. A stage of which the graph has nothing (a head that only training has) is left empty.

    Raises:
        PolylaneError: the graph cannot be cut, or its stages would wait for each other.
    """
    if reference.stages == 1:
        return Partition(graph, ())
    if graph.is_opaque:
        raise PolylaneError(_too_many_stages(graph, reference.stages, 1))
    cut = Partition(reference.graph, reference.cuts)  # each piece for itself
    piece_of = cut.stage_of
    known = {node.name: node for node in reference.graph.nodes}
    holder: dict[str, int] = {}
    modules: dict[str, int] = {}
    for node in reference.graph.nodes:
        modules.setdefault(node.module, piece_of[node.name])
        for parameter in node.parameters:
            holder.setdefault(parameter, piece_of[node.name])
    guesses: list[int | None] = []
    weights = []
    for node in graph.nodes:
        held = [holder[p] for p in node.parameters if p in holder]
        same = known.get(node.name)
        weights.append(1000.0 if held else 0.0 if node.recomputable else 1.0)
        if same is not None and same.parameters == node.parameters:  # a tied weight lives on several stages
            guesses.append(piece_of[node.name])
        else:
            guesses.append(held[0] if held else modules.get(node.module))
    partition = Partition(graph, _majority_cuts(graph, guesses, weights, cut.stages), reference.stage_of_piece)
    _require_order(partition)
    return partition


def _majority_cuts(
    graph: Graph, guesses: Sequence[int | None], weights: Sequence[float], pieces: int
) -> tuple[int, ...]:
    """Where to cut into so many pieces, some of which may be empty, so that most nodes are on the piece they belong to.

    Args:
        guesses: of every node, the piece that it belongs to, where that is known.
        weights: of every node, how much that counts.
    """
    places = [0, *cut_positions(graph), len(graph.nodes)]
    cuts: list[int] = []
    pairs = list(zip(weights, guesses, strict=True))
    for piece in range(1, pieces):
        # Disagreement of a cut at p: nodes before it that belong later, and nodes after it that belong earlier.
        late = np.cumsum([0.0] + [w if g is not None and g >= piece else 0.0 for w, g in pairs])
        early = np.cumsum([0.0] + [w if g is not None and g < piece else 0.0 for w, g in pairs])
        room = [p for p in places if not cuts or p >= cuts[-1]]
        cuts.append(min(room, key=lambda p: late[p] + early[-1] - early[p]))
    return tuple(cuts)


def _require_order(partition: Partition) -> None:
    """See that no two stages wait for each other.

    Raises:
        PolylaneError: they do, with the values they wait for.
    """
    needs: dict[int, set[int]] = {stage: set() for stage in range(partition.stages)}
    for start, end in partition.edges:
        needs[end].add(start)
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        values = {(c.producer, stage): c.value for c in partition.crossings for stage in c.consumers}
        circle = itertools.pairwise(error.args[1])
        waiting = ", ".join(f"stage {b} needs {values[a, b]} of stage {a}" for a, b in circle)
        raise PolylaneError(
            "stages wait for each other in a graph that is cut where the training's is (of evaluation, of another "
            f"loss, for batches of another form): {waiting}; put what lies between on one of them, or give the pieces "
            "a stage each"
        ) from None
