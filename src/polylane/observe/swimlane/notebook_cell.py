"""Notebook cells: a swimlane as a notebook shows it, a picture of its own whose styles are not those of the page."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from polylane.observe.swimlane.layout import format_headline, format_title
from polylane.observe.swimlane.svg import escape, svg
from polylane.observe.timeline import Timeline

MOST_SPANS = 20_000  # of a timeline that is drawn into a notebook's file


def draw_cell(timeline: Timeline) -> str:
    """Return HTML that shows a timeline; its headline alone where it would make the notebook large."""
    headline = f"{escape(format_title(timeline))} · {escape(format_headline(timeline))}"
    if not timeline.spans or len(timeline.spans) > MOST_SPANS:
        return f"<p>{headline}</p>"
    picture = base64.b64encode(svg(timeline).encode()).decode()
    return f'<img src="data:image/svg+xml;base64,{picture}" alt="{headline}" style="max-width: 100%">'


def draw_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return HTML that shows a few facts by name, below a title."""
    align = "style='text-align: left'"
    rows = "".join(
        f"<tr><th {align}>{escape(name)}</th><td {align}>{escape(str(value))}</td></tr>"
        for name, value in facts.items()
    )
    return f"<p><b>{escape(title)}</b></p><table>{rows}</table>"
