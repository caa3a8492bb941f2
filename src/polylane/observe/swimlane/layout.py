"""Layout that all swimlane pictures share: the rows of a lane, labels, colours, the time axis and the headline."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from string import ascii_lowercase

from polylane.observe.timeline import Span, Timeline, union_intervals
from polylane.schedule.action import COMPUTE, ActionKind


@dataclass(frozen=True, slots=True)
class SpanStyle:
    """The style of one kind of span.

    Attributes:
        name: the word in the legend.
        fill: colour of the box, as #rrggbb.
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
    ActionKind.REDUCE: SpanStyle("reduce", "#882255", "#ffffff", "+", "41;97"),
    ActionKind.STEP: SpanStyle("step", "#009e73", "#000000", "#", "42;30"),
}
HUNG = SpanStyle("does not go on", "#ff0000", "#ffffff", "!", "48;5;196;97")
IDLE = SpanStyle("idle", "#eceff2", "#57606a", "·", "2")
IDLE_DARK = "#262c36"


def style_of(span: Span) -> SpanStyle:
    """Return the style of a span: that of its kind, or red where the training stood still for it."""
    return HUNG if span.is_hung else STYLES[span.action.kind]


@dataclass(frozen=True, slots=True)
class LaneRow:
    """The spans of one rank, on two rows.

    Attributes:
        label: name of the rank, with its stages.
        main: compute, and communication during which nothing is computed.
        thin: communication that overlaps with compute, drawn on a thin row below.
        stages: the stages of the rank, ascending; more than one are its chunks, called a, b, ... in this order.
    """

    label: str
    main: tuple[Span, ...]
    thin: tuple[Span, ...]
    stages: tuple[int, ...]

    def updates(self) -> tuple[Span, ...]:
        """Return the updates that take no time, as in theory: pictures mark where they are."""
        return tuple(span for span in self.main if span.action.kind is ActionKind.STEP and span.end == span.start)

    def number(self, span: Span) -> str:
        """Return the microbatch of a pass, with a letter for its chunk where there are several; "" for what has none.

        More chunks than there are letters keep their numbers alone.
        """
        if span.action.microbatch is None:
            return ""
        several = 1 < len(self.stages) <= len(ascii_lowercase)
        return f"{span.action.microbatch}{ascii_lowercase[self.stages.index(span.action.stage)] if several else ''}"


def build_rows(timeline: Timeline) -> tuple[LaneRow, ...]:
    """Return a row per rank, with spans in order of start."""
    lanes = timeline.lanes()
    stages = [tuple(sorted({span.action.stage for span in lane})) for lane in lanes]
    labels = _labels(stages, timeline.unit)
    return tuple(
        LaneRow(label, *_main_and_thin(lane), group) for label, lane, group in zip(labels, lanes, stages, strict=True)
    )


def _main_and_thin(lane: Sequence[Span]) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
    # Communication goes to the thin row where it overlaps with compute or with earlier communication of the main row:
    # no two boxes of a row overlap.
    computed = union_intervals(span for span in lane if span.action.kind in COMPUTE)
    starts = [start for start, _ in computed]
    main: list[Span] = []
    thin: list[Span] = []
    last_end = -math.inf  # the end of the last communication on the main row
    for span in lane:
        if span.action.kind in COMPUTE:
            main.append(span)
            continue
        index = bisect_right(starts, span.start) - 1
        within = index >= 0 and computed[index][1] > span.start
        runs_into = index + 1 < len(starts) and starts[index + 1] < span.end
        if within or runs_into or span.start < last_end:
            thin.append(span)
        else:
            main.append(span)
            last_end = span.end
    return tuple(main), tuple(thin)


def _labels(stages: Sequence[tuple[int, ...]], unit: str) -> list[str]:
    """Return a label per rank: ``stage 0`` in theory where each rank is one stage, else ``rank 0`` with its stages."""
    if unit == "ticks" and any(stages) and all(of in ((rank,), ()) for rank, of in enumerate(stages)):
        return [f"stage {rank}" for rank in range(len(stages))]
    return [f"rank {rank}" + (f" · stage {', '.join(map(str, of))}" if of else "") for rank, of in enumerate(stages)]


def legend_styles(timeline: Timeline) -> list[SpanStyle]:
    """Return the styles that occur, in the order of `STYLES`, and idle last."""
    used = {style_of(span) for span in timeline.spans}
    return [*dict.fromkeys(style for style in (*STYLES.values(), HUNG) if style in used), IDLE]


def format_headline(timeline: Timeline) -> str:
    """Return ``utilization 72.7 % (96/132) · makespan 33 ticks``; in ticks with the coloured area over the whole one.

    Where it is known, what all ranks sent follows: ``· 1.2 MB sent``.
    """
    makespan, unit, cells = timeline.makespan(), timeline.unit, ""
    if unit == "ticks":
        cells = f" ({format_number(sum(timeline.busy()))}/{format_number(timeline.ranks * makespan)})"
    sent = f" · {format_bytes(sum(timeline.sent()))} sent" if any(timeline.sent()) else ""
    return (
        f"utilization {format_percent(timeline.utilization())}{cells} · makespan "
        f"{format_duration(makespan, unit)}{sent}"
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


def style_shares(spans: Iterable[Span], origin: float, width: float, bins: int) -> list[dict[SpanStyle, float]]:
    """Return, for each bin of ``width`` from ``origin``, the fraction of it that each style covers.

    This is for spans too small to draw. Where spans overlap, fractions are scaled down to fill the bin, so that the
    coloured area stays true.
    """
    shares: list[dict[SpanStyle, float]] = [{} for _ in range(bins)]
    for span in spans:
        style = style_of(span)
        start, end = (span.start - origin) / width, (span.end - origin) / width
        for at in range(max(0, int(start)), min(bins, math.ceil(end))):
            covered = min(end, at + 1) - max(start, at)
            if covered > 0:
                shares[at][style] = shares[at].get(style, 0.0) + covered
    for bin_shares in shares:
        total = sum(bin_shares.values())
        if total > 1:
            bin_shares.update({style: part / total for style, part in bin_shares.items()})
    return shares
