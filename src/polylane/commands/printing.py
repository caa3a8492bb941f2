"""Printing: JSON, files, and numbers in the form in which people read them."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import sys
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
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


@dataclass(frozen=True)
class BreakableText:
    """Text of names, such as a plan: broken after a comma, a dot, a slash or a space, and nowhere else.

    Attributes:
        text: is printed as it is.
    """

    text: str

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max((cell_len(piece.rstrip()) for piece in self._pieces()), default=0)
        return Measurement(min(longest, options.max_width), min(cell_len(self.text), options.max_width))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        lines, width = [""], options.max_width
        for piece in self._pieces():
            if lines[-1] and cell_len(lines[-1] + piece.rstrip()) > width:
                lines.append("")
            lines[-1] += piece
        yield Text("\n".join(line.rstrip() for line in lines), no_wrap=True, overflow="ignore")

    def _pieces(self) -> list[str]:
        return re.findall(r"[^,./ ]*(?:[,./]|\s+|$)", self.text)


class WordTable(Table):
    """Table whose words and figures stay whole: names break where a name may, and figures not at all."""

    def add_words(self, *cells: str, style: str = "") -> None:
        """Add a row: cells of columns that are aligned to the left are names, all others figures."""
        renderables: list[BreakableText | str] = []
        for column, cell in zip(self.columns, cells, strict=True):
            text = clean_text(cell)
            if column.justify != "left":  # rich takes the longest word of a figure for its least width
                column.min_width = max(column.min_width or cell_len(str(column.header)), cell_len(text))
            renderables.append(BreakableText(text) if column.justify == "left" else text)
        self.add_row(*renderables, style=style or None)


def make_table(title: str | Text, *columns: str, left: Collection[str] = (), **style: Any) -> WordTable:
    """Return an empty table: columns named in ``left`` are aligned to the left, those of numbers to the right.

    Args:
        title: headline; a Text where it has a style of its own.
        columns: names of the columns.
        left: those whose cells are names, which may be broken where names may.
        style: of the table, as rich takes it.
    """
    table = WordTable(title=title or None, **{"box": box.SIMPLE, **style})
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", no_wrap=name not in left)
    return table


def print_table(out: Console, table: WordTable) -> None:
    """Print a table; where the terminal is too narrow for its figures, each row as lines of ``column  figure``."""
    for padding in ((0, 1), (0, 0)):
        table.padding = padding
        if Measurement.get(out, out.options.update(max_width=10_000), table).minimum <= out.width:
            out.print(table)
            return
    if table.title:
        out.print(table.title)
    names = [str(column.header) for column in table.columns]
    rows = zip(*(column.cells for column in table.columns), strict=True)
    for cells in rows:
        record = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, cell in zip(names, cells, strict=True):
            if not isinstance(cell, str) or cell:
                record.add_row(name, cell)
        out.print(record)
        out.print()


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


def replace_text(path: Path, text: str) -> None:
    """Write a file whole: an earlier one is replaced when the new one is complete.

    Raises:
        OSError: the file cannot be written; it has the path of the file itself.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        unfinished.write_text(text, encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


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


def format_name(name: str) -> str:
    """Return a name that the user chose as one line of letters that are seen, whatever it is made of."""
    words = "".join(letter if letter.isprintable() else " " for letter in str(name))
    return " ".join(words.split()) or "(no name)"


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


def format_extent(numbers: Collection[int]) -> str:
    """Write the least and the greatest of some numbers: "2 to 5", or "2" where all are equal."""
    return " to ".join(map(str, sorted({min(numbers), max(numbers)})))
