"""Time accounts: what each rank did with a step's time, as computing, moving bytes, waiting for a rank, and bubble.

    computing   passes and updates, less what passes in collectives inside them
    moving      bytes are under way, and nothing is computed
    waiting     for one rank: it is later than its replicas, or its pass takes longer than that of a typical stage
    bubble      the rest: what the order of the passes leaves empty, even where all stages are equally fast, and the
                time before a rank's first and after its last action

The four add up to the makespan on every rank. What no compute covers is told by :mod:`polylane.observe.stretches`. In
collectives inside a pass ranks wait for the last one to arrive, which waits least. What the least waiting rank of a
pass spends in them is moving; what others spend beyond that is waiting for it. The ranks of a pass are those with the
same pass of the same stage, of all replicas: which of them one collective is of is not in a timeline.

A timeline without messages, as in theory, has bubbles alone beside computing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polylane.observe.stretches import Stretch, TimeState, find_stretches
from polylane.observe.timeline import Span, Timeline, union_intervals
from polylane.schedule.action import COMPUTE


@dataclass(frozen=True, slots=True)
class InnerTime:
    """What a pass or an update spends in collectives inside it.

    Attributes:
        moving: time in which bytes are under way, in the unit of the timeline.
        waiting: time for which the rank waits for another one.
        peer: the rank that it waits for; None where ``waiting`` is 0.
    """

    moving: float
    waiting: float
    peer: int | None = None


@dataclass(frozen=True)
class RankTime:
    """The time of one rank, in the unit of the timeline; the four parts add up to the makespan.

    Attributes:
        computing: passes and updates, overlaps once, without the collectives inside them.
        moving: bytes are under way and nothing is computed.
        waiting: by the rank that is waited for.
        bubble: idle, with nothing to do.
    """

    computing: float
    moving: float
    waiting: Mapping[int, float]
    bubble: float

    @property
    def waited(self) -> float:
        """The time that it waits, for whichever rank."""
        return sum(self.waiting.values())

    @property
    def communication(self) -> float:
        """The time that it moves bytes or waits for a rank."""
        return self.moving + self.waited


@dataclass(frozen=True)
class TimeAccount:
    """The time of all ranks in a timeline.

    Attributes:
        makespan: time from the first span's start to the last one's end, in the unit of the timeline.
        ranks: the time of each rank.
        stretches: for each rank what no compute covers, without gaps and overlaps, in order.
        inner: what is spent inside passes and updates, of those that have collectives in them.
    """

    makespan: float
    ranks: tuple[RankTime, ...]
    stretches: tuple[tuple[Stretch, ...], ...]
    inner: Mapping[Span, InnerTime]

    def shares(self) -> dict[str, float]:
        """Return the mean over ranks of computing, moving, waiting and bubble, over the makespan: they add up to 1.

        All are 0 where there is no time.
        """
        area = self.makespan * len(self.ranks)
        parts = (
            sum(rank.computing for rank in self.ranks),
            sum(rank.moving for rank in self.ranks),
            sum(rank.waited for rank in self.ranks),
            sum(rank.bubble for rank in self.ranks),
        )
        return {str(state): part / area if area else 0.0 for state, part in zip(TimeState, parts, strict=True)}

    def waiting_for(self) -> dict[int, float]:
        """Return the share of all ranks' time in which somebody waits for a rank, by that rank, the largest first."""
        area, waited = self.makespan * len(self.ranks), defaultdict[int, float](float)
        for rank in self.ranks:
            for peer, time in rank.waiting.items():
                waited[peer] += time
        return {peer: time / area for peer, time in sorted(waited.items(), key=lambda item: -item[1]) if time > 0}


def account_time(timeline: Timeline) -> TimeAccount:
    """Return what every rank did with its time, from the first span's start to the last span's end."""
    lanes, stretches = timeline.lanes(), find_stretches(timeline)
    covered = [union_intervals(span for span in lane if span.action.kind in COMPUTE) for lane in lanes]
    lengths = [sum(end - start for start, end in intervals) for intervals in covered]
    inner = _split_inner_time(lanes, lengths)
    ranks = tuple(_add_up(*rank, inner) for rank in zip(lengths, lanes, stretches, strict=True))
    return TimeAccount(timeline.makespan(), ranks, stretches, inner)


def _add_up(
    computing: float,
    lane: Sequence[Span],
    stretches: Sequence[Stretch],
    inner: Mapping[Span, InnerTime],
) -> RankTime:
    """Return the time of a rank, from what its compute covers, what is inside of it, and the rest."""
    # 0 is an int: whole ticks stay whole.
    parts, waiting = defaultdict[TimeState, float](lambda: 0), defaultdict[int, float](lambda: 0)
    for span in lane:
        if (inner_time := inner.get(span)) is not None:
            computing -= inner_time.moving + inner_time.waiting
            parts[TimeState.MOVING] += inner_time.moving
            if inner_time.peer is not None:
                waiting[inner_time.peer] += inner_time.waiting
    for stretch in stretches:
        if stretch.state is TimeState.WAITING and stretch.peer is not None:
            waiting[stretch.peer] += stretch.end - stretch.start
        else:
            parts[stretch.state] += stretch.end - stretch.start
    return RankTime(max(0, computing), parts[TimeState.MOVING], dict(waiting), parts[TimeState.BUBBLE])


def _split_inner_time(lanes: Sequence[Sequence[Span]], lengths: Sequence[float]) -> dict[Span, InnerTime]:
    """Return what every pass and update spends in collectives inside it.

    Args:
        lanes: the spans of each rank, in order.
        lengths: how long each rank computes, overlaps once: no more than that is spent inside.
    """
    groups: dict[tuple[Any, ...], list[Span]] = defaultdict(list)
    waited = [0.0] * len(lanes)
    for rank, lane in enumerate(lanes):
        counts = defaultdict[tuple[Any, ...], int](int)
        for span in lane:
            action = span.action
            if action.kind in COMPUTE:
                waited[rank] += span.waited
                # In a timeline of several steps, the nth of one rank belongs to the nth of the others.
                key = (action.kind, action.stage, action.microbatch, action.value)
                groups[*key, counts[key]].append(span)
                counts[key] += 1
    # A wait is not longer than its pass; but passes may overlap, and files may say anything.
    scale = [room / time if time > room else 1 for room, time in zip(lengths, waited, strict=True)]
    inner: dict[Span, InnerTime] = {}
    for group in groups.values():
        latecomer = min(group, key=lambda span: span.waited)
        for span in group:
            if span.waited:
                moving, waiting = (
                    latecomer.waited * scale[span.rank],
                    (span.waited - latecomer.waited) * scale[span.rank],
                )
                inner[span] = InnerTime(moving, waiting, latecomer.rank if waiting else None)
    return inner
