"""Errors: the base of all errors that a user can fix, and those of workers; words for their sentences."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Sequence
from typing import Any


class PolylaneError(Exception):
    """A message for the user: one sentence that says what was wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. A mistake of our own is any other exception.
    """


class NotFinite(PolylaneError):
    """Weights hold NaN or infinity, and are not saved for this reason."""


class WorkerFailed(Exception):
    """A worker of this job raised or died: the one error of the whole job, raised where the job was started.

    Its text is the message for the user: which worker, where in the plan and in the model, and the original traceback.

    Attributes:
        rank: rank of the worker that failed first; one that only lost its peer is not blamed if the peer is known.
        error_type: name of the exception's class, or of the signal that ended the worker (``"SIGKILL"``).
        error_message: text of the exception in the worker.
        traceback: the original traceback in the worker, formatted; empty for a worker that was killed.
        stage, microbatch, module, source: where it happened, as far as it is known (see :class:`ActionFailed`).
    """

    def __init__(
        self,
        rank: int,
        error_type: str,
        error_message: str,
        traceback: str = "",
        *,
        stage: int | None = None,
        microbatch: int | None = None,
        module: str | None = None,
        source: str | None = None,
    ) -> None:
        self.rank = rank
        self.error_type = error_type
        self.error_message = error_message
        self.traceback = traceback
        self.stage = stage
        self.microbatch = microbatch
        self.module = module
        self.source = source
        super().__init__(rank, error_type, error_message, traceback)

    def __str__(self) -> str:
        head = f"worker {self.rank} failed{describe_place(self.stage, self.microbatch, self.module, self.source)}"
        if self.traceback:
            return f"{head}\n\n{self.traceback.rstrip()}"
        return f"{head}: {self.error_message}"


class ActionFailed(Exception):
    """An action of a worker's program raised; ``raise ActionFailed(...) from error`` adds where that was.

    It is pickled with its cause's traceback as text, since tracebacks cannot be pickled.

    Args:
        rank: rank of the worker that raised.
        stage, microbatch: numbers of stage and microbatch, from 0; None for what is done once a step.
        module: path of the user's module, such as ``layers.3.attn``.
        source: line of the user's code, such as ``model.py:42: x = self.attn(x)``.
        cause_traceback: formatted traceback of the cause, after unpickling.
    """

    def __init__(
        self,
        rank: int,
        stage: int | None = None,
        microbatch: int | None = None,
        module: str | None = None,
        source: str | None = None,
        cause_traceback: str = "",
    ) -> None:
        self.rank = rank
        self.stage = stage
        self.microbatch = microbatch
        self.module = module
        self.source = source
        self._cause_traceback = cause_traceback
        super().__init__(rank, stage, microbatch, module, source)

    @property
    def cause(self) -> BaseException | None:
        """The original exception; None in another process than the worker's."""
        return self.__cause__

    @property
    def cause_traceback(self) -> str:
        """The original exception with its traceback, formatted; kept by pickling."""
        if self.__cause__ is None:
            return self._cause_traceback
        return "".join(traceback.format_exception(self.__cause__))

    def __str__(self) -> str:
        told = self.cause_traceback.strip().rsplit("\n", 1)[-1]
        return f"rank {self.rank}{describe_place(self.stage, self.microbatch, self.module, self.source)}: {told}"

    def __reduce__(self) -> tuple[Any, ...]:
        fields = (self.rank, self.stage, self.microbatch, self.module, self.source, self.cause_traceback)
        return type(self), fields


class PeerLost(Exception):
    """Another worker is gone, or does not answer: mostly not the original error, but its consequence on other workers.

    Args:
        peer: rank of the lost worker; None for a collective, where it is not known which rank is lost.
        doing: what this worker was doing, such as "receiving from".
        reason: message of the communication backend.
    """

    def __init__(self, peer: int | None, doing: str, reason: str) -> None:
        self.peer = peer
        self.doing = doing
        self.reason = reason
        super().__init__(peer, doing, reason)

    def __str__(self) -> str:
        whom = "a peer" if self.peer is None else f"rank {self.peer}"
        return f"lost {whom} while {self.doing}: {self.reason}"


def describe_place(stage: int | None, microbatch: int | None, module: str | None, source: str | None) -> str:
    """Describe where something happened, as far as it is known, with a blank before it; empty if nothing is."""
    named = [
        text
        for text, value in (
            (f"stage {stage}", stage),
            (f"microbatch {microbatch}", microbatch),
            (f"in {module}", module),
        )
        if value is not None
    ]
    place = f" at {', '.join(named)}" if named else ""
    return place + (f" ({source})" if source else "")


# ---- words for a sentence ------------------------------------------------------------------------------------------

_SHOWN = 60  # most characters of a wrong value that are quoted


def format_value(given: object) -> str:
    """Format a value for a sentence, shortened."""
    text = "empty" if given is None else repr(given)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def suggest_name(name: str, known: Sequence[str]) -> str:
    """Return "; did you mean ...?" if a known name is similar, else an empty text."""
    begun = sorted(each for each in known if name and each.startswith(f"{name}-"))
    if begun:  # the name is a prefix of several, such as "h100" of "h100-80g": suggest all of them
        return f"; did you mean {' or '.join(begun)}?"
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]}?" if close else ""
