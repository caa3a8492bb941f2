"""Report file: a report as JSON in a run's folder, and as the picture of the last steps with the culprit in red."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from polylane.diagnosis.report import HangReport, RankReport
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind

_KIND = "why"
MOST_RANKS = 1 << 20  # that a report's picture has lanes for: the bound of a plan's workers
_LAST_SECOND = 253_402_300_799  # since 1970, of the last year that clocks can show
# Most of a picture that what did not end may take, as a part of what came before.
_LONGEST_END = 0.5


def to_dict(report: HangReport) -> dict[str, Any]:
    """Return a report as plain data for JSON; see :func:`from_dict`."""
    running = {f"{rank}": [action.to_row(), since] for rank, (action, since) in report.unfinished.items()}
    return {
        "polylane": 1,
        "kind": _KIND,
        "sentence": report.sentence,
        "culprits": list(report.culprits),
        "wall": report.wall,
        "now": report.now,
        "ranks": [worker.to_dict() for worker in report.ranks],
        "unfinished": running,
        "timeline": report.timeline.to_dict(),
    }


def from_dict(data: Any) -> HangReport:
    """Return the report that :func:`to_dict` wrote.

    Args:
        data: what JSON said, of whomever: a file may have been edited, and a post may be of another host.

    Raises:
        ValueError: this is no such report, or a part of it is missing or not what it should be.
    """
    if not isinstance(data, Mapping) or data.get("polylane") != 1 or data.get("kind") != _KIND:
        raise ValueError('expected "polylane": 1 and "kind": "why"')
    try:
        running = data["unfinished"].items()
        report = HangReport(
            data["sentence"],
            tuple(data["culprits"]),
            tuple(RankReport.from_dict(entry) for entry in data["ranks"]),
            Timeline.from_dict(data["timeline"]),
            {int(rank): (Action.from_row(row), since) for rank, (row, since) in running},
            data["now"],
            data["wall"],
        )
        _check_values(report)
    except (LookupError, TypeError, AttributeError) as error:  # what any edit of the file may end in
        raise ValueError(f"a part of it is missing or wrong: {error!r}") from error
    return report


def _check_values(report: HangReport) -> None:
    """Check that the values of a report are of the types that they should be, and that clocks and pictures have them.

    Raises:
        ValueError: one of them is not.
    """
    timeline, spans = report.timeline, report.timeline.spans
    texts = [report.sentence, timeline.unit, timeline.title, *timeline.notes, *timeline.notes.values()]
    counts = [timeline.ranks, *report.culprits, *report.unfinished]
    times = [report.now, report.wall, *(since for _, since in report.unfinished.values())]
    for worker in report.ranks:
        texts += [worker.host, worker.phase, worker.operator, worker.source, worker.waits_on, worker.stacks]
        counts += [worker.rank, worker.pid, worker.step]
        times.append(worker.stalled)
    for span in spans:
        counts += [span.rank, span.bytes]
        times += [span.start, span.end, span.waited]
    actions = [worker.action for worker in report.ranks if worker.action is not None]
    actions += [span.action for span in spans] + [action for action, _ in report.unfinished.values()]
    for action in actions:
        texts += [] if action.value is None else [action.value]
        counts += [action.stage, action.steps_back]
        counts += [number for number in (action.microbatch, action.peer) if number is not None]
    if not all(type(item) is str for item in texts) or not all(type(item.gradient) is bool for item in actions):
        raise ValueError("a part of it is of another type")
    if not all(type(count) is int and 0 <= count < 1 << 63 for count in counts):
        raise ValueError("a number of it is of another type, or below 0")
    if not all(type(time) in (int, float) and math.isfinite(time) for time in times):
        raise ValueError("a time of it is no number")
    if timeline.ranks > MOST_RANKS or not 0 <= report.wall <= _LAST_SECOND:
        raise ValueError(f"it is of more than {MOST_RANKS} ranks, or of no moment since 1970")


def draw_timeline(report: HangReport) -> Timeline:
    """Return the last steps up to the moment of a report, with what had not ended; that of the culprits is red.

    What had not ended is drawn shorter than it was, where it would leave no room for the steps before.
    """
    spans = report.timeline.spans
    begin = min((span.start for span in spans), default=report.now - 1.0)
    end = max((span.end for span in spans), default=report.now - 1.0)
    until = min(report.now, end + max(_LONGEST_END * (end - begin), 1e-6))
    cut = f", of which {until - end:.3g} s are drawn" if until < report.now else ""
    title = f"the last steps; then nothing for {report.now - end:.1f} s{cut}"
    return replace(report.timeline, spans=(*spans, *_unfinished_spans(report, begin, until)), title=title).from_zero()


def _unfinished_spans(report: HangReport, begin: float, until: float) -> Iterator[Span]:
    lanes = report.timeline.lanes()
    for rank in range(report.timeline.ranks):
        is_hung = rank in report.culprits
        action, since = report.unfinished.get(rank, (None, lanes[rank][-1].end if lanes[rank] else begin))
        if action is None and is_hung:  # outside of its program: in its loader, say
            phases = {worker.rank: worker.phase for worker in report.ranks}
            action = Action(ActionKind.STEP, lanes[rank][-1].action.stage if lanes[rank] else 0, None, phases.get(rank))
        if action is not None:
            yield Span(rank, action, max(begin, min(since, until)), until, is_hung=is_hung)
