"""Schedule as simulator input: its forward and backward passes with durations, and the messages between lanes."""

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
    """Simulate the passes of a schedule; further arguments and errors as of :func:`scheduled`.

    Args:
        hop: latency in ticks of a value between two lanes, overlapped with computation.

    Returns:
        The timeline in ticks, without messages; rank = lane. Integers stay integers.
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
    """Return a schedule's passes as tasks, each after the receives that it needs and before the sends of its result.

    Args:
        lanes: ``lanes[s]`` has the forward and backward passes of stage s in order. If the graph has more stages than
            there are lanes, a lane has those of all the virtual stages of one rank, in any order.
        forward: duration of one forward pass, one number for all stages or one for each.
        backward: duration of one backward pass, one number for all stages or one for each.
        transfer: duration of a message between two lanes; within a lane there is none.
        graph: which stages feed which; default: a chain of one stage per lane.

    Returns:
        Tasks by lane; messages have their stage of origin as ``value`` ("stage0") and lanes as peers.

    Raises:
        ValueError: durations are negative or not one per stage; an action is in another stage's lane, repeated, no
            pass, or before one in its own lane that it needs.
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
    """Return the lane of each stage: its own number, or for virtual stages the lane that has its actions.

    Virtual stages without any action are left out.
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
    """Check that no action is repeated or precedes one in its own lane that it needs: no message orders these."""
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
    """Return a duration for each stage, given one number for all or one for each."""
    each = list(ticks) if isinstance(ticks, Sequence) else [ticks] * stages
    if len(each) != stages:
        raise ValueError(f"{name} names {len(each)} durations for {stages} stages: give one number, or one per stage")
    for value in each:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a duration of at least 0 ticks, not {value}")
    return each
