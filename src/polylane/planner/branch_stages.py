"""Branch parallelism: independent branches of a graph as stages that run at the same time, as in two-tower models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from networkx.utils import UnionFind

from polylane.cost.predict import predict
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition, cut_positions
from polylane.plan import fit_to_graph as fit
from polylane.plan.spec import Degrees, Spec
from polylane.planner.balance import Array
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan
from polylane.schedule.stage_graph import CyclicStages, StageGraph

# Fraction of a fork's work below which a branch is not worth a worker.
WORTH = 0.1
MOST_WORKERS = 16  # over which the branches of a fork are spread
# Most positions of the graph that are searched for a fork.
MOST_FORKS = 64
# Few: branches run side by side, and have no long pipeline to fill.
MICROBATCHES = (1, 2, 4)


@dataclass(frozen=True)
class Fork:
    """A place where a graph divides into branches that join again.

    Attributes:
        first: position of its first node.
        join: position of the first node that reads several branches.
        branches: positions of each branch's nodes, in ascending order.
    """

    first: int
    join: int
    branches: tuple[tuple[int, ...], ...]


def find_fork(graph: Graph, seconds: Array, start: int) -> Fork | None:
    """Return the fork that begins at a position: join nodes with their inputs until one joins two large branches.

    Args:
        graph: the captured graph to search.
        seconds: seconds of both passes of every node.
        start: position where the fork may begin; values made before it count as available to all branches.
    """
    branches = UnionFind()  # nodes that are joined
    branch_seconds: dict[str, float] = {}  # seconds of each branch, by its root
    total = 0.0
    for position in range(start, len(graph.nodes)):
        node = graph.nodes[position]
        # Sizes and masks that every stage recomputes connect nothing: no value crosses on their account.
        if node.recomputable:
            continue
        read = dict.fromkeys(branches[name] for name in node.inputs if name in branches.parents)
        if len(read) > 1 and sum(branch_seconds[branch] >= WORTH * total for branch in read) > 1:
            return Fork(start, position, _branch_nodes(graph, range(start, position), branches, branch_seconds))
        node_seconds = float(seconds[position])
        branches.union(node.name, *read)
        branch_seconds[branches[node.name]] = sum(branch_seconds.pop(branch) for branch in read) + node_seconds
        total += node_seconds
    return None


def _branch_nodes(
    graph: Graph, positions: range, branches: UnionFind, branch_seconds: Mapping[str, float]
) -> tuple[tuple[int, ...], ...]:
    """Return the positions of the nodes of every branch that takes time, in the order of their first nodes."""
    branch_positions: dict[str, list[int]] = {}
    for position in positions:
        name = graph.nodes[position].name
        if name in branches.parents:
            branch_positions.setdefault(branches[name], []).append(position)
    return tuple(tuple(nodes) for name, nodes in branch_positions.items() if branch_seconds[name] > 0)


def plan_branches(estimates: CurveCache, workers: int, limit: float) -> list[RatedPlan]:
    """Return plans that run branches on up to ``workers`` workers, one per stage, rated by exact prediction."""
    graph = estimates.basis.stages.graph
    if graph.is_opaque or workers < 2:
        return []
    table = estimates.table(Degrees(), max(1, estimates.batch))
    seconds = np.diff(table.forward + table.backward)
    places = estimates.positions[:-1]
    if len(places) > MOST_FORKS:
        places = places[np.linspace(0, len(places) - 1, MOST_FORKS).astype(int)]
    plans, seen_cuts = list[RatedPlan](), set[tuple[tuple[int, ...], tuple[int, ...]]]()
    forks = (find_fork(graph, seconds, int(position)) for position in places)
    for fork in (fork for fork in forks if fork is not None):
        for stages in range(2, min(workers, len(fork.branches), MOST_WORKERS) + 1):
            partition = place_branches(graph, fork, seconds, stages)
            if partition is None or (partition.cuts, partition.stage_of_piece) in seen_cuts:
                continue
            seen_cuts.add((partition.cuts, partition.stage_of_piece))
            plans += _rate_partition(estimates, partition, limit)
    return plans


def place_branches(graph: Graph, fork: Fork, seconds: Array, stages: int) -> Partition | None:
    """Return a partition with a fork's branches spread over ``stages`` stages; None if the graph cannot be cut so.

    Branches are placed greedily, the longest first, on the stage with the least work. The nodes before the fork are on
    the first stage, those after it on the last; both stages compute branches as well.
    """
    # Longest processing time first: within 4/3 of the best makespan (Graham, 1969).
    loads, stage_of = [0.0] * stages, dict[int, int]()
    for branch in sorted(fork.branches, key=lambda nodes: -float(seconds[list(nodes)].sum())):
        stage = loads.index(min(loads))
        loads[stage] += float(seconds[list(branch)].sum())
        stage_of |= dict.fromkeys(branch, stage)
    owners: list[int] = []
    for position, node in enumerate(graph.nodes):
        outer_stage = 0 if position < fork.first else stages - 1
        in_fork = fork.first <= position < fork.join and not node.recomputable
        owners.append(stage_of.get(position, owners[-1] if owners else 0) if in_fork else outer_stage)
        # A recomputable node follows the node before it, so that it makes no cut of its own.
        if node.recomputable and owners[:-1]:
            owners[-1] = owners[-2]
    cuts = tuple(p for p in range(1, len(owners)) if owners[p] != owners[p - 1])
    if not set(cuts) <= set(cut_positions(graph)) or len(set(owners)) < stages:
        return None
    partition = Partition(graph, cuts, (owners[0], *(owners[p] for p in cuts)))
    # Stages that wait for each other in a circle make no pipeline.
    try:
        StageGraph.of_partition(partition)
    except CyclicStages:
        return None
    return partition


def _rate_partition(estimates: CurveCache, partition: Partition, limit: float) -> Iterator[RatedPlan]:
    meshes, pieces = (Degrees(),) * partition.stages, partition.stage_of_piece
    for microbatches in (m for m in MICROBATCHES if m <= estimates.batch):
        spec = Spec(stages=meshes, microbatches=microbatches)
        plan = fit.plan_from_partition(partition, spec, microbatches)
        prediction = predict(estimates.basis, partition, plan, estimates.batch, exact=False)
        peak_bytes = float(max(stage.memory.total for stage in prediction.stages))
        yield RatedPlan(meshes, partition.cuts, microbatches, prediction.seconds, peak_bytes, limit, pieces)
