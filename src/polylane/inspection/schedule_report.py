"""A schedule in theory: its timeline in ticks, and its figures as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Timeline
from polylane.schedule.schedules import DEFAULT_CHUNKS, assign_stages, schedule_lanes
from polylane.schedule.stage_graph import StageGraph

Ticks = float | Sequence[float]


def lanes_timeline(
    schedule: str,
    stages: int | StageGraph,
    microbatches: int,
    forward: Ticks = 1,
    backward: Ticks = 2,
    *,
    weight: Ticks | None = None,
    hop: float = 0,
    chunks: int | None = None,
) -> Timeline:
    """Return one step of a schedule in ticks, a lane for each worker.

    Args:
        schedule: name of the schedule, of :data:`polylane.schedule.schedules.NAMES`.
        stages: number of workers of a chain, each of which has ``chunks`` stages; or a graph of all stages, whose
            branches run at the same time.
        microbatches: number of microbatches in a batch, at least 1.
        forward: ticks of one forward pass of a stage (of a chunk), one number or one for each.
        backward: ticks of one whole backward pass, given like ``forward``.
        weight: ticks of the weight half of a backward pass in two, given like ``forward``; default: half of it.
        hop: ticks that a value takes between two workers, beside what these compute.
        chunks: stages of each worker; default: one, or as many as the schedule has.

    Raises:
        ValueError: an unknown schedule, fewer than one stage or microbatch, chunks that the schedule does not have or
            that the stages do not divide into, or durations that do not fit the stages.
    """
    per_worker = DEFAULT_CHUNKS.get(schedule, 1) if chunks is None else chunks
    # One worker first: it refuses the name and the chunks before they are multiplied.
    assign_stages(schedule, 1, per_worker)
    graph = stages if isinstance(stages, StageGraph) else StageGraph.chain(StageGraph.chain(stages).stages * per_worker)
    workers, left = divmod(graph.stages, per_worker)
    if left:
        raise ValueError(f"{graph.stages} stages cannot be dealt to workers in chunks of {per_worker}")
    lanes = schedule_lanes(schedule, graph, microbatches, assign_stages(schedule, workers, per_worker))
    played = simulate_schedule(lanes, forward, backward, hop, graph, weight)
    said = {"stages": workers, "chunks": per_worker, "microbatches": microbatches}
    shown = {name: count for name, count in said.items() if name != "chunks" or per_worker > 1}
    title = " · ".join([schedule, *(f"{name} {count}" for name, count in shown.items())])
    return replace(played, title=title, notes={"schedule": schedule, **{name: str(n) for name, n in said.items()}})


def lanes_summary(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline of `lanes_timeline`, as plain data for JSON.

    ``busy`` counts the coloured cells of all workers and ``area`` the whole rectangle, in ticks; ``utilization`` is
    their quotient. ``worker_utilization`` has for each worker its busy ticks over those from its first pass to its last
    one. ``peak_live_microbatches`` has a number for each worker, where a chunk counts as its part of a microbatch.
    """
    chunks = int(timeline.notes["chunks"])
    peaks = (Fraction(peak, chunks) for peak in timeline.peak_live_microbatches())
    return {
        "schedule": timeline.notes["schedule"],
        "stages": int(timeline.notes["stages"]),
        "chunks": chunks,
        "microbatches": int(timeline.notes["microbatches"]),
        "utilization": timeline.utilization(),
        "worker_utilization": list(timeline.worker_utilization()),
        "makespan": timeline.makespan(),
        "busy": sum(timeline.busy()),
        "area": timeline.ranks * timeline.makespan(),
        "peak_live_microbatches": [int(peak) if peak.denominator == 1 else float(peak) for peak in peaks],
    }
