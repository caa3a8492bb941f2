"""Graph + Plan -> every rank's Program, communication included."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from polylane.graph.graph import Graph, TensorInfo
from polylane.graph.partition import Crossing, Partition
from polylane.plan.plan import Plan
from polylane.program.program import Bucket, Program
from polylane.schedule.action import Action, Kind
from polylane.schedule.synchronous import SCHEDULES

# Small gradients travel together up to this size; larger ones alone, and without being copied. gloo's all-reduce
# costs its latency (half a millisecond and more) up to about 1 MB, and its bytes above that.
BUCKET_BYTES = 4 << 20


def lower(
    partition: Partition,
    plan: Plan,
    holders: Mapping[str, Collection[int]] | None = None,
    partial: Mapping[str, Collection[str]] | None = None,
) -> tuple[Program, ...]:
    """Every worker's program, by rank.

    Args:
        partition: the graph and its cuts.
        plan: what runs where, in which order.
        holders: stages that must keep a parameter up to date although they do not use it here (another objective of the
            same training does).
        partial: parameter -> the operator axes along which every rank has only a summand of its gradient.

    A value goes straight from the rank that makes it to the rank with the same replica and coordinates of every stage
    that needs it; its gradient comes back the same way. On each directed pair of ranks, sends and receives are in the
    same order.
    """
    lanes = SCHEDULES[plan.schedule](plan.pipeline, plan.microbatches)
    buckets = _buckets(partition, plan, holders or {}, partial or {})
    programs = []
    for rank in range(plan.workers):
        (stage, replica), column = plan.place(rank), plan.column(rank)
        receives = tuple(c for c in partition.crossings if stage in c.consumers)
        sends = tuple(c for c in partition.crossings if c.producer == stage)
        own = tuple(bucket for bucket in buckets if rank in bucket.ranks)
        actions = [each for action in lanes[stage] for each in _with_communication(action, column, receives, sends)]
        actions += [Action(Kind.REDUCE, stage, value=bucket.name) for bucket in own if len(bucket.ranks) > 1]
        actions.append(Action(Kind.STEP, stage))
        programs.append(
            Program(
                rank=rank,
                stage=stage,
                replica=replica,
                replicas=plan.group(rank, ("data",)),
                last=column[-1],
                actions=tuple(actions),
                receives=receives,
                sends=sends,
                buckets=own,
                partition=partition,
                coordinates=plan.coordinates(rank),
            )
        )
    return tuple(programs)


def lower_evaluation(partition: Partition, plan: Plan) -> tuple[Program, ...]:
    """Every worker's program for a forward pass only, one microbatch after another."""
    programs = []
    for program in lower(partition, plan):
        kept = tuple(a for a in program.actions if a.kind is Kind.FORWARD or (a.kind in _TRAVEL and not a.gradient))
        programs.append(replace(program, actions=kept, buckets=()))
    return tuple(programs)


_TRAVEL = (Kind.SEND, Kind.RECEIVE)


def _with_communication(
    action: Action, column: Sequence[int], receives: Sequence[Crossing], sends: Sequence[Crossing]
) -> list[Action]:
    """A compute action between the receives it needs and the sends it makes possible; ``column``: ranks by stage."""
    stage, microbatch = action.stage, action.microbatch

    def travel(kind: Kind, crossing: Crossing, peer_stage: int, gradient: bool) -> Action:
        return Action(kind, stage, microbatch, crossing.value, column[peer_stage], gradient)

    if action.kind is Kind.FORWARD:
        before = [travel(Kind.RECEIVE, c, c.producer, False) for c in receives]
        after = [travel(Kind.SEND, c, consumer, False) for c in sends for consumer in c.consumers]
    else:
        before = [travel(Kind.RECEIVE, c, consumer, True) for c in sends if c.requires_grad for consumer in c.consumers]
        after = [travel(Kind.SEND, c, c.producer, True) for c in receives if c.requires_grad]
    return [*before, action, *after]


def _buckets(
    partition: Partition, plan: Plan, others: Mapping[str, Collection[int]], partial: Mapping[str, Collection[str]]
) -> tuple[Bucket, ...]:
    """Gradients grouped by who sums them, in reverse order of first use, as a backward pass finishes them.

    All ranks have their buckets in one global order: by stages, then by axes. So no two of them ever wait for each
    other in two groups that overlap.
    """
    graph = partition.graph
    differentiated = _differentiated(graph)
    held = [set(partition.parameters(stage)) for stage in range(plan.pipeline)]
    order = {name: i for i, name in reversed(list(enumerate(p for node in graph.nodes for p in node.parameters)))}
    alike: dict[tuple[tuple[int, ...], tuple[str, ...]], list[str]] = {}
    for name in sorted(order, key=order.__getitem__, reverse=True):
        if name in differentiated:
            holders = tuple(
                stage for stage in range(plan.pipeline) if name in held[stage] or stage in others.get(name, ())
            )
            axes = tuple(axis for axis in plan.axes if axis in partial.get(name, ()))
            alike.setdefault((holders, axes), []).append(name)
    buckets = []
    for holders, axes in sorted(alike, key=lambda key: (len(key[0]), key)):
        label = f"stage{holders[0]}" if len(holders) == 1 else "tied" + "-".join(map(str, holders))
        for number, names in enumerate(_filled(graph.parameters, alike[holders, axes])):
            name = ".".join([label, *axes, str(number)])
            buckets += [Bucket(name, ranks, names) for ranks in _summing(plan, holders, axes)]
    return tuple(buckets)


def _summing(plan: Plan, stages: Sequence[int], axes: Collection[str]) -> list[tuple[int, ...]]:
    """The ranks of these stages in groups that sum gradients: alike but for replica, stage and indices on ``axes``."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for stage in stages:
        for rank in plan.stages[stage].devices:
            at = plan.coordinates(rank)
            groups.setdefault(tuple(at[axis] for axis in plan.axes if axis not in axes), []).append(rank)
    return [tuple(sorted(ranks)) for ranks in groups.values()]


def _differentiated(graph: Graph) -> set[str]:
    """Trainable parameters from which a gradient's path leads to the loss.

    The others (behind a ``detach``, say) have no gradient on one device and must not get zeros here: weight decay and
    momentum would move them.
    """
    read = {name for node in graph.nodes for name in node.inputs}
    reached = {node.name for node in graph.nodes if node.name not in read}
    parameters: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in reached and node.requires_grad:
            reached.update(node.inputs)
            parameters.update(node.parameters)
    return {name for name in parameters if graph.parameters[name].trainable}


def _filled(parameters: Mapping[str, TensorInfo], names: Sequence[str]) -> list[tuple[str, ...]]:
    """Names in order, as many together as stay below :data:`BUCKET_BYTES` with one dtype."""
    groups: list[list[str]] = []
    size, dtype = 0, ""
    for name in names:
        info = parameters[name]
        nbytes, kind = info.bytes, info.dtype
        if not groups or size + nbytes > BUCKET_BYTES or kind != dtype:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size, dtype = size + nbytes, kind
    return [tuple(group) for group in groups]
