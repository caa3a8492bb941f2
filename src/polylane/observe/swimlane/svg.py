"""Swimlane as one standalone SVG picture: for a page, a paper or an issue."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from polylane.observe.swimlane import layout
from polylane.observe.timeline import Span, Timeline, transfer_times
from polylane.schedule.action import COMPUTE

# pixels
LANE, THIN, GAP, TOP, BOTTOM, RIGHT = 26, 7, 8, 64, 62, 24
TICK = 24  # width of one tick in theory, unless the picture would be wider than WIDEST
NARROW, WIDEST = 480, 1200
MARK = 3  # width of the mark of an update that takes no time
LETTER = 7.0  # width of one letter of a 12 pixel sans serif, rounded up
NUMBER, SMALLEST = 11, 6.5  # size of the numbers in boxes, and the smallest in narrow ones
DIGIT = 0.6  # width of a digit over the size of its letters, rounded up

_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }}
.title {{ font-size: 15px; font-weight: 600; }}
.faint {{ fill: #57606a; }}
.paper {{ fill: #ffffff; }}
.idle {{ fill: {layout.IDLE.fill}; }}
.hatch {{ stroke: {layout.WAITING.fill}; stroke-width: 1.5; }}
.grid {{ stroke: #8c959f; stroke-opacity: 0.45; stroke-width: 1; }}
.number {{ font-size: {NUMBER}px; text-anchor: middle; pointer-events: none; }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3; }}
  .faint {{ fill: #9da7b1; }}
  .paper {{ fill: #0d1117; }}
  .idle {{ fill: {layout.IDLE_DARK}; }}
}}
"""


# Waits are hatched, in pictures of a white and of a dark page.
_HATCH = (
    '<defs><pattern id="waiting" width="5" height="5" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    '<line class="hatch" x1="1" x2="1" y1="0" y2="5"/></pattern></defs>'
)


@dataclass(frozen=True, slots=True)
class _Picture:
    """The scale of a picture, by which spans are drawn.

    Attributes:
        timeline: the spans that are drawn.
        times: upper bounds of transfer times, see `transfer_times`.
        left: x of the first span's start, in pixels.
        plot: width of the lanes, in pixels.
        scale: pixels per unit of the timeline's time.
    """

    timeline: Timeline
    times: Mapping[Span, float]
    left: float
    plot: float
    scale: float


def svg(timeline: Timeline, extent: float = 0, label_length: int = 0) -> str:
    """Return the swimlane as a standalone SVG document: a lane per rank, numbered by microbatch, with axis and legend.

    Communication during compute is on a thin row below it. Spans narrower than a pixel and a half are drawn together:
    each pixel column is filled in proportion to the time that they take, so that the coloured area stays true.

    Args:
        timeline: the spans that are drawn.
        extent: the time that the picture is as wide as, so that several have one scale; never less than the makespan.
        label_length: letters for which labels have room at least, so that the lanes of several begin at one place.
    """
    lanes = layout.build_rows(timeline)
    margin = 24 + LETTER * max([label_length, *(len(row.label) for row in lanes)])
    extent = max(extent, timeline.makespan())
    plot = min(WIDEST, max(NARROW, TICK * extent)) if timeline.unit == "ticks" else WIDEST
    scale = plot / (extent or 1)
    width, plot = margin + plot + RIGHT, plot * (timeline.makespan() / extent if extent else 1)
    picture = _Picture(timeline, transfer_times(timeline.spans), margin, plot, scale)
    ground: list[str] = []
    boxes: list[str] = []
    y = float(TOP)
    for row in lanes:
        ground += _row_background(row, margin, y, plot)
        boxes += _boxes(row, picture, y)
        y += LANE + (THIN + 1 if row.thin else 0) + GAP
    height = y + BOTTOM
    title = layout.format_title(timeline)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{escape(title)} · {escape(layout.format_headline(timeline))}</title>",
            f"<style>{_STYLE}</style>",
            _HATCH,
            '<rect class="paper" width="100%" height="100%"/>',
            f'<text class="title" x="16" y="26">{escape(title)}</text>',
            f'<text class="faint" x="16" y="46">{escape(layout.format_headline(timeline))}</text>',
            *ground,
            *_axis(timeline, margin, y, scale),
            *boxes,
            *_legend(lanes, margin, y + 44),
            "</svg>\n",
        ]
    )


def escape(words: str) -> str:
    """Return text that is safe in XML and HTML, also in quotes; characters that XML cannot hold become "?"."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))


def describe_box(box: layout.Box, timeline: Timeline, time: float = 0) -> str:
    """Describe a box in one line: ``forward, stage 1, microbatch 2, rank 1: 3 ticks from 4 ticks``.

    A part of a communication is what the rank does there, in which message: ``waiting for rank 0, receive, stage 1,
    ...: 20 ms from 10 ms``.

    Args:
        box: a part of a row, of `layout.build_rows`.
        timeline: its timeline, for the unit and the start.
        time: upper bound of the transfer time of its bytes; 0 where it is not known.
    """
    span, unit = box.span, timeline.unit
    action = span.action
    parts = [f"waiting for rank {box.peer}"] if box.peer is not None else []
    parts += [f"{action.kind}", f"stage {action.stage}"]
    parts += [f"microbatch {action.microbatch}"] if action.microbatch is not None else []
    parts += [f"{'gradient of ' if action.gradient else ''}{action.value}"] if action.value is not None else []
    parts += [f"rank {span.rank}"]
    parts += [f"peer {action.peer}"] if action.peer is not None else []
    if (inner := box.inner) is not None:
        parts += [f"{layout.format_duration(inner.moving, unit)} of it in collectives"] if inner.moving else []
        parts += [f"{layout.format_duration(inner.waiting, unit)} waiting for rank {inner.peer}"] * bool(inner.waiting)
    parts += [_describe_transfer(span, unit, time)] if span.bytes else []
    return (
        f"{', '.join(parts)}: {layout.format_duration(box.end - box.start, unit)} from "
        f"{layout.format_duration(box.start - timeline.start(), unit, digits=8)}"
    )


def _describe_transfer(span: Span, unit: str, time: float) -> str:
    """Return ``1.2 MB in at most 3.4 ms (340 MB/s or more)``."""
    if span.action.kind in COMPUTE:
        return f"{layout.format_bytes(span.bytes)} sent in collectives"
    rate = f" ({layout.format_bytes(span.bytes / time)}/s or more)" if time and unit == "seconds" else ""
    return layout.format_bytes(span.bytes) + (f" in at most {layout.format_duration(time, unit)}{rate}" if time else "")


def _row_background(row: layout.LaneRow, margin: float, y: float, plot: float) -> Iterator[str]:
    yield f'<text x="{margin - 10:g}" y="{y + LANE / 2 + 4:g}" text-anchor="end">{escape(row.label)}</text>'
    yield f'<rect class="idle" x="{margin:g}" y="{y:g}" width="{plot:g}" height="{LANE}"/>'


def _boxes(row: layout.LaneRow, picture: _Picture, y: float) -> Iterator[str]:
    for boxes, top, height in ((row.main, y, LANE), (row.thin, y + LANE + 1, THIN)):
        # Narrow boxes are drawn first, so that no wide one is hidden behind them.
        narrow = [box for box in boxes if (box.end - box.start) * picture.scale < 1.5]
        yield from _stack_narrow_boxes(narrow, picture, top, height)
        for box in boxes:
            if (box.end - box.start) * picture.scale >= 1.5:
                yield from _box(box, row.number(box), picture, top, height)
    for span in row.updates():
        x = picture.left + (span.start - picture.timeline.start()) * picture.scale
        title = escape(f"update, stage {span.action.stage}, after microbatch {span.action.microbatch}")
        yield (
            f'<rect x="{x - MARK:.2f}" y="{y:g}" width="{MARK}" height="{LANE}" '
            f'fill="{layout.style_of(span).fill}"><title>{title}</title></rect>'
        )


def _box(box: layout.Box, number: str, picture: _Picture, top: float, height: float) -> Iterator[str]:
    x = picture.left + (box.start - picture.timeline.start()) * picture.scale
    width = (box.end - box.start) * picture.scale
    seam = 1 if width > 4 else 0  # a line of background between one box and the next
    title, below = escape(describe_box(box, picture.timeline, picture.times.get(box.span, 0))), top + height
    for style, part in box.layers():
        below -= part * height
        yield (
            f'<rect x="{x:.2f}" y="{below:.4g}" width="{width - seam:.2f}" height="{part * height:.4g}" '
            f'fill="{_paint(style)}"><title>{title}</title></rect>'
        )
    # Where the letter of the chunk has no room, the microbatch stands alone.
    number = number if _number_size(number, width - seam) >= SMALLEST else number.rstrip(ascii_lowercase)
    letters = _number_size(number, width - seam)
    if height == LANE and number and letters >= SMALLEST:
        smaller = f"; font-size: {letters:.1f}px" if letters < NUMBER else ""
        yield (
            f'<text class="number" x="{x + (width - seam) / 2:.2f}" y="{top + height / 2 + 4:g}" '
            f'style="fill: {box.style.ink}{smaller}">{number}</text>'
        )


def _number_size(number: str, width: float) -> float:
    """Return the size at which a number fits into a box, in pixels."""
    return min(NUMBER, (width - 1) / max(1, len(number)) / DIGIT)


def _paint(style: layout.SpanStyle) -> str:
    return "url(#waiting)" if style is layout.WAITING else style.fill


def _stack_narrow_boxes(boxes: Sequence[layout.Box], picture: _Picture, top: float, height: float) -> Iterator[str]:
    """Yield boxes too narrow to draw as stacks one pixel wide: one path for each colour."""
    if not boxes:
        return
    bins, timeline = round(picture.plot), picture.timeline
    paths: dict[layout.SpanStyle, list[str]] = {}
    for at, share in enumerate(layout.style_shares(boxes, timeline.start(), (timeline.makespan() or 1) / bins, bins)):
        below = top + height
        for style in layout.ALL_STYLES:  # from the bottom up in the order of the legend
            if style in share:
                tall = share[style] * height
                paths.setdefault(style, []).append(f"M{picture.left + at:g} {below:.2f}h1v{-tall:.2f}h-1z")
                below -= tall
    for style, pieces in paths.items():
        yield f'<path fill="{_paint(style)}" d="{"".join(pieces)}"/>'


def _axis(timeline: Timeline, margin: float, y: float, scale: float) -> Iterator[str]:
    marks = layout.time_axis(timeline.makespan(), timeline.unit)
    for at, label in marks.marks:
        x = margin + at * scale
        yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 4}" y2="{y:g}"/>'
        yield f'<text class="faint" x="{x:.2f}" y="{y + 14:g}" text-anchor="middle">{escape(label)}</text>'
    yield f'<text class="faint" x="{margin - 10:g}" y="{y + 14:g}" text-anchor="end">{escape(marks.unit)}</text>'


def _legend(lanes: Sequence[layout.LaneRow], x: float, y: float) -> Iterator[str]:
    for style in layout.legend_styles(lanes):
        fill = 'class="idle"' if style is layout.IDLE else f'fill="{_paint(style)}"'
        yield f'<rect {fill} x="{x:g}" y="{y - 10:g}" width="14" height="12"/>'
        yield f'<text x="{x + 20:g}" y="{y:g}">{escape(style.name)}</text>'
        x += 20 + LETTER * len(style.name) + 22
