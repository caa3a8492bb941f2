"""Timelines: every action of every rank with its start and end, in one type for theory, prediction and measurement."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from importlib import import_module
from typing import Any

from polylane.schedule.action import COMPUTE, Action, ActionKind

# The columns of a span in a file. `from_dict` reads them by name, so that a later version may add columns.
COLUMNS = ("rank", "kind", "stage", "microbatch", "value", "peer", "gradient", "start", "end", "waited", "bytes")
# Columns that files of earlier versions lack, with the value that is read instead.
_LATER: dict[str, Any] = {"bytes": 0}


@dataclass(frozen=True, slots=True)
class Span:
    """One action of one rank.

    Attributes:
        rank: the rank that acts, and its lane in a picture.
        action: kind of the action, stage, microbatch, value and peer.
        start: seconds, or ticks where the timeline is theory.
        end: in the unit of ``start``, and not before it.
        waited: the part of it that passed in collectives inside the action, such as the batch statistics of a forward
            pass.
        bytes: of the tensors that this rank gave to its transport in the action or received from it: the value of a
            send or receive, the gradients of a reduce, and what a pass or a step sends in the collectives inside it.
            The traffic of the collective's algorithm may be another. 0 where nothing was counted.
        is_hung: whether it had not ended when the training stood still for it; such spans are not written into files.

    Examples:
        >>> from polylane.observe.timeline import Span, Timeline
        >>> from polylane.schedule.action import Action, ActionKind
        >>> span = Span(rank=0, action=Action(ActionKind.FORWARD, stage=0, microbatch=0), start=0.0, end=0.5)
        >>> Timeline((span,), ranks=2).utilization()
        0.5
    """

    rank: int
    action: Action
    start: float
    end: float
    waited: float = 0
    bytes: int = 0
    is_hung: bool = False


@dataclass(frozen=True, repr=False)
class Timeline:
    """The spans of one step, or of several, on ``ranks`` lanes.

    Attributes:
        spans: in any order; spans of one rank may nest (a reduce runs during a backward pass).
        ranks: number of lanes, idle ones included.
        unit: "seconds" where measured or predicted, "ticks" in theory.
        title: headline of a picture; "" for none.
        notes: further facts by name, such as the step; all of them text.
        groups: by the name of a reduce, the groups of ranks that have it, where ranks with other coordinates sum other
            gradients under the same name; a name that is missing is of all ranks that have it.

    Raises:
        ValueError: a span's rank is outside the lanes, or it ends before it starts.

    Examples:
        >>> import json, torch, polylane
        >>> model = torch.nn.Linear(8, 1)
        >>> batch = torch.ones(16, 8), torch.zeros(16, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> timeline = job.step(batch).timeline
        >>> [str(span.action.kind) for span in timeline.spans]
        ['forward', 'backward', 'step']
    """

    spans: tuple[Span, ...]
    ranks: int
    unit: str = "seconds"
    title: str = ""
    notes: dict[str, str] = field(default_factory=dict)
    groups: dict[str, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for span in self.spans:
            if not 0 <= span.rank < self.ranks:
                raise ValueError(f"{span} lies outside the timeline's {self.ranks} ranks")
            if not -math.inf < span.start <= span.end < math.inf:  # this refuses NaN, too
                raise ValueError(f"{span} must have a finite start that is not after its end")

    def __repr__(self) -> str:
        name = f"{self.title!r}, " if self.title else ""
        length, share = f"{self.makespan():.6g} {self.unit}", f"{self.utilization():.1%} computing"
        return f"<Timeline: {name}{self.ranks} ranks, {len(self.spans)} spans, {length}, {share}>"

    def _repr_html_(self) -> str:
        """Return the swimlane, which a notebook shows in the timeline's cell."""
        # Pictures are drawn of timelines: they are looked up by name, not imported here.
        return str(import_module("polylane.observe.swimlane.notebook_cell").draw_cell(self))

    def start(self) -> float:
        """Return when the first span starts; 0 where there is none.

        Examples:
            >>> timeline.start()
            0.0
        """
        return min((span.start for span in self.spans), default=0)

    def makespan(self) -> float:
        """Return the time from the first span's start to the last span's end, over all ranks; 0 without spans.

        Examples:
            >>> 0 < timeline.makespan() < 10
            True
        """
        return max((span.end for span in self.spans), default=0) - self.start()

    def lanes(self) -> tuple[tuple[Span, ...], ...]:
        """Return the spans of each rank in order of start; of two that start together, the longer one first.

        Examples:
            >>> len(timeline.lanes())
            1
        """
        lanes: list[list[Span]] = [[] for _ in range(self.ranks)]
        for span in self.spans:
            lanes[span.rank].append(span)
        return tuple(tuple(sorted(lane, key=lambda span: (span.start, -span.end))) for lane in lanes)

    def busy(self) -> tuple[float, ...]:
        """Return for each rank the time in which it computes, less what it waited inside; overlaps count once.

        What it does with the rest of its time: ``polylane.observe.time_account.account_time``.

        Examples:
            >>> len(timeline.busy())
            1
        """
        compute = (_spans_of_kinds(lane, COMPUTE) for lane in self.lanes())
        return tuple(max(0, _length(union_intervals(spans)) - sum(span.waited for span in spans)) for spans in compute)

    def sent(self) -> tuple[int, ...]:
        """Return for each rank the bytes of its sends, its reduces and the collectives inside its actions.

        Examples:
            >>> timeline.sent()
            (0,)
        """
        sent = [0] * self.ranks
        for span in self.spans:
            sent[span.rank] += 0 if span.action.kind is ActionKind.RECEIVE else span.bytes
        return tuple(sent)

    def utilization(self) -> float:
        """Return the coloured area over the rectangle: busy time of all ranks / (ranks x makespan), from 0 to 1.

        Examples:
            >>> 0 < timeline.utilization() <= 1
            True
        """
        # An empty timeline has no area, and utilization 0.
        area = self.ranks * self.makespan()
        return sum(self.busy()) / area if area else 0.0

    def worker_utilization(self) -> tuple[float, ...]:
        """Return for each rank its busy time over the time from its first span to its last one; 0 without spans.

        Bubbles before and after are left out: with the next step they may be filled, those in between may not.

        Examples:
            >>> len(timeline.worker_utilization())
            1
        """
        ends = [(lane[0].start, max(span.end for span in lane)) if lane else (0, 0) for lane in self.lanes()]
        return tuple(
            busy / (end - start) if end > start else 0.0 for busy, (start, end) in zip(self.busy(), ends, strict=True)
        )

    def peak_live_microbatches(self) -> tuple[Fraction, ...]:
        """Return for each rank the largest number of live microbatches: forward begun, backward not ended.

        A backward in two halves ends with its weight half, which reads the activations last. On a rank with several
        stages a microbatch counts as a part of one for each of them. One whose backward pass never comes stays live to
        the end.

        Examples:
            >>> timeline.peak_live_microbatches()
            (Fraction(1, 1),)
        """
        peaks = []
        for lane in self.lanes():
            stages = {span.action.stage for span in lane if span.action.kind is ActionKind.FORWARD}
            peaks.append(Fraction(_peak_lives(_microbatch_lives(lane)), len(stages) or 1))
        return tuple(peaks)

    def from_zero(self) -> Timeline:
        """Return the timeline shifted in time, so that its first span starts at 0.

        Examples:
            >>> timeline.from_zero().start()
            0.0
        """
        origin = self.start()
        return replace(self, spans=tuple(replace(s, start=s.start - origin, end=s.end - origin) for s in self.spans))

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON, a row per span under the names of the columns; see `from_dict`.

        Examples:
            >>> text = json.dumps(timeline.to_dict())
        """
        rows = [
            [s.rank, str(a.kind), a.stage, a.microbatch, a.value, a.peer, a.gradient, s.start, s.end, s.waited, s.bytes]
            for s in self.spans
            for a in (s.action,)
        ]
        head = {"polylane": 1, "kind": "timeline", "title": self.title, "unit": self.unit, "ranks": self.ranks}
        groups = {"groups": {name: [*map(list, ranks)] for name, ranks in self.groups.items()}} if self.groups else {}
        return {**head, "notes": dict(self.notes), **groups, "columns": list(COLUMNS), "spans": rows}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Timeline:
        """Return the timeline that `to_dict` wrote.

        Args:
            data: what ``to_dict`` returned, or ``timeline.json`` of a run's folder holds.

        Raises:
            ValueError: this is not a timeline of schema 1, or a part of it is missing or not what it should be.

        Examples:
            >>> type(timeline).from_dict(json.loads(text)) == timeline
            True
        """
        if data.get("polylane") != 1 or data.get("kind") != "timeline":
            header = {key: data[key] for key in ("polylane", "kind") if key in data}
            raise ValueError(
                f'not a timeline: expected "polylane": 1 and "kind": "timeline", found {header or "neither"}'
            )
        missing = [key for key in ("unit", "ranks", "columns", "spans") if key not in data]
        columns = (*data.get("columns", COLUMNS), *_LATER)
        missing += [f"columns: {name}" for name in COLUMNS if name not in columns]
        if missing:
            raise ValueError(f"this timeline lacks {', '.join(missing)}")
        places = {name: index for index, name in enumerate(data["columns"])}
        at = [places.get(name) for name in COLUMNS]
        spans = tuple(_span_from_row(number, row, at) for number, row in enumerate(data["spans"]))
        groups = {name: tuple(map(tuple, ranks)) for name, ranks in data.get("groups", {}).items()}
        return Timeline(spans, data["ranks"], data["unit"], data.get("title", ""), dict(data.get("notes", {})), groups)


def union_intervals(spans: Iterable[Span]) -> list[tuple[float, float]]:
    """Return the (start, end) intervals that the spans cover: disjoint, ascending, none of them empty."""
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
    """Return (first forward's start, last backward's end) of every microbatch on every stage, from a lane in order.

    A pass may come in several spans. A forward after a backward is the same microbatch number in the next step.
    """
    lives: list[tuple[float, float]] = []
    latest: dict[tuple[int, int | None], int] = {}  # (stage, microbatch) -> index in lives of its latest life
    for span in lane:
        key = (span.action.stage, span.action.microbatch)
        if span.action.kind is ActionKind.FORWARD and (key not in latest or lives[latest[key]][1] < math.inf):
            latest[key] = len(lives)
            lives.append((span.start, math.inf))
        elif span.action.kind in (ActionKind.BACKWARD, ActionKind.BACKWARD_WEIGHT) and key in latest:
            start, end = lives[latest[key]]
            lives[latest[key]] = (start, span.end if end == math.inf else max(end, span.end))
    return lives


def _peak_lives(lives: Iterable[tuple[float, float]]) -> int:
    """Return the largest number of lives at one moment; one that ends makes room for one that starts at that moment."""
    events: list[tuple[float, int, int]] = []
    for start, end in lives:
        # Events of one moment sort by their second field: ends, then starts, then the ends of lives of no length.
        events += [(start, 1, +1), (end, 0 if end > start else 2, -1)]
    alive = peak = 0
    for _, _, change in sorted(events):
        alive += change
        peak = max(peak, alive)
    return peak


def _span_from_row(number: int, row: Sequence[Any], at: Sequence[int | None]) -> Span:
    """Return the span of one row.

    Args:
        number: index of the row, for messages.
        row: the values of the span's columns.
        at: index of each of `COLUMNS` in the row; None where the file lacks it.

    Raises:
        ValueError: a value is missing, or of the wrong type.
    """
    try:
        values = (_LATER[name] if index is None else row[index] for name, index in zip(COLUMNS, at, strict=True))
        rank, kind, stage, microbatch, value, peer, gradient, start, end, waited, size = values
        return Span(rank, Action(ActionKind(kind), stage, microbatch, value, peer, gradient), start, end, waited, size)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"span {number} of this timeline cannot be read, {row!r}: {error}") from error


# ---- messages --------------------------------------------------------------------------------------------------------


def match_messages(spans: Iterable[Span]) -> list[tuple[Span, Span]]:
    """Return every (send, receive) of the same value; its nth send belongs to its nth receive."""
    sent: dict[tuple[Any, ...], deque[Span]] = defaultdict(deque)
    received: list[Span] = []
    travelling = (span for span in spans if span.action.kind in (ActionKind.SEND, ActionKind.RECEIVE))
    for span in sorted(travelling, key=lambda span: span.start):
        action = span.action
        if action.kind is ActionKind.SEND:
            # Between two ranks messages arrive in the order in which they were sent, so that counting is enough.
            sent[(span.rank, action.peer, action.value, action.microbatch, action.gradient)].append(span)
        else:
            received.append(span)
    pairs = []
    for receive in received:
        action = receive.action
        sends = sent[(action.peer, receive.rank, action.value, action.microbatch, action.gradient)]
        if sends:
            pairs.append((sends.popleft(), receive))
    return pairs


def transfer_times(spans: Iterable[Span]) -> dict[Span, float]:
    """Return, for every send, receive and reduce whose bytes are known, how long they took to travel at most.

    A message travels from the start of its send to the end of its receive: one that arrives while its receiver still
    computes was faster than that. A reduce lasts from its own start to its end. There is no entry where one end of a
    message is missing, or where the clocks of two hosts differ so much that the time is not positive.
    """
    sized = [span for span in spans if span.bytes]
    times = {span: span.end - span.start for span in sized if span.action.kind is ActionKind.REDUCE}
    for send, receive in match_messages(sized):
        times[send] = times[receive] = receive.end - send.start
    return {span: time for span, time in times.items() if time > 0}
