"""Schedule as simulator input: its forward and backward passes with durations, and the messages between lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from polylane.cost.simulator.longest_path import longest_path
from polylane.cost.simulator.matching import Role, ScheduledTask, Transmission
from polylane.cost.simulator.task import Task, TransferTime, describe_action
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import PASSES, Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes


def simulate_schedule(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    hop: float | Mapping[tuple[int, int], float] = 0,
    graph: StageGraph | None = None,
    weight: float | Sequence[float] | None = None,
    halving: float | Sequence[float] = 0,
) -> Timeline:
    """Simulate the passes of a schedule, each as early as the passes that it reads from allow.

    Args:
        lanes: ``lanes[s]`` has the forward and backward passes of stage s in order; an update of its weights after a
            microbatch's backward is a step of that microbatch, which takes no time. If the graph has more stages than
            there are lanes, a lane has those of all the virtual stages of one rank, in any order.
        forward: duration of one forward pass, one number for all stages or one for each.
        backward: duration of one whole backward pass, one number for all stages or one for each.
        hop: latency in ticks of a value, or its gradient, between two lanes, overlapped with computation: one number
            for all, or one for each pair (producer, consumer) of stages.
        graph: which stages feed which; default: a chain of one stage per lane.
        weight: the part of ``backward`` that its weight half takes where a schedule has it in two halves; default: one
            half of it. The input half takes the rest.
        halving: what a backward pass takes longer in two halves, as a part of the whole pass: one number for all stages
            or one for each. The weight half takes it.

    Returns:
        The timeline in ticks, without messages; rank = lane. Integers stay integers, but for halves of odd ones.

    Raises:
        ValueError: durations are negative or not one per stage, or a weight half is longer than its pass; an action is
            in another stage's lane, repeated, no pass, or before one in its own lane that it needs; or a deadlock, with
            the pass that can never run.
    """
    if not lanes:
        return Timeline((), ranks=0, unit="ticks")
    graph = StageGraph.chain(len(lanes)) if graph is None else graph
    lane_of = _lanes_of_stages(lanes, graph)
    passes = _SchedulePasses(graph, lane_of, pass_ticks(graph.stages, forward, backward, weight, halving), hop)
    spans: list[list[Span]] = [[] for _ in lanes]
    longest_path(passes.run(lane, actions, spans[lane]) for lane, actions in enumerate(lanes))
    _check_all_ran(lanes, spans, graph)
    return Timeline(tuple(span for lane in spans for span in lane), ranks=len(lanes), unit="ticks")


def simulate_replicas(
    lanes: Sequence[Lanes],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    graph: StageGraph,
    weight: float | Sequence[float] | None = None,
    hop: float = 0,
    halving: float | Sequence[float] = 0,
) -> Timeline:
    """Simulate the passes of replicas that compute whole microbatches in turn; sums of gradients take no time.

    Args:
        lanes: for every group of workers, the passes of each of its replicas; one stage for each group where groups
            have different numbers of replicas.
        forward, backward, graph, weight, hop, halving: as of :func:`simulate_schedule`, by stage.

    Returns:
        The timeline; ranks number the replicas of the first group, then those of the second, and so on.
    """
    counts = [len(of_replicas) for of_replicas in lanes]
    if len(set(counts)) == 1:
        # Replicas with the same number are a pipeline of their own.
        spans = list[Span]()
        for replica in range(counts[0]):
            pipeline = [group[replica] for group in lanes]
            played = simulate_schedule(pipeline, forward, backward, hop, graph, weight, halving)
            spans += [replace(span, rank=span.rank * counts[0] + replica) for span in played.spans]
        return replace(played, spans=tuple(spans), ranks=sum(counts))
    all_lanes = [lane for of_replicas in lanes for lane in of_replicas]
    # No two stages share a lane, so that every value is a message.
    passes = _SchedulePasses(graph, {}, pass_ticks(graph.stages, forward, backward, weight, halving), hop)
    lane_spans: list[list[Span]] = [[] for _ in all_lanes]
    longest_path(passes.run(number, lane, lane_spans[number]) for number, lane in enumerate(all_lanes))
    return Timeline(tuple(span for of_lane in lane_spans for span in of_lane), ranks=len(all_lanes), unit="ticks")


class _SchedulePasses:
    """The passes of a schedule as tasks of the simulator, made one by one, since a long schedule has many of them.

    Args:
        graph: which stages feed which.
        lane_of: the lane of each stage.
        ticks: duration of each kind of pass on every stage, as of :func:`pass_ticks`.
        hop: latency in ticks of a value between two lanes, as of :func:`simulate_schedule`.
    """

    def __init__(
        self,
        graph: StageGraph,
        lane_of: dict[int, int],
        ticks: dict[ActionKind, list[float]],
        hop: float | Mapping[tuple[int, int], float],
    ) -> None:
        self._graph, self._lane_of, self._ticks = graph, lane_of, ticks
        edges = [(source, stage) for stage, sources in enumerate(graph.predecessors) for source in sources]
        ticks_of = [hop[edge] for edge in edges] if isinstance(hop, Mapping) else [hop] * len(edges)
        # One more, so that a wrong number is refused where there is no edge, too.
        _per_stage("hop", [*ticks_of, 0 if isinstance(hop, Mapping) else hop], len(edges) + 1)
        self._hops = {edge: TransferTime(latency=ticks) for edge, ticks in zip(edges, ticks_of, strict=True)}
        # Messages that so far only one of their two passes has asked for, by what sends them and the stage they go to.
        self._open: dict[tuple[bool, int, int | None, int], Transmission] = {}

    def run(self, lane: int, actions: Sequence[Action], spans: list[Span]) -> Iterator[ScheduledTask]:
        """Yield the passes of a lane; once one has been run, its span is appended to ``spans``."""
        for action in actions:
            stage, microbatch, back = action.stage, action.microbatch, action.kind is not ActionKind.FORWARD
            sources, targets = _neighbours(action, self._graph)
            task = ScheduledTask(Task(action, self._ticks[action.kind][stage]), Role.COMPUTE)
            task.awaited = tuple(
                self._message((back, source, microbatch, stage), action, lane)
                for source in sources
                if self._lane_of.get(source) != lane
            )
            task.released = tuple(
                (1, self._message((back, stage, microbatch, target), action, lane))
                for target in targets
                if self._lane_of.get(target) != lane
            )
            yield task
            assert task.start is not None and task.end is not None  # the simulator takes the next pass after this one
            spans.append(Span(lane, action, task.start, task.end))

    def _message(self, key: tuple[bool, int, int | None, int], action: Action, lane: int) -> Transmission:
        message = self._open.pop(key, None)
        if message is None:
            back, source, _, target = key
            hop = self._hops[(target, source) if back else (source, target)]
            message = self._open[key] = Transmission(action, hop, (lane,), key, missing_count=1)
        return message


def pass_ticks(
    stages: int,
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    weight: float | Sequence[float] | None = None,
    halving: float | Sequence[float] = 0,
) -> dict[ActionKind, list[float]]:
    """Return the duration of each kind of pass on every stage.

    Args:
        stages: number of stages in the graph.
        forward, backward, weight, halving: ticks, and a part of them, as of :func:`simulate_schedule`.

    Raises:
        ValueError: durations are negative or not one per stage, or a weight half is longer than its whole pass.
    """
    totals = _per_stage("backward", backward, stages)
    # Halves of even numbers stay whole, so that pictures keep a cell for every tick.
    halves = [ticks // 2 if isinstance(ticks, int) and ticks % 2 == 0 else ticks / 2 for ticks in totals]
    second = halves if weight is None else _per_stage("weight", weight, stages)
    for stage, (part, total) in enumerate(zip(second, totals, strict=True)):
        if part > total:
            raise ValueError(f"the weight half of stage {stage} takes {part} ticks, its whole backward only {total}")
    longer = _per_stage("halving", halving, stages, "a part of at least 0")
    late = [part + extra * total if extra else part for part, extra, total in zip(second, longer, totals, strict=True)]
    return {
        ActionKind.FORWARD: _per_stage("forward", forward, stages),
        ActionKind.BACKWARD: totals,
        ActionKind.BACKWARD_INPUT: [total - part for part, total in zip(second, totals, strict=True)],
        ActionKind.BACKWARD_WEIGHT: late,
        ActionKind.STEP: [0] * stages,
    }


def _neighbours(action: Action, graph: StageGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the stages whose passes a pass reads from, and those that read from it: of values, or of gradients."""
    if action.kind in (ActionKind.BACKWARD_WEIGHT, ActionKind.STEP):
        return (), ()  # gradients of parameters stay on their stage
    predecessors, successors = graph.predecessors[action.stage], graph.successors[action.stage]
    return (predecessors, successors) if action.kind is ActionKind.FORWARD else (successors, predecessors)


def _needs(action: Action, graph: StageGraph) -> Iterator[tuple[tuple[ActionKind, ...], int]]:
    """Yield what a pass needs for its microbatch: a stage, and the kinds of pass of which it must have run one."""
    for stage in _neighbours(action, graph)[0]:
        # A neighbour's gradient comes from its backward pass, or from the first half of it.
        yield (_GIVE_VALUES if action.kind is ActionKind.FORWARD else _GIVE_GRADIENTS), stage
    if action.kind is not ActionKind.FORWARD:
        yield _BEFORE[action.kind], action.stage


_GIVE_VALUES = (ActionKind.FORWARD,)
_GIVE_GRADIENTS = (ActionKind.BACKWARD, ActionKind.BACKWARD_INPUT)
# What a stage itself must have run before.
_BEFORE = {
    ActionKind.BACKWARD: (ActionKind.FORWARD,),
    ActionKind.BACKWARD_INPUT: (ActionKind.FORWARD,),
    ActionKind.BACKWARD_WEIGHT: (ActionKind.BACKWARD_INPUT,),
    ActionKind.STEP: (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT),
}


def _check_all_ran(lanes: Sequence[Sequence[Action]], spans: Sequence[Sequence[Span]], graph: StageGraph) -> None:
    """Check that no lane is blocked for ever.

    Raises:
        ValueError: a pass waits for one in another lane that is not there, or is itself blocked.
    """
    blocked = [(number, lane[len(past)]) for number, lane in enumerate(lanes) if len(past := spans[number]) < len(lane)]
    if not blocked:
        return
    number, action = blocked[0]
    ran = {span.action for lane in spans for span in lane}
    either = next(
        alternatives
        for kinds, stage in _needs(action, graph)
        if not ran.intersection(alternatives := [Action(kind, stage, action.microbatch) for kind in kinds])
    )
    present_needs = [need for need in either if any(need in lane for lane in lanes)]
    missing, why = (present_needs[0], "is itself blocked") if present_needs else (either[0], "no lane has")
    raise ValueError(
        f"deadlock: {describe_action(action)} in lane {number} waits for {describe_action(missing)}, which {why}"
    )


def _lanes_of_stages(lanes: Sequence[Sequence[Action]], graph: StageGraph) -> dict[int, int]:
    """Return the lane of each stage: its own number, or for virtual stages the lane that has its actions.

    Virtual stages without any action are left out.
    """
    if graph.stages < len(lanes):
        raise ValueError(f"the graph has {graph.stages} stages, there are {len(lanes)} lanes")
    virtual = graph.stages > len(lanes)
    lane_of = {} if virtual else {stage: stage for stage in range(graph.stages)}
    for number, lane in enumerate(lanes):
        for action in lane:
            if action.kind not in PASSES | {ActionKind.STEP} or action.microbatch is None:
                raise ValueError(f"lanes hold forwards and backwards of a microbatch only, not {action}")
            if virtual and not 0 <= action.stage < graph.stages:
                raise ValueError(f"lane {number} holds {describe_action(action)}: there are {graph.stages} stages")
            if lane_of.setdefault(action.stage, number if virtual else action.stage) != number:
                raise ValueError(
                    f"lane {number} holds {describe_action(action)}: it belongs in lane {lane_of[action.stage]}"
                )
    for number, lane in enumerate(lanes):
        _check_order(lane, number, lane_of, graph)
    return lane_of


def _check_order(lane: Sequence[Action], number: int, lane_of: dict[int, int], graph: StageGraph) -> None:
    """Check that no action is repeated or precedes one in its own lane that it needs: no message orders these."""
    seen_passes: set[tuple[ActionKind, int, int | None]] = set()
    for action in lane:
        for kinds, stage in _needs(action, graph):
            is_own_lane = lane_of.get(stage, number) == number
            if is_own_lane and not any((kind, stage, action.microbatch) in seen_passes for kind in kinds):
                needs = [Action(kind, stage, action.microbatch) for kind in kinds]
                needed = describe_action(next((need for need in needs if need in lane), needs[0]))
                raise ValueError(
                    f"deadlock: {describe_action(action)} waits for {needed}, which does not come before it"
                )
        if (action.kind, action.stage, action.microbatch) in seen_passes:
            raise ValueError(f"lane {number} holds {describe_action(action)} twice")
        seen_passes.add((action.kind, action.stage, action.microbatch))


def _per_stage(
    name: str, ticks: float | Sequence[float], stages: int, requirement: str = "a duration of at least 0 ticks"
) -> list[float]:
    """Return a duration for each stage, given one number for all or one for each."""
    durations = list(ticks) if isinstance(ticks, Sequence) else [ticks] * stages
    if len(durations) != stages:
        raise ValueError(
            f"{name} names {len(durations)} durations for {stages} stages: give one number, or one per stage"
        )
    for value in durations:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be {requirement}, not {value}")
    return durations
