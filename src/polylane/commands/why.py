"""``polylane why``: why a run stood still or failed, from what its workers were doing at that moment."""

from __future__ import annotations

import json
import os
import stat
import sys
import time
from contextlib import suppress
from pathlib import Path

from polylane.commands.logs.file_names import GOODPUT, METRICS, TIMELINE, UNFINISHED, WHY, find_folder
from polylane.commands.logs.metrics_file import read_json
from polylane.commands.printing import console, format_duration, make_table, print_json, print_table, write_text
from polylane.commands.reporting.run_files import is_claimed
from polylane.commands.requests import WhyRequest
from polylane.diagnosis import report_file
from polylane.diagnosis.report import HangReport
from polylane.errors import PolylaneError
from polylane.observe.swimlane import render as swimlane

LARGEST_BYTES = 64 << 20  # of a report that is read


def run(request: WhyRequest) -> None:
    """Print why a run stood still or failed, and write the pictures that are asked for.

    Raises:
        PolylaneError: the run has no report, or it cannot be read.
    """
    report = read_report(request.run)
    timeline = report_file.draw_timeline(report)
    # Of an end of which all workers know none stands out; of one before the first step there is nothing to draw.
    has_picture = bool(report.ranks and report.timeline.spans)
    if not has_picture and (request.svg or request.html):
        raise PolylaneError(f"{request.run} has no picture of its end, which was: {report.sentence}")
    if request.svg is not None:
        write_text(request.svg, swimlane.svg(timeline))
    if request.html is not None:
        write_text(request.html, swimlane.html(timeline))
    if request.json:
        print_json(report_file.to_dict(report))
        return
    out = console()
    print(_printable(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(report.wall))}: {report.sentence}"))
    if not report.ranks:
        return
    table = make_table("", "rank", "for", "where", "", left=("where", ""))
    for rank in report.ranks:
        shown = rank.waits_on if rank.doing.name == "WAITING" else ""
        activity = f"{rank.doing}{f' ({shown})' if shown else ''}"
        table.add_words(str(rank.rank), format_duration(rank.stalled), _printable(rank.place), _printable(activity))
    print_table(out, table)
    if has_picture:
        draw = swimlane.ansi if sys.stdout.isatty() else swimlane.text
        print(_printable(draw(timeline, out.width), keep="\x1b\n"))
    for rank in report.ranks:
        if rank.rank in report.culprits and rank.stacks:
            print(
                f"What rank {rank.rank} was calling, the innermost call first:\n{_printable(rank.stacks, keep=chr(10))}"
            )


def read_report(run: Path) -> HangReport:
    """Return the report of a run, the latest where an earlier run's files are in its folder.

    Raises:
        PolylaneError: there is none, or it cannot be read.
    """
    try:
        places = [path for path in (run / UNFINISHED / WHY, run / WHY) if _is_file(path)]
    except OSError as error:
        raise PolylaneError(f"{run} cannot be read: {error.strerror or error}") from None
    if not places:
        raise PolylaneError(f"{run} {_describe_lack(run)}")
    try:
        if places[0].stat().st_size > LARGEST_BYTES:
            raise ValueError(f"it is larger than {LARGEST_BYTES >> 20} MB")
        return report_file.from_dict(json.loads(places[0].read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise PolylaneError(f"{places[0]} cannot be read: {error}") from None


def _describe_lack(run: Path) -> str:
    """Return why a run has no report."""
    if not os.path.isdir(run):
        return "is no folder"
    if is_claimed(run):
        return "has no report: it is running, and none of its workers has hung or failed"
    folder = find_folder(run)
    if ended_by := _find_signal(folder):
        return f"has no report: it was ended by {ended_by}, and none of its workers hung or failed"
    # A run that comes to its end writes its timeline then.
    if os.path.isfile(folder / METRICS) and not os.path.isfile(folder / TIMELINE):
        return "has no report: it was ended before its training was done, by a signal such as that of kill -9"
    return "has no report: none of its workers hung or failed"


def _find_signal(folder: Path) -> str:
    """Return the name of the signal that has ended a run's last attempt; "" where none has, or that is not known."""
    with suppress(LookupError, TypeError):  # a file that somebody edited, or an earlier version wrote
        name = (read_json(folder / GOODPUT) or {})["attempts"][-1]["ended_by"]
        return _printable(str(name))
    return ""


def _is_file(path: Path) -> bool:
    """Return whether there is a file.

    Raises:
        OSError: the system does not let this user see it.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _printable(text: str, keep: str = "") -> str:
    """Return text without control characters, which a terminal would obey."""
    return "".join(letter if letter.isprintable() or letter in keep else "?" for letter in text)
