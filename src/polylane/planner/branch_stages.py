"""Branches as stages: parts of a graph that do not wait for each other, on workers of their own at the same time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import predict
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, cut_positions
from polylane.plan import fit_to_graph as fit
from polylane.plan.spec import Degrees, Spec
from polylane.planner.balance import Array
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan
from polylane.schedule.stage_graph import CyclicStages, StageGraph

# A branch with less of the fork's work than this is not worth a worker.
WORTH = 0.1
MOST_WORKERS = 16
# How many places of the graph are looked at for a fork.
MOST_FORKS = 64
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Fork:
    """Where a graph divides and meets again.

    Attributes:
        first: position of its first node.
        join: position of the node that reads what several branches make.
        branches: positions of the nodes of each, ascending.
    """

    first: int
    join: int
    branches: tuple[tuple[int, ...], ...]


def find_forks(graph: Graph, seconds: Array, places: Sequence[int]) -> Iterator[Fork]:
    """The forks that begin at some positions.

    Args:
        graph: what is looked at.
        seconds: of every node.
        places: positions where a fork may begin; what is made before one counts as there.
    """
    for first in places:
        found = _find_fork(graph, seconds, first)
        if found is not None:
            yield found


def _find_fork(graph: Graph, seconds: Array, first: int) -> Fork | None:
    """Nodes are joined with what they read, in order, until one joins two branches that are worth a worker each."""
    parent: dict[str, str] = {}  # towards the first node of a branch (union-find, with path halving)
    work: dict[str, float] = {}  # by that node
    total = 0.0

    def root(name: str) -> str:
        while parent[name] != name:
            parent[name] = name = parent[parent[name]]
        return name

    for position in range(first, len(graph.nodes)):
        node = graph.nodes[position]
        if node.recomputable:
            continue
        read = {root(name) for name in node.inputs if name in parent}
        if len(read) > 1 and sum(work[branch] >= WORTH * total for branch in read) > 1:
            return Fork(first, position, _branch_nodes(graph, range(first, position), parent, root, work))
        merged = min(read, key=graph.positions.__getitem__, default=node.name)
        parent[node.name] = merged
        for branch in read - {merged}:
            parent[branch] = merged
            work[merged] += work.pop(branch)
        own = float(seconds[position])
        work[merged] = work.get(merged, 0.0) + own
        total += own
    return None


def _branch_nodes(
    graph: Graph, positions: range, parent: Mapping[str, str], root: Callable[[str], str], work: Mapping[str, float]
) -> tuple[tuple[int, ...], ...]:
    """The positions of the nodes of every branch that takes time, in the order of their first nodes."""
    found: dict[str, list[int]] = {}
    for position in positions:
        name = graph.nodes[position].name
        if name in parent:
            found.setdefault(root(name), []).append(position)
    return tuple(tuple(nodes) for name, nodes in found.items() if work[name] > 0)


def plan_branches(
    estimates: CurveCache, workers: int, methods: Sequence[TrainingOptions], limit: float
) -> list[RatedPlan]:
    """The plans that put branches on up to so many workers, one worker for each stage, predicted exactly."""
    graph = estimates.basis.stages.graph
    if graph.is_opaque or workers < 2:
        return []
    table = estimates.table(Degrees(), max(1, estimates.batch))
    seconds = np.diff(table.forward + table.backward)
    places = estimates.positions[:-1]
    if len(places) > MOST_FORKS:
        places = places[np.linspace(0, len(places) - 1, MOST_FORKS).astype(int)]
    found, seen = list[RatedPlan](), set[tuple[tuple[int, ...], tuple[int, ...]]]()
    for fork in find_forks(graph, seconds, [int(p) for p in places]):
        for stages in range(2, min(workers, len(fork.branches), MOST_WORKERS) + 1):
            partition = place_branches(graph, fork, seconds, stages)
            if partition is None or (partition.cuts, partition.stage_of_piece) in seen:
                continue
            seen.add((partition.cuts, partition.stage_of_piece))
            found += _rate_partition(estimates, partition, methods, limit)
    return found


def place_branches(graph: Graph, fork: Fork, seconds: Array, stages: int) -> Partition | None:
    """A fork's branches on so many stages, the longest first where there is least; None where they cannot be cut so.

    What comes before the fork is on the first stage, what comes after on the last: both compute a branch as well.
    """
    loads, stage_of = [0.0] * stages, dict[int, int]()
    for branch in sorted(fork.branches, key=lambda nodes: -float(seconds[list(nodes)].sum())):
        least = loads.index(min(loads))
        loads[least] += float(seconds[list(branch)].sum())
        stage_of |= dict.fromkeys(branch, least)
    owners: list[int] = []
    for position, node in enumerate(graph.nodes):
        outside = 0 if position < fork.first else stages - 1
        inside = fork.first <= position < fork.join and not node.recomputable
        owners.append(stage_of.get(position, owners[-1] if owners else 0) if inside else outside)
        if node.recomputable and owners[:-1]:
            owners[-1] = owners[-2]
    cuts = tuple(p for p in range(1, len(owners)) if owners[p] != owners[p - 1])
    if not set(cuts) <= set(cut_positions(graph)) or len(set(owners)) < stages:
        return None
    partition = Partition(graph, cuts, (owners[0], *(owners[p] for p in cuts)))
    try:
        StageGraph.of_partition(partition)
    except CyclicStages:
        return None
    return partition


def _rate_partition(
    estimates: CurveCache, partition: Partition, methods: Sequence[TrainingOptions], limit: float
) -> Iterator[RatedPlan]:
    meshes = (Degrees(),) * partition.stages
    for method in methods:
        basis = replace(estimates.basis, method=method)
        for microbatches in (m for m in MICROBATCHES if m <= estimates.batch):
            plan = fit.plan_from_partition(
                partition, Spec.of_meshes(meshes, "1f1b", microbatches, "float32"), microbatches
            )
            prediction = predict(basis, partition, plan, estimates.batch, exact=False)
            most = max(stage.memory.total for stage in prediction.stages)
            yield RatedPlan(
                meshes,
                partition.cuts,
                "1f1b",
                microbatches,
                method,
                prediction.seconds,
                float(most),
                limit,
                partition.stage_of_piece,
            )
