"""Swimlane as one standalone HTML file: zoom, move, point at a span, and a table of the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polylane.observe.stretches import TimeState
from polylane.observe.swimlane import layout
from polylane.observe.swimlane.svg import escape
from polylane.observe.time_account import RankTime, account_time
from polylane.observe.timeline import Timeline, transfer_times
from polylane.schedule.action import ActionKind

_TEMPLATE = Path(__file__).with_name("swimlane.html")
_SCRIPT = Path(__file__).with_name("swimlane.js")
LONGEST_WAITS = 3  # that a table tells of each rank
_STATES = [TimeState.COMPUTING, TimeState.MOVING, TimeState.WAITING, TimeState.BUBBLE]


def html(timeline: Timeline) -> str:
    """Return the swimlane as a page of its own: no other file, no network, light or dark as the reader's system is.

    Pointing at a span shows its rank, kind, stage, microbatch, value, peer, start, duration, bytes, and the least
    bandwidth at which they travelled. The table below the lanes has, for each rank, its time account
    (`polylane.observe.time_account`), the peak of live microbatches, and the bytes sent where they are known.
    """
    lanes = layout.build_rows(timeline)
    parts = {
        "title": escape(layout.format_title(timeline)),
        "headline": escape(layout.format_headline(timeline)),
        "legend": "".join(legend_items(lanes)),
        "script": swimlane_script(),
        "table": "\n".join(_table(timeline, [row.label for row in lanes])),
        "data": embed_json(lane_data(timeline, lanes)),
    }
    # One pass over the template: text that is inserted is not searched for places again.
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def swimlane_script() -> str:
    """Return the script that draws and moves swimlanes, as text that can stand in a page's script."""
    return _SCRIPT.read_text(encoding="utf-8")


def embed_json(data: Any) -> str:
    """Return data as JSON that can stand in a page's script element."""
    # "<" cannot stand in a script: "</script>" would end it
    return json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")


def legend_items(lanes: Sequence[layout.LaneRow]) -> Iterator[str]:
    """Yield the items of the legend of these lanes, as HTML."""
    for style in layout.legend_styles(lanes):
        fill = 'class="hatched"' if style is layout.WAITING else f'style="background: {style.fill}"'
        fill = 'style="background: var(--idle)"' if style is layout.IDLE else fill
        yield f"<li><i {fill}></i>{escape(style.name)}</li>"


def _table(timeline: Timeline, labels: Sequence[str]) -> Iterator[str]:
    account, unit = account_time(timeline), timeline.unit
    sent = timeline.sent() if any(timeline.sent()) else ()
    heads = ["", "utilization", "computing", "moving bytes", "waiting", "bubble", "peak live microbatches"]
    heads += ["sent"] if sent else []
    yield f"<thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>\n<tbody>"
    for rank, (label, live) in enumerate(zip(labels, timeline.peak_live_microbatches(), strict=True)):
        spent = account.ranks[rank]
        times = (layout.format_duration(time, unit) for time in (spent.computing, spent.moving))
        share = layout.format_percent(spent.computing / account.makespan if account.makespan else 0.0)
        counts = [layout.format_bytes(count) for count in sent[rank : rank + 1]]
        bubble = layout.format_duration(spent.bubble, unit)
        cells = [share, *times, describe_waits(spent, unit), bubble, layout.format_number(float(live)), *counts]
        yield _line(label, cells, heads)
    yield "</tbody>\n<tfoot>"
    totals = [
        sum(getattr(rank, part) for rank in account.ranks) for part in ("computing", "moving", "waited", "bubble")
    ]
    sums = (layout.format_duration(total, unit) for total in totals)
    cells = [layout.format_percent(timeline.utilization()), *sums, ""]
    cells += [layout.format_bytes(sum(sent))] if sent else []
    yield _line(f"all, of {layout.format_duration(account.makespan * timeline.ranks, unit)}", cells, heads)
    yield "</tfoot>"


def describe_waits(spent: RankTime, unit: str) -> str:
    """Return ``1.2 ms for rank 3``, or ``5 ms: 3 ms for rank 1, 2 ms for rank 0``; ``0 s`` where it waits for none."""
    waits = [
        (layout.format_duration(time, unit), peer) for peer, time in sorted(spent.waiting.items(), key=lambda i: -i[1])
    ]
    words = ", ".join(f"{time} for rank {peer}" for time, peer in waits[:LONGEST_WAITS])
    words += ", ..." if len(waits) > LONGEST_WAITS else ""
    return f"{layout.format_duration(spent.waited, unit)}: {words}" if len(waits) > 1 else words or "0"


def _line(label: str, cells: Sequence[str], heads: Sequence[str]) -> str:
    """Return a row; every cell has the name of its column, which stands before it on a narrow screen."""
    named = zip(cells, heads[1:], strict=True)
    columns = "".join(f'<td data-head="{escape(head)}">{escape(cell)}</td>' for cell, head in named)
    return f"<tr><th>{escape(label)}</th>{columns}</tr>"


def lane_data(
    timeline: Timeline, lanes: Sequence[layout.LaneRow], ranks: Sequence[int] | None = None, digits: int = 9
) -> dict[str, Any]:
    """Return what the script of swimlanes reads; a box is fourteen numbers in a row, see FIELDS there.

    Args:
        timeline: theoretical, predicted or measured spans.
        lanes: its rows, from `layout.build_rows`.
        ranks: which of them are drawn; None: all.
        digits: decimal places of times: 9 are nanoseconds, and nobody zooms in further.
    """
    kinds = list(ActionKind)
    values: dict[str, int] = {}
    origin, times = timeline.start(), transfer_times(timeline.spans)

    # Names of values are numbered, since each appears in many spans.
    def flat(boxes: Sequence[layout.Box]) -> list[float]:
        numbers: list[float] = []
        for box in boxes:
            span, action, inner = box.span, box.span.action, box.inner
            value = -1 if action.value is None else values.setdefault(action.value, len(values))
            whom = box.peer if inner is None else inner.peer
            numbers += [
                round(box.start - origin, digits),
                round(box.end - origin, digits),
                len(kinds) if span.is_hung else kinds.index(action.kind),
                action.stage,
                -1 if action.microbatch is None else action.microbatch,
                value,
                -1 if action.peer is None else action.peer,
                int(action.gradient),
                span.bytes,
                round(times.get(span, 0), digits),
                _STATES.index(box.state) if box.style is not layout.HUNG else 0,
                -1 if whom is None else whom,
                0 if inner is None else round(inner.moving, digits),
                0 if inner is None else round(inner.waiting, digits),
            ]
        return numbers

    drawn = [
        {"rank": rank, "label": row.label, "main": flat(row.main), "thin": flat(row.thin), "stages": list(row.stages)}
        for rank, row in enumerate(lanes)
        if ranks is None or rank in ranks
    ]
    named = {**{str(kind): layout.STYLES[kind] for kind in kinds}, layout.HUNG.name: layout.HUNG}
    named[layout.WAITING.name] = layout.WAITING
    styles = [{"name": name, "fill": style.fill, "ink": style.ink} for name, style in named.items()]
    head = {"unit": timeline.unit, "extent": timeline.makespan(), "kinds": styles}
    head |= {"collective": kinds.index(ActionKind.REDUCE), "waiting": len(styles) - 1}
    return {**head, "values": list(values), "lanes": drawn}
