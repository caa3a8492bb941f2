"""Tasks of a schedule: its forwards and backwards with durations, and the messages between its lanes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import NOTHING, Task, TransferTime
from polylane.observe.timeline import Timeline
from polylane.schedule.action import PASSES, Action, ActionKind
from polylane.schedule.stage_graph import StageGraph

TaskLanes = tuple[tuple[Task, ...], ...]


def simulate_schedule(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    hop: float = 0,
    graph: StageGraph | None = None,
) -> Timeline:
    """The passes of a schedule in time, every lane in its order; arguments and errors as of :func:`scheduled`.

    Args:
        hop: ticks that a value travels from one lane to another, which keeps neither of them from computing.

    Returns:
        The timeline in ticks, without the messages; rank = lane. Whole numbers stay whole.
    """
    (hop,) = _per_stage("hop", [hop], 1)
    played = simulate_tasks(scheduled(lanes, forward, backward, TransferTime(latency=hop), graph))
    return replace(played, spans=tuple(span for span in played.spans if span.action.kind in PASSES), unit="ticks")


def scheduled(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    transfer: TransferTime = NOTHING,
    graph: StageGraph | None = None,
) -> TaskLanes:
    """A schedule's forwards and backwards, each between the receives it needs and the sends it makes possible.

    Args:
        lanes: ``lanes[s]`` holds the forwards and backwards of stage s, first to last. Where the graph has more stages
            than there are lanes, a lane holds those of all the (virtual) stages of one rank, in any mixture.
        forward: duration of one forward, the same on all stages or one number for each stage.
        backward: duration of one backward, likewise.
        transfer: how a value, or its gradient, moves from one lane to another; within a lane nothing moves.
        graph: which stages feed which; default: a chain of as many stages as lanes.

    Returns:
        Lanes whose messages carry their stage of origin as ``value`` ("stage0") and lanes as peers.

    Raises:
        ValueError: durations that are negative or do not fit the stages; an action in another stage's lane, twice, of
            another kind, or before one in its own lane that it needs.
    """
    if not lanes:
        return ()
    graph = StageGraph.chain(len(lanes)) if graph is None else graph
    lane_of = _lanes_of_stages(lanes, graph)
    seconds = {
        ActionKind.FORWARD: _per_stage("forward", forward, graph.stages),
        ActionKind.BACKWARD: _per_stage("backward", backward, graph.stages),
    }

    def tasks_of(action: Action, lane: int) -> Iterable[Task]:
        stage, microbatch, back = action.stage, action.microbatch, action.kind is ActionKind.BACKWARD
        sources, targets = (graph.successors, graph.predecessors) if back else (graph.predecessors, graph.successors)
        for other in sources[stage]:
            if lane_of.get(other) != lane:
                value = f"stage{stage if back else other}"
                receive = Action(ActionKind.RECEIVE, stage, microbatch, value, lane_of.get(other), back)
                yield Task(receive, key=(other, stage, microbatch))
        yield Task(action, seconds[action.kind][stage])
        for other in targets[stage]:
            if lane_of.get(other) != lane:
                value = f"stage{other if back else stage}"
                send = Action(ActionKind.SEND, stage, microbatch, value, lane_of.get(other), back)
                yield Task(send, key=(stage, other, microbatch), transfer=transfer)

    return tuple(
        tuple(task for action in actions for task in tasks_of(action, lane)) for lane, actions in enumerate(lanes)
    )


def _lanes_of_stages(lanes: Sequence[Sequence[Action]], graph: StageGraph) -> dict[int, int]:
    """Which lane has each stage: its own number, or, where there are more stages than lanes, where its actions are.

    A stage without any action may then be left out.
    """
    if graph.stages < len(lanes):
        raise ValueError(f"the graph has {graph.stages} stages, there are {len(lanes)} lanes")
    virtual = graph.stages > len(lanes)
    lane_of = {} if virtual else {stage: stage for stage in range(graph.stages)}
    for number, lane in enumerate(lanes):
        for action in lane:
            if action.kind not in PASSES or action.microbatch is None:
                raise ValueError(f"lanes hold forwards and backwards of a microbatch only, not {action}")
            if virtual and not 0 <= action.stage < graph.stages:
                raise ValueError(f"lane {number} holds {_name(action)}: there are {graph.stages} stages")
            if lane_of.setdefault(action.stage, number if virtual else action.stage) != number:
                raise ValueError(f"lane {number} holds {_name(action)}: it belongs in lane {lane_of[action.stage]}")
    for number, lane in enumerate(lanes):
        _check_order(lane, number, lane_of, graph)
    return lane_of


def _check_order(lane: Sequence[Action], number: int, lane_of: dict[int, int], graph: StageGraph) -> None:
    """Refuse an action that is twice in a lane, or before one that it needs: no message would hold it back there."""
    seen: set[tuple[ActionKind, int, int | None]] = set()
    for action in lane:
        forward, before = action.kind is ActionKind.FORWARD, graph.predecessors[action.stage]
        needs = [(action.kind, other) for other in (before if forward else graph.successors[action.stage])]
        needs += [] if forward else [(ActionKind.FORWARD, action.stage)]
        for kind, stage in needs:
            if lane_of.get(stage, number) == number and (kind, stage, action.microbatch) not in seen:
                needed = _name(Action(kind, stage, action.microbatch))
                raise ValueError(f"deadlock: {_name(action)} waits for {needed}, which does not come before it")
        if (action.kind, action.stage, action.microbatch) in seen:
            raise ValueError(f"lane {number} holds {_name(action)} twice")
        seen.add((action.kind, action.stage, action.microbatch))


def _name(action: Action) -> str:
    return f"the {action.kind} of microbatch {action.microbatch} on stage {action.stage}"


def _per_stage(name: str, ticks: float | Sequence[float], stages: int) -> list[float]:
    """A duration for each stage, of one number for all or one for each."""
    each = list(ticks) if isinstance(ticks, Sequence) else [ticks] * stages
    if len(each) != stages:
        raise ValueError(f"{name} names {len(each)} durations for {stages} stages: give one number, or one per stage")
    for value in each:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a duration of at least 0 ticks, not {value}")
    return each
