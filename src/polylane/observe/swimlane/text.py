"""Swimlane in characters: a cell per tick in theory, a column per slice of time in seconds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from itertools import groupby

from polylane.observe.swimlane import layout
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import PASSES, ActionKind

_Cell = tuple[str, layout.SpanStyle]  # the characters of a cell, and the style that they show
_Paint = Callable[[Sequence[_Cell]], str]


def text(timeline: Timeline, width: int = 100) -> str:
    """Return the swimlane in plain characters, readable without colour.

    In ticks it is drawn as in papers: a cell per tick, the forward of microbatch 3 as ``3``, its backward as ``<3``, or
    in two halves as ``<3`` (input gradients) and ``=3`` (weight gradients). On a rank with several chunks a letter says
    which: ``3a``, ``<3b``. An update that takes no time is a ``#`` in the cell before it. In seconds, or where the
    ticks do not fit, each column shows the style that fills most of its time, and the microbatch where there is room;
    a wait for a slower rank is ``/``, and communication during compute is on a line of its own below.

    Args:
        timeline: theoretical, predicted or measured spans.
        width: number of characters in a line, labels included.
    """
    return _draw(timeline, width, _plain)


def ansi(timeline: Timeline, width: int = 100) -> str:
    """Return the same characters with ANSI colours, for a terminal (``rich.text.Text.from_ansi`` reads them, too)."""
    return _draw(timeline, width, _coloured)


def _plain(cells: Sequence[_Cell]) -> str:
    return "".join(characters for characters, _ in cells).rstrip()


def _coloured(cells: Sequence[_Cell]) -> str:
    # One escape sequence for a run of cells of one style, none for blanks.
    runs = (
        (style, "".join(characters for characters, _ in run)) for style, run in groupby(cells, lambda cell: cell[1])
    )
    return "".join(f"\x1b[{style.ansi}m{run}\x1b[0m" if run.strip() else run for style, run in runs).rstrip()


def _draw(timeline: Timeline, width: int, paint: _Paint) -> str:
    lanes = layout.build_rows(timeline)
    margin = max((len(row.label) for row in lanes), default=0)
    # Three characters separate the labels from the lanes.
    room = max(width - margin - 3, 20)
    # One cell per tick where all of them fit into a line; else columns of equal time.
    cell = _cell_width(timeline, lanes)
    # Numbers with letters are hard to tell apart where they touch.
    if any(len(row.stages) > 1 for row in lanes) and timeline.makespan() * (cell + 1) <= room:
        cell += bool(cell)
    if cell and timeline.makespan() * cell <= room:
        grid = _cells(timeline, lanes, cell)
        per_column = ""
        space = round(timeline.makespan()) * cell
        ruler = _ruler(layout.time_axis(timeline.makespan(), timeline.unit, most=max(space // 4, 1)), cell, space, cell)
        key = _legend_lines(lanes, {kind: f"{sign}0 {layout.STYLES[kind].name}" for kind, sign in _SIGNS.items()})
    else:
        grid = _columns(timeline, lanes, room)
        per_column = f" · a column is {layout.format_duration(timeline.makespan() / room, timeline.unit)}"
        scale = room / (timeline.makespan() or 1)
        ruler = _ruler(layout.time_axis(timeline.makespan(), timeline.unit, most=max(room // 12, 1)), scale, room, 1)
        key = _legend_lines(lanes, {})
    lines = [layout.format_title(timeline)] if timeline.title else []
    lines += [layout.format_headline(timeline) + per_column, f"{'':{margin}} │ {ruler}".rstrip()]
    lines += [f"{label:{margin}} │ {paint(cells)}".rstrip() for label, cells in grid]
    return "\n".join([*lines, key, *_bytes_sent_lines(timeline, width)]) + "\n"


def _bytes_sent_lines(timeline: Timeline, width: int) -> list[str]:
    """Return lines that say what each rank sent; none where nothing was counted."""
    sent = timeline.sent()
    return textwrap.wrap(f"sent by each rank: {', '.join(map(layout.format_bytes, sent))}", width) if any(sent) else []


def _legend_lines(lanes: Sequence[layout.LaneRow], instead: dict[ActionKind, str]) -> str:
    words = {layout.STYLES[kind]: word for kind, word in instead.items()}
    return "   ".join(words.get(style, f"{style.glyph} {style.name}") for style in layout.legend_styles(lanes))


def _ruler(marks: layout.TimeAxis, scale: float, room: int, cell: int) -> str:
    """Return the numbers of the axis, each over the last character of its cell, and the unit; numbers never touch."""
    line = ""
    for at, label in marks.marks:
        column = max(round(at * scale) + cell - len(label), 0) if cell > 1 else round(at * scale)
        if (column > len(line) or not line) and column + len(label) <= room:
            line += " " * (column - len(line)) + label
    return f"{line} {marks.unit}"


# --- a cell per tick ---


# What stands before the microbatch of a pass.
_SIGNS = {
    ActionKind.FORWARD: "",
    ActionKind.BACKWARD: "<",
    ActionKind.BACKWARD_INPUT: "<",
    ActionKind.BACKWARD_WEIGHT: "=",
}


def _cell_width(timeline: Timeline, lanes: Sequence[layout.LaneRow]) -> int:
    """Return the characters of one tick, a sign and the longest number; 0 where spans do not fit the ticks."""
    start = timeline.start()
    if timeline.unit != "ticks" or not all(
        (span.start - start) % 1 == 0 and (span.end - start) % 1 == 0 for span in timeline.spans
    ):
        return 0
    return 1 + max((1, *(len(row.number(box)) for row in lanes for box in row.main)))


def _cells(timeline: Timeline, lanes: Sequence[layout.LaneRow], cell: int) -> list[tuple[str, list[_Cell]]]:
    start, ticks = timeline.start(), round(timeline.makespan())
    grid = []
    for row in lanes:
        for label, boxes, empty in ((row.label, row.main, layout.IDLE.glyph), ("", row.thin, "")):
            cells = [(f"{empty:>{cell}}", layout.IDLE)] * ticks
            for box in boxes:
                filled = (f"{_sign(box, row):>{cell}}", box.style)
                for tick in range(round(box.start - start), round(box.end - start)):
                    cells[tick] = filled
            # An update that takes no time has no cell of its own: it is marked in the one before.
            for span in row.updates() if boxes is row.main else ():
                index, mark = round(span.start - start) - 1, layout.style_of(span).glyph + row.number(_point(span))
                cells[max(0, index)] = (f"{mark:>{cell}}", cells[index][1])
            if boxes or label:
                grid.append((label, cells))
    return grid


def _point(span: Span) -> layout.Box:
    """Return the box of an update that takes no time."""
    return layout.Box(span.start, span.end, layout.style_of(span), span)


def _sign(box: layout.Box, row: layout.LaneRow) -> str:
    kind = box.span.action.kind
    if box.span.action.microbatch is None or kind not in _SIGNS:
        return box.style.glyph
    return _SIGNS[kind] + row.number(box)


# --- a column per slice of time ---


def _columns(timeline: Timeline, lanes: Sequence[layout.LaneRow], room: int) -> list[tuple[str, list[_Cell]]]:
    start, width = timeline.start(), (timeline.makespan() or 1) / room
    grid = []
    for row in lanes:
        main = [_fullest_style(share, layout.IDLE.glyph) for share in layout.style_shares(row.main, start, width, room)]
        for box in row.main:
            _write_number(main, box, row, (box.start - start) / width, (box.end - start) / width)
        for span in row.updates():
            style = layout.style_of(span)
            main[max(0, round((span.start - start) / width) - 1)] = (style.glyph, style)
        grid.append((row.label, main))
        thin = [_fullest_style(share, " ") for share in layout.style_shares(row.thin, start, width, room)]
        if any(style is not layout.IDLE for _, style in thin):
            grid.append(("", thin))
    return grid


def _fullest_style(share: dict[layout.SpanStyle, float], empty: str) -> _Cell:
    """Return the cell for what fills most of a column, where idle time counts as well."""
    style, part = max(share.items(), key=lambda item: item[1], default=(layout.IDLE, 0.0))
    return (style.glyph, style) if part >= 1 - sum(share.values()) and part > 0 else (empty, layout.IDLE)


def _write_number(cells: list[_Cell], box: layout.Box, row: layout.LaneRow, start: float, end: float) -> None:
    """Write the microbatch over the first columns of a span that has one more: it also marks where the span starts."""
    if box.span.action.kind not in PASSES or not (label := row.number(box)):
        return
    style = box.style
    left, right = math.ceil(start - 0.5), min(math.floor(end + 0.5), len(cells))
    if right - left > len(label) and all(shown is style for _, shown in cells[left:right]):
        cells[left : left + len(label)] = [(digit, style) for digit in label]
