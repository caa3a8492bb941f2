"""Reads the file of a timeline back, as a program that draws it would: columns by name, those of later versions too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from polylane.observe.timeline import COLUMNS, Span, Timeline
from polylane.schedule.action import Action, ActionKind

# Columns that files of earlier versions lack, with the value that is read instead.
_LATER: dict[str, Any] = {"bytes": 0}


def read_timeline(data: Mapping[str, Any]) -> Timeline:
    """Return the timeline that `Timeline.to_dict` wrote.

    Raises:
        ValueError: this is not a timeline of schema 1, or a part of it is missing or not what it should be.
    """
    if data.get("polylane") != 1 or data.get("kind") != "timeline":
        found = {key: data[key] for key in ("polylane", "kind") if key in data}
        raise ValueError(f'not a timeline: expected "polylane": 1 and "kind": "timeline", found {found or "neither"}')
    missing = [key for key in ("unit", "ranks", "columns", "spans") if key not in data]
    known = (*data.get("columns", COLUMNS), *_LATER)
    missing += [f"columns: {name}" for name in COLUMNS if name not in known]
    if missing:
        raise ValueError(f"this timeline lacks {', '.join(missing)}")
    places = {name: place for place, name in enumerate(data["columns"])}
    at = [places.get(name) for name in COLUMNS]
    spans = tuple(_span_from_row(number, row, at) for number, row in enumerate(data["spans"]))
    return Timeline(spans, data["ranks"], data["unit"], data.get("title", ""), dict(data.get("notes", {})))


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
        given = (_LATER[name] if place is None else row[place] for name, place in zip(COLUMNS, at, strict=True))
        rank, kind, stage, microbatch, value, peer, gradient, start, end, waited, size = given
        return Span(rank, Action(ActionKind(kind), stage, microbatch, value, peer, gradient), start, end, waited, size)
    except (ValueError, TypeError, IndexError) as error:
        raise ValueError(f"span {number} of this timeline cannot be read, {row!r}: {error}") from error
