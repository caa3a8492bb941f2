"""Who did what, when: the one record that theory, prediction and measurement share."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from polylane.schedule.action import COMMUNICATION, COMPUTE, Action, ActionKind

# What a span is in a file, in this order; `from_dict` goes by these names, so that a later version may add more.
COLUMNS = ("rank", "kind", "stage", "microbatch", "value", "peer", "gradient", "start", "end", "waited", "bytes")
# Of these, what files of earlier versions do not have, and what is read instead.
_LATER: dict[str, Any] = {"bytes": 0}


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank, from ``start`` to ``end`` (seconds, or ticks when the timeline is theory).

    ``waited`` is how much of it went by in collectives inside the action, such as the batch statistics of a forward
    pass.

    ``bytes`` are those of the tensors that this rank handed to its transport in the action, or got from it: what a send
    sends and a receive receives, the gradients that a reduce sums with others', and what a pass or a step sends
    in the collectives inside it; not what an algorithm makes of them on the wire. 0 where nobody counted.
    """

    rank: int
    action: Action
    start: float
    end: float
    waited: float = 0
    bytes: int = 0


@dataclass(frozen=True)
class Timeline:
    """The spans of one step (or several), on ``ranks`` lanes.

    Attributes:
        spans: in any order; spans of one rank may nest (a reduce runs while a backward does).
        ranks: number of lanes, idle ones included.
        unit: "seconds" when measured or predicted, "ticks" when theory.

    Raises:
        ValueError: a span outside the lanes, or one that ends before it starts.
    """

    spans: tuple[Span, ...]
    ranks: int
    unit: str = "seconds"
    title: str = ""
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for span in self.spans:
            if not 0 <= span.rank < self.ranks:
                raise ValueError(f"{span} lies outside the timeline's {self.ranks} ranks")
            if not -math.inf < span.start <= span.end < math.inf:  # this refuses NaN, too
                raise ValueError(f"{span} must have a finite start that is not after its end")

    def start(self) -> float:
        """When the first span starts; 0 where there is none."""
        return min((span.start for span in self.spans), default=0)

    def makespan(self) -> float:
        """From the start of the first span to the end of the last, over all ranks; 0 where there is none."""
        return max((span.end for span in self.spans), default=0) - self.start()

    def lanes(self) -> tuple[tuple[Span, ...], ...]:
        """The spans of each rank in order of start; of two that start together, the longer one first."""
        lanes: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            lanes[span.rank].append(span)
        return tuple(tuple(sorted(lane, key=lambda span: (span.start, -span.end))) for lane in lanes)

    def busy(self) -> tuple[float, ...]:
        """Per rank, the time in which it computes, less what it waited inside; overlapping spans count once."""
        compute = (_spans_of_kinds(lane, COMPUTE) for lane in self.lanes())
        return tuple(max(0, _length(union_intervals(spans)) - sum(span.waited for span in spans)) for spans in compute)

    def exposed_communication(self) -> tuple[float, ...]:
        """Per rank, the time in which it sends, receives, reduces or waits inside an action, and does not compute."""
        either = (_length(union_intervals(_spans_of_kinds(lane, COMPUTE | COMMUNICATION))) for lane in self.lanes())
        return tuple(max(0, both - busy) for both, busy in zip(either, self.busy(), strict=True))

    def idle(self) -> tuple[float, ...]:
        """Per rank, the time in which nothing happens: busy + exposed communication + idle = makespan."""
        makespan = self.makespan()
        return tuple(
            max(0, makespan - busy - exposed)
            for busy, exposed in zip(self.busy(), self.exposed_communication(), strict=True)
        )

    def sent(self) -> tuple[int, ...]:
        """Per rank, the bytes that it gave away: in its sends, its reduces and the collectives inside its actions."""
        sent = [0] * self.ranks
        for span in self.spans:
            sent[span.rank] += 0 if span.action.kind is ActionKind.RECEIVE else span.bytes
        return tuple(sent)

    def utilization(self) -> float:
        """The coloured area over the rectangle: busy time of all ranks / (ranks x makespan), from 0 to 1."""
        area = self.ranks * self.makespan()
        return sum(self.busy()) / area if area else 0.0

    def peak_live_microbatches(self) -> tuple[int, ...]:
        """Per rank, the most microbatches it holds at once, from the start of a forward to the end of its backward.

        On a rank with several stages a microbatch counts once for every stage that holds it. A forward whose backward
        never comes holds its microbatch to the end.
        """
        return tuple(_peak_lives(_microbatch_lives(lane)) for lane in self.lanes())

    def from_zero(self) -> Timeline:
        """The same timeline, shifted so that its first span starts at 0."""
        first = self.start()
        return replace(self, spans=tuple(replace(s, start=s.start - first, end=s.end - first) for s in self.spans))

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON, a row per span under the names of the columns; `from_dict` reads it back exactly."""
        rows = [
            [s.rank, str(a.kind), a.stage, a.microbatch, a.value, a.peer, a.gradient, s.start, s.end, s.waited, s.bytes]
            for s in self.spans
            for a in (s.action,)
        ]
        head = {"polylane": 1, "kind": "timeline", "title": self.title, "unit": self.unit, "ranks": self.ranks}
        return {**head, "notes": dict(self.notes), "columns": list(COLUMNS), "spans": rows}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Timeline:
        """The timeline that `to_dict` wrote.

        Raises:
            ValueError: this is not a timeline of schema 1, or a part of it is missing or not what it should be.
        """
        if data.get("polylane") != 1 or data.get("kind") != "timeline":
            found = {key: data[key] for key in ("polylane", "kind") if key in data}
            raise ValueError(
                f'not a timeline: expected "polylane": 1 and "kind": "timeline", found {found or "neither"}'
            )
        missing = [key for key in ("unit", "ranks", "columns", "spans") if key not in data]
        known = (*data.get("columns", COLUMNS), *_LATER)
        missing += [f"columns: {name}" for name in COLUMNS if name not in known]
        if missing:
            raise ValueError(f"this timeline lacks {', '.join(missing)}")
        places = {name: place for place, name in enumerate(data["columns"])}
        at = [places.get(name) for name in COLUMNS]
        spans = tuple(_span_from_row(number, row, at) for number, row in enumerate(data["spans"]))
        return Timeline(spans, data["ranks"], data["unit"], data.get("title", ""), dict(data.get("notes", {})))


def union_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """The (start, end) intervals that the spans cover together: disjoint, ascending, none of them empty."""
    covered: list[tuple[float, float]] = []
    for start, end in sorted((span.start, span.end) for span in spans if span.end > span.start):
        if covered and start <= covered[-1][1]:
            covered[-1] = (covered[-1][0], max(end, covered[-1][1]))
        else:
            covered.append((start, end))
    return covered


def _length(intervals: Iterable[tuple[float, float]]) -> float:
    return sum(end - start for start, end in intervals)


def _spans_of_kinds(lane: Iterable[Span], kinds: frozenset[ActionKind]) -> list[Span]:
    return [span for span in lane if span.action.kind in kinds]


def _microbatch_lives(lane: Iterable[Span]) -> list[tuple[float, float]]:
    """The (first forward's start, last backward's end) of every microbatch on every stage, of a lane in order.

    A forward or backward may come in several pieces; a forward after a backward is the same microbatch of a next step.
    """
    lives: list[tuple[float, float]] = []
    latest: dict[tuple[int, int | None], int] = {}  # -> its place in lives
    for span in lane:
        key = (span.action.stage, span.action.microbatch)
        if span.action.kind is ActionKind.FORWARD and (key not in latest or lives[latest[key]][1] < math.inf):
            latest[key] = len(lives)
            lives.append((span.start, math.inf))
        elif span.action.kind is ActionKind.BACKWARD and key in latest:
            first, last = lives[latest[key]]
            lives[latest[key]] = (first, span.end if last == math.inf else max(last, span.end))
    return lives


def _peak_lives(lives: Iterable[tuple[float, float]]) -> int:
    """The most lives at one moment; one that ends makes room for one that starts then."""
    events: list[tuple[float, int, int]] = []
    for start, end in lives:
        events += [(start, 1, +1), (end, 0 if end > start else 2, -1)]
    alive = peak = 0
    for _, _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak


def _span_from_row(number: int, row: Sequence[Any], at: Sequence[int | None]) -> Span:
    """The span of one row; ``at`` is where each of `COLUMNS` stands in it, None where it does not."""
    try:
        given = (_LATER[name] if place is None else row[place] for name, place in zip(COLUMNS, at, strict=True))
        rank, kind, stage, microbatch, value, peer, gradient, start, end, waited, size = given
        return Span(rank, Action(ActionKind(kind), stage, microbatch, value, peer, gradient), start, end, waited, size)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"span {number} of this timeline cannot be read, {row!r}: {error}") from error
