"""A timeline as one HTML file that stands alone: zoom, move, point at a span, and a table of the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polylane.observe.lane_layout import IDLE, STYLES, Row, duration, headline, legend, percent, rows, size
from polylane.observe.messages import under_way
from polylane.observe.swimlane_svg import escape
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Kind

_TEMPLATE = Path(__file__).with_name("swimlane.html")


def html(timeline: Timeline) -> str:
    """The swimlane as a page of its own: no other file, no network, light or dark as the reader's system is.

    Pointing at a span shows its rank, kind, stage, microbatch, value, peer, start, duration, bytes, and how fast these
    were at least. The table below the lanes holds, for each rank, busy, exposed communication and idle time, the peak
    of live microbatches, and the bytes sent where they are known.
    """
    lanes = rows(timeline)
    parts = {
        "title": escape(timeline.title or "swimlane"),
        "headline": escape(headline(timeline)),
        "legend": "".join(_legend(timeline)),
        "table": "\n".join(_table(timeline, [row.label for row in lanes])),
        # "<" cannot stand in a script: "</script>" would end it
        "data": json.dumps(_data(timeline, lanes), separators=(",", ":")).replace("<", "\\u003c"),
    }
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], template)


def _legend(timeline: Timeline) -> Iterator[str]:
    for style in legend(timeline):
        fill = "var(--idle)" if style is IDLE else style.fill
        yield f'<li><i style="background: {fill}"></i>{escape(style.name)}</li>'


def _table(timeline: Timeline, labels: Sequence[str]) -> Iterator[str]:
    makespan, unit = timeline.makespan(), timeline.unit
    busy, exposed, idle = timeline.busy(), timeline.exposed_communication(), timeline.idle()
    sent = timeline.sent() if any(timeline.sent()) else ()
    heads = ["", "utilization", "busy", "exposed communication", "idle", "peak live microbatches"]
    heads += ["sent"] if sent else []
    yield f"<thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>\n<tbody>"
    for rank, (label, live) in enumerate(zip(labels, timeline.peak_live_microbatches(), strict=True)):
        times = (duration(each[rank], unit) for each in (busy, exposed, idle))
        share = percent(busy[rank] / makespan if makespan else 0.0)
        yield _line(label, [share, *times, str(live), *(size(one) for one in sent[rank : rank + 1])])
    yield "</tbody>\n<tfoot>"
    times = (duration(sum(each), unit) for each in (busy, exposed, idle))
    cells = [percent(timeline.utilization()), *times, "", *([size(sum(sent))] if sent else [])]
    yield _line(f"all, of {duration(makespan * timeline.ranks, unit)}", cells)
    yield "</tfoot>"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _data(timeline: Timeline, lanes: Sequence[Row]) -> dict[str, Any]:
    """What the page's script reads; a span is eleven numbers in a row, see FIELDS there."""
    kinds = list(Kind)
    values: dict[str, int] = {}
    first, times = timeline.start(), under_way(timeline.spans)

    def flat(spans: Sequence[Span]) -> list[float]:
        numbers: list[float] = []
        for span in spans:
            action = span.action
            value = -1 if action.value is None else values.setdefault(action.value, len(values))
            numbers += [
                # to the nanosecond: ten digits less for each span, and nobody zooms in further
                round(span.start - first, 9),
                round(span.end - first, 9),
                kinds.index(action.kind),
                action.stage,
                -1 if action.microbatch is None else action.microbatch,
                value,
                -1 if action.peer is None else action.peer,
                int(action.gradient),
                round(span.waited, 9),
                span.bytes,
                round(times.get(span, 0), 9),
            ]
        return numbers

    drawn = [{"label": row.label, "main": flat(row.main), "thin": flat(row.thin)} for row in lanes]
    styles = [{"name": str(kind), "fill": STYLES[kind].fill, "ink": STYLES[kind].ink} for kind in kinds]
    head = {"unit": timeline.unit, "extent": timeline.makespan(), "kinds": styles}
    return {**head, "values": list(values), "lanes": drawn}
