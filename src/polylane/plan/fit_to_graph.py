"""Fitting a plan to a graph: from the plan's node names to a partition, and from a partition to a complete plan."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from itertools import accumulate

import networkx as nx

from polylane.errors import PolylaneError, suggest_name
from polylane.graph.graph import Graph, Node
from polylane.graph.partition import Partition, StageCrossing, cut_positions
from polylane.graph.python_state.module_paths import is_inside
from polylane.plan.lanes import stage_graph_of
from polylane.plan.order import check_order_runs
from polylane.plan.pinned_placements import check_pins
from polylane.plan.plan import Plan, check
from polylane.plan.recompute import DEFAULT, RecomputeRule
from polylane.plan.spec import Degrees, Spec
from polylane.plan.stage import MESH, Fingerprint, Stage
from polylane.schedule.stage_graph import CyclicStages

# One replica of a stage, whose ranks shard its operators: (first sample as a fraction of the batch, stage, replica).
_Group = tuple[float, int, int]


def fingerprint(graph: Graph) -> Fingerprint:
    """Return the fingerprint that a plan for ``graph`` carries."""
    return Fingerprint(id=graph.fingerprint, nodes=len(graph.nodes), parameters=len(graph.parameters))


def plan_from_partition(partition: Partition, spec: Spec, microbatches: int) -> Plan:
    """Build the plan that puts each stage of a partition on a mesh of data x sequence x tensor ranks.

    Args:
        partition: the graph and its cuts into stages.
        spec: meshes, schedule, precision and sync; see :func:`assign_ranks` for the ranks.
        microbatches: number of microbatches of a step.
    """
    nodes, groups = partition.graph.nodes, assign_ranks(spec.group_meshes)
    # A stage of a branching model may be several pieces of the graph's order, each named by its first and last node.
    pieces: list[list[str]] = [[] for _ in spec.meshes]
    for start, end, stage in partition.pieces:
        pieces[stage] += [nodes[start].name, nodes[end - 1].name]
    stages = tuple(
        Stage(
            nodes=tuple(pieces[s]),
            devices=groups[group],
            mesh={axis: n for axis, n in zip(MESH, degrees, strict=True) if n > 1 or axis == "data"},  # type: ignore[misc]
        )
        for s, (degrees, group) in enumerate(zip(spec.meshes, spec.stage_groups, strict=True))
    )
    options = {**spec.option_values(), "microbatches": microbatches}
    return Plan(graph=fingerprint(partition.graph), stages=stages, **options)


def assign_ranks(meshes: Sequence[Degrees]) -> tuple[tuple[int, ...], ...]:
    """Assign ranks to every group of workers, in the order of its mesh.

    Ranks are numbered host by host. Those that shard an operator are consecutive, and where their number is a power of
    two they begin at a multiple of it, so that they never straddle two hosts whose size is a multiple of that power.
    Stages come next, replicas are outermost: where all stages have equally many replicas, rank = (replica * stages +
    stage) * ranks of a replica + index. Else groups are ordered by their first sample, as far as alignment allows.
    """
    groups = sorted((r / mesh.data, s, r) for s, mesh in enumerate(meshes) for r in range(mesh.data))
    sizes = [mesh.sequence * mesh.tensor for mesh in meshes]
    ranks: list[list[int]] = [[] for _ in meshes]
    first_rank = 0
    for _, stage, _ in _align_groups(groups, sizes):
        ranks[stage] += range(first_rank, first_rank + sizes[stage])
        first_rank += sizes[stage]
    return tuple(map(tuple, ranks))


def _align_groups(groups: Sequence[_Group], sizes: Sequence[int]) -> list[_Group]:
    """Order groups so that each whose size is a power of two begins at a multiple of its size.

    As in a buddy allocator: two neighbours of one size are merged into one of twice the size, up to the largest size.
    What is left over, at most one bundle of each smaller size, comes last, the largest first; then groups of other
    sizes.
    """
    #   1  2  1  1  2   ->   1 1  2  2  1      (1, 2: groups of so many ranks)
    powers = [size for size in sizes if size & (size - 1) == 0]
    line: list[tuple[_Group, ...]] = []
    over: list[tuple[_Group, ...]] = []
    size = 1
    while powers and size <= max(powers):
        if len(line) % 2:
            over.insert(0, line.pop())
        pairs = [a + b for a, b in zip(line[::2], line[1::2], strict=True)]
        line = sorted([*pairs, *((group,) for group in groups if sizes[group[1]] == size)])
        size *= 2
    other_groups = [group for group in groups if sizes[group[1]] not in powers]
    return [*(group for bundle in (*line, *over) for group in bundle), *other_groups]


def with_fingerprint(plan: Plan, graph: Graph) -> Plan:
    """Return the plan with its graph's fingerprint, so that a file written from it says which model it is for."""
    return plan if plan.graph is not None else plan.model_copy(update={"graph": fingerprint(graph)})


def partition_for(plan: Plan, graph: Graph) -> Partition:
    """Cut ``graph`` as ``plan`` says.

    Raises:
        PolylaneError: the plan contradicts itself, is for another model (with the difference), its stages do not cover
            the graph, or they wait for each other.
    """
    check(plan)  # pydantic does not validate a copy with changes
    graph_identity = fingerprint(graph)
    if plan.graph is not None and plan.graph.id != graph_identity.id:
        title = plan.title if plan.title != "plan" else "the plan"
        raise PolylaneError(f"{title} is for another model: {_difference(plan, plan.graph, graph, graph_identity)}")
    pieces = _stage_pieces(plan, graph)
    # A piece may begin with recomputable nodes, which belong to no stage: the cut is before the first node that does.
    allowed = set(cut_positions(graph))
    for cut, _, index in pieces[1:]:
        while graph.nodes[cut].recomputable:
            cut += 1
        if cut not in allowed:
            raise PolylaneError(
                f"{plan.title}: stages.{index}.nodes: the graph cannot be cut before {graph.nodes[cut].name}: it "
                "shares memory that is written in place, or reads a value whose size depends on data"
            )
    cuts, owners = tuple(start for start, _, _ in pieces[1:]), tuple(stage for _, _, stage in pieces)
    partition = Partition(graph, cuts, () if owners == tuple(range(len(owners))) else owners)
    _check_order(plan, partition)
    check_pins([stage.placements for stage in plan.stages], partition, plan.title)
    return partition


def _stage_pieces(plan: Plan, graph: Graph) -> list[tuple[int, int, int]]:
    """Find the pieces of all stages as (first position, last position, stage), in the graph's order; they cover it.

    Nodes between two pieces belong to the earlier one if they are of its last source line, to the later one if they
    are of its first source line or are recomputable.

    Raises:
        PolylaneError: they do not cover the graph, or two have the same node.
    """
    nodes, pieces = graph.nodes, list[tuple[int, int, int]]()
    for index, stage in enumerate(plan.stages):
        for names in stage.pieces:
            start, end = _find_nodes(plan, nodes, names[0], index)[0], _find_nodes(plan, nodes, names[1], index)[-1]
            if end < start:
                wrong = f"{nodes[end].name} comes before {nodes[start].name}"
                raise PolylaneError(f"{plan.title}: stages.{index}.nodes: {wrong}")
            pieces.append((start, end, index))
    pieces.sort()
    begin, result = 0, list[tuple[int, int, int]]()
    for start, end, index in pieces:
        if result:
            result[-1] = (result[-1][0], _extend_to_line_end(nodes, begin - 1, start), result[-1][2])
            begin = result[-1][1] + 1
        while begin < start and _same_source_line(nodes[start - 1], nodes[start]):
            start -= 1
        if start > begin and not all(node.recomputable for node in nodes[begin:start]):
            raise PolylaneError(f"{plan.title}: stages: {_describe_left_out(graph, range(begin, start), pieces)}")
        if start < begin:
            owner = next(stage for a, b, stage in result if a <= start <= b)
            raise PolylaneError(
                f"{plan.title}: stages.{index}.nodes: {nodes[start].name} is on stage {owner} already: every node has "
                "one stage"
            )
        result.append((begin, end, index))  # with recomputable nodes before it, which each stage computes for itself
        begin = end + 1
    begin = _extend_to_line_end(nodes, begin - 1, len(nodes)) + 1
    if not all(node.recomputable for node in nodes[begin:]):
        raise PolylaneError(f"{plan.title}: stages: {_describe_left_out(graph, range(begin, len(nodes)), pieces)}")
    return [*result[:-1], (result[-1][0], len(nodes) - 1, result[-1][2])]


def _extend_to_line_end(nodes: Sequence[Node], index: int, end: int) -> int:
    """Return the last node before ``end`` that follows the one at ``index`` and is of the same line of the user's code.

    A mean over a count is captured as several nodes, of which a plan may name the one that torch has.
    """
    while index + 1 < end and _same_source_line(nodes[index], nodes[index + 1]):
        index += 1
    return index


def _same_source_line(node: Node, next_node: Node) -> bool:
    return bool(node.source) and (node.module, node.source) == (next_node.module, next_node.source)


def _describe_left_out(graph: Graph, missing: Sequence[int], pieces: Sequence[tuple[int, int, int]]) -> str:
    """Describe a node that no stage computes, and the stage that needs it."""
    names = {graph.nodes[i].name for i in missing}
    for start, end, stage in pieces:
        for i in range(start, end + 1):
            for value in graph.nodes[i].inputs:
                if value in names:
                    return f"{graph.nodes[i].name} on stage {stage} needs {value}, which no stage computes"
    return f"no stage has {graph.nodes[missing[0]].name}: together they must cover the graph, in its order"


def _check_order(plan: Plan, partition: Partition) -> None:
    try:
        graph = stage_graph_of(partition, plan)
    except CyclicStages:
        # A stage of two pieces: another stage reads values of the first one, and the second one reads that stage's.
        crossing, stage = _find_backward_crossing(partition)
        raise PolylaneError(
            f"{plan.title}: stages wait for each other: stage {stage} needs {crossing.value} of stage "
            f"{crossing.producer}, which itself needs what stage {stage} makes: put what lies between on one of them, "
            "or give the pieces a stage each"
        ) from None
    try:
        check_order_runs(plan.order, graph)
    except PolylaneError as error:
        raise PolylaneError(f"{plan.title}: {error}") from None


def _find_backward_crossing(partition: Partition) -> tuple[StageCrossing, int]:
    """Find a value that a stage reads from a stage which depends on it in turn: an edge of a cycle."""
    waits = nx.DiGraph(partition.edges)
    return next(
        (crossing, stage)
        for crossing in reversed(partition.crossings)
        for stage in crossing.consumers
        if nx.has_path(waits, stage, crossing.producer)
    )


def _find_nodes(plan: Plan, nodes: tuple[Node, ...], name: str, index: int) -> list[int]:
    # A name is a node's, or a module's, which stands for all of its nodes.
    exact = [i for i, node in enumerate(nodes) if node.name == name]
    members = [i for i, node in enumerate(nodes) if node.module == name or node.module.startswith(f"{name}.")]
    if not exact and not members:
        unknown = f"the model has no node and no module {name!r}{_hint(plan, nodes, name)}"
        raise PolylaneError(f"{plan.title}: stages.{index}.nodes: {unknown}")
    return exact or members


def _hint(plan: Plan, nodes: tuple[Node, ...], name: str) -> str:
    """Suggest a name for one that the graph does not have; and the graph's first or last node, if it was for that."""
    hint = suggest_name(name, [*(n.name for n in nodes), *(n.module for n in nodes)])
    if name == plan.stages[-1].nodes[-1]:  # a loss, say, that the model computes itself
        hint += f"; this graph's last node is {nodes[-1].name}"
    elif name == plan.stages[0].nodes[0]:
        hint += f"; this graph's first node is {nodes[0].name}"
    return hint


def _difference(plan: Plan, plan_identity: Fingerprint, graph: Graph, graph_identity: Fingerprint) -> str:
    known_names = {node.name for node in graph.nodes} | {node.module for node in graph.nodes}
    missing = [name for stage in plan.stages for name in stage.nodes if name not in known_names]
    if missing:
        return f"it names {missing[0]!r}, which this model does not have"
    if plan_identity.parameters != graph_identity.parameters:
        return f"it has {plan_identity.parameters} parameter tensors, this model {graph_identity.parameters}"
    if plan_identity.nodes != graph_identity.nodes:
        return f"it has {plan_identity.nodes} nodes, this model {graph_identity.nodes}"
    return f"the shapes or the wiring differ (fingerprint {plan_identity.id}, this model's is {graph_identity.id})"


def check_chunks(spec: Spec, graph: Graph) -> None:
    """Refuse more chunks on a worker than a graph has parts for all workers.

    Raises:
        PolylaneError: the graph cannot be cut into so many stages.
    """
    limit = len(cut_positions(graph)) + 1
    if spec.chunks > 1 and len(spec.meshes) > limit and not graph.is_opaque:
        raise PolylaneError(
            f"chunks={spec.chunks} on each of pipeline={spec.pipeline} are {len(spec.meshes)} stages, and the graph "
            f"can be cut into at most {limit}: lower one of them"
        )


def check_asynchronous(plan: Plan, partition: Partition) -> None:
    """Refuse a graph that an asynchronous pipeline cannot train; nothing for any other plan.

    Raises:
        PolylaneError: the loss is no mean over samples, or stages share a weight.
    """
    if not plan.is_asynchronous:
        return
    prefix = f"{plan.title}: schedule: {plan.schedule}"
    if not partition.graph.loss_is_mean:
        raise PolylaneError(
            f"{prefix} needs a loss that is a mean over samples: over what this one is a mean is known only when all "
            "stages have seen the batch"
        )
    for name, info in partition.graph.parameters.items():
        holders = [stage for stage in range(partition.stages) if name in partition.parameters(stage)]
        if len(holders) > 1 and info.trainable:  # stages may share what nobody updates
            raise PolylaneError(
                f"{prefix}: stages {' and '.join(map(str, holders))} share {name}, and would update it at different "
                "times: cut so that one stage has it, or take a schedule that waits"
            )


def check_recompute(plan: Plan, partitions: Collection[Partition]) -> None:
    """Refuse modules to recompute that the model does not have, or that are not where it is said of them.

    Args:
        plan: the plan, with its ``recompute`` for all stages or each.
        partitions: the cuts of all graphs that are trained.

    Raises:
        PolylaneError: an unknown module, one of another stage, or one whose stages all speak for themselves; naming
            the plan's key.
    """
    silent = {number for number, stage in enumerate(plan.stages) if stage.recompute is None}
    rules: list[tuple[str, RecomputeRule, set[int]]] = [("recompute", plan.recompute, silent)]
    rules += [(f"stages.{s}.recompute", plan.recompute_of(s), {s}) for s in range(plan.pipeline) if s not in silent]
    for key, rule, stages in rules:
        for module in () if isinstance(rule, str) else rule:
            having = _stages_with_module(module, partitions)
            if module == DEFAULT or not having.isdisjoint(stages):
                continue
            if not having:
                paths = {node.module for partition in partitions for node in partition.graph.nodes}
                modules = sorted({path for full_path in paths for path in accumulate(re.split(r"(?=\.)", full_path))})
                wrong = f"the model runs no operator in a module of this name{suggest_name(module, modules)}"
            else:
                wrong = f"it is on stage {', '.join(map(str, sorted(having)))}"
                wrong += ", which says for itself what it recomputes: say it there" if key == "recompute" else ""
            raise PolylaneError(f"{plan.title}: {key}.{module}: {wrong}")


def _stages_with_module(module: str, partitions: Collection[Partition]) -> set[int]:
    """Return the stages that run operators of a module, in any graph."""
    return {
        stage
        for partition in partitions
        for stage in range(partition.stages)
        if any(is_inside(node.module, module) for node in partition.nodes(stage))
    }
