"""Schedule as simulator input: its forward and backward passes with durations, and the messages between lanes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from polylane.cost.simulator.longest_path import longest_path
from polylane.cost.simulator.matching import Role, ScheduledTask, Transmission
from polylane.cost.simulator.task import Task, TransferTime, describe_action
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import PASSES, Action, ActionKind
from polylane.schedule.stage_graph import StageGraph


def simulate_schedule(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    hop: float = 0,
    graph: StageGraph | None = None,
) -> Timeline:
    """Simulate the passes of a schedule, each as early as the passes that it reads from allow.

    Args:
        lanes: ``lanes[s]`` has the forward and backward passes of stage s in order. If the graph has more stages than
            there are lanes, a lane has those of all the virtual stages of one rank, in any order.
        forward: duration of one forward pass, one number for all stages or one for each.
        backward: duration of one backward pass, one number for all stages or one for each.
        hop: latency in ticks of a value between two lanes, overlapped with computation.
        graph: which stages feed which; default: a chain of one stage per lane.

    Returns:
        The timeline in ticks, without messages; rank = lane. Integers stay integers.

    Raises:
        ValueError: durations are negative or not one per stage; an action is in another stage's lane, repeated, no
            pass, or before one in its own lane that it needs; or a deadlock, with the pass that can never run.
    """
    if not lanes:
        return Timeline((), ranks=0, unit="ticks")
    graph = StageGraph.chain(len(lanes)) if graph is None else graph
    lane_of = _lanes_of_stages(lanes, graph)
    passes = _SchedulePasses(graph, lane_of, forward, backward, hop)
    spans: list[list[Span]] = [[] for _ in lanes]
    longest_path(passes.run(lane, actions, spans[lane]) for lane, actions in enumerate(lanes))
    _check_all_ran(lanes, spans, graph)
    return Timeline(tuple(span for lane in spans for span in lane), ranks=len(lanes), unit="ticks")


class _SchedulePasses:
    """The passes of a schedule as tasks of the simulator, made one by one, since a long schedule has many of them.

    Args:
        graph: which stages feed which.
        lane_of: the lane of each stage.
        forward, backward, hop: ticks, as of :func:`simulate_schedule`.
    """

    def __init__(
        self,
        graph: StageGraph,
        lane_of: dict[int, int],
        forward: float | Sequence[float],
        backward: float | Sequence[float],
        hop: float,
    ) -> None:
        self._graph, self._lane_of = graph, lane_of
        self._ticks = {
            ActionKind.FORWARD: _per_stage("forward", forward, graph.stages),
            ActionKind.BACKWARD: _per_stage("backward", backward, graph.stages),
        }
        self._hop = TransferTime(latency=_per_stage("hop", [hop], 1)[0])
        # Messages that so far only one of their two passes has asked for, by what sends them and the stage they go to.
        self._open: dict[tuple[ActionKind, int, int | None, int], Transmission] = {}

    def run(self, lane: int, actions: Sequence[Action], done: list[Span]) -> Iterator[ScheduledTask]:
        """Yield the passes of a lane; once one has been run, its span is appended to ``done``."""
        for action in actions:
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            sources, targets = _neighbours(action, self._graph)
            task = ScheduledTask(Task(action, self._ticks[kind][stage]), Role.COMPUTE)
            task.awaited = tuple(
                self._message((kind, other, microbatch, stage), action, lane)
                for other in sources
                if self._lane_of.get(other) != lane
            )
            task.released = tuple(
                (1, self._message((kind, stage, microbatch, other), action, lane))
                for other in targets
                if self._lane_of.get(other) != lane
            )
            yield task
            assert task.start is not None and task.end is not None  # the simulator takes the next pass after this one
            done.append(Span(lane, action, task.start, task.end))

    def _message(self, key: tuple[ActionKind, int, int | None, int], action: Action, lane: int) -> Transmission:
        found = self._open.pop(key, None)
        if found is None:
            found = self._open[key] = Transmission(action, self._hop, (lane,), key, missing_count=1)
        return found


def _neighbours(action: Action, graph: StageGraph) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the stages whose passes of the same kind a pass reads from, and those that read from it."""
    before, after = graph.predecessors[action.stage], graph.successors[action.stage]
    return (before, after) if action.kind is ActionKind.FORWARD else (after, before)


def _check_all_ran(lanes: Sequence[Sequence[Action]], spans: Sequence[Sequence[Span]], graph: StageGraph) -> None:
    """Check that no lane is blocked for ever.

    Raises:
        ValueError: a pass waits for one in another lane that is not there, or is itself blocked.
    """
    blocked = [(number, lane[len(done)]) for number, lane in enumerate(lanes) if len(done := spans[number]) < len(lane)]
    if not blocked:
        return
    number, action = blocked[0]
    ran = {span.action for lane in spans for span in lane}
    needs = [Action(action.kind, stage, action.microbatch) for stage in _neighbours(action, graph)[0]]
    missing = next(need for need in needs if need not in ran)
    why = "is itself blocked" if any(missing in lane for lane in lanes) else "no lane has"
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
            if action.kind not in PASSES or action.microbatch is None:
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
    seen: set[tuple[ActionKind, int, int | None]] = set()
    for action in lane:
        needs = [(action.kind, other) for other in _neighbours(action, graph)[0]]
        needs += [(ActionKind.FORWARD, action.stage)] if action.kind is ActionKind.BACKWARD else []
        for kind, stage in needs:
            if lane_of.get(stage, number) == number and (kind, stage, action.microbatch) not in seen:
                needed = describe_action(Action(kind, stage, action.microbatch))
                raise ValueError(
                    f"deadlock: {describe_action(action)} waits for {needed}, which does not come before it"
                )
        if (action.kind, action.stage, action.microbatch) in seen:
            raise ValueError(f"lane {number} holds {describe_action(action)} twice")
        seen.add((action.kind, action.stage, action.microbatch))


def _per_stage(name: str, ticks: float | Sequence[float], stages: int) -> list[float]:
    """Return a duration for each stage, given one number for all or one for each."""
    each = list(ticks) if isinstance(ticks, Sequence) else [ticks] * stages
    if len(each) != stages:
        raise ValueError(f"{name} names {len(each)} durations for {stages} stages: give one number, or one per stage")
    for value in each:
        if not 0 <= value < math.inf:
            raise ValueError(f"{name} must be a duration of at least 0 ticks, not {value}")
    return each
