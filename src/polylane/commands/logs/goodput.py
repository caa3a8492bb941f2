"""Goodput in time: the part of a run's wall time in which its workers computed, and what the rest was lost to.

A run may have several attempts: it is resumed, or its workers are started again. Each has its causes, which add up to
its wall time; the time between two attempts is one as well. Steps that an attempt makes again, because no checkpoint
was saved after them, are taken from the useful time of the attempt that made them first.

This is not the goodput of Pollux (throughput times statistical efficiency), see :mod:`polylane.efficiency`.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.diagnosis.page_layout import Phase
from polylane.observe.stretches import TimeState

if TYPE_CHECKING:
    from polylane.runtime.progress_page import Progress

TELL_SECONDS = 5.0  # between two messages about time

# Shares of a step's time that are told apart; on accelerators "communicating" in place of moving and waiting.
SHARES = (*map(str, TimeState), "communicating")

# What rank 0 does between its steps; the parts of a step are told apart by shares of observed ones.
TRAINING = "training"
CAUSES = {
    Phase.TRAINING: TRAINING,
    Phase.STARTING: "start",
    Phase.LOADING: "loading",
    Phase.COMPILING: "compiling",
    Phase.EVALUATING: "evaluation",
    Phase.SAVING: "checkpoint",
    Phase.AUDITING: "audit",
    Phase.ENDING: "end",
    Phase.SCRIPT: "script",
}

USEFUL = str(TimeState.COMPUTING)
STOPPED = "stopped"  # between two attempts
REDONE = "redone steps"
START, FIRST_STEP, OVERHEAD, OTHER = "start", "first step", "overhead", "other"


@dataclass
class Attempt:
    """One attempt at a run, from its start to the last that was heard of it.

    Attributes:
        began: when this attempt, or the process that made it, was started, in seconds since 1970.
        last_seen: when the last message about it came, in seconds since 1970.
        plan: the plan, in one line.
        workers: number of workers that the plan takes, dedicated servers among them.
        resumed_at: step of the checkpoint that it went on from; None: it began.
        last_step: number of the last step that it has made.
        seconds: of its time, by cause.
        ended_by: name of the signal that has ended it, such as SIGTERM; "" where none has.
    """

    began: float
    last_seen: float
    plan: str
    workers: int
    resumed_at: int | None
    last_step: int
    seconds: dict[str, float] = field(default_factory=dict)
    ended_by: str = ""

    @property
    def steps(self) -> int:
        """Number of steps that it has made."""
        return max(0, self.last_step - (self.resumed_at or 0))


def find_process_start() -> float:
    """Return when this process began, in seconds since 1970; now, where the system does not tell."""
    try:
        ticks = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()[19]  # since the boot
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(ticks) / os.sysconf("SC_CLK_TCK")
        return time.time() - max(0.0, age)
    except (OSError, ValueError, LookupError, AttributeError):
        return time.time()


class GoodputLedger:
    """Where the wall time of a run went.

    Args:
        began: when the first attempt of this process began, in seconds since 1970.
    """

    def __init__(self, began: float) -> None:
        self._began, self._attempts = began, list[Attempt]()
        # Of the latest attempt what was told of its time last, and when.
        self._told_seconds, self._told_at = dict[str, float](), began

    def begin(self, plan: str, workers: int, resumed_at: int | None, earlier: Mapping[str, Any] | None) -> None:
        """Begin an attempt: its workers are ready for their first step.

        Args:
            plan: the plan, in one line.
            workers: number of workers that the plan takes.
            resumed_at: step of the checkpoint that it goes on from; None: it begins.
            earlier: what :meth:`to_dict` returned to the process before; None: the run begins with this attempt, or
                this process has seen the ones before.
        """
        moment = time.time()
        if resumed_at is None:
            self._attempts.clear()
        elif earlier is not None and not self._attempts:
            # A file that somebody edited, or an earlier version wrote, says nothing of the attempts before.
            with suppress(LookupError, TypeError):
                self._attempts = [
                    Attempt(**{field.name: record[field.name] for field in fields(Attempt) if field.name in record})
                    for record in earlier["attempts"]
                ]
        began, self._began = self._began, moment
        attempt = Attempt(began, moment, plan, workers, resumed_at, resumed_at or 0, {START: moment - began})
        self._attempts.append(attempt)
        self._told_seconds, self._told_at = attempt.seconds, moment

    @property
    def has_begun(self) -> bool:
        """Whether there is an attempt."""
        return bool(self._attempts)

    def note_signal(self, number: int) -> None:
        """Note that a signal has ended the latest attempt."""
        if self._attempts:
            self._attempts[-1].ended_by = signal.Signals(number).name

    def note_step(self, step: int) -> None:
        """Note that a step was made, after which nothing more may be heard of the attempt.

        What it did since it told of its time is not known: the same, for the most part, as before.
        """
        attempt, moment = self._attempts[-1], time.time()
        usual = {cause: s for cause, s in self._told_seconds.items() if cause not in (START, FIRST_STEP)}
        total, since = sum(usual.values()), moment - self._told_at
        parts = {cause: since * seconds / total for cause, seconds in usual.items()} if total else {OVERHEAD: since}
        attempt.last_step, attempt.last_seen = step, moment
        attempt.seconds = {
            cause: self._told_seconds.get(cause, 0.0) + parts.get(cause, 0.0) for cause in self._told_seconds | parts
        }
        # What follows a failure, until other workers are ready, is the next attempt's start.
        self._began = moment

    def update(self, step: int, phases: Mapping[str, float], first_step: float, shares: Mapping[str, float]) -> None:
        """Take the times of rank 0 since the attempt's first step began.

        Args:
            step: number of the last step.
            phases: seconds by what it did; "training" are the steps.
            first_step: of these the seconds of the first step.
            shares: of a later step: what all workers do with it, see :class:`.StepColumns`.
        """
        attempt, moment = self._attempts[-1], time.time()
        start = self._told_seconds[START]
        seconds = {START: start, FIRST_STEP: first_step}
        later = max(0.0, phases.get(TRAINING, 0.0) - first_step)
        parts = {name: shares.get(name, 0.0) * later for name in SHARES if shares.get(name)}
        seconds |= parts | {OVERHEAD: max(0.0, later - sum(parts.values()))}
        seconds |= {name: value for name, value in phases.items() if name not in (TRAINING, START)}
        seconds[OTHER] = max(0.0, moment - attempt.began - sum(seconds.values()))
        attempt.last_seen, attempt.last_step = moment, step
        attempt.seconds = {cause: lasting for cause, lasting in seconds.items() if lasting > 0}
        self._told_seconds, self._told_at, self._began = attempt.seconds, moment, moment

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data for JSON: attempts, and the sums of all of them, by cause."""
        totals = Counter[str]()
        attempts = [asdict(attempt) for attempt in self._attempts]
        for attempt, later, record in zip(self._attempts, [*self._attempts[1:], None], attempts, strict=True):
            redone = 0 if later is None else max(0, attempt.last_step - (later.resumed_at or 0))
            part = min(1.0, redone / attempt.steps) if attempt.steps else 0.0
            for cause, seconds in attempt.seconds.items():
                lost = part * seconds if cause in (*SHARES, OVERHEAD, FIRST_STEP) else 0.0
                totals[cause] += seconds - lost  # type: ignore[assignment]
                totals[REDONE] += lost  # type: ignore[assignment]
            if later is not None:
                totals[STOPPED] += max(0.0, later.began - attempt.last_seen)  # type: ignore[assignment]
            record |= {"steps": attempt.steps, "redone_steps": redone}
        wall = self._attempts[-1].last_seen - self._attempts[0].began if self._attempts else 0.0
        useful = float(totals[USEFUL])
        seconds_by_cause = {cause: seconds for cause, seconds in totals.items() if seconds > 0}
        share = useful / wall if wall > 0 else 0.0
        return {
            "attempts": attempts,
            "wall_seconds": wall,
            "useful_seconds": useful,
            "share": share,
            "seconds": seconds_by_cause,
        }


class PhaseClock:
    """Tells now and then what this worker did with its time since the first step began.

    Args:
        progress: knows how long it has been in each phase.
        tell: called with "time" messages.
        means: returns the mean shares of observed steps so far.
    """

    def __init__(self, progress: Progress, tell: Callable[[dict[str, Any]], None], means: Callable[[], Any]) -> None:
        self._progress, self._tell, self._means = progress, tell, means
        self._base = {phase: progress.phase_seconds(phase) for phase in Phase}
        self._first_step, self._told_at = -1.0, -math.inf

    def note_step(self, step: int) -> None:
        """Note that a step has been made, and tell, if the last time is long enough ago."""
        if self._first_step < 0:
            self._first_step = self._since(Phase.TRAINING)
        if time.monotonic() - self._told_at >= TELL_SECONDS:
            self.tell(step)

    def tell(self, step: int) -> None:
        """Tell where the time went up to a step."""
        self._told_at = time.monotonic()
        phases = {CAUSES[phase]: self._since(phase) for phase in CAUSES}
        times = {"phases": phases, "first_step": max(0.0, self._first_step), "shares": dict(self._means())}
        self._tell({"kind": "time", "step": step, **times})

    def _since(self, phase: Phase) -> float:
        return self._progress.phase_seconds(phase) - self._base[phase]


def describe_goodput(ledger: Mapping[str, Any]) -> str:
    """Describe a ledger in one line: the useful share of the wall time, and what most of the rest was lost to.

    Args:
        ledger: plain data that :meth:`GoodputLedger.to_dict` returns, or that a file has of it.
    """
    wall = ledger["wall_seconds"] or 1.0
    causes = sorted(((s / wall, cause) for cause, s in ledger["seconds"].items() if cause != USEFUL), reverse=True)
    lost = ", ".join(f"{share:.0%} {cause}" for share, cause in causes[:4] if share >= 0.005)
    return f"goodput {ledger['share']:.0%} of {wall:,.0f} s" + (f"; lost to: {lost}" if lost else "")
