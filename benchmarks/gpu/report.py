"""The report: tables on the screen, and as JSON and markdown in the run folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.gpu.setting import Row, columns_of, format_figure

SUBJECTS = (
    *("equality", "dropout", "collectives", "families", "spans", "memory", "speed", "prediction", "resuming"),
    "several GPUs",
)


def show(rows: Sequence[Row], machine: dict[str, Any]) -> None:
    """Print a table for each subject."""
    out = Console()
    out.print(", ".join(f"{key}: {value}" for key, value in machine.items()), soft_wrap=True)
    for subject, own in by_subject(rows).items():
        table = Table(subject, *columns_of(own), "holds", title_justify="left")
        for row in own:
            style = "red" if row.holds is False else ""
            table.add_row(row.name, *_cells(row, columns_of(own)), format_figure(row.holds), style=style)
        out.print(table)


def write(rows: Sequence[Row], machine: dict[str, Any], folder: Path) -> None:
    """Write report.json and report.md into the run folder."""
    data = {"machine": machine, "rows": [row.to_dict() for row in rows]}
    (folder / "report.json").write_text(json.dumps(data, indent=1) + "\n")
    lines = ["# What was measured", "", *(f"* {key}: {value}" for key, value in machine.items())]
    for subject, own in by_subject(rows).items():
        columns = columns_of(own)
        lines += ["", f"## {subject}", "", f"| {' | '.join(['what', *columns, 'holds'])} |"]
        lines += ["|" + "---|" * (len(columns) + 2)]
        for row in own:
            lines.append(f"| {' | '.join([row.name, *_cells(row, columns), format_figure(row.holds)])} |")
    (folder / "report.md").write_text("\n".join(lines) + "\n")


def by_subject(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the rows of each subject that has any, in the order of the report."""
    return {subject: own for subject in SUBJECTS if (own := [row for row in rows if row.subject == subject])}


def _cells(row: Row, columns: Sequence[str]) -> list[str]:
    return [format_figure(row.figures[name]) if name in row.figures else "" for name in columns]
