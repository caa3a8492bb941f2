"""Schedule theory: the swimlane of a pipeline schedule in ticks, with its utilization and live microbatches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.observe.timeline import Timeline
from polylane.schedule.stage_graph import StageGraph, as_stage_graph
from polylane.schedule.synchronous import schedule_lanes


def lanes_timeline(
    schedule: str,
    stages: int | StageGraph,
    microbatches: int,
    forward: float | Sequence[float] = 1,
    backward: float | Sequence[float] = 2,
) -> Timeline:
    """Return one step of a schedule in ticks, with stage s on lane s.

    Args:
        schedule: name of the schedule: "naive", "afab" or "1f1b".
        stages: number of stages of a chain, at least 1; or a graph of stages, whose branches run at the same time.
        microbatches: number of microbatches in a batch, at least 1.
        forward: ticks of one forward pass, the same on all stages or one number for each stage.
        backward: ticks of one backward pass, given like ``forward``.

    Raises:
        ValueError: an unknown schedule, fewer than one stage or microbatch, or durations that do not fit the stages.
    """
    graph = as_stage_graph(stages)
    played = simulate_schedule(schedule_lanes(schedule, graph, microbatches), forward, backward, graph=graph)
    return Timeline(
        spans=played.spans,
        ranks=played.ranks,
        unit=played.unit,
        title=f"{schedule} · stages {graph.stages} · microbatches {microbatches}",
        notes={"schedule": schedule, "stages": str(graph.stages), "microbatches": str(microbatches)},
    )


def lanes_summary(timeline: Timeline) -> dict[str, Any]:
    """Return the figures of a timeline of `lanes_timeline`, as plain data for JSON.

    ``busy`` counts the coloured cells of all stages and ``area`` the whole rectangle, in ticks; ``utilization`` is
    their quotient; ``peak_live_microbatches`` has a number for each stage.
    """
    return {
        "schedule": timeline.notes["schedule"],
        "stages": int(timeline.notes["stages"]),
        "microbatches": int(timeline.notes["microbatches"]),
        "utilization": timeline.utilization(),
        "makespan": timeline.makespan(),
        "busy": sum(timeline.busy()),
        "area": timeline.ranks * timeline.makespan(),
        "peak_live_microbatches": list(timeline.peak_live_microbatches()),
    }
