"""Stretches: what a rank does while it computes nothing, and which rank it waits for, moment by moment.

* A receive moves bytes from when its send begins. Before that it waits for the sender, and what it waits for is what
  the sender does at that moment: if that waits itself, for the rank at the end of the chain. A pass there leaves a
  bubble for as long as a pass of its kind takes on a typical stage, and is waited for beyond that; so is a rank that
  does nothing which a span shows.
* A reduce moves bytes from when the last rank of its group has begun it; before that it waits for that rank. Ranks of
  one stage are meant to be there together; for one of another stage (tied weights) the rule of receives holds.
* A lane that is free right before a receive or a reduce waits for it: a simulated receive begins when its message does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from statistics import median_low
from typing import Any

from polylane.observe.timeline import Span, Timeline, match_messages, union_intervals
from polylane.schedule.action import COMPUTE, ActionKind


class TimeState(StrEnum):
    """What a rank does with a moment of its time."""

    COMPUTING = "computing"
    MOVING = "moving"
    WAITING = "waiting"
    BUBBLE = "bubble"


@dataclass(frozen=True, slots=True)
class Stretch:
    """A stretch of a rank's time with one state.

    Attributes:
        start: in the unit of the timeline.
        end: in the unit of the timeline, after ``start``.
        state: what the rank does.
        peer: the rank that it waits for; None in other states, and where nobody keeps it.
        span: the communication that covers the stretch, if any.
    """

    start: float
    end: float
    state: TimeState
    peer: int | None = None
    span: Span | None = None


def find_stretches(timeline: Timeline) -> tuple[tuple[Stretch, ...], ...]:
    """Return for each rank what no compute covers, from the timeline's start to its end, in order."""
    lanes = timeline.lanes()
    bounds = timeline.start(), timeline.start() + timeline.makespan()
    departures = _find_departures(timeline, lanes)
    direct = [_cut_stretches(lane, departures, bounds) for lane in lanes]
    blame = _Blame(lanes, direct, _typical_times(timeline.spans))
    return tuple(tuple(blame.judge_lane(rank)) for rank in range(timeline.ranks))


# Communication: from when on bytes move, and for whom it waits until then --------------------------------------------


@dataclass(frozen=True, slots=True)
class _Departure:
    """When the bytes of a receive or a reduce begin to move.

    Attributes:
        begin: when the rank is ready for them: the start of the span, or of the free time right before it.
        time: when they begin to move, not before ``begin``.
        peer: the rank that is waited for until then; None: nobody.
    """

    begin: float
    time: float
    peer: int | None


def _find_departures(timeline: Timeline, lanes: Sequence[Sequence[Span]]) -> dict[int, _Departure]:
    """Return the departure of every receive and reduce, by the ``id`` of its span: equal spans may occur twice."""
    begins = {id(s): s.start for lane in lanes for s in lane}
    for lane in lanes:
        begins |= _find_early_begins(lane, timeline.start())
    departures: dict[int, _Departure] = {}
    for send, receive in match_messages(timeline.spans):
        if send.rank == receive.rank:
            continue
        begin = begins[id(receive)]
        # The clocks of two hosts may differ: a message does not move before it is sent, nor after it is there.
        time = max(begin, min(send.start, receive.end))
        departures[id(receive)] = _Departure(begin, time, send.rank)
    for group in _group_reduces(timeline, lanes):
        latecomer = max(group, key=lambda span: begins[id(span)])
        for span in group:
            begin = begins[id(span)]
            time = max(begin, min(begins[id(latecomer)], span.end))
            departures[id(span)] = _Departure(begin, time, None if span is latecomer else latecomer.rank)
    return departures


def _find_early_begins(lane: Sequence[Span], start: float) -> dict[int, float]:
    """Return the end of the free time right before a receive or a reduce, by the ``id`` of the span.

    Args:
        lane: the spans of one rank, in order.
        start: when the timeline starts.
    """
    begins, free_since = dict[int, float](), start
    for span in lane:
        waits = span.action.kind in (ActionKind.RECEIVE, ActionKind.REDUCE)
        if span.start > free_since and waits:
            begins[id(span)] = free_since
        free_since = max(free_since, span.end)
    return begins


def _group_reduces(timeline: Timeline, lanes: Sequence[Sequence[Span]]) -> Iterator[list[Span]]:
    """Yield the spans of each reduce: the nth of a name on every rank of a group, which is all ranks that have it.

    Where ranks with other coordinates reduce under the same name, ``timeline.groups`` says which belong together.
    """
    groups: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
    for rank, lane in enumerate(lanes):
        counts = defaultdict[str | None, int](int)
        for span in lane:
            if span.action.kind is ActionKind.REDUCE:
                value = span.action.value
                named = timeline.groups.get(value or "", ())
                members = next((group for group in named if rank in group), None)
                groups[value, members, counts[value]].append(span)
                counts[value] += 1
    yield from groups.values()


def _cut_stretches(
    lane: Sequence[Span],
    departures: Mapping[int, _Departure],
    bounds: tuple[float, float],
) -> list[Stretch]:
    """Return what no compute of a rank covers, cut where its state changes; waits name the next rank of the chain.

    Args:
        lane: the spans of the rank, in order.
        departures: of its receives and reduces.
        bounds: start and end of the timeline.
    """
    covered = union_intervals(span for span in lane if span.action.kind in COMPUTE)
    pieces: list[Stretch] = []
    for span in lane:
        if span.action.kind in COMPUTE:
            continue
        departure = departures.get(id(span), _Departure(span.start, span.start, None))
        if departure.time > departure.begin:
            pieces.append(Stretch(departure.begin, departure.time, TimeState.WAITING, departure.peer, span))
        # A message is under way before a simulated receive begins; a reduce moves in its own time.
        time = departure.time if span.action.kind is ActionKind.RECEIVE else max(span.start, departure.time)
        if span.end > time:
            pieces.append(Stretch(time, span.end, TimeState.MOVING, None, span))
    pieces.sort(key=lambda piece: piece.start)
    stretches, begin, active, number = list[Stretch](), bounds[0], list[Stretch](), 0
    for start, end in (*covered, (bounds[1], bounds[1])):
        while number < len(pieces) and pieces[number].start < start:
            active.append(pieces[number])
            number += 1
        active = [piece for piece in active if piece.end > begin]
        if start > begin:
            stretches += _cover_interval(begin, start, active)
        begin = end
    return stretches


def _cover_interval(start: float, end: float, pieces: Sequence[Stretch]) -> Iterator[Stretch]:
    """Yield the states of a rank between two moments in which it does not compute, from the pieces that reach into it.

    Where several pieces cover a moment, it moves if one of them does, and waits in the one that began last.
    """
    cuts = sorted({start, end, *(t for piece in pieces for t in (piece.start, piece.end) if start < t < end)})
    for low, high in pairwise(cuts):
        over = [piece for piece in pieces if piece.start <= low and piece.end >= high]
        moving = next((piece for piece in over if piece.state is TimeState.MOVING), None)
        piece = moving or (over[-1] if over else None)
        if piece is None:
            yield Stretch(low, high, TimeState.BUBBLE)
        else:
            yield replace(piece, start=low, end=high)


# Waits: whose fault? -------------------------------------------------------------------------------------------------


def _typical_times(spans: Iterable[Span]) -> dict[ActionKind, float]:
    """Return how long each kind of compute takes on a typical stage: the lower median of the stages' medians."""
    times: dict[ActionKind, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in spans:
        if span.action.kind in COMPUTE:
            times[span.action.kind][span.action.stage].append(span.end - span.start)
    return {kind: median_low(map(median_low, stages.values())) for kind, stages in times.items()}


@dataclass
class _Blame:
    """Follows waits to the rank that keeps the others.

    Attributes:
        lanes: the spans of each rank, in order.
        direct: what no compute of each rank covers, with the next rank of the chain.
        typical: how long each kind of compute takes on a typical stage.
    """

    lanes: Sequence[Sequence[Span]]
    direct: Sequence[Sequence[Stretch]]
    typical: Mapping[ActionKind, float]
    _passes: list[list[Span]] = field(default_factory=list)
    _pass_starts: list[list[float]] = field(default_factory=list)
    _stretch_starts: list[list[float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        for lane, stretches in zip(self.lanes, self.direct, strict=True):
            self._passes.append([s for s in lane if s.action.kind in COMPUTE and s.end > s.start])
            self._pass_starts.append([span.start for span in self._passes[-1]])
            self._stretch_starts.append([stretch.start for stretch in stretches])

    def judge_lane(self, rank: int) -> Iterator[Stretch]:
        """Yield the stretches of a rank with those that it waits for at the end of each chain; equal ones as one."""
        latest: Stretch | None = None
        for stretch in self.direct[rank]:
            for piece in self._judge(rank, stretch):
                if (
                    latest is not None
                    and latest.end == piece.start
                    and replace(piece, start=latest.start) == replace(latest, end=piece.end)
                ):
                    latest = replace(latest, end=piece.end)
                    continue
                if latest is not None:
                    yield latest
                latest = piece
        if latest is not None:
            yield latest

    def _judge(self, rank: int, stretch: Stretch) -> Iterator[Stretch]:
        if stretch.peer is None or (stretch.span is not None and self._are_replicas(stretch.peer, stretch.span)):
            yield stretch
            return
        for low, high, state, peer in self._follow(stretch.peer, stretch.start, stretch.end, {rank}):
            yield replace(stretch, start=low, end=high, state=state, peer=peer)

    def _are_replicas(self, peer: int, span: Span) -> bool:
        """Return whether a span is a reduce over replicas of a stage, a rank among them."""
        stages = {s.action.stage for s in self._passes[peer]}
        return span.action.kind is ActionKind.REDUCE and span.action.stage in stages

    def _follow(
        self, rank: int, low: float, high: float, visited: set[int]
    ) -> Iterator[tuple[float, float, TimeState, int | None]]:
        """Yield (start, end, state, peer) of those who wait for a rank between two moments, from what it does then."""
        if rank in visited:  # clocks differ, so that ranks seem to wait for each other: nobody can be told
            yield low, high, TimeState.BUBBLE, None
            return
        at, stretches, starts = low, self.direct[rank], self._stretch_starts[rank]
        number = max(0, bisect_right(starts, low) - 1)
        while at < high:
            if number < len(stretches) and stretches[number].end <= at:
                number += 1
                continue
            stretch = stretches[number] if number < len(stretches) else None
            if stretch is None or stretch.start > at:
                until = high if stretch is None else min(high, stretch.start)
                yield from self._judge_compute(rank, at, until)
            else:
                until = min(high, stretch.end)
                if stretch.state is TimeState.WAITING and stretch.peer is not None:
                    yield from self._follow(stretch.peer, at, until, {*visited, rank})
                elif stretch.state is TimeState.MOVING:  # what it sends on later is still under way
                    yield at, until, TimeState.BUBBLE, None
                else:
                    yield at, until, TimeState.WAITING, rank
            at = until

    def _judge_compute(
        self, rank: int, low: float, high: float
    ) -> Iterator[tuple[float, float, TimeState, int | None]]:
        """Yield bubbles while a pass of the rank is no longer than typical, and waits from then on."""
        passes, at = self._passes[rank], low
        number = max(0, bisect_right(self._pass_starts[rank], low) - 1)
        while at < high:
            while number < len(passes) and passes[number].end <= at:
                number += 1
            if number == len(passes):  # overlapping passes, of which a longer one came first
                yield at, high, TimeState.BUBBLE, None
                return
            span = passes[number]
            late = max(at, min(high, span.end, span.start + self.typical[span.action.kind]))
            until = max(late, min(high, span.end))
            if late > at:
                yield at, late, TimeState.BUBBLE, None
            if until > late:
                yield late, until, TimeState.WAITING, rank
            at = until
