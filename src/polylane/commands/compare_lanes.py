"""``polylane lanes --compare``: all schedules side by side, as a table, JSON, or a page with their pictures."""

from __future__ import annotations

from typing import Any

from polylane.commands.printing import console, make_table, print_json, print_table, write_text
from polylane.commands.requests import LanesRequest
from polylane.errors import format_plural
from polylane.inspection.schedule_comparison import ComparedModel, ComparedSchedules, compare_schedules
from polylane.observe.swimlane.layout import format_number, format_percent
from polylane.observe.swimlane.render import gallery
from polylane.schedule.schedules import ASYNCHRONOUS

HEADS = ("schedule", "ticks", "utilization", "per worker", "steady", "live", "versions", "staleness", "messages")


def print_comparison(request: LanesRequest, model: ComparedModel) -> None:
    """Draw all schedules, print their figures, and write the page that is asked for.

    Raises:
        ValueError: durations that do not fit the stages, or fewer than one stage or microbatch.
        PolylaneError: the page cannot be written.
    """
    compared = compare_schedules(model)
    figures = compared.figures()
    rows = [_row(figure) for figure in figures]
    title = f"schedules of {format_plural(figures[0]['stages'], 'stage')}"
    title += f" and {model.microbatches} microbatch{'es' if model.microbatches > 1 else ''}"
    title += f", {', '.join(map(str, model.replicas))} replicas in turn" if model.replicas else ""
    if request.html is not None:
        timelines = {name: drawn.timeline for name, drawn in compared.drawn.items()}
        write_text(request.html, gallery(title, HEADS, rows, timelines, _notes(compared)))
    if request.json:
        print_json(
            {
                "stages": figures[0]["stages"],
                "microbatches": model.microbatches,
                "schedules": figures,
                "left_out": compared.left_out,
            }
        )
        return
    table = make_table(title, *HEADS, left=("schedule",))
    for row in rows:
        table.add_words(*row)
    screen = console()
    print_table(screen, table)
    for note in _notes(compared):
        screen.print(note)


def _row(figures: dict[str, Any]) -> list[str]:
    steady, messages = figures["steady_utilization"], figures["messages_over_1f1b"]
    return [
        figures["title"],
        format_number(figures["makespan"]),
        format_percent(figures["utilization"]),
        # Of the worker that idles most in between: 100 % only if none does.
        format_percent(min(figures["worker_utilization"])),
        # A synchronous step fills and drains every time: that it is full in between is no gain.
        "-" if steady is None or figures["schedule"] not in ASYNCHRONOUS else format_percent(steady),
        format_number(max(figures["peak_live_microbatches"])),
        str(max(figures["weight_versions"])),
        str(max(figures["staleness"])),
        "-" if messages is None else f"{format_number(messages)} x",
    ]


def _notes(compared: ComparedSchedules) -> list[str]:
    """Return what the table's columns mean, and which schedules are not in it."""
    return [
        "ticks: of a step, or of a run from fill to drain; utilization: over the whole rectangle; per worker: of the "
        "one that idles most from its own first to its own last pass; steady: while an asynchronous pipeline is full; "
        "live microbatches, versions of weights and staleness (updates that they lack): of the worker with most; "
        "messages: for each microbatch, over those of 1f1b.",
        *(f"{name} is left out: {why}" for name, why in compared.left_out.items()),
    ]
