"""Play what every stage does, in order, over durations: who runs when, and for how long everybody waits."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, Kind
from polylane.schedule.stage_graph import StageGraph

_Step = tuple[Kind, int, int]  # kind, stage, microbatch: what another stage may wait for
_Needs = list[tuple[_Step, float]]  # what must have ended, and the ticks it then takes to arrive


def play(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    hop: float = 0,
    graph: StageGraph | None = None,
) -> Timeline:
    """Run each stage's lane in exactly its order, every action as early as its inputs allow.

    A forward waits for the forwards of the stages before, a backward for the stage's own forward and for the backwards
    of the stages after; what comes from another stage arrives ``hop`` ticks after it was computed, and travelling keeps
    no stage from computing. Whole numbers stay whole, so that theory can be checked exactly.

    Args:
        lanes: ``lanes[s]`` holds the forwards and backwards of stage s, first to last. Where the graph has more stages
            than there are lanes, a lane holds those of all the (virtual) stages of one rank, in any mixture.
        forward: ticks of one forward, the same on all stages or one number for each stage.
        backward: ticks of one backward, likewise.
        hop: ticks from one stage to the next, where that is in another lane.
        graph: which stages feed which; default: a chain of as many stages as lanes.

    Returns:
        The timeline in ticks; rank = lane.

    Raises:
        ValueError: durations that are negative or do not fit the stages; an action in another stage's lane, twice, or
            of another kind; or lanes that can never proceed, with the action that is blocked and what it waits for.
    """
    if not lanes:
        return Timeline((), ranks=0, unit="ticks")
    graph = StageGraph.chain(len(lanes)) if graph is None else graph
    lane_of = lanes_of_stages(lanes, graph)
    ticks = {
        Kind.FORWARD: per_stage("forward", forward, graph.stages),
        Kind.BACKWARD: per_stage("backward", backward, graph.stages),
    }
    (hop,) = per_stage("hop", [hop], 1)

    ended: dict[_Step, float] = {}
    spans: list[list[Span]] = [[] for _ in lanes]
    to_try = list(range(len(lanes)))
    while to_try:
        rank = to_try.pop()
        lane, done = lanes[rank], spans[rank]
        while len(done) < len(lane):
            action = lane[len(done)]
            needs = _needs(action, graph, hop, lane_of)
            if not all(step in ended for step, _ in needs):
                break  # the lane that ends the missing step tries this one again
            start = max((ended[step] + delay for step, delay in needs), default=0)
            start = max(start, done[-1].end if done else 0)
            end = start + ticks[action.kind][action.stage]
            done.append(Span(rank=rank, action=action, start=start, end=end))
            ended[_step(action)] = end
            others = (graph.after if action.kind is Kind.FORWARD else graph.before)[action.stage]
            to_try += [lane_of[other] for other in others if lane_of.get(other, rank) != rank]

    _check_all_ran(lanes, [len(done) for done in spans], ended, graph)
    return Timeline(tuple(span for lane_spans in spans for span in lane_spans), ranks=len(lanes), unit="ticks")


def lanes_of_stages(lanes: Sequence[Sequence[Action]], graph: StageGraph) -> dict[int, int]:
    """Which lane has each stage: its own number, or, where there are more stages than lanes, where its actions are.

    A stage without any action may then be left out.

    Raises:
        ValueError: more lanes than stages; an action that is twice there, or in another lane than it should be, or none
            of a pass.
    """
    if graph.stages < len(lanes):
        raise ValueError(f"the graph has {graph.stages} stages, there are {len(lanes)} lanes")
    virtual = graph.stages > len(lanes)
    lane_of = {} if virtual else {stage: stage for stage in range(graph.stages)}
    seen: set[_Step] = set()
    for number, lane in enumerate(lanes):
        for action in lane:
            if action.kind not in (Kind.FORWARD, Kind.BACKWARD) or action.microbatch is None:
                raise ValueError(f"lanes hold forwards and backwards of a microbatch only, not {action}")
            step = _step(action)
            if virtual and not 0 <= action.stage < graph.stages:
                raise ValueError(f"lane {number} holds {_name(step)}: there are {graph.stages} stages")
            if lane_of.setdefault(action.stage, number if virtual else action.stage) != number:
                raise ValueError(f"lane {number} holds {_name(step)}: it belongs in lane {lane_of[action.stage]}")
            if step in seen:
                raise ValueError(f"lane {number} holds {_name(step)} twice")
            seen.add(step)
    return lane_of


def _needs(action: Action, graph: StageGraph, hop: float, lane_of: Mapping[int, int]) -> _Needs:
    kind, stage, microbatch = _step(action)

    def delay(other: int) -> float:
        return 0 if lane_of.get(other) == lane_of[stage] else hop

    if kind is Kind.FORWARD:
        return [((kind, before, microbatch), delay(before)) for before in graph.before[stage]]
    own: _Needs = [((Kind.FORWARD, stage, microbatch), 0)]
    return [*own, *(((kind, after, microbatch), delay(after)) for after in graph.after[stage])]


def _step(action: Action) -> _Step:
    assert action.microbatch is not None  # _check has refused the others
    return action.kind, action.stage, action.microbatch


def _name(step: _Step) -> str:
    kind, stage, microbatch = step
    return f"the {kind} of microbatch {microbatch} on stage {stage}"


def per_stage(name: str, ticks: float | Sequence[float], stages: int) -> list[float]:
    """A duration for each stage, of one number for all or one for each.

    Raises:
        ValueError: another number of durations, or one that is negative or no number.
    """
    each = list(ticks) if isinstance(ticks, Sequence) else [ticks] * stages
    if len(each) != stages:
        raise ValueError(f"{name} names {len(each)} durations for {stages} stages: give one number, or one per stage")
    for value in each:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a duration of at least 0 ticks, not {value}")
    return each


def _check_all_ran(
    lanes: Sequence[Sequence[Action]], done: list[int], ended: dict[_Step, float], graph: StageGraph
) -> None:
    left = {_step(action) for lane, count in zip(lanes, done, strict=True) for action in lane[count:]}
    for lane, count in zip(lanes, done, strict=True):
        if count < len(lane):
            blocked = lane[count]
            missing = next(step for step, _ in _needs(blocked, graph, 0, {blocked.stage: 0}) if step not in ended)
            why = "is itself blocked, or comes later in its lane" if missing in left else "is in no lane"
            raise ValueError(f"deadlock: {_name(_step(blocked))} waits for {_name(missing)}, which {why}")
