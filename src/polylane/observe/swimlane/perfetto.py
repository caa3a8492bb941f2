"""Swimlane as a Chrome trace, for ui.perfetto.dev or chrome://tracing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polylane.observe.swimlane.layout import format_bytes
from polylane.observe.timeline import Span, Timeline, match_messages, transfer_times
from polylane.schedule.action import COMPUTE

_Placed = tuple[Span, int]  # a span and the number of the thread that it is drawn on


def perfetto(timeline: Timeline) -> dict[str, Any]:
    """Return the trace as plain data for ``json.dump``: complete events ("X") in microseconds from the first span.

    A rank is a process. Compute is its thread 0; communication has the threads from 1, as many as run at once. Arrows
    lead from a send to the receive of the same value. A tick of theory counts as one microsecond. Arguments give the
    bytes that were sent or received, and the least bandwidth.

    Source: Google, "Trace Event Format".
    """
    scale = 1e6 if timeline.unit == "seconds" else 1.0
    events: list[dict[str, Any]] = []
    placed: list[_Placed] = []
    for rank, lane in enumerate(timeline.lanes()):
        threads = _place_spans(lane)
        events.append(_name_event("process_name", rank, 0, f"rank {rank}"))
        events.append(_name_event("process_sort_index", rank, 0, rank))
        for thread in sorted({0, *(thread for _, thread in threads)}):
            events.append(_name_event("thread_name", rank, thread, "communication" if thread else "compute"))
        placed += threads
    origin = timeline.start()
    times = transfer_times(timeline.spans) if timeline.unit == "seconds" else {}
    events += [_complete_event(span, thread, origin, scale, times.get(span)) for span, thread in placed]
    events += _arrows(dict(placed), origin, scale)
    notes = {"title": timeline.title, "unit": timeline.unit, "utilization": timeline.utilization(), **timeline.notes}
    if any(timeline.sent()):
        notes["sent bytes"] = list(timeline.sent())
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": notes}


def _place_spans(lane: Sequence[Span]) -> list[_Placed]:
    """Return each span with its thread: communication on the first thread that is free.

    Viewers want the spans of one thread to nest or to follow each other.
    """
    placed: list[_Placed] = []
    free_at: list[float] = []
    for span in lane:
        if span.action.kind in COMPUTE:
            placed.append((span, 0))
            continue
        thread = next((i for i, free in enumerate(free_at) if free <= span.start), len(free_at))
        free_at[thread : thread + 1] = [span.end]
        placed.append((span, thread + 1))
    return placed


def _name_event(kind: str, rank: int, thread: int, value: str | int) -> dict[str, Any]:
    key = "sort_index" if isinstance(value, int) else "name"
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "args": {key: value}}


def _complete_event(span: Span, thread: int, origin: float, scale: float, time: float | None) -> dict[str, Any]:
    action = span.action
    details = {
        "stage": action.stage,
        "microbatch": action.microbatch,
        "value": action.value,
        "peer": action.peer,
        "gradient": action.gradient or None,
        "waited": span.waited or None,
        "bytes": span.bytes or None,
        "at least": None if time is None else f"{format_bytes(span.bytes / time)}/s",
    }
    return {
        "ph": "X",
        "name": str(action.kind) + (f" {action.microbatch}" if action.microbatch is not None else ""),
        "cat": str(action.kind),
        "pid": span.rank,
        "tid": thread,
        "ts": (span.start - origin) * scale,
        "dur": (span.end - span.start) * scale,
        "args": {key: value for key, value in details.items() if value is not None},
    }


def _arrows(threads: Mapping[Span, int], origin: float, scale: float) -> list[dict[str, Any]]:
    """Return a flow event from every send to the receive of the same value."""
    events: list[dict[str, Any]] = []
    for number, (send, receive) in enumerate(match_messages(threads), start=1):
        # inside the receive and not before the send: viewers drop an arrow that leads back in time
        arrival = (max(receive.start, min(send.start, receive.end)) + receive.end) / 2
        flow = {"cat": "message", "name": str(send.action.value or "message"), "id": number}
        start = {"pid": send.rank, "tid": threads[send], "ts": (send.start - origin) * scale}
        events.append({**flow, "ph": "s", **start})
        end = {"pid": receive.rank, "tid": threads[receive], "ts": (arrival - origin) * scale}
        events.append({**flow, "ph": "f", "bp": "e", **end})
    return events
