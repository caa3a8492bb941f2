"""Layout that all swimlane pictures share: the rows of a lane, labels, colours, the time axis and the headline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from polylane.observe.stretches import Stretch, TimeState
from polylane.observe.time_account import InnerTime, account_time
from polylane.observe.timeline import Span, Timeline, union_intervals
from polylane.schedule.action import COMPUTE, ActionKind


@dataclass(frozen=True, slots=True)
class SpanStyle:
    """The style of one kind of box; the same in theory, prediction and measurement.

    Attributes:
        name: the word in the legend.
        fill: colour of the box, or of its hatching, as #rrggbb.
        ink: colour of the number in the box, as #rrggbb.
        glyph: the character that stands for it in text.
        ansi: parameters of the ANSI escape sequence for a terminal.
    """

    name: str
    fill: str
    ink: str
    glyph: str
    ansi: str


# The palette of Okabe and Ito, "Color Universal Design", 2008, whose colours differ with any colour vision. Forward and
# backward also differ in lightness, so that a grey print is readable.
_TRAVEL = SpanStyle("send / receive", "#cc79a7", "#000000", "~", "45;30")
STYLES: dict[ActionKind, SpanStyle] = {
    ActionKind.FORWARD: SpanStyle("forward", "#0072b2", "#ffffff", "▓", "44;97"),
    ActionKind.BACKWARD: SpanStyle("backward", "#e69f00", "#000000", "░", "43;30"),
    ActionKind.BACKWARD_INPUT: SpanStyle("input gradients", "#d55e00", "#000000", "▒", "48;5;166;30"),
    ActionKind.BACKWARD_WEIGHT: SpanStyle("weight gradients", "#f0e442", "#000000", "=", "48;5;227;30"),
    ActionKind.SEND: _TRAVEL,
    ActionKind.RECEIVE: _TRAVEL,
    ActionKind.REDUCE: SpanStyle("collective", "#882255", "#ffffff", "+", "41;97"),
    ActionKind.STEP: SpanStyle("step", "#009e73", "#000000", "#", "42;30"),
}
WAITING = SpanStyle("waiting", "#8c959f", "#000000", "/", "2")  # hatched, where there is colour
HUNG = SpanStyle("does not go on", "#ff0000", "#ffffff", "!", "48;5;196;97")
IDLE = SpanStyle("bubble", "#eceff2", "#57606a", "·", "2")
IDLE_DARK = "#262c36"
COLLECTIVE = STYLES[ActionKind.REDUCE]
ALL_STYLES = (*dict.fromkeys(STYLES.values()), WAITING, HUNG)  # from the bottom up, where several share a column


def style_of(span: Span) -> SpanStyle:
    """Return the style of a span: that of its kind, or red where the training stood still for it."""
    return HUNG if span.is_hung else STYLES[span.action.kind]


@dataclass(frozen=True, slots=True)
class Box:
    """What a rank does from one moment to the next, as it is drawn.

    Attributes:
        start: in the unit of the timeline.
        end: in the unit of the timeline.
        style: of the whole box; of a pass, of what it computes.
        span: the pass or the communication that it is, or a part of.
        state: what the rank does; passes compute, though it may wait inside them for a part of their time.
        peer: the rank that it waits for; None where it does not wait.
        inner: what passes in collectives inside a pass; None: nothing does.
    """

    start: float
    end: float
    style: SpanStyle
    span: Span
    state: TimeState = TimeState.COMPUTING
    peer: int | None = None
    inner: InnerTime | None = None

    def layers(self) -> tuple[tuple[SpanStyle, float], ...]:
        """Return the styles of the box from the bottom up, each with its fraction of the height (0 to 1).

        A pass has its colour for the part of its time in which it computes: the coloured area is what is computed.
        """
        length = self.end - self.start
        if self.inner is None or not length:
            return ((self.style, 1.0),)
        moving, waiting = self.inner.moving / length, self.inner.waiting / length
        layers = ((self.style, max(0.0, 1 - moving - waiting)), (COLLECTIVE, moving), (WAITING, waiting))
        return tuple((style, part) for style, part in layers if part > 0)


@dataclass(frozen=True, slots=True)
class LaneRow:
    """What one rank does, on two rows.

    Attributes:
        label: name of the rank, with its stages.
        main: passes, and what the rank waits for or moves while it computes nothing; none overlaps with communication.
        thin: communication that overlaps with compute, drawn on a thin row below.
        stages: the stages of the rank, ascending; more than one are its chunks, called a, b, ... in this order.
    """

    label: str
    main: tuple[Box, ...]
    thin: tuple[Box, ...]
    stages: tuple[int, ...]

    def updates(self) -> tuple[Span, ...]:
        """Return the updates that take no time, as in theory: pictures mark where they are."""
        return tuple(b.span for b in self.main if b.span.action.kind is ActionKind.STEP and b.end == b.start)

    def number(self, box: Box) -> str:
        """Return the microbatch of a pass, with a letter for its chunk where there are several; "" for what has none.

        More chunks than there are letters keep their numbers alone; communication has none.
        """
        action = box.span.action
        if action.microbatch is None or action.kind not in COMPUTE:
            return ""
        several = 1 < len(self.stages) <= len(ascii_lowercase)
        return f"{action.microbatch}{ascii_lowercase[self.stages.index(action.stage)] if several else ''}"


def build_rows(timeline: Timeline) -> tuple[LaneRow, ...]:
    """Return a row per rank, with boxes in order of start."""
    lanes, account = timeline.lanes(), account_time(timeline)
    stages = [tuple(sorted({span.action.stage for span in lane})) for lane in lanes]
    rows = []
    for label, lane, group, stretches in zip(
        _labels(stages, timeline.unit), lanes, stages, account.stretches, strict=True
    ):
        passes = [
            Box(span.start, span.end, style_of(span), span, inner=account.inner.get(span))
            for span in lane
            if span.action.kind in COMPUTE
        ]
        main = sorted([*passes, *_box_stretches(stretches)], key=lambda box: (box.start, -box.end))
        thin = tuple(
            Box(span.start, span.end, style_of(span), span, TimeState.MOVING) for span in _overlapping_spans(lane)
        )
        rows.append(LaneRow(label, tuple(main), thin, group))
    return tuple(rows)


def _box_stretches(stretches: Iterable[Stretch]) -> Iterator[Box]:
    """Yield the boxes of what no compute covers; a bubble is empty, unless the training stands still there."""
    for stretch in stretches:
        if stretch.span is not None and (stretch.state is not TimeState.BUBBLE or stretch.span.is_hung):
            style = style_of(stretch.span)
            is_wait = stretch.state is TimeState.WAITING and not stretch.span.is_hung
            style = WAITING if is_wait else style
            yield Box(stretch.start, stretch.end, style, stretch.span, stretch.state, stretch.peer)


def _overlapping_spans(lane: Sequence[Span]) -> list[Span]:
    """Return the communication of a rank that overlaps with its compute, or with communication that began before."""
    computed = union_intervals(span for span in lane if span.action.kind in COMPUTE)
    starts = [start for start, _ in computed]
    overlapping: list[Span] = []
    last_end = -math.inf  # the end of the last communication that overlaps with nothing
    for span in lane:
        if span.action.kind in COMPUTE:
            continue
        index = bisect_right(starts, span.start) - 1
        within = index >= 0 and computed[index][1] > span.start
        runs_into = index + 1 < len(starts) and starts[index + 1] < span.end
        if within or runs_into or span.start < last_end:
            overlapping.append(span)
        else:
            last_end = span.end
    return overlapping


def _labels(stages: Sequence[tuple[int, ...]], unit: str) -> list[str]:
    """Return a label per rank: ``stage 0`` in theory where each rank is one stage, else ``rank 0`` with its stages."""
    if unit == "ticks" and any(stages) and all(of in ((rank,), ()) for rank, of in enumerate(stages)):
        return [f"stage {rank}" for rank in range(len(stages))]
    return [f"rank {rank}" + (f" · stage {', '.join(map(str, of))}" if of else "") for rank, of in enumerate(stages)]


def legend_styles(rows: Iterable[LaneRow]) -> list[SpanStyle]:
    """Return the styles that occur, in the order of `STYLES`, and idle last."""
    used = {style for row in rows for box in (*row.main, *row.thin) for style, _ in box.layers()}
    return [*(style for style in ALL_STYLES if style in used), IDLE]


def format_title(timeline: Timeline) -> str:
    """Return the title with the recipe and the plan, where the notes say them: ``measured · step 44 · data=2``."""
    facts = [timeline.notes.get(name, "") for name in ("recipe", "plan")]
    words = [timeline.title or "swimlane", *(fact for fact in facts if fact and fact not in timeline.title)]
    return " · ".join(words)


def format_headline(timeline: Timeline) -> str:
    """Return ``utilization 72.7 % (96/132) · makespan 33 ticks``; in ticks with the coloured area over the whole one.

    Where they are known, what all ranks sent and why this step is shown follow: ``· 1.2 MB sent · the slowest step``.
    """
    makespan, unit, cells = timeline.makespan(), timeline.unit, ""
    if unit == "ticks":
        cells = f" ({format_number(sum(timeline.busy()))}/{format_number(timeline.ranks * makespan)})"
    sent = f" · {format_bytes(sum(timeline.sent()))} sent" if any(timeline.sent()) else ""
    reason = f" · {timeline.notes['reason']}" if timeline.notes.get("reason") else ""
    return (
        f"utilization {format_percent(timeline.utilization())}{cells} · makespan "
        f"{format_duration(makespan, unit)}{sent}{reason}"
    )


def format_percent(part: float) -> str:
    """Return ``72.7 %`` for a fraction from 0 to 1."""
    return f"{part * 100:.1f} %"


def format_duration(value: float, unit: str, digits: int = 4) -> str:
    """Return a duration with its unit, to ``digits`` significant digits: ``1.5 ms``, ``33 ticks``."""
    if unit != "seconds":
        return f"{format_number(value, digits)} {unit[:-1] if value == 1 and unit.endswith('s') else unit}"
    name, scale = scale_time_unit(value, unit)
    return f"{format_number(value * scale, digits)} {name}"


def format_bytes(count: float) -> str:
    """Return a number of bytes with its unit: ``24 B``, ``1.2 MB``, ``340 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        # 999.5 would round to 1000 of this unit, and 99.95 to three digits before the point.
        if count < 999.5:
            return f"{count:.0f} {unit}" if unit == "B" or count >= 99.95 else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_number(value: float, digits: int = 4) -> str:
    """Return a number to ``digits`` significant digits, or with all digits of its whole part."""
    return str(round(value)) if value == round(value) or abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"


def scale_time_unit(extent: float, unit: str) -> tuple[str, float]:
    """Return the unit in which to print such a time, and how many of it are one of the timeline's: ("ms", 1000.0)."""
    if unit != "seconds":
        return unit, 1
    for name, scale in (("s", 1.0), ("ms", 1e3)):
        if extent * scale >= 1:
            return name, scale
    return ("µs", 1e6) if extent else ("s", 1.0)


@dataclass(frozen=True, slots=True)
class TimeAxis:
    """The marks of a time axis.

    Attributes:
        unit: the unit in which labels count.
        marks: (time since the first span, label) of each mark, in the timeline's unit.
    """

    unit: str
    marks: tuple[tuple[float, str], ...]


def time_axis(extent: float, unit: str, most: int = 12) -> TimeAxis:
    """Return round marks from 0 to ``extent``, about ``most`` of them: in steps of 1, 2 or 5 times a power of ten."""
    name, scale = scale_time_unit(extent, unit)
    if not extent:
        return TimeAxis(name, ((0, "0"),))
    minimum = extent * scale / most
    power = 10.0 ** math.floor(math.log10(minimum))
    # The tolerance keeps a rounding error from choosing the next larger step.
    step = next(power * digit for digit in (1, 2, 5, 10) if power * digit >= minimum * (1 - 1e-9))
    if unit == "ticks":
        step = max(step, 1)
    count = math.floor(extent * scale / step * (1 + 1e-9))
    return TimeAxis(name, tuple((i * step / scale, format_number(i * step)) for i in range(count + 1)))


def style_shares(boxes: Iterable[Box], origin: float, width: float, bins: int) -> list[dict[SpanStyle, float]]:
    """Return, for each bin of ``width`` from ``origin``, the fraction of it that each style covers.

    This is for boxes too small to draw. Where boxes overlap, fractions are scaled down to fill the bin, so that the
    coloured area stays true.
    """
    shares: list[dict[SpanStyle, float]] = [{} for _ in range(bins)]
    for box in boxes:
        layers = box.layers()
        start, end = (box.start - origin) / width, (box.end - origin) / width
        for at in range(max(0, int(start)), min(bins, math.ceil(end))):
            covered = min(end, at + 1) - max(start, at)
            if covered > 0:
                for style, part in layers:
                    shares[at][style] = shares[at].get(style, 0.0) + covered * part
    for bin_shares in shares:
        total = sum(bin_shares.values())
        if total > 1:
            bin_shares.update({style: part / total for style, part in bin_shares.items()})
    return shares
