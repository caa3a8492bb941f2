"""Graph partition: cut a graph into pipeline stages, and determine which stage sends which value to which stages."""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from graphlib import CycleError, TopologicalSorter

import numpy as np
from numpy.typing import NDArray

from polylane.errors import PolylaneError, format_plural
from polylane.graph.graph import Graph, Node
from polylane.graph.parameter_pieces import find_parameter_pieces

# How far above the fastest possible slowest stage a cut may go in order to send fewer bytes.
SLACK = 0.03


@dataclass(frozen=True)
class StageCrossing:
    """A value that crosses stages: sent from the stage that makes it directly to each stage that needs it.

    Attributes:
        value: name of the node whose value is sent.
        producer: index of the stage that makes the value.
        consumers: indices of the stages that read the value, ascending.
        bytes: size of the value on the example batch.
        requires_grad: whether a gradient is sent back.
    """

    value: str
    producer: int
    consumers: tuple[int, ...]
    bytes: int
    requires_grad: bool


@dataclass(frozen=True)
class Partition:
    """A graph cut into pieces, which make up the stages.

    Attributes:
        graph: the graph that is partitioned.
        cuts: position of the first node of every piece but the first, ascending.
        stage_of_piece: the stage of every piece; if empty, each piece is a stage of its own. Every stage has at least
            one piece; pieces, and so stages, may be empty.
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
        """Number of pipeline stages."""
        return max(self.stage_of_piece) + 1 if self.stage_of_piece else len(self.cuts) + 1

    @property
    def loss_stage(self) -> int:
        """Index of the stage that has the end of the graph, and computes the loss."""
        return self.pieces[-1][2]

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The stage of every node, by name; recomputable nodes are assigned by position, and recomputed elsewhere."""
        nodes = self.graph.nodes
        return {nodes[i].name: stage for start, end, stage in self.pieces for i in range(start, end)}

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """Pairs (producer stage, consumer stage) between which values are sent, sorted."""
        return tuple(sorted({(c.producer, consumer) for c in self.crossings for consumer in c.consumers}))

    @cached_property
    def _outputs(self) -> tuple[str, ...]:
        return self.graph.outputs or tuple(node.name for node in self.graph.nodes[-1:])

    @cached_property
    def _nodes(self) -> tuple[tuple[Node, ...], ...]:
        position, nodes = self.graph.positions, self.graph.nodes
        needed_nodes: list[set[int]] = [set() for _ in range(self.stages)]
        for start, end, stage in self.pieces:
            needed_nodes[stage].update(i for i in range(start, end) if not nodes[i].recomputable)
        for stage, needed in enumerate(needed_nodes):
            # Start from the stage's own work, and add the recomputable nodes that it reads, transitively.
            reads = [name for i in needed for name in nodes[i].inputs]
            reads += self._outputs if stage == self.loss_stage else ()
            while reads:
                at = position[reads.pop()]
                if nodes[at].recomputable and at not in needed:
                    needed.add(at)
                    reads += nodes[at].inputs
        return tuple(tuple(nodes[i] for i in sorted(needed)) for needed in needed_nodes)

    def nodes(self, stage: int) -> tuple[Node, ...]:
        """Return the nodes a stage runs, in order, including the recomputable ones it needs and no others."""
        return self._nodes[stage]

    @cached_property
    def crossings(self) -> tuple[StageCrossing, ...]:
        """Every value that crosses between stages, in graph order; the loss's inputs go to the loss stage."""
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
        """Return canonical names of the parameters that a stage reads, in the model's order."""
        used = {name for node in self.nodes(stage) for name in node.parameters}
        return tuple(sorted(used, key=self.graph.parameter_order.__getitem__))

    def buffers(self, stage: int) -> tuple[str, ...]:
        """Return names of the buffers that a stage reads or writes."""
        used = {name for node in self.nodes(stage) for name in node.buffers}
        return tuple(name for name in self.graph.buffers if name in used)


def cut_positions(graph: Graph, staying: Collection[str] = ()) -> list[int]:
    """Return the positions of nodes before which a graph may be cut.

    Never inside a group that shares written memory; never where a value would cross whose size depends on data, or one
    of ``staying``; and only before nodes that do work of their own.

    Args:
        graph: the graph to be cut.
        staying: names of values that must not cross stages.
    """
    ends = last_uses(graph)
    stuck = {n.name for n in graph.nodes if not n.can_cross_stages} | set(staying)
    spans = [(start, end, 1.0) for start, end in graph.unsplittable_ranges]
    spans += [(i, ends.get(n.name, i), 1) for i, n in enumerate(graph.nodes) if n.name in stuck and not n.recomputable]
    weights = sum_over_spans(graph, spans)
    positions = [p for p, node in enumerate(graph.nodes) if not node.recomputable]
    return [p for p in positions[1:] if not weights[p]]  # a stage of recomputable nodes alone would be none


def last_uses(graph: Graph) -> dict[str, int]:
    """Return the position of the last node that reads each value; the loss is read at the very end."""
    positions = {name: position for position, node in enumerate(graph.nodes) for name in node.inputs}
    return positions | dict.fromkeys(graph.outputs, len(graph.nodes) - 1)


def sum_over_spans(graph: Graph, spans: Iterable[tuple[int, int, float]]) -> NDArray[np.float64]:
    """Return for every position, and the end, the summed weights of the spans that a cut there goes through.

    A span has the positions of its first and last node, and a weight.
    """
    # Differences between neighbouring positions; the cumulative sum is the weight open at each.
    delta = np.zeros(len(graph.nodes) + 1)
    for start, end, weight in spans:
        delta[start + 1] += weight
        delta[end + 1] -= weight
    return np.cumsum(delta)


def value_spans(graph: Graph, size: Callable[[Node], float]) -> Iterator[tuple[int, int, float]]:
    """Yield every value that stages would send, from the node that makes it to its last reader, with its size."""
    for name, end in last_uses(graph).items():
        start = graph.positions[name]
        if not graph.nodes[start].recomputable and end > start:
            yield start, end, size(graph.nodes[start])


def _live_bytes(graph: Graph) -> NDArray[np.float64]:
    """Return for every position the bytes that a cut there sends: values still needed, and tied weights used later."""
    # There, and its gradient back.
    values = value_spans(graph, lambda node: node.bytes * (2 if node.requires_grad else 1))
    # A tied weight on both sides of a cut: its gradient is summed over the stages, about twice its size in each step.
    readers = defaultdict[str, list[int]](list)
    for position, node in enumerate(graph.nodes):
        for name in node.parameters:
            readers[name].append(position)
    tied = [(at[0], at[-1], 2 * graph.parameters[name].bytes) for name, at in readers.items() if at[-1] > at[0]]
    return sum_over_spans(graph, [*values, *tied])


def balance_stages(
    graph: Graph,
    stages: int,
    seconds: Sequence[float],
    workers: Sequence[int] | None = None,
    staying: Collection[str] = (),
) -> Partition:
    """Cut into ``stages`` so that the slowest is as fast as possible, and then (within 3%) with fewest bytes sent.

    Args:
        graph: the graph to be partitioned.
        stages: number of pipeline stages.
        seconds: time of every node, forward and backward (any unit).
        workers: number of workers that share each stage's work; default: equally many.
        staying: names of values that must not cross stages.

    Raises:
        PolylaneError: the graph cannot be cut into that many stages.
    """
    if stages == 1:
        return Partition(graph, ())
    positions = cut_positions(graph, staying)
    if stages > len(positions) + 1:
        raise PolylaneError(_too_many_stages(graph, stages, len(positions) + 1))
    # From here on indices count positions that may be cut, not nodes: work done before each, and bytes sent at each.
    ends = np.array([0, *positions, len(graph.nodes)])
    work = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=np.float64))])[ends]
    live = _live_bytes(graph)[ends]
    return Partition(graph, tuple(int(ends[i]) for i in _best_cuts(work, live, tuple(workers or (1,) * stages))))


def _best_cuts(work: NDArray[np.float64], live: NDArray[np.float64], workers: Sequence[int]) -> list[int]:
    """Return cuts with the fewest bytes within the slack; of those, ones with a slowest stage as fast as possible."""
    low = _min_slowest(work, workers)
    high = low * (1 + SLACK)
    cuts = _min_bytes_cuts(work, live, workers, high)
    fewest = live[cuts].sum()
    # Bisect the limit: a lower one that costs no more bytes is kept.
    for _ in range(6):
        middle = (low + high) / 2
        tighter = _min_bytes_cuts(work, live, workers, middle)
        if live[tighter].sum() <= fewest:
            cuts, high = tighter, middle
        else:
            low = middle
    return cuts


def _too_many_stages(graph: Graph, stages: int, max_stages: int) -> str:
    if graph.is_opaque:
        return f"pipeline={stages}: the model is opaque and cannot be cut ({graph.notes[-1]}); use data parallelism"
    stages_of = format_plural(max_stages, "stage")
    return f"pipeline={stages}: the graph can be cut into at most {stages_of}; lower pipeline, or use data parallelism"


def _min_slowest(work: NDArray[np.float64], workers: Sequence[int]) -> float:
    """Return the smallest possible time of the slowest stage, by bisection."""
    low, high = work[-1] / sum(workers), work[-1] / min(workers)
    for _ in range(64):
        middle = (low + high) / 2
        low, high = (low, middle) if _is_feasible(work, workers, middle) else (middle, high)
    return float(high)


def _is_feasible(work: NDArray[np.float64], workers: Sequence[int], limit: float) -> bool:
    """Return whether cuts exist with which every stage has some work and stays within ``limit``."""
    reached = np.zeros(len(work), dtype=bool)
    reached[0] = True
    for worker_count in workers:
        counts = np.concatenate([[0], np.cumsum(reached)])  # how many of the first positions can be reached
        # A position can end this stage if any reachable start is in [earliest, position).
        reached = counts[np.arange(len(work))] > counts[_earliest_starts(work, limit * worker_count)]
    return bool(reached[-1])


def _earliest_starts(work: NDArray[np.float64], limit: float) -> NDArray[np.int64]:
    """Return for every end of a stage the first start with which it stays within ``limit``."""
    # The tolerance makes equal sums of seconds compare as equal.
    starts: NDArray[np.int64] = np.searchsorted(work, work - limit - 1e-12 * work[-1], side="left")
    return starts


def _min_bytes_cuts(
    work: NDArray[np.float64], live: NDArray[np.float64], workers: Sequence[int], limit: float
) -> list[int]:
    """Return indices of the cuts with the fewest bytes among those whose stages all stay within ``limit``.

    Dynamic programming over stages; the best start of a stage that ends at j is a minimum over a sliding window.
    """
    count = len(work)
    earliest = _earliest_starts(work, limit * workers[0])
    cost = np.where(earliest == 0, 0.0, np.inf)
    cost[0] = np.inf
    choices = []
    for worker_count in workers[1:]:
        earliest = _earliest_starts(work, limit * worker_count)
        previous, cost = cost + live, np.full(count, np.inf)
        choice = np.zeros(count, dtype=np.int64)
        window: deque[int] = deque()
        # Monotonic queue: starts in ascending order of position and of cost, so that its first element is the minimum.
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
    # Follow the choices back from the end of the graph.
    cuts, at = [], count - 1
    for choice in reversed(choices):
        at = int(choice[at])
        cuts.append(at)
    return cuts[::-1]


def align_partition(reference: Partition, graph: Graph) -> Partition:
    """Cut another graph of the same model (evaluation, another loss, other shapes) where ``reference`` was cut.

    Nodes correspond by module path, operator and number; a parameter outweighs all nodes without any, so that it stays
    on a stage that has it. A stage of which the graph has nothing (a head only used in training) is left empty.

    Args:
        reference: the training graph's partition.
        graph: the graph to be cut in the same way.

    Raises:
        PolylaneError: the graph cannot be cut, or its stages would wait for each other.
    """
    if reference.stages == 1:
        return Partition(graph, ())
    if graph.is_opaque:
        raise PolylaneError(_too_many_stages(graph, reference.stages, 1))
    cut = Partition(reference.graph, reference.cuts)  # one stage per piece
    piece_of = cut.stage_of
    nodes = {node.name: node for node in reference.graph.nodes}
    holders = {name: {piece} for name, piece in find_parameter_pieces(reference.graph, piece_of).items()}
    modules: dict[str, int] = {}
    for node in reference.graph.nodes:
        modules.setdefault(node.module, piece_of[node.name])
        for name in node.parameters:  # of a tied weight, or a module that is called twice, on several pieces
            holders[name].add(piece_of[node.name])
    costs = np.zeros((len(graph.nodes), cut.stages))
    for row, node in zip(costs, graph.nodes, strict=True):
        pieces = [holders[name] for name in node.parameters if name in holders]
        namesake = nodes.get(node.name)
        # The piece that its namesake, its parameters or at least its module belong to.
        guess = min(pieces[0]) if pieces else modules.get(node.module)
        if namesake is not None and namesake.parameters == node.parameters:
            guess = piece_of[node.name]
        if guess is not None and (pieces or not node.recomputable):
            row += 1
            row[guess] -= 1
        if pieces:
            row += len(graph.nodes) + 1
            row[list(set.intersection(*pieces) or pieces[0])] -= len(graph.nodes) + 1
    partition = Partition(graph, _choose_cuts(graph, costs), reference.stage_of_piece)
    _require_order(partition)
    return partition


def _choose_cuts(graph: Graph, costs: np.ndarray) -> tuple[int, ...]:
    """Return the cuts into pieces, possibly empty, of least cost; of several the earliest.

    Args:
        graph: the graph to be cut.
        costs: cost of every node on every piece, (nodes, pieces).
    """
    places = np.array([0, *cut_positions(graph), len(graph.nodes)])
    sums = np.concatenate([np.zeros((1, costs.shape[1])), costs.cumsum(0)])[places]
    best, choices = sums[:, 0], list[np.ndarray]()
    for piece in range(1, costs.shape[1]):
        begin_costs = best - sums[:, piece]  # by the place where the piece begins, but for what all up to a place have
        lowest_costs = np.minimum.accumulate(begin_costs)
        is_new = np.concatenate([[True], begin_costs[1:] < lowest_costs[:-1]])
        choices.append(np.maximum.accumulate(np.where(is_new, np.arange(len(places)), 0)))
        best = lowest_costs + sums[:, piece]
    ends = [len(places) - 1]
    for choice in reversed(choices):
        ends.insert(0, choice[ends[0]])
    return tuple(int(places[end]) for end in ends[:-1])


def _require_order(partition: Partition) -> None:
    """Check that no two stages wait for each other.

    Raises:
        PolylaneError: stages form a cycle; the message names the values they wait for.
    """
    edges = partition.edges
    needs = {stage: {start for start, end in edges if end == stage} for stage in range(partition.stages)}
    try:
        TopologicalSorter(needs).prepare()
    except CycleError as error:
        values = {(c.producer, stage): c.value for c in partition.crossings for stage in c.consumers}
        waits = itertools.pairwise(error.args[1])
        waiting = ", ".join(f"stage {b} needs {values[a, b]} of stage {a}" for a, b in waits)
        raise PolylaneError(
            "stages wait for each other in a graph that is cut where the training's is (of evaluation, of another "
            f"loss, for batches of another form): {waiting}; put what lies between on one of them, or give the pieces "
            "a stage each"
        ) from None
