"""Steps: lanes of tasks from the lanes of a schedule, for several steps, and at the speed that each worker has."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from polylane.cost.simulate import lanes_of_stages, per_stage
from polylane.cost.task import NOTHING, Task, Transfer
from polylane.schedule.action import Action, Kind
from polylane.schedule.stage_graph import StageGraph

TaskLanes = tuple[tuple[Task, ...], ...]


def scheduled(
    lanes: Sequence[Sequence[Action]],
    forward: float | Sequence[float],
    backward: float | Sequence[float],
    transfer: Transfer | Callable[[int, int], Transfer] = NOTHING,
    graph: StageGraph | None = None,
) -> TaskLanes:
    """A schedule's forwards and backwards, each between the receives it needs and the sends it makes possible.

    Args:
        lanes: as for `polylane.cost.simulate.play`, virtual stages included.
        forward: seconds of one forward, the same on all stages or one number for each stage.
        backward: seconds of one backward, likewise.
        transfer: how a value, or its gradient, moves from one stage to another (from, to). Between stages of the same
            lane nothing moves.
        graph: which stages feed which; default: a chain of as many stages as lanes.

    Returns:
        Lanes whose messages carry their stage of origin as ``value`` ("stage0") and lanes as peers.

    Raises:
        ValueError: lanes or durations that do not fit the stages.
    """
    if not lanes:
        return ()
    graph = StageGraph.chain(len(lanes)) if graph is None else graph
    lane_of = lanes_of_stages(lanes, graph)
    seconds = {
        Kind.FORWARD: per_stage("forward", forward, graph.stages),
        Kind.BACKWARD: per_stage("backward", backward, graph.stages),
    }
    moves = transfer if callable(transfer) else lambda start, end: transfer
    known = {
        (start, end): moves(start, end)
        for one, others in enumerate(graph.after)
        for other in others
        for start, end in ((one, other), (other, one))
        if lane_of.get(one) != lane_of.get(other)
    }

    def around(action: Action) -> Iterable[Task]:
        stage, microbatch, back = action.stage, action.microbatch, action.kind is Kind.BACKWARD
        sources, targets = (graph.after, graph.before) if back else (graph.before, graph.after)
        for other in sources[stage]:
            if (other, stage) in known:
                value = f"stage{stage if back else other}"
                receive = Action(Kind.RECEIVE, stage, microbatch, value, lane_of.get(other), back)
                yield Task(receive, key=(other, stage, microbatch))
        yield Task(action, seconds[action.kind][stage])
        for other in targets[stage]:
            if (stage, other) in known:
                value = f"stage{other if back else stage}"
                send = Action(Kind.SEND, stage, microbatch, value, lane_of.get(other), back)
                yield Task(send, key=(stage, other, microbatch), transfer=known[stage, other])

    return tuple(tuple(task for action in lane for task in around(action)) for lane in lanes)


def at_speeds(lanes: Sequence[Sequence[Task]], speeds: Sequence[float]) -> TaskLanes:
    """The same lanes on workers of these speeds: 0.8 takes 1/0.8 of the seconds, but for what is waited inside.

    Raises:
        ValueError: another number of speeds than of lanes, or a speed that is not above 0.
    """
    if len(speeds) != len(lanes):
        raise ValueError(f"{len(speeds)} speeds are given for {len(lanes)} lanes")
    for speed in speeds:
        if not speed > 0:
            raise ValueError(f"a speed must be more than 0, not {speed}")
    return tuple(
        tuple(lane)
        if speed == 1
        else tuple(replace(task, seconds=(task.seconds - task.waited) / speed + task.waited) for task in lane)
        for lane, speed in zip(lanes, speeds, strict=True)
    )


def repeat(
    lanes: Sequence[Sequence[Task]],
    steps: int,
    reduce_every: int = 1,
    skipped: Callable[[Task], bool] = lambda task: True,
) -> TaskLanes:
    """So many steps, one after another; no lane waits for another one but where its tasks do.

    Of two numbers of steps the difference in time, by that of the steps, is the time of a step in the long run.

    Args:
        lanes: the tasks of one step.
        steps: how many, at least 1.
        reduce_every: reductions take part in every so many steps only, the last of them (local SGD: Stich, "Local SGD
            Converges Fast and Communicates Little", 2019).
        skipped: which reductions are left out in the steps between; default: all. Those of gradients that one replica
            has in parts (tensor parallelism, tied weights) never may be.

    Raises:
        ValueError: fewer than one step, or reductions every fewer than one.
    """
    if steps < 1 or reduce_every < 1:
        raise ValueError(f"steps and reduce_every must be at least 1, not {steps} and {reduce_every}")
    between = tuple(_without(lane, skipped) for lane in lanes)
    return tuple(
        tuple(task for step in range(steps) for task in (whole if (step + 1) % reduce_every == 0 else less))
        for whole, less in zip(lanes, between, strict=True)
    )


def _without(lane: Sequence[Task], skipped: Callable[[Task], bool]) -> tuple[Task, ...]:
    """A lane without some reductions, and without what waits for them."""
    reductions = [task for task in lane if task.action.kind is Kind.REDUCE and skipped(task)]
    keys = {task.key for task in reductions if task.key is not None}
    waits = [task for task in lane if task.action.kind is Kind.RECEIVE and task.key in keys]
    gone = {id(task) for task in (*reductions, *waits)}
    return tuple(task for task in lane if id(task) not in gone)
