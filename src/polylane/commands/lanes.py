"""``polylane lanes``: draw a pipeline schedule's swimlane from theory."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polylane.commands import planning
from polylane.commands.compare_lanes import print_comparison
from polylane.commands.printing import print_json, write_text
from polylane.commands.requests import LanesRequest
from polylane.errors import PolylaneError
from polylane.inspection.schedule_comparison import ComparedModel
from polylane.inspection.schedule_report import DrawnSchedule, ScheduleShape, draw_schedule, lanes_summary
from polylane.observe.swimlane import render as swimlane
from polylane.observe.swimlane.layout import build_rows, format_number, format_percent
from polylane.observe.timeline import Timeline
from polylane.schedule.schedules import ASYNCHRONOUS, DEFAULT_CHUNKS
from polylane.schedule.stage_graph import CyclicStages, StageGraph
from polylane.yaml_file import read

# What is drawn within some 20 seconds:
MOST = 2**18  # forward passes in one picture
MOST_COMPARED = 2**14  # forward passes of a step whose schedules are compared
MOST_ROWS = 2**15  # workers
MOST_COMPARED_ROWS = 2**10  # workers whose schedules are compared
MOST_TICKS = 10**12  # most ticks of one pass: larger ones add up to numbers without meaning


@planning.gc_disabled()
def run(request: LanesRequest) -> None:
    """Draw the schedule, and write the pictures that are asked for.

    Raises:
        PolylaneError: stages that cannot be read, durations that do not fit them, or a file that cannot be written.
    """
    _check_mode(request)
    drawn = _read_stages(request)
    weight = drawn.weight if request.weight is None else _ticks("--weight", request.weight)
    replicas, halving = _parse_replicas(request.replicas), _ticks("--halving", request.halving)
    stages, hop = drawn.graph if drawn.names else drawn.graph.stages, _number("--hop", request.hop, request.hop)
    try:
        if request.schedule is None:
            model = ComparedModel(
                stages=stages,
                microbatches=request.microbatches,
                chunks=request.chunks,
                forward=drawn.forward,
                backward=drawn.backward,
                weight=weight,
                hop=hop,
                halving=halving,
                replicas=replicas,
            )
            print_comparison(request, model)
            return
        shape = ScheduleShape(
            schedule=request.schedule,
            stages=stages,
            microbatches=request.microbatches,
            chunks=request.chunks,
            batches=request.batches,
            vertical_sync=request.vertical_sync,
            live=request.live,
            replicas=replicas,
        )
        ticks = drawn.forward, drawn.backward
        _print_schedule(request, draw_schedule(shape, *ticks, weight=weight, hop=hop, halving=halving))
    except ValueError as error:
        raise PolylaneError(str(error)) from error
    if drawn.names and not request.json:
        print("stages: " + ", ".join(f"{number} {name}" for number, name in enumerate(drawn.names)))


def _check_mode(request: LanesRequest) -> None:
    """Check that one schedule is asked for, or all of them.

    Raises:
        PolylaneError: neither or both, or options of one schedule where all are drawn.
    """
    if request.compare == (request.schedule is not None):
        raise PolylaneError("name the schedule to draw, or give --compare for all of them")
    single = {
        "--svg": request.svg,
        "--batches": request.batches,
        "--vertical-sync": request.vertical_sync or None,
        "--live": request.live,
    }
    for option, value in single.items():
        if request.compare and value is not None:
            raise PolylaneError(f"{option} is for one schedule: with --compare, --html writes the pictures of all")


def _print_schedule(request: LanesRequest, schedule: DrawnSchedule) -> None:
    """Print one schedule, and write the pictures that are asked for."""
    timeline, summary = schedule.timeline, lanes_summary(schedule)
    if request.svg is not None:
        write_text(request.svg, swimlane.svg(timeline))
    if request.html is not None:
        write_text(request.html, swimlane.html(timeline))
    if request.json:
        print_json(summary)
        return
    # NO_COLOR is a convention that terminal programs share: https://no-color.org.
    width = shutil.get_terminal_size((100, 24)).columns
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print((swimlane.ansi if colours else swimlane.text)(timeline, width), end="")
    _print_figures(timeline, summary, width)


def _print_figures(timeline: Timeline, summary: dict[str, Any], width: int) -> None:
    """Print the figures of each worker below the picture, in lines of ``width`` columns."""
    # "stage 0", or "rank 0 · stage 0, 4", whose first half is enough here.
    names = [row.label.partition(" · ")[0] for row in build_rows(timeline)]
    utilization = map(format_percent, summary["worker_utilization"])
    _print_by_worker("utilization from first to last pass", utilization, names, width)
    _print_by_worker("peak live microbatches", map(format_number, summary["peak_live_microbatches"]), names, width)
    if (chunks := summary["chunks"]) > 1:
        total = format_number(timeline.makespan() / chunks)
        print(f"ticks are of a chunk's passes: with {chunks} chunks to a stage's, as --compare has them, {total} ticks")
    if "origin" in summary:
        print(f"found from {summary['origin']}")
    if summary["schedule"] not in ASYNCHRONOUS:
        return
    steady = summary["steady_utilization"]
    print(f"utilization while the pipeline is full: {'never full' if steady is None else format_percent(steady)}")
    for key, title in (("weight_versions", "versions of weights"), ("staleness", "updates that weights lack")):
        _print_by_worker(title, map(str, summary[key]), names, width)


def _print_by_worker(title: str, values: Iterable[str], names: Sequence[str], width: int) -> None:
    """Print a figure of each worker, in lines of ``width`` columns that break between workers."""
    # textwrap breaks at no such blank.
    figures = [f"{value} on {name}".replace(" ", "\xa0") for value, name in zip(values, names, strict=True)]
    print(textwrap.fill(f"{title}: " + ", ".join(figures), width).replace("\xa0", " "))


# The command line's stages and durations -----------------------------------------------------------------------------


Ticks = float | list[float]


@dataclass(frozen=True)
class _Drawn:
    """The stages of a picture, and their durations.

    Attributes:
        graph: the stages, each with those that it waits for.
        forward: ticks of one forward pass, for all stages or for each.
        backward: ticks of one backward pass, for all stages or for each.
        weight: ticks of its weight half, for all stages or for each; None: half of it.
        names: names of the stages in their order; empty for a chain.
    """

    graph: StageGraph
    forward: Ticks
    backward: Ticks
    weight: Ticks | None = None
    names: tuple[str, ...] = ()


def _read_stages(request: LanesRequest) -> _Drawn:
    """Return the stages that are asked for.

    Raises:
        PolylaneError: they cannot be read, or there are too many to draw.
    """
    stages, ticks = request.stages, (_ticks("--forward", request.forward), _ticks("--backward", request.backward))
    # A number, also a negative one, is a count of stages, for a sentence about its value; anything else is a path.
    drawn = _chain(stages, *ticks) if stages.strip().lstrip("-").isdecimal() else _read(Path(stages), *ticks)
    chunks = request.chunks or DEFAULT_CHUNKS.get(request.schedule or "", 1)
    passes = drawn.graph.stages * request.microbatches * chunks * (request.batches or 1)
    limit = MOST_COMPARED if request.compare else MOST
    if passes > limit:
        terms = f" times --chunks {chunks}" if chunks > 1 else ""
        terms += f" times --batches {request.batches}" if request.batches else ""
        raise PolylaneError(
            f"--stages {stages} times --microbatches {request.microbatches}{terms} are more than {limit:,} passes, too "
            f"many to {'compare all schedules of' if request.compare else 'draw'}"
        )
    rows = drawn.graph.stages * max(_parse_replicas(request.replicas), default=1)
    many = f" times --replicas {request.replicas}" if request.replicas else ""
    limit = MOST_COMPARED_ROWS if request.compare else MOST_ROWS
    if rows > limit:
        raise PolylaneError(
            f"--stages {stages}{many} are more than {limit:,} workers, too many to "
            f"{'compare all schedules of' if request.compare else 'draw'}"
        )
    return drawn


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
    stages = read(path, "stages").get("stages")
    if not isinstance(stages, dict) or not stages:
        raise PolylaneError(f"stages {path}: stages must be a mapping from a stage's name to what it comes after")
    names = [str(name) for name in stages]
    if isinstance(forward, list) or isinstance(backward, list):
        raise PolylaneError(
            f"stages {path}: give durations that differ in the file, as forward, backward and weight of a stage"
        )
    # The weight halves are those of the stages that say them, and half of the pass of the others.
    edges, halves = list[tuple[int, int]](), dict[int, float]()
    ticks = {"forward": [forward] * len(names), "backward": [backward] * len(names)}
    for number, (name, stage) in enumerate(zip(names, stages.values(), strict=True)):
        item = f"stages {path}: stages.{name}"
        for key, value in (stage if isinstance(stage, dict) else {} if stage is None else {"": stage}).items():
            if key in (*ticks, "weight") and isinstance(value, int | float) and not isinstance(value, bool):
                (halves if key == "weight" else ticks[key])[number] = value
            elif key == "after" and isinstance(value, list):
                for source in map(str, value):
                    if source not in names:
                        raise PolylaneError(f"{item}.after: there is no stage {source!r}, known are {', '.join(names)}")
                    edges.append((names.index(source), number))
            else:
                keys = "after: [names of stages], forward: ticks, backward: ticks and weight: ticks"
                raise PolylaneError(f"{item}: a stage may say {keys}, not {key}: {value}")
    weight = [halves.get(number, duration / 2) for number, duration in enumerate(ticks["backward"])] if halves else None
    try:
        graph = StageGraph.of_edges(len(names), edges)
        return _Drawn(graph, ticks["forward"], ticks["backward"], weight, tuple(names))
    except CyclicStages as circle:
        chain = " -> ".join(names[stage] for stage in circle.stages)
        raise PolylaneError(f"stages {path}: stages {chain} wait for each other") from None


def _parse_replicas(text: str | None) -> tuple[int, ...]:
    """Return the replicas of all stages, or of each; empty where none are asked for.

    Raises:
        PolylaneError: they are no whole numbers of at least 1, or more than can be drawn.
    """
    pieces = [] if text is None else [piece.strip() for piece in text.split(",")]
    for piece in pieces:
        if not (piece.isascii() and piece.isdecimal()) or len(piece) > len(str(MOST)) or not 1 <= int(piece) <= MOST:
            raise PolylaneError(
                f"--replicas takes a whole number from 1 to {MOST:,}, or one for each stage as in 2,1, not {text!r}"
            )
    return tuple(int(piece) for piece in pieces)


def _ticks(option: str, text: str) -> Ticks:
    """Return one number for all stages, or one for each; whole numbers stay int, for exact ticks."""
    numbers = [_number(option, piece.strip(), text) for piece in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


def _number(option: str, piece: str, text: str) -> float:
    try:
        is_integer = piece.removeprefix("-").isdecimal() and len(piece) < len(str(MOST_TICKS))
        value = int(piece) if is_integer else float(piece)
    except ValueError:
        several = "" if option == "--hop" else ", or one for each stage as in 1,2,1"
        raise PolylaneError(f"{option} takes a number of ticks{several}, not {text!r}") from None
    if not -MOST_TICKS <= value <= MOST_TICKS:
        raise PolylaneError(f"{option} takes at most {MOST_TICKS:.0e} ticks, not {piece[:40]}")
    return value
