"""``polylane lanes``: a schedule's swimlane from theory."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from polylane.commands.output import print_json, write
from polylane.errors import PolylaneError
from polylane.lanes import lanes_summary, lanes_timeline
from polylane.observe import swimlane

MOST = 2**18  # forward passes in a picture


def run(
    schedule: str,
    *,
    stages: int,
    microbatches: int,
    forward: str,
    backward: str,
    svg: Path | None,
    html: Path | None,
    json: bool,
) -> None:
    """Draw it, and write the pictures that are asked for.

    Raises:
        PolylaneError: durations that do not fit the stages, or a file that cannot be written.
    """
    if stages * microbatches > MOST:
        raise PolylaneError(
            f"--stages {stages} times --microbatches {microbatches} are more than {MOST:,} passes, too many to draw"
        )
    try:
        timeline = lanes_timeline(
            schedule, stages, microbatches, _ticks("--forward", forward), _ticks("--backward", backward)
        )
    except ValueError as error:
        raise PolylaneError(str(error)) from error
    if svg is not None:
        write(svg, swimlane.svg(timeline))
    if html is not None:
        write(html, swimlane.html(timeline))
    summary = lanes_summary(timeline)
    if json:
        print_json(summary)
        return
    width = shutil.get_terminal_size((100, 24)).columns
    colours = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    print((swimlane.ansi if colours else swimlane.text)(timeline, width), end="")
    live = ", ".join(f"{peak} on stage {stage}" for stage, peak in enumerate(summary["peak_live_microbatches"]))
    print(f"peak live microbatches: {live}")


def _ticks(option: str, text: str) -> float | list[float]:
    """One number for all stages, or one for each; whole numbers stay whole."""
    numbers = [_number(option, piece.strip(), text) for piece in text.split(",")]
    return numbers[0] if len(numbers) == 1 else numbers


def _number(option: str, piece: str, text: str) -> float:
    try:
        return int(piece) if piece.isdecimal() else float(piece)
    except ValueError:
        raise PolylaneError(
            f"{option} takes a number of ticks, or one for each stage as in 1,2,1, not {text!r}"
        ) from None
