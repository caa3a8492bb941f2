"""Patience: after how long without progress a worker is said to hang, from the run's own step times.

what the worker is in                          bound
stopped, held by a debugger or in the system   the margin, whatever the phase; more than steps usually take
a step that ran before                         the margin, more than steps usually take
its loader, a first step, a compilation,
weights that are written, the start and end    LONG_SECONDS: named as what it is after the margin, and not a hang
waiting for a host that nothing is heard of    as in a step that ran before (SILENT_LEAST or more); else SILENT_SECONDS
"""

from __future__ import annotations

from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.report import Doing

MARGIN_SECONDS = 8.0
LONG_SECONDS = 570.0  # below the ten minutes after which a worker gives up waiting for another one
SILENT_LEAST = 5.0  # a busy machine may keep a process waiting for a second or two
SILENT_SECONDS = 30.0  # the process that speaks for a host does not compile or load, whatever its workers do
START_SECONDS = 60.0  # a start that takes no longer is not worth a word
_STEPS = frozenset({Phase.TRAINING, Phase.EVALUATING})
_NOT_RUNNING = frozenset({Doing.STOPPED})


def choose_bound(record: Record, doing: Doing, hang_after: float | None) -> float:
    """Return the seconds without progress after which a worker hangs.

    Args:
        record: where it is.
        doing: what its process does.
        hang_after: the user's bound; None: from the step times.
    """
    bound = _usual_bound(record, hang_after)
    return bound if doing in _NOT_RUNNING or _runs_again(record) else max(bound, LONG_SECONDS)


def silence_bound(record: Record, hang_after: float | None) -> float:
    """Return the seconds after which a worker need not wait any longer for a host that nothing is heard of."""
    bound = _usual_bound(record, hang_after)
    return max(bound, SILENT_LEAST if _runs_again(record) else SILENT_SECONDS)


def note_bound(record: Record, hang_after: float | None) -> float:
    """Return the seconds without progress after which it is said what a worker is doing."""
    bound = _usual_bound(record, hang_after)
    return max(bound, START_SECONDS) if record.phase is Phase.STARTING else bound


def _runs_again(record: Record) -> bool:
    return record.phase in _STEPS and record.round > 0 and not record.is_new


def _usual_bound(record: Record, hang_after: float | None) -> float:
    return record.usual / 1e9 + MARGIN_SECONDS if hang_after is None else hang_after
