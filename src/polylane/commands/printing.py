"""Printing: JSON, files, and numbers in the form in which people read them."""

from __future__ import annotations

import json
import math
import shutil
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from polylane.errors import LINES, PolylaneError, clean_text
from polylane.observe.swimlane import layout

FEW = 8  # most numbers that are listed one by one
EXACT = 999.5  # seconds from which on a duration is read in minutes and hours

_THOUSANDS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def print_json(data: Any) -> None:
    """Print one JSON object on stdout: indented on a terminal, on one line in a pipe."""
    print(dump_json(data, indent=2 if sys.stdout.isatty() else None), flush=True)


def dump_json(data: Any, indent: int | None = None) -> str:
    """Return strict JSON: NaN and infinities, which JSON does not have, become null."""
    return json.dumps(_null_if_infinite(data), indent=indent, allow_nan=False)


def _null_if_infinite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _null_if_infinite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_null_if_infinite(value) for value in data]
    return data


class _PlainConsole(Console):
    """Console that prints every text as it is: names of modules and files may read like markup, emoji or commands."""

    def render_str(self, text: str, **options: Any) -> Text:
        return super().render_str(clean_text(text, keep=LINES), **options)


def console(stderr: bool = False) -> Console:
    """Return a rich console on stdout or stderr: as wide as the terminal, 120 characters in a pipe."""
    width = shutil.get_terminal_size((120, 24)).columns
    return _PlainConsole(highlight=False, markup=False, emoji=False, width=width, stderr=stderr)


def print_line(line: str) -> None:
    """Print a line that has names of the user's: cleaned, and never wrapped."""
    print(clean_text(line))


def make_table(title: str, *columns: str, left: Collection[str] = ()) -> Table:
    """Return an empty table: columns named in ``left`` are aligned to the left, those of numbers to the right."""
    table = Table(box=box.SIMPLE, title=title)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right")
    return table


def write_text(path: Path, text: str) -> None:
    """Write a file, and make its folder where that is missing.

    Raises:
        PolylaneError: the folder or the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise PolylaneError(f"{path} cannot be written: {error.strerror or error}") from error


def format_count(number: float, unit: str = "") -> str:
    """Return a count to three significant digits: ``1.23 M``, ``45 kB``, ``0``."""
    for scale, letter in _THOUSANDS:
        if abs(number) >= scale:
            value = number / scale
            return f"{value:.{2 if value < 10 else 1 if value < 100 else 0}f} {letter}{unit}"
    return f"{number:.0f} {unit}".rstrip()


def format_duration(duration: float) -> str:
    """Return seconds to three significant digits: ``820 µs``, ``35.1 ms``, ``1.24 s``; long ones ``20 min 34 s``."""
    return layout.format_duration(duration, "seconds", digits=3) if duration < EXACT else format_seconds(duration)


def format_seconds(duration: float) -> str:
    """Return the time of a whole run, whose fractions nobody asks for: ``3.2 s``, ``4 min 05 s``, ``2 h 03 min``."""
    if duration < 100:
        return f"{duration:.1f} s"
    seconds = round(duration)
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02d} s"
    return f"{seconds // 3600} h {seconds % 3600 // 60:02d} min"


def format_ranges(numbers: Sequence[int]) -> str:
    """Return a few numbers as ``0, 3``, and many as ranges: ``0-63, 256-319, ..., 768-831 (256)``."""
    if len(numbers) <= FEW:
        return ", ".join(map(str, numbers))
    starts = [i for i, n in enumerate(numbers) if i == 0 or n != numbers[i - 1] + 1]
    ends = [*(i - 1 for i in starts[1:]), len(numbers) - 1]
    runs = [f"{numbers[a]}-{numbers[b]}" if b > a else f"{numbers[a]}" for a, b in zip(starts, ends, strict=True)]
    shown = runs if len(runs) <= FEW // 2 else [*runs[:2], "...", runs[-1]]
    return f"{', '.join(shown)} ({len(numbers):,})"
