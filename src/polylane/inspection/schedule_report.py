"""A schedule in theory: its timeline in ticks, and its figures as plain data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from polylane.cost.simulator.schedule_tasks import pass_ticks, simulate_replicas
from polylane.errors import format_plural
from polylane.observe.timeline import Timeline, union_intervals
from polylane.schedule.action import ActionKind
from polylane.schedule.asynchronous import AsynchronousRun, pipedream, pipedream_2bw
from polylane.schedule.live import peak_live
from polylane.schedule.problem import ScheduleProblem
from polylane.schedule.round_robin import WARM_UPS, renumber, replica_lanes
from polylane.schedule.schedules import ASYNCHRONOUS, DEFAULT_CHUNKS, assign_stages
from polylane.schedule.search import find_schedule
from polylane.schedule.stage_graph import StageGraph, as_stage_graph
from polylane.schedule.synchronous import Lanes

Ticks = float | Sequence[float]

AUTO = "auto"  # the name under which a schedule is searched for
MOST_SEARCHED = 2**11  # forward passes whose order is searched, which takes seconds
BATCHES = 2  # batches of a run of pipedream-2bw, if none are asked for: the second one computes on old weights


@dataclass(frozen=True, kw_only=True)
class ScheduleShape:
    """What is drawn: a schedule of so many stages, chunks and microbatches.

    Attributes:
        schedule: a name of :data:`polylane.schedule.schedules.NAMES` or ``ASYNCHRONOUS``; or "auto", for the order
            that `polylane.schedule.search.find_schedule` finds for the ticks that are drawn.
        stages: number of workers of a chain, each of which has ``chunks`` stages; or a graph of all stages, whose
            branches run at the same time.
        microbatches: number of microbatches in a batch, at least 1; of pipedream, in the whole run.
        chunks: stages of each worker; None: one, or as many as the schedule has.
        batches: batches of the run, of pipedream-2bw only; None: :data:`BATCHES`.
        vertical_sync: whether a microbatch sees the same weights on all stages, of pipedream only.
        live: live microbatches that a worker may hold at most, of auto only; None: as many as there are.
        replicas: for each place in the pipeline, the workers there, which compute whole microbatches in turn; or one
            number for all; empty: one worker.
    """

    schedule: str
    stages: int | StageGraph
    microbatches: int
    chunks: int | None = None
    batches: int | None = None
    vertical_sync: bool = False
    live: int | None = None
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True)
class DrawnSchedule:
    """A schedule that was played, with what its pictures and tables say.

    Attributes:
        shape: the requested stages, chunks and microbatches.
        timeline: one step, or the run of an asynchronous schedule, in ticks; a lane for each worker.
        chunks: stages of each worker.
        origin: for a schedule that was found, what the search started from, and whether no order ends earlier; else "".
        messages: values and gradients that went from one worker to another.
        peak_live: for each worker, the most microbatches that are live; a chunk counts as its part of one.
        weight_versions: for each worker, the most versions of its weights that are kept.
        staleness: for each worker, the most updates that the weights of a pass lack.
    """

    shape: ScheduleShape
    timeline: Timeline
    chunks: int
    origin: str
    messages: int
    peak_live: tuple[Fraction, ...]
    weight_versions: tuple[int, ...]
    staleness: tuple[int, ...]


def draw_schedule(
    shape: ScheduleShape,
    forward: Ticks = 1,
    backward: Ticks = 2,
    *,
    weight: Ticks | None = None,
    hop: float = 0,
    halving: Ticks = 0,
) -> DrawnSchedule:
    """Play a schedule in ticks.

    Args:
        shape: stages, microbatches and chunks of the schedule that is played.
        forward: ticks of one forward pass of a stage (of a chunk), one number or one for each.
        backward: ticks of one whole backward pass, given like ``forward``.
        weight: ticks of the weight half of a backward pass in two, given like ``forward``; default: half of it.
        hop: ticks that a value takes between two workers, beside what these compute.
        halving: what a backward pass takes longer in two halves, as a part of it, given like ``forward``.

    Raises:
        ValueError: an unknown schedule, fewer than one stage or microbatch, chunks that the schedule does not have or
            that the stages do not divide into, options of another schedule, durations that do not fit the stages, or
            numbers of replicas that the schedule cannot have.
    """
    _check_options(shape)
    turns, origin = _turns(shape), ""
    run = _asynchronous_run(shape)
    if run is not None:
        graph = as_stage_graph(shape.stages)
        count, chunks, owners = len(turns), 1, tuple(range(graph.stages))
        of_replicas = _update_lanes(run, turns[0])
        versions, staleness = (
            tuple(figure for figure in figures for _ in range(turns[0]))
            for figures in (run.peak_versions(), run.staleness())
        )
    else:
        if shape.schedule == AUTO:
            graph, chunks, owners, found_lanes, origin = _search_lanes(
                shape, ticks_of=lambda stages: pass_ticks(stages, forward, backward, weight, halving), hop=hop
            )
            of_replicas = tuple((lane,) for lane in found_lanes)
        else:
            graph, chunks, owners = _stages_of_workers(shape, shape.schedule)
            of_stages = [turns[owner] for owner in owners]
            of_replicas = replica_lanes(shape.schedule, graph, shape.microbatches, of_stages, owners)
        count = len(of_replicas)
        versions, staleness = (1,) * sum(turns), (0,) * sum(turns)
    played = simulate_replicas(of_replicas, forward, backward, graph, weight, hop, halving)
    lanes = tuple(lane for of_group in of_replicas for lane in of_group)
    return DrawnSchedule(
        shape=shape,
        timeline=replace(played, title=_title(shape, count, chunks), notes=_notes(shape, count, chunks)),
        chunks=chunks,
        origin=origin,
        messages=_count_messages(lanes, graph, owners),
        peak_live=tuple(Fraction(peak, chunks) for peak in peak_live(lanes)),
        weight_versions=versions,
        staleness=staleness,
    )


def lanes_summary(drawn: DrawnSchedule) -> dict[str, Any]:
    """Return the figures of a schedule, as plain data for JSON.

    ``busy`` counts the coloured cells of all workers and ``area`` the whole rectangle, in ticks; ``utilization`` is
    their quotient. ``worker_utilization`` has for each worker its busy ticks over those from its first pass to its last
    one; ``steady_utilization`` is that of all workers while the pipeline is full, None where it never is.
    """
    timeline = drawn.timeline
    return {
        "schedule": drawn.shape.schedule,
        **({"origin": drawn.origin} if drawn.origin else {}),
        "stages": int(timeline.notes["stages"]),
        **({"replicas": list(_turns(drawn.shape))} if drawn.shape.replicas else {}),
        "chunks": drawn.chunks,
        "microbatches": drawn.shape.microbatches,
        "utilization": timeline.utilization(),
        "worker_utilization": list(timeline.worker_utilization()),
        "steady_utilization": steady_utilization(timeline),
        "makespan": timeline.makespan(),
        "busy": sum(timeline.busy()),
        "area": timeline.ranks * timeline.makespan(),
        "peak_live_microbatches": [int(p) if p.denominator == 1 else float(p) for p in drawn.peak_live],
        "weight_versions": list(drawn.weight_versions),
        "staleness": list(drawn.staleness),
        "messages": drawn.messages,
    }


def steady_utilization(timeline: Timeline) -> float | None:
    """Return the busy share of all workers from the first microbatch's last pass to the last one's first pass.

    In between the pipeline is full: it neither fills nor drains. None where these passes overlap or meet, as in a step
    of few microbatches.
    """
    passes = [span for span in timeline.spans if span.end > span.start]
    numbers = [span.action.microbatch for span in passes if span.action.microbatch is not None]
    if not numbers:
        return None
    first_one, last_one = min(numbers), max(numbers)
    start = max(span.end for span in passes if span.action.microbatch == first_one)
    end = min(span.start for span in passes if span.action.microbatch == last_one)
    if start >= end:
        return None
    busy_time = 0.0
    for lane in timeline.lanes():
        for low, high in union_intervals(span for span in lane if span.action.kind is not ActionKind.STEP):
            busy_time += max(0.0, min(high, end) - max(low, start))
    return busy_time / ((end - start) * timeline.ranks)


def _check_options(shape: ScheduleShape) -> None:
    """Check that options of single schedules are given to them.

    Raises:
        ValueError: an option that the schedule does not have.
    """
    if shape.vertical_sync and shape.schedule != "pipedream":
        raise ValueError(f"vertical sync is an option of pipedream, not of {shape.schedule}")
    if shape.batches is not None and shape.schedule != "pipedream-2bw":
        raise ValueError(f"several batches are drawn of pipedream-2bw, not of {shape.schedule}")
    if shape.live is not None and shape.schedule != AUTO:
        raise ValueError(f"a bound on live microbatches is for auto: {shape.schedule} holds what its order says")
    if shape.schedule in ASYNCHRONOUS and shape.chunks not in (None, 1):
        raise ValueError(f"the schedule {shape.schedule} has one stage on a worker, not {shape.chunks} chunks")


def _turns(shape: ScheduleShape) -> tuple[int, ...]:
    """Return the number of workers at each place of the pipeline.

    Raises:
        ValueError: numbers of replicas that do not fit the stages, the microbatches or the schedule.
    """
    graph = as_stage_graph(shape.stages)
    chunks = shape.chunks or DEFAULT_CHUNKS.get(shape.schedule, 1)
    is_graph = isinstance(shape.stages, StageGraph)
    if is_graph and graph.stages % chunks:
        stages = format_plural(graph.stages, "stage")
        raise ValueError(f"{stages} cannot be dealt to workers in chunks of {chunks}")
    places = graph.stages // chunks if is_graph else graph.stages
    if not shape.replicas:
        return (1,) * places
    turns = shape.replicas * places if len(shape.replicas) == 1 else shape.replicas
    if len(turns) != places:
        raise ValueError(f"replicas names {len(turns)} numbers for {places} stages: give one number, or one per stage")
    maximum = max(turns)
    if min(turns) < 1:
        raise ValueError(f"replicas must be whole numbers of at least 1, not {min(turns)}")
    if maximum > shape.microbatches:
        raise ValueError(
            f"{maximum} replicas cannot compute {shape.microbatches} microbatches in turn: draw {maximum} or more"
        )
    if maximum > 1 and shape.schedule == AUTO:
        raise ValueError("auto finds orders of workers that do the same, not of replicas in turn")
    if len(set(turns)) > 1 and shape.schedule not in WARM_UPS:
        raise ValueError(
            f"{shape.schedule} needs as many replicas of every stage; {', '.join(WARM_UPS)} may have different numbers"
        )
    if shape.schedule in ASYNCHRONOUS and shape.microbatches % maximum:
        raise ValueError(
            f"{shape.schedule} shares the microbatches of an update evenly: {shape.microbatches} is no multiple of "
            f"{maximum} replicas"
        )
    return turns


def _asynchronous_run(shape: ScheduleShape) -> AsynchronousRun | None:
    """Return the run of an asynchronous schedule, as each of its replicas has it; None for a synchronous one."""
    microbatches = shape.microbatches // _turns(shape)[0]
    if shape.schedule == "pipedream":
        return pipedream(shape.stages, microbatches, shape.vertical_sync)
    if shape.schedule == "pipedream-2bw":
        batches = BATCHES if shape.batches is None else shape.batches
        return pipedream_2bw(shape.stages, microbatches, batches)
    return None


def _update_lanes(run: AsynchronousRun, replicas: int) -> tuple[Lanes, ...]:
    """Return for every stage the lanes of its replicas in turn, each of which has an equal part of every update."""
    return tuple(tuple(renumber(lane, replica, replicas) for replica in range(replicas)) for lane in run.lanes)


def _search_lanes(
    shape: ScheduleShape, ticks_of: Callable[[int], Mapping[ActionKind, Sequence[float]]], hop: float
) -> tuple[StageGraph, int, tuple[int, ...], Lanes, str]:
    """Return what a search finds: the stages, chunks and workers, the lanes, and where these come from.

    Chunks are dealt round-robin, two of them also as a V; what ends first is taken, or what holds less.

    Args:
        shape: the schedule that is drawn, with its stages, chunks and bound.
        ticks_of: number of stages -> duration of each kind of pass on every stage.
        hop: ticks that a value takes between two workers.

    Raises:
        ValueError: chunks that the stages do not divide into, too many passes to search, or a bound below what one
            microbatch takes.
    """
    candidates: list[tuple[tuple[float, float], StageGraph, int, tuple[int, ...], Lanes, str]] = []
    chunks = 1 if shape.chunks is None else shape.chunks
    for layout in {1: ("1f1b",), 2: ("interleaved", "zb-v")}.get(chunks, ("interleaved",)):
        graph, _, owners = _stages_of_workers(replace(shape, chunks=chunks), layout)
        if (passes := graph.stages * shape.microbatches) > MOST_SEARCHED:
            raise ValueError(f"auto searches orders of at most {MOST_SEARCHED:,} forward passes, not {passes:,}")
        ticks = ticks_of(graph.stages)
        live = shape.microbatches if shape.live is None else shape.live
        best = find_schedule(
            ScheduleProblem(
                graph=graph,
                workers=owners,
                microbatches=shape.microbatches,
                forward=tuple(ticks[ActionKind.FORWARD]),
                input_gradient=tuple(ticks[ActionKind.BACKWARD_INPUT]),
                weight_gradient=tuple(ticks[ActionKind.BACKWARD_WEIGHT]),
                backward=tuple(ticks[ActionKind.BACKWARD]),
                hop=hop,
                memory=(live * chunks,) * (1 + max(owners)),
            )
        )
        layout_of = f"{best.origin}, stages as a V" if layout == "zb-v" and best.origin != layout else best.origin
        origin = f"{layout_of}{'; no order ends earlier' if best.optimal else ''}"
        candidates.append(((best.makespan, sum(best.peak_bytes)), graph, chunks, owners, best.lanes, origin))
    return min(candidates, key=lambda candidate: candidate[0])[1:]


def _stages_of_workers(shape: ScheduleShape, schedule: str) -> tuple[StageGraph, int, tuple[int, ...]]:
    """Return the graph of all stages, the chunks of a worker, and the worker of each stage, as a schedule has them.

    Raises:
        ValueError: an unknown schedule, or chunks that it does not have or that the stages do not divide into.
    """
    chunks = DEFAULT_CHUNKS.get(schedule, 1) if shape.chunks is None else shape.chunks
    # One worker first: it refuses the name and the chunks before they are multiplied.
    assign_stages(schedule, 1, chunks)
    graph = shape.stages
    if not isinstance(graph, StageGraph):
        graph = StageGraph.chain(StageGraph.chain(graph).stages * chunks)
    workers, remainder = divmod(graph.stages, chunks)
    if remainder:
        raise ValueError(f"{graph.stages} stages cannot be dealt to workers in chunks of {chunks}")
    return graph, chunks, assign_stages(schedule, workers, chunks)


def _count_messages(lanes: Lanes, graph: StageGraph, owners: Sequence[int]) -> int:
    """Count the values that go to another worker, once for each that reads them, and the gradients that come back."""
    pairs = {
        (stage, owners[reader])
        for stage, readers in enumerate(graph.successors)
        for reader in readers
        if owners[reader] != owners[stage]
    }
    passes = {action.microbatch for lane in lanes for action in lane}
    return 2 * len(pairs) * len(passes)


def _notes(shape: ScheduleShape, workers: int, chunks: int) -> dict[str, str]:
    notes = {"schedule": shape.schedule, "stages": str(workers)}
    notes |= {"replicas": ", ".join(map(str, shape.replicas))} if shape.replicas else {}
    notes |= {"chunks": str(chunks)} if chunks > 1 else {}
    notes |= {"microbatches": str(shape.microbatches)}
    notes |= {"live": str(shape.live)} if shape.live is not None else {}
    notes |= {"batches": str(shape.batches or BATCHES)} if shape.schedule == "pipedream-2bw" else {}
    return notes | ({"vertical sync": "yes"} if shape.vertical_sync else {})


def _title(shape: ScheduleShape, workers: int, chunks: int) -> str:
    name, *notes = _notes(shape, workers, chunks).items()
    return " · ".join([name[1], *(key if key == "vertical sync" else f"{key} {value}" for key, value in notes)])
