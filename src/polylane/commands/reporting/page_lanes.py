"""Swimlanes of a page: timelines as the page's script reads them, with as many ranks as a small page has room for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from polylane.observe.swimlane.html import lane_data
from polylane.observe.swimlane.layout import build_rows, format_headline, format_title, legend_styles
from polylane.observe.time_account import RankTime, account_time
from polylane.observe.timeline import Timeline
from polylane.schedule.action import ActionKind

MOST_BOXES = 4500  # of one picture, whose ranks are left out beyond it
FEWEST_RANKS, MOST_RANKS = 4, 16  # that are drawn of one timeline
PRECISION = 5  # digits of the times of a picture: a hundred-thousandth of its width

TRAFFIC = {
    (ActionKind.SEND, False): "values to other stages",
    (ActionKind.SEND, True): "gradients to other stages",
    (ActionKind.REDUCE, False): "gradients between replicas",
    (ActionKind.STEP, False): "weights after the update",
}
INSIDE = "collectives inside passes"


def draw_lanes(timeline: Timeline) -> dict[str, Any]:
    """Return a picture: ``title``, ``headline``, ``lanes``, ``legend``, ``account``, and what is ``left_out``."""
    rows, account = build_rows(timeline), account_time(timeline)
    ranks = _choose_ranks(timeline, [len(row.main) + len(row.thin) for row in rows])
    extent = timeline.makespan()
    digits = PRECISION - math.floor(math.log10(extent)) if extent > 0 else 9
    omitted = timeline.ranks - len(ranks)
    return {
        "title": format_title(timeline),
        "headline": format_headline(timeline),
        "lanes": lane_data(timeline, rows, ranks, digits=max(0, digits)),
        "legend": [[style.name, style.fill] for style in legend_styles(rows)],
        "shares": account.shares(),
        "account": [_describe_rank(row.label, spent) for row, spent in zip(rows, account.ranks, strict=True)],
        "sent": list(timeline.sent()) if any(timeline.sent()) else [],
        "left_out": f"{len(ranks)} of {timeline.ranks} ranks are drawn, the table has all" if omitted else "",
    }


def _describe_rank(label: str, spent: RankTime) -> list[Any]:
    """Return [label, computing, moving, bubble, {rank that is waited for: time}] of a rank, in the timeline's unit."""
    waiting = {str(rank): float(f"{time:.5g}") for rank, time in sorted(spent.waiting.items(), key=lambda i: -i[1])}
    times = (spent.computing, spent.moving, spent.bubble)
    return [label, *(float(f"{time:.6g}") for time in times), waiting]


def _choose_ranks(timeline: Timeline, boxes: Sequence[int]) -> list[int]:
    """Return the ranks that are drawn: all, or as many as there is room for, some of every stage among them.

    Args:
        timeline: theoretical, predicted or measured spans.
        boxes: how many boxes each rank has.
    """
    count = min(MOST_RANKS, max(FEWEST_RANKS, MOST_BOXES // max(1, max(boxes, default=1))))
    if timeline.ranks <= count:
        return list(range(timeline.ranks))
    # Round the stages, so that each has its first rank drawn before any has its second.
    stage_of = [min((span.action.stage for span in lane), default=0) for lane in timeline.lanes()]
    position, keys = Counter[int](), list[tuple[int, int, int]]()
    for rank, stage in enumerate(stage_of):
        keys.append((position[stage], stage, rank))
        position[stage] += 1
    return sorted(rank for _, _, rank in sorted(keys)[:count])


def count_traffic(timeline: Timeline) -> list[list[Any]]:
    """Return [kind, bytes of all ranks] of what is sent in the timeline, the most first."""
    sent = Counter[str]()
    for span in timeline.spans:
        if span.action.kind is not ActionKind.RECEIVE and span.bytes:
            sent[TRAFFIC.get((span.action.kind, span.action.gradient), INSIDE)] += span.bytes
    return [[kind, size] for kind, size in sent.most_common()]


def stages_of(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the number and ranks of the stages in a timeline, for runs whose plan was not described."""
    ranks: dict[int, set[int]] = {}
    for span in timeline.spans:
        ranks.setdefault(span.action.stage, set()).add(span.rank)
    return [{"stage": stage, "ranks": sorted(ranks[stage])} for stage in sorted(ranks)]
