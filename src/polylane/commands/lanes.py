"""``polylane lanes``: draw a pipeline schedule's swimlane from theory."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from polylane.commands import planning
from polylane.commands.printing import print_json, write_text
from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.errors import PolylaneError
from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Timeline
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import CyclicStages, StageGraph, as_stage_graph
from polylane.yaml_file import read

MOST = 2**18  # most forward passes that are drawn in one picture


@planning.gc_disabled()
def run(
    schedule: str,
    *,
    stages: str,
    microbatches: int,
    forward: str,
    backward: str,
    svg: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Draw the schedule, and write the pictures that are asked for.

    Args:
        schedule: name of the schedule: "naive", "afab" or "1f1b".
        stages: a number of stages in a chain, or the path of a YAML file of stages that branch.
        microbatches: number of microbatches in a batch.
        forward: ticks of one forward pass, or one number for each stage as in 1,2,1.
        backward: ticks of one backward pass, given like ``forward``.
        svg: file for the picture as SVG; None: not written.
        html: file for the picture as a page; None: not written.
        json: print the figures as one JSON object, in place of the picture.

    Raises:
        PolylaneError: stages that cannot be read, durations that do not fit them, or a file that cannot be written.
    """
    ticks = _ticks("--forward", forward), _ticks("--backward", backward)
    # A number, also a negative one, is a count of stages, for a sentence about its value; anything else is a path.
    drawn = _chain(stages, *ticks) if stages.strip().lstrip("-").isdecimal() else _read(Path(stages), *ticks)
    if drawn.graph.stages * microbatches > MOST:
        raise PolylaneError(
            f"--stages {stages} times --microbatches {microbatches} are more than {MOST:,} passes, too many to draw"
        )
    try:
        timeline = lanes_timeline(schedule, drawn.graph, microbatches, drawn.forward, drawn.backward)
    except ValueError as error:
        raise PolylaneError(str(error)) from error
    if svg is not None:
        write_text(svg, swimlane.svg(timeline))
    if html is not None:
        write_text(html, swimlane.html(timeline))
    summary = lanes_summary(timeline)
    if json:
        print_json(summary)
        return
    # NO_COLOR is a convention that terminal programs share: https://no-color.org.
    width = shutil.get_terminal_size((100, 24)).columns
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print((swimlane.ansi if colours else swimlane.text)(timeline, width), end="")
    live = ", ".join(f"{peak} on stage {stage}" for stage, peak in enumerate(summary["peak_live_microbatches"]))
    print(f"peak live microbatches: {live}")
    if drawn.names:
        print("stages: " + ", ".join(f"{number} {name}" for number, name in enumerate(drawn.names)))


# The theory ----------------------------------------------------------------------------------------------------------


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
    title = f"{schedule} · stages {graph.stages} · microbatches {microbatches}"
    notes = {"schedule": schedule, "stages": str(graph.stages), "microbatches": str(microbatches)}
    return replace(played, title=title, notes=notes)


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


# The command line's stages and durations -----------------------------------------------------------------------------


Ticks = float | list[float]


@dataclass(frozen=True)
class _Drawn:
    """The stages of a picture, and their durations.

    Attributes:
        graph: the stages, each with those that it waits for.
        forward: ticks of one forward pass, for all stages or for each.
        backward: ticks of one backward pass, for all stages or for each.
        names: names of the stages in their order; empty for a chain.
    """

    graph: StageGraph
    forward: Ticks
    backward: Ticks
    names: tuple[str, ...] = ()


def _chain(text: str, forward: Ticks, backward: Ticks) -> _Drawn:
    # int() refuses text of thousands of digits; such a number is too large in any case.
    stages = int(text) if len(text) <= len(str(MOST)) else MOST + 1
    if not 1 <= stages <= MOST:
        raise PolylaneError(f"--stages {text} must be a whole number from 1 to {MOST:,}, or a file of stages")
    return _Drawn(StageGraph.chain(stages), forward, backward)


def _read(path: Path, forward: Ticks, backward: Ticks) -> _Drawn:
    """Read stages by name, each with the stages that it comes "after", and its own durations where they differ.

    Raises:
        PolylaneError: the file cannot be read, or a key or name is wrong.
    """
    given = read(path, "stages").get("stages")
    if not isinstance(given, dict) or not given:
        raise PolylaneError(f"stages {path}: stages must be a mapping from a stage's name to what it comes after")
    names = [str(name) for name in given]
    if isinstance(forward, list) or isinstance(backward, list):
        raise PolylaneError(
            f"stages {path}: give durations that differ in the file, as forward and backward of a stage"
        )
    edges, ticks = list[tuple[int, int]](), {"forward": [forward] * len(names), "backward": [backward] * len(names)}
    for number, (name, stage) in enumerate(zip(names, given.values(), strict=True)):
        where = f"stages {path}: stages.{name}"
        for key, value in (stage if isinstance(stage, dict) else {} if stage is None else {"": stage}).items():
            if key in ticks and isinstance(value, int | float) and not isinstance(value, bool):
                ticks[key][number] = value
            elif key == "after" and isinstance(value, list):
                for other in map(str, value):
                    if other not in names:
                        raise PolylaneError(f"{where}.after: there is no stage {other!r}, known are {', '.join(names)}")
                    edges.append((names.index(other), number))
            else:
                known = "after: [names of stages], forward: ticks and backward: ticks"
                raise PolylaneError(f"{where}: a stage may say {known}, not {key}: {value}")
    try:
        return _Drawn(StageGraph.of_edges(len(names), edges), ticks["forward"], ticks["backward"], tuple(names))
    except CyclicStages as circle:
        way = " -> ".join(names[stage] for stage in circle.stages)
        raise PolylaneError(f"stages {path}: stages {way} wait for each other") from None


def _ticks(option: str, text: str) -> Ticks:
    """Return one number for all stages, or one for each; whole numbers stay int, for exact ticks."""
    numbers = [_number(option, piece.strip(), text) for piece in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


def _number(option: str, piece: str, text: str) -> float:
    try:
        return int(piece) if piece.isdecimal() else float(piece)
    except ValueError:
        raise PolylaneError(
            f"{option} takes a number of ticks, or one for each stage as in 1,2,1, not {text!r}"
        ) from None
