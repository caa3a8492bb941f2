"""Several swimlanes on one page, under each other and on one scale of time, below a table of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.observe.swimlane.layout import build_rows
from polylane.observe.swimlane.svg import escape, svg
from polylane.observe.timeline import Timeline

_STYLE = """
:root { --paper: #ffffff; --ink: #1f2328; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --line: #3d444d; } }
body { margin: clamp(10px, 2.5vw, 32px); background: var(--paper); color: var(--ink);
       font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 18px; }
h2 { font-size: 15px; margin: 28px 0 0; }
p { max-width: 100ch; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px clamp(6px, 1vw, 14px); text-align: right; border-bottom: 1px solid var(--line);
         font-weight: 400; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky; left: 0;
                                 background: var(--paper); }
thead th { font-weight: 600; }
.scroll { overflow-x: auto; }
.scroll svg { min-width: 100%; height: auto; }
"""


def gallery(
    title: str,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    timelines: Mapping[str, Timeline],
    notes: Sequence[str] = (),
) -> str:
    """Return a page of its own with a table and a picture of every timeline; no other file, no network.

    Args:
        title: headline of the page.
        heads: names of the table's columns.
        rows: cells of the table, a row for each line.
        timelines: what is drawn, by its heading; all on the time scale of the longest one.
        notes: sentences below the table.
    """
    extent = max((timeline.makespan() for timeline in timelines.values()), default=0)
    length = max((len(row.label) for timeline in timelines.values() for row in build_rows(timeline)), default=0)
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            _open_region("Figures"),
            f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            *(
                f"<h2>{escape(heading)}</h2>\n{_open_region(heading)}\n{svg(timeline, extent, length)}</div>"
                for heading, timeline in timelines.items()
            ),
            "</body>\n</html>\n",
        ]
    )


def _open_region(name: str) -> str:
    """Return the start of a part that a keyboard can reach and move sideways."""
    return f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(name)}">'
