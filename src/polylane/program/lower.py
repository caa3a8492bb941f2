"""Lowering: graph + plan -> every rank's program, with sends, receives and gradient buckets in one global order."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import chain, combinations

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph, TensorInfo
from polylane.graph.partition import Partition, StageCrossing
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.plan.lanes import replica_lanes_of, stage_graph_of
from polylane.plan.order import check_order_runs
from polylane.plan.plan import Plan
from polylane.program.late_sends import defer_sends
from polylane.program.program import GradientBucket, Program
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.asynchronous import steady_step
from polylane.schedule.round_robin import renumber
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

Partials = Sequence[Mapping[str, Collection[str]]]

# Gradients are flattened into buckets up to this size; larger ones have a bucket alone, and are not copied. gloo's
# all-reduce costs its latency (half a millisecond and more) up to about 1 MB, and its bytes above that.
BUCKET_BYTES = 4 << 20


def lower(
    partition: Partition,
    plan: Plan,
    holders: Mapping[str, Collection[int]] | None = None,
    partial: Partials = (),
    only: Collection[int] | None = None,
) -> tuple[Program, ...]:
    """Lower a partition to every worker's program, by rank.

    A value is sent directly from the ranks that compute it to those of every stage that needs it; its gradient comes
    back the same way. Workers with several stages get it once, for the first of them that needs it, and what stays on a
    worker is not sent. On each directed pair of ranks, sends and receives are in the same order, and there is an order
    of all actions that every program and every wait for a message agrees with.

    Args:
        partition: the graph and its cuts into stages.
        plan: what runs where, in which order.
        holders: stages that must keep a parameter up to date although they do not use it here (another objective of the
            same training does); of several stages on the same workers the first.
        partial: for every stage, parameter -> the operator axes along which every rank has only a partial sum of its
            gradient.
        only: ranks whose programs are wanted; default: all. One of each stage is enough to know a plan's time.
    """
    lanes = _lanes_of_step(plan, stage_graph_of(partition, plan))
    targets = frozenset(range(plan.workers) if only is None else only)
    summed = build_buckets(partition, plan, holders or {}, partial or ({},) * plan.pipeline, targets)
    programs = tuple(_assemble_program(partition, plan, lanes, summed, rank) for rank in sorted(targets))
    if only is not None:
        return programs
    if plan.is_asynchronous:
        # Its programs run beside those of earlier steps; in its one order nobody needs to wait later than usual.
        return programs
    # Workers with one stage need messages in the order in which they are sent.
    return defer_sends(order_receives(programs) if plan.most_chunks > 1 else programs)


def _lanes_of_step(plan: Plan, graph: StageGraph) -> tuple[Lanes, ...]:
    """Return what each group of workers does in a step: its passes, and in asynchronous pipelines its updates.

    Of every group there is a lane for each of its replicas; one for all of them where they do the same.
    """
    if plan.is_asynchronous:
        turns = range(plan.data if plan.takes_turns else 1)
        return tuple(
            tuple(renumber(lane, turn, len(turns)) for turn in turns) for lane in steady_step(graph, plan.most_turns)
        )
    lanes = replica_lanes_of(plan, graph)
    if plan.order:
        # Another objective of the training, or its evaluation, may have stages wait for each other in other ways.
        try:
            check_order_runs(plan.order, graph)
        except PolylaneError as error:
            raise PolylaneError(f"{plan.title}: {error}") from None
    return lanes


def _assemble_program(
    partition: Partition, plan: Plan, lanes: Sequence[Lanes], summed: Sequence[GradientBucket], rank: int
) -> Program:
    """Assemble a worker's program: passes with their messages, then gradient sums, then the optimizer step.

    Args:
        partition: the graph and its cuts into the plan's stages.
        plan: what runs where, for meshes and ranks.
        lanes: for every group of workers, the passes of its replicas in order; one lane if all do the same.
        summed: gradient buckets of all ranks, in the order of reduction.
        rank: rank of the worker whose program it is.
    """
    stage, replica = plan.stage_and_replica(rank)
    own_stages = plan.chunks(stage)
    sources = find_local_sources(partition, own_stages)
    receives = {
        s: [c for c in partition.crossings if s in c.consumers and (c.value, s) not in sources] for s in own_stages
    }
    sent = [message for c in partition.crossings if c.producer in own_stages and (message := crossing_as_sent(c, plan))]
    sends = {s: [c for c in sent if c.producer == s] for s in own_stages}
    buckets = tuple(bucket for bucket in summed if rank in bucket.ranks)
    # All reduces come behind the passes here. The runtime starts each one as soon as its gradients are complete,
    # during the last backward pass; a REDUCE action waits for the result. In an asynchronous pipeline every update
    # comes with its reduces behind the batch's last backward pass.
    update = [
        *(Action(ActionKind.REDUCE, stage, value=bucket.name) for bucket in buckets if len(bucket.ranks) > 1),
        Action(ActionKind.STEP, stage),
    ]
    # Which replica of another stage has a microbatch depends on its number only where replicas take turns.
    all_peers = [] if plan.takes_turns else [plan.peers(rank, number) for number in range(partition.stages)]
    actions, of_replicas = list[Action](), lanes[plan.stage_groups[stage]]
    for action in of_replicas[replica % len(of_replicas)]:
        if action.kind is ActionKind.STEP:
            actions += [replace(update_action, steps_back=action.steps_back) for update_action in update]
        else:
            peers = all_peers or [plan.peers(rank, number, action.microbatch) for number in range(partition.stages)]
            actions += add_messages(action, peers, receives[action.stage], sends[action.stage])
    return Program(
        rank=rank,
        stage=stage,
        replica=replica,
        replicas=plan.group(rank, ("data",)),
        actions=tuple(actions if plan.is_asynchronous else [*actions, *update]),
        stages=own_stages,
        local_sources=sources,
        buckets=buckets,
        partition=partition,
        coordinates=plan.coordinates(rank),
        microbatches=plan.microbatches,
        takes_turns=plan.takes_turns,
    )


def find_local_sources(partition: Partition, stages: Sequence[int]) -> dict[tuple[str, int], int]:
    """Return the values that stages of one worker get from another stage of it, by (value, stage) that reads it.

    It is the stage that computes the value; else the first stage that reads it, which receives it for all of them.
    """
    sources = dict[tuple[str, int], int]()
    for crossing in partition.crossings:
        readers = [stage for stage in crossing.consumers if stage in stages]
        source = crossing.producer if crossing.producer in stages else min(readers, default=-1)
        sources |= {(crossing.value, stage): source for stage in readers if stage != source}
    return sources


def crossing_as_sent(crossing: StageCrossing, plan: Plan) -> StageCrossing | None:
    """Return a crossing with, of every other group of workers, the first stage that reads it; None: no other does.

    The consumers are ascending, so that the first one of a group receives it (:func:`find_local_sources`).
    """
    first_readers = dict[int, int]()
    for consumer in crossing.consumers:
        first_readers.setdefault(plan.first_chunk(consumer), consumer)
    first_readers.pop(plan.first_chunk(crossing.producer), None)
    return replace(crossing, consumers=tuple(first_readers.values())) if first_readers else None


def order_receives(programs: Sequence[Program]) -> tuple[Program, ...]:
    """Return the programs with receives in the order in which their messages are sent, on each pair of ranks.

    Messages between two ranks are matched by their order. Where a worker has several stages it may need a later message
    first: the receives before it then come before it too. That costs no time, since they were sent earlier.
    """
    sent: dict[tuple[int, int], list[Action]] = {}
    for program in programs:
        for action in program.actions:
            if action.kind is ActionKind.SEND and action.peer is not None:
                sent.setdefault((program.rank, action.peer), []).append(action)
    return tuple(_order_receives_of(program, sent) for program in programs)


def _order_receives_of(program: Program, sent: Mapping[tuple[int, int], Sequence[Action]]) -> Program:
    # A receive and its send agree in these; the stages differ.
    def message(action: Action) -> tuple[object, ...]:
        return action.value, action.microbatch, action.gradient

    receives = {(a.peer, *message(a)): a for a in program.actions if a.kind is ActionKind.RECEIVE}
    queues = {
        peer: deque(receives[peer, *message(action)] for action in sent.get((peer, program.rank), ()))
        for peer in {a.peer for a in receives.values()}
        if peer is not None
    }
    ordered, placed_actions = list[Action](), set[Action]()
    for action in program.actions:
        if action.kind is not ActionKind.RECEIVE or action.peer is None:
            ordered.append(action)
            continue
        while action not in placed_actions:
            ordered.append(queues[action.peer].popleft())
            placed_actions.add(ordered[-1])
    return replace(program, actions=tuple(ordered))


def lower_evaluation(partition: Partition, plan: Plan) -> tuple[Program, ...]:
    """Lower a partition to every worker's program for evaluation: forward passes and their messages only."""
    programs = []
    for program in lower(partition, plan):
        actions = tuple(
            a for a in program.actions if a.kind is ActionKind.FORWARD or (a.kind in _TRAVEL and not a.gradient)
        )
        programs.append(replace(program, actions=actions, buckets=(), late_sends={}))
    return tuple(programs)


_TRAVEL = (ActionKind.SEND, ActionKind.RECEIVE)


def without_replica_sync(program: Program, plan: Plan) -> Program:
    """Return the program without the gradient sums between replicas, for local SGD and parameter servers.

    Ranks of one replica still sum: those along operator axes, and those of stages that hold the same (tied) weights.
    """
    groups = {bucket.ranks for bucket in program.buckets}  # few groups, each shared by many buckets
    within = {ranks: tuple(r for r in ranks if plan.stage_and_replica(r)[1] == program.replica) for ranks in groups}
    buckets = tuple(replace(bucket, ranks=within[bucket.ranks]) for bucket in program.buckets)
    summed = {bucket.name for bucket in buckets if len(bucket.ranks) > 1}
    actions = tuple(a for a in program.actions if a.kind is not ActionKind.REDUCE or a.value in summed)
    return replace(program, actions=actions, buckets=buckets)


def add_messages(
    action: Action, peers: Sequence[Sequence[int]], receives: Sequence[StageCrossing], sends: Sequence[StageCrossing]
) -> list[Action]:
    """Put a compute action between the receives that it needs and the sends that follow; ``peers``: ranks by stage."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind is ActionKind.BACKWARD_WEIGHT:
        return [action]

    def travel(kind: ActionKind, crossing: StageCrossing, stages: Sequence[int], gradient: bool) -> list[Action]:
        back = action.steps_back
        ranks = (p for end_stage in stages for p in peers[end_stage])
        return [Action(kind, stage, microbatch, crossing.value, p, gradient, back) for p in ranks]

    if action.kind is ActionKind.FORWARD:
        arrivals = [a for c in receives for a in travel(ActionKind.RECEIVE, c, [c.producer], False)]
        departures = [a for c in sends for a in travel(ActionKind.SEND, c, c.consumers, False)]
    else:
        arrivals = [a for c in sends if c.requires_grad for a in travel(ActionKind.RECEIVE, c, c.consumers, True)]
        departures = [a for c in receives if c.requires_grad for a in travel(ActionKind.SEND, c, [c.producer], True)]
    return [*arrivals, action, *departures]


def build_buckets(
    partition: Partition,
    plan: Plan,
    other_holders: Mapping[str, Collection[int]],
    partial: Partials,
    targets: frozenset[int],
) -> tuple[GradientBucket, ...]:
    """Group gradients into buckets by the ranks that sum them, in reverse order of first use.

    A backward pass finishes gradients in about this order. All ranks have their buckets in one global order: by stages,
    then by axes. So no two ranks ever wait for each other in two groups that overlap.

    Args:
        partition: the graph and its cuts into stages.
        plan: the plan, for meshes and ranks.
        other_holders: by parameter, further stages that keep it up to date though they do not use it in this graph.
        partial: for every stage, parameter -> the axes along which ranks have partial sums of its gradient.
        targets: ranks whose programs are wanted; groups without any of them are left out.
    """
    graph = partition.graph
    # A parameter that the loss does not depend on gets no gradient, and must not get zeros by a sum.
    trained, sparse = differentiable_parameters(graph), frozenset(find_sparse_gradients(graph))
    stage_parameters = [set(partition.parameters(stage)) for stage in range(plan.pipeline)]
    workers = plan.first_chunks
    order = {name: i for i, name in reversed(list(enumerate(p for node in graph.nodes for p in node.parameters)))}
    # Parameters that the same stages sum along the same axes may share a bucket. Those of one group of workers are
    # further divided by the stages that use them: their gradients are complete at different times.
    classes: dict[tuple[tuple[int, ...], tuple[tuple[str, ...], ...], tuple[int, ...]], list[str]] = {}
    for name in sorted(order, key=order.__getitem__, reverse=True):
        if name in trained:
            using = [stage for stage in range(plan.pipeline) if name in stage_parameters[stage]]
            first_chunks = {*map(plan.first_chunk, using), *other_holders.get(name, ())}
            holders = tuple(stage for stage in workers if stage in first_chunks)
            axes = tuple(tuple(a for a in plan.axes_of(s) if a in partial[s].get(name, ())) for s in holders)
            alone = tuple(using or holders) if len(holders) == 1 else ()
            classes.setdefault((holders, axes, alone), []).append(name)
    buckets = list[GradientBucket]()
    # Parameters of one stage first, tied ones last: the sum of a tied one waits for the slowest of its stages. Of a
    # worker's stages the last one first, whose backward passes end first.
    for holders, axes, alone in sorted(classes, key=lambda key: (len(key[0]), key[0], [-s for s in key[2]], key[1])):
        label = f"stage{'-'.join(map(str, alone))}" if alone else "tied" + "-".join(map(str, holders))
        groups, silent = _reduction_groups(plan, holders, axes, targets)
        for number, names in enumerate(fill_buckets(graph.parameters, classes[holders, axes, alone], sparse)):
            name = ".".join([label, *dict.fromkeys(a for stage_axes in axes for a in stage_axes), str(number)])
            buckets += [GradientBucket(name, ranks, names, silent, names[0] in sparse) for ranks in groups]
    return tuple(buckets)


def _reduction_groups(
    plan: Plan, stages: Sequence[int], axes: Sequence[Collection[str]], targets: Collection[int]
) -> tuple[list[tuple[int, ...]], frozenset[int]]:
    """Return the groups of ranks that sum gradients of these stages, and the ranks that must contribute zeros.

    On stages with the same mesh a group are the ranks that differ only in replica, stage and indices on ``axes``. With
    different meshes it is all ranks: several of them then have the same gradient, and all but one of these add zeros.
    Groups without any wanted rank are left out.
    """
    if len(stages) == 1:
        return _stage_groups(plan, stages[0], axes[0], targets), frozenset()
    groups: dict[tuple[int, ...], list[int]] = {}
    silent: set[int] = set()
    aligned = all(plan.have_same_mesh(stages[0], stage) for stage in stages)
    for stage, summed in zip(stages, axes, strict=True):
        for rank in plan.stages[stage].devices:
            at = plan.coordinates(rank)
            key = tuple(index for axis, index in at.items() if axis not in summed)  # axes along which it is replicated
            groups.setdefault(key if aligned else (), []).append(rank)
            if not aligned and any(key):
                silent.add(rank)
    rank_groups = [tuple(sorted(ranks)) for ranks in groups.values()]
    return [ranks for ranks in rank_groups if any(rank in targets for rank in ranks)], frozenset(silent)


def possible_groups(plan: Plan, stages: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all groups that may sum the gradient of a parameter of these stages, along whichever axes it is partial.

    Which of them a later graph needs, its layout says: a layer that no batch has used yet, or one that is frozen now.
    """
    groups = set[tuple[int, ...]]()
    for axes in chain.from_iterable(combinations(plan.axes, count) for count in range(len(plan.axes) + 1)):
        summed = [tuple(axis for axis in axes if axis in plan.axes_of(stage)) for stage in stages]
        groups.update(_reduction_groups(plan, stages, summed, range(plan.workers))[0])
    return groups


def _stage_groups(plan: Plan, stage: int, axes: Collection[str], targets: Collection[int]) -> list[tuple[int, ...]]:
    """Return the groups of one stage with a wanted rank: of thousands of ranks only a few may be wanted."""
    groups, grouped_ranks = list[tuple[int, ...]](), set[int]()
    for rank in plan.stages[stage].devices:
        if rank in targets and rank not in grouped_ranks:
            groups.append(plan.group(rank, ("data", *axes)))
            grouped_ranks.update(groups[-1])
    return groups


def differentiable_parameters(graph: Graph) -> set[str]:
    """Return the trainable parameters that the loss depends on through differentiable operators.

    The others (behind a ``detach``, for example) have no gradient on one device and must not get zeros here: weight
    decay and momentum would change them.
    """
    read = {name for node in graph.nodes for name in node.inputs}
    reached = {node.name for node in graph.nodes if node.name not in read}
    parameters: set[str] = set()
    for node in reversed(graph.nodes):
        if node.name in reached and node.requires_grad:
            reached.update(node.inputs)
            parameters.update(node.parameters)
    return {name for name in parameters if graph.parameters[name].trainable}


def fill_buckets(
    parameters: Mapping[str, TensorInfo], names: Sequence[str], sparse: Collection[str] = ()
) -> list[tuple[str, ...]]:
    """Fill buckets with names in order: each of one dtype, and at most :data:`BUCKET_BYTES` unless it has one name.

    Args:
        parameters: sizes and dtypes by name.
        names: names of parameters, in the order of their gradients.
        sparse: names of parameters with sparse gradients, each of which has a bucket of its own.
    """
    groups: list[list[str]] = []
    size, kind = 0, ""
    for name in names:
        nbytes, new_kind = parameters[name].bytes, name if name in sparse else parameters[name].dtype
        # Gradients of a bucket are sent as one tensor, which has one dtype; a sparse one has no place in it.
        if not groups or size + nbytes > BUCKET_BYTES or new_kind != kind:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size, kind = size + nbytes, new_kind
    return [tuple(group) for group in groups]
