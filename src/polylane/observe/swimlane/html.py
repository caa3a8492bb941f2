"""Swimlane as one standalone HTML file: zoom, move, point at a span, and a table of the figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from polylane.observe.swimlane import layout
from polylane.observe.swimlane.svg import escape
from polylane.observe.timeline import Span, Timeline, transfer_times
from polylane.schedule.action import ActionKind

_TEMPLATE = Path(__file__).with_name("swimlane.html")


def html(timeline: Timeline) -> str:
    """Return the swimlane as a page of its own: no other file, no network, light or dark as the reader's system is.

    Pointing at a span shows its rank, kind, stage, microbatch, value, peer, start, duration, bytes, and the least
    bandwidth at which they travelled. The table below the lanes has, for each rank, busy, exposed communication and
    idle time, the peak of live microbatches, and the bytes sent where they are known.
    """
    lanes = layout.build_rows(timeline)
    parts = {
        "title": escape(timeline.title or "swimlane"),
        "headline": escape(layout.format_headline(timeline)),
        "legend": "".join(_legend(timeline)),
        "table": "\n".join(_table(timeline, [row.label for row in lanes])),
        # "<" cannot stand in a script: "</script>" would end it
        "data": json.dumps(_data(timeline, lanes), separators=(",", ":")).replace("<", "\\u003c"),
    }
    # One pass over the template: text that is inserted is not searched for places again.
    template = _TEMPLATE.read_text(encoding="utf-8")
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], template)


def _legend(timeline: Timeline) -> Iterator[str]:
    for style in layout.legend_styles(timeline):
        fill = "var(--idle)" if style is layout.IDLE else style.fill
        yield f'<li><i style="background: {fill}"></i>{escape(style.name)}</li>'


def _table(timeline: Timeline, labels: Sequence[str]) -> Iterator[str]:
    makespan, unit = timeline.makespan(), timeline.unit
    busy, exposed, idle = timeline.busy(), timeline.exposed_communication(), timeline.idle()
    sent = timeline.sent() if any(timeline.sent()) else ()
    heads = ["", "utilization", "busy", "exposed communication", "idle", "peak live microbatches"]
    heads += ["sent"] if sent else []
    yield f"<thead><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr></thead>\n<tbody>"
    for rank, (label, live) in enumerate(zip(labels, timeline.peak_live_microbatches(), strict=True)):
        times = (layout.format_duration(durations[rank], unit) for durations in (busy, exposed, idle))
        share = layout.format_percent(busy[rank] / makespan if makespan else 0.0)
        counts = [layout.format_bytes(count) for count in sent[rank : rank + 1]]
        yield _line(label, [share, *times, layout.format_number(float(live)), *counts])
    yield "</tbody>\n<tfoot>"
    times = (layout.format_duration(sum(durations), unit) for durations in (busy, exposed, idle))
    cells = [
        layout.format_percent(timeline.utilization()),
        *times,
        "",
        *([layout.format_bytes(sum(sent))] if sent else []),
    ]
    yield _line(f"all, of {layout.format_duration(makespan * timeline.ranks, unit)}", cells)
    yield "</tfoot>"


def _line(label: str, cells: Sequence[str]) -> str:
    return f"<tr><th>{escape(label)}</th>{''.join(f'<td>{escape(cell)}</td>' for cell in cells)}</tr>"


def _data(timeline: Timeline, lanes: Sequence[layout.LaneRow]) -> dict[str, Any]:
    """Return what the page's script reads; a span is eleven numbers in a row, see FIELDS there."""
    kinds = list(ActionKind)
    values: dict[str, int] = {}
    origin, times = timeline.start(), transfer_times(timeline.spans)

    # Names of values are numbered, since each appears in many spans.
    def flat(spans: Sequence[Span]) -> list[float]:
        numbers: list[float] = []
        for span in spans:
            action = span.action
            value = -1 if action.value is None else values.setdefault(action.value, len(values))
            numbers += [
                # to the nanosecond: ten digits less for each span, and nobody zooms in further
                round(span.start - origin, 9),
                round(span.end - origin, 9),
                len(kinds) if span.is_hung else kinds.index(action.kind),
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

    drawn = [
        {"label": row.label, "main": flat(row.main), "thin": flat(row.thin), "stages": list(row.stages)}
        for row in lanes
    ]
    named = {**{str(kind): layout.STYLES[kind] for kind in kinds}, layout.HUNG.name: layout.HUNG}
    styles = [{"name": name, "fill": style.fill, "ink": style.ink} for name, style in named.items()]
    head = {"unit": timeline.unit, "extent": timeline.makespan(), "kinds": styles}
    return {**head, "values": list(values), "lanes": drawn}
