"""Several swimlanes on one page, under each other and on one scale of time, below a table of their figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from polylane.observe.swimlane.svg import escape, svg
from polylane.observe.timeline import Timeline

_STYLE = """
:root { --paper: #ffffff; --ink: #1f2328; --line: #d0d7de; }
@media (prefers-color-scheme: dark) { :root { --paper: #0d1117; --ink: #e6edf3; --line: #3d444d; } }
body { margin: 24px; background: var(--paper); color: var(--ink);
       font: 14px/1.45 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 18px; }
h2 { font-size: 15px; margin: 28px 0 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px; text-align: right; border-bottom: 1px solid var(--line); font-weight: 400; }
th:first-child, td:first-child { text-align: left; padding-left: 0; }
thead th { font-weight: 600; }
.scroll { overflow-x: auto; }
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
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return "\n".join(
        [
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">',
            '<meta name="color-scheme" content="light dark">',
            f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>",
            f'<div class="scroll">\n<table>\n<thead><tr>{head}</tr></thead>\n<tbody>',
            f"{body}\n</tbody>\n</table>\n</div>",
            *(f"<p>{escape(note)}</p>" for note in notes),
            *(
                f'<h2>{escape(heading)}</h2>\n<div class="scroll">\n{svg(timeline, extent)}</div>'
                for heading, timeline in timelines.items()
            ),
            "</body>\n</html>\n",
        ]
    )
