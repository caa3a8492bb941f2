"""Swimlane as one standalone SVG picture: for a page, a paper or an issue."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from polylane.observe.swimlane import layout
from polylane.observe.timeline import Span, Timeline, transfer_times
from polylane.schedule.action import COMPUTE, ActionKind

# pixels
LANE, THIN, GAP, TOP, BOTTOM, RIGHT = 26, 7, 8, 64, 62, 24
TICK = 24  # width of one tick in theory, unless the picture would be wider than WIDEST
NARROW, WIDEST = 480, 1200
MARK = 3  # width of the mark of an update that takes no time
LETTER = 7.0  # width of one letter of a 12 pixel sans serif, rounded up

_STYLE = f"""
text {{ font: 12px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328; }}
.title {{ font-size: 15px; font-weight: 600; }}
.faint {{ fill: #57606a; }}
.paper {{ fill: #ffffff; }}
.idle {{ fill: {layout.IDLE.fill}; }}
.grid {{ stroke: #8c959f; stroke-opacity: 0.45; stroke-width: 1; }}
.number {{ font-size: 11px; text-anchor: middle; pointer-events: none; }}
@media (prefers-color-scheme: dark) {{
  text {{ fill: #e6edf3; }}
  .faint {{ fill: #9da7b1; }}
  .paper {{ fill: #0d1117; }}
  .idle {{ fill: {layout.IDLE_DARK}; }}
}}
"""


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


def svg(timeline: Timeline, extent: float = 0) -> str:
    """Return the swimlane as a standalone SVG document: a lane per rank, numbered by microbatch, with axis and legend.

    Communication during compute is on a thin row below it. Spans narrower than a pixel and a half are drawn together:
    each pixel column is filled in proportion to the time that they take, so that the coloured area stays true.

    Args:
        timeline: the spans that are drawn.
        extent: the time that the picture is as wide as, so that several have one scale; never less than the makespan.
    """
    lanes = layout.build_rows(timeline)
    margin = 24 + LETTER * max((len(row.label) for row in lanes), default=0)
    extent = max(extent, timeline.makespan())
    plot = min(WIDEST, max(NARROW, TICK * extent)) if timeline.unit == "ticks" else WIDEST
    scale = plot / (extent or 1)
    plot *= timeline.makespan() / extent if extent else 1
    picture = _Picture(timeline, transfer_times(timeline.spans), margin, plot, scale)
    ground: list[str] = []
    boxes: list[str] = []
    y = float(TOP)
    for row in lanes:
        ground += _row_background(row, margin, y, plot)
        boxes += _boxes(row, picture, y)
        y += LANE + (THIN + 1 if row.thin else 0) + GAP
    width, height = margin + plot + RIGHT, y + BOTTOM
    title = timeline.title or "swimlane"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img">',
            f"<title>{escape(title)} · {escape(layout.format_headline(timeline))}</title>",
            f"<style>{_STYLE}</style>",
            '<rect class="paper" width="100%" height="100%"/>',
            f'<text class="title" x="16" y="26">{escape(title)}</text>',
            f'<text class="faint" x="16" y="46">{escape(layout.format_headline(timeline))}</text>',
            *ground,
            *_axis(timeline, margin, y, scale),
            *boxes,
            *_legend(timeline, margin, y + 44),
            "</svg>\n",
        ]
    )


def escape(words: str) -> str:
    """Return text that is safe in XML and HTML, also in quotes; characters that XML cannot hold become "?"."""
    return html.escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", words))


def describe_span(span: Span, timeline: Timeline, time: float = 0) -> str:
    """Describe a span in one line: ``forward, stage 1, microbatch 2, rank 1: 3 ticks from 4 ticks``.

    Args:
        span: the span to be described.
        timeline: its timeline, for the unit and the start.
        time: upper bound of the transfer time of its bytes; 0 where it is not known.
    """
    action = span.action
    parts = [f"{action.kind}", f"stage {action.stage}"]
    parts += [f"microbatch {action.microbatch}"] if action.microbatch is not None else []
    parts += [f"{'gradient of ' if action.gradient else ''}{action.value}"] if action.value is not None else []
    parts += [f"rank {span.rank}"]
    parts += [f"peer {action.peer}"] if action.peer is not None else []
    long, at = span.end - span.start, span.start - timeline.start()
    parts += [f"{layout.format_duration(span.waited, timeline.unit)} of it in collectives"] if span.waited else []
    parts += [_describe_transfer(span, timeline.unit, time)] if span.bytes else []
    waited = "waited " if action.kind is ActionKind.RECEIVE else ""
    return (
        f"{', '.join(parts)}: {waited}{layout.format_duration(long, timeline.unit)} from "
        f"{layout.format_duration(at, timeline.unit, digits=8)}"
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
    for spans, top, height in ((row.main, y, LANE), (row.thin, y + LANE + 1, THIN)):
        # Narrow spans are drawn first, so that no wide span is hidden behind them.
        wide = [span for span in spans if (span.end - span.start) * picture.scale >= 1.5]
        yield from _stack_narrow_spans(
            [s for s in spans if (s.end - s.start) * picture.scale < 1.5], picture, top, height
        )
        for span in wide:
            yield from _box(span, row.number(span), picture, top, height)
    for span in row.updates():
        x = picture.left + (span.start - picture.timeline.start()) * picture.scale
        title = escape(f"update, stage {span.action.stage}, after microbatch {span.action.microbatch}")
        yield (
            f'<rect x="{x - MARK:.2f}" y="{y:g}" width="{MARK}" height="{LANE}" '
            f'fill="{layout.style_of(span).fill}"><title>{title}</title></rect>'
        )


def _box(span: Span, number: str, picture: _Picture, top: float, height: float) -> Iterator[str]:
    style, timeline = layout.style_of(span), picture.timeline
    x = picture.left + (span.start - timeline.start()) * picture.scale
    width = (span.end - span.start) * picture.scale
    seam = 1 if width > 4 else 0  # a line of background between one box and the next
    yield (
        f'<rect x="{x:.2f}" y="{top:g}" width="{width - seam:.2f}" height="{height}" fill="{style.fill}">'
        f"<title>{escape(describe_span(span, timeline, picture.times.get(span, 0)))}</title></rect>"
    )
    if height == LANE and number and width > 4 + LETTER * len(number):
        middle = x + (width - seam) / 2
        yield (
            f'<text class="number" x="{middle:.2f}" y="{top + height / 2 + 4:g}" style="fill: {style.ink}">'
            f"{number}</text>"
        )


def _stack_narrow_spans(spans: Sequence[Span], picture: _Picture, top: float, height: float) -> Iterator[str]:
    """Yield spans too narrow to draw as stacks one pixel wide: one path for each colour."""
    if not spans:
        return
    bins, timeline = round(picture.plot), picture.timeline
    paths: dict[layout.SpanStyle, list[str]] = {}
    for at, share in enumerate(layout.style_shares(spans, timeline.start(), (timeline.makespan() or 1) / bins, bins)):
        below = top + height
        # From the bottom up in the order of the legend. pop: send and receive share one style, which is drawn once.
        for style in layout.STYLES.values():
            if style in share:
                tall = share.pop(style) * height
                paths.setdefault(style, []).append(f"M{picture.left + at:g} {below:.2f}h1v{-tall:.2f}h-1z")
                below -= tall
    for style, pieces in paths.items():
        yield f'<path fill="{style.fill}" d="{"".join(pieces)}"/>'


def _axis(timeline: Timeline, margin: float, y: float, scale: float) -> Iterator[str]:
    marks = layout.time_axis(timeline.makespan(), timeline.unit)
    for at, label in marks.marks:
        x = margin + at * scale
        yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 4}" y2="{y:g}"/>'
        yield f'<text class="faint" x="{x:.2f}" y="{y + 14:g}" text-anchor="middle">{escape(label)}</text>'
    yield f'<text class="faint" x="{margin - 10:g}" y="{y + 14:g}" text-anchor="end">{escape(marks.unit)}</text>'


def _legend(timeline: Timeline, x: float, y: float) -> Iterator[str]:
    for style in layout.legend_styles(timeline):
        fill = 'class="idle"' if style is layout.IDLE else f'fill="{style.fill}"'
        yield f'<rect {fill} x="{x:g}" y="{y - 10:g}" width="14" height="12"/>'
        yield f'<text x="{x + 20:g}" y="{y:g}">{escape(style.name)}</text>'
        x += 20 + LETTER * len(style.name) + 22
