"""Patience: after how long without progress a worker is said to hang, from its step times or the user's bound.

what the worker is in                          bound                            with a bound of the user's
stopped                                        the margin, whatever the phase   that
a step that ran before                         the margin                       that
its loader, after the first step               LONG_SECONDS                     that
held by a debugger, or with the interpreter's
lock held, outside of such a step              LONG_SECONDS                     that
a first step, a compilation, weights that are
written, the start, the script's own code      LONG_SECONDS                     LONG_SECONDS, or that if it is longer
its end, with the interpreter's lock held:
Python takes down what the process has made    LONG_SECONDS                     LONG_SECONDS, or that if it is longer

waiting for a host that nothing is heard of, in
a step that ran before, there also for an
operation that all have begun                  the silent margin                that, or SILENT_LEAST if it is longer
elsewhere                                      SILENT_SECONDS                   SILENT_SECONDS, or that if it is longer

The margins are added to what steps usually take. Who is in a phase with the long bound is named as what it is after the
margin, or the user's bound.
"""

from __future__ import annotations

from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.report import FROZEN, Doing

MARGIN_SECONDS = 8.0
LONG_SECONDS = 570.0  # below the ten minutes after which a worker gives up waiting for another one
# Of a host that is silent or a link that is dead: TCP sends again after 0.2, 0.6, 1.4, 3.0 and 6.2 s.
SILENT_MARGIN_SECONDS = 7.0
SILENT_LEAST = 5.0  # a busy machine may keep a process waiting for a second or two
SILENT_SECONDS = 30.0  # the process that speaks for a host does not compile or load, whatever its workers do
START_SECONDS = 60.0  # a start, an audit or an end that takes no longer is not worth a word
_STEPS = frozenset({Phase.TRAINING, Phase.EVALUATING})
_LONG_BY_NATURE = frozenset({Phase.STARTING, Phase.ENDING, Phase.AUDITING})


def choose_bound(record: Record, doing: Doing, hang_after: float | None) -> float:
    """Return the seconds without progress after which a worker hangs.

    Args:
        record: where the worker is, and since when.
        doing: what its process does.
        hang_after: the user's bound; None: from the step times.
    """
    bound = _usual_bound(record, hang_after)
    # Before the first step a loader may read again what an earlier run has seen.
    is_leaving = record.phase is Phase.ENDING and doing is Doing.HOLDS_INTERPRETER
    is_bounded = (doing in FROZEN and not is_leaving) or (record.phase is Phase.LOADING and record.round > 0)
    if doing is Doing.STOPPED or _runs_again(record) or (hang_after is not None and is_bounded):
        return bound
    return max(bound, LONG_SECONDS)


def silence_bound(record: Record, hang_after: float | None) -> float:
    """Return the seconds after which a worker need not wait any longer for a host that nothing is heard of."""
    if _runs_again(record):
        return record.usual / 1e9 + SILENT_MARGIN_SECONDS if hang_after is None else max(hang_after, SILENT_LEAST)
    return max(_usual_bound(record, hang_after), SILENT_SECONDS)


def note_bound(record: Record, hang_after: float | None) -> float:
    """Return the seconds without progress after which it is said what a worker is doing."""
    bound = _usual_bound(record, hang_after)
    return max(bound, START_SECONDS) if record.phase in _LONG_BY_NATURE else bound


def _runs_again(record: Record) -> bool:
    return record.phase in _STEPS and record.round > 0 and not record.is_new


def _usual_bound(record: Record, hang_after: float | None) -> float:
    return record.usual / 1e9 + MARGIN_SECONDS if hang_after is None else hang_after
