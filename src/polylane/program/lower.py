"""Graph + Plan -> every rank's Program, communication included."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

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
    partition: Partition, plan: Plan, holders: Mapping[str, Collection[int]] | None = None
) -> tuple[Program, ...]:
    """Every worker's program, by rank.

    Args:
        partition: the graph and its cuts.
        plan: what runs where, in which order.
        holders: stages that must keep a parameter up to date although they do not use it here (another objective of the
            same training does).

    A value goes straight from the replica that makes it to the same replica of every stage that needs it; its gradient
    comes back the same way. On each directed pair of ranks, sends and receives are in the same order.
    """
    lanes = SCHEDULES[plan.schedule](plan.pipeline, plan.microbatches)
    buckets = _buckets(partition, plan, holders or {})
    programs = []
    for rank in range(plan.workers):
        stage, replica = plan.place(rank)
        receives = tuple(c for c in partition.crossings if stage in c.consumers)
        sends = tuple(c for c in partition.crossings if c.producer == stage)
        own = tuple(bucket for bucket in buckets if rank in bucket.ranks)
        actions = [
            each for action in lanes[stage] for each in _with_communication(action, plan, replica, receives, sends)
        ]
        actions += [Action(Kind.REDUCE, stage, value=bucket.name) for bucket in own if len(bucket.ranks) > 1]
        actions.append(Action(Kind.STEP, stage))
        programs.append(
            Program(
                rank=rank,
                stage=stage,
                replica=replica,
                replicas=plan.stages[stage].devices,
                last=plan.stages[-1].devices[replica],
                actions=tuple(actions),
                receives=receives,
                sends=sends,
                buckets=own,
                partition=partition,
            )
        )
    return tuple(programs)


def lower_evaluation(partition: Partition, plan: Plan) -> tuple[Program, ...]:
    """Every worker's program for a forward pass only, one microbatch after another."""
    programs = []
    for program in lower(partition, plan):
        kept = tuple(a for a in program.actions if a.kind is Kind.FORWARD or (a.kind in _TRAVEL and not a.gradient))
        programs.append(
            Program(
                program.rank, program.stage, program.replica, program.replicas, program.last, kept,
                program.receives, program.sends, (), partition,
            )
        )  # fmt: skip
    return tuple(programs)


_TRAVEL = (Kind.SEND, Kind.RECEIVE)


def _with_communication(
    action: Action, plan: Plan, replica: int, receives: Sequence[Crossing], sends: Sequence[Crossing]
) -> list[Action]:
    """A compute action between the receives it needs and the sends it makes possible."""
    stage, microbatch = action.stage, action.microbatch

    def travel(kind: Kind, crossing: Crossing, peer_stage: int, gradient: bool) -> Action:
        return Action(kind, stage, microbatch, crossing.value, plan.stages[peer_stage].devices[replica], gradient)

    if action.kind is Kind.FORWARD:
        before = [travel(Kind.RECEIVE, c, c.producer, False) for c in receives]
        after = [travel(Kind.SEND, c, consumer, False) for c in sends for consumer in c.consumers]
    else:
        before = [travel(Kind.RECEIVE, c, consumer, True) for c in sends if c.requires_grad for consumer in c.consumers]
        after = [travel(Kind.SEND, c, c.producer, True) for c in receives if c.requires_grad]
    return [*before, action, *after]


def _buckets(partition: Partition, plan: Plan, others: Mapping[str, Collection[int]]) -> tuple[Bucket, ...]:
    """Gradients grouped by who holds them, in reverse order of first use, as a backward pass finishes them."""
    graph = partition.graph
    differentiated = _differentiated(graph)
    held = [set(partition.parameters(stage)) for stage in range(plan.pipeline)]
    order = {name: i for i, name in reversed(list(enumerate(p for node in graph.nodes for p in node.parameters)))}
    by_holders: dict[tuple[int, ...], list[str]] = {}
    for name in sorted(order, key=order.__getitem__, reverse=True):
        if name in differentiated:
            holders = tuple(
                stage for stage in range(plan.pipeline) if name in held[stage] or stage in others.get(name, ())
            )
            by_holders.setdefault(holders, []).append(name)
    buckets = []
    for holders in sorted(by_holders, key=lambda h: (len(h), h)):
        ranks = tuple(sorted(rank for stage in holders for rank in plan.stages[stage].devices))
        label = f"stage{holders[0]}" if len(holders) == 1 else "tied" + "-".join(map(str, holders))
        for number, names in enumerate(_filled(graph.parameters, by_holders[holders])):
            buckets.append(Bucket(f"{label}.{number}", ranks, names))
    return tuple(buckets)


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
