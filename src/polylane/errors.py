"""Errors: the base of all errors that a user can fix, and those of workers; words for their sentences."""

from __future__ import annotations

import difflib
import errno
import re
import traceback
from collections.abc import Sequence
from typing import Any


class PolylaneError(Exception):
    """A message for the user: one sentence that says what was wrong, where, and what to do.

    The command line prints it without a traceback and exits with code 2. A mistake of our own is any other exception.
    What a file, a name or another exception put into the sentence is cleaned and shortened (``clean_sentence``).

    Examples:
        >>> import polylane
        >>> try:
        ...     polylane.data_parallel()
        ... except polylane.PolylaneError as error:
        ...     print(error)
        data_parallel takes one nn.Module or several
    """

    def __str__(self) -> str:
        return clean_sentence(super().__str__())


class Interruption(BaseException):
    """The run is to end, whatever it does: like KeyboardInterrupt no ``except Exception`` sees it."""


# What is nobody's error. Other exceptions that are no Exception are a user's own, such as one that ends a search.
INTERRUPTIONS = (KeyboardInterrupt, GeneratorExit, Interruption)


class NotFinite(PolylaneError):
    """Weights hold NaN or infinity, and are not saved for this reason.

    Examples:
        >>> import torch, polylane
        >>> from polylane.errors import NotFinite
        >>> model = torch.nn.Linear(8, 1)
        >>> batch = torch.ones(4, 8), torch.zeros(4, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> job.load_state_dict({"weight": torch.full((1, 8), torch.nan), "bias": torch.zeros(1)})
        >>> try:
        ...     job.save("model.safetensors")
        ... except NotFinite as error:
        ...     print(error)
        weight holds NaN, so that model.safetensors was not written
    """


class AuditFailed(PolylaneError):
    """A step of a training was not what one device computes; nothing of it is kept any more.

    Examples:
        >>> import polylane
        >>> from polylane.errors import AuditFailed
        >>> issubclass(AuditFailed, polylane.PolylaneError)
        True
    """


class WorkerFailed(Exception):
    """A worker of this job raised or died: the one error of the whole job, raised where the job was started.

    Its text is the message for the user: which worker, where in the plan and in the model, and the original traceback.

    Attributes:
        rank: rank of the worker that failed first; one that only lost its peer is not blamed if the peer is known.
        error_type: name of the exception's class, or of the signal that ended the worker (``"SIGKILL"``).
        error_message: text of the exception in the worker.
        traceback: the original traceback in the worker, formatted; empty for a worker that was killed.
        stage, microbatch, module, source: where it happened, as far as it is known (see ``ActionFailed``).

    Examples:
        >>> import polylane
        >>> from polylane.errors import WorkerFailed
        >>> try:
        ...     polylane.launch(lambda: 1 / 0, workers=2)
        ... except WorkerFailed as error:
        ...     failure = error
        ...     print(error.error_type, error.error_message)
        ZeroDivisionError division by zero
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

    @property
    def sentence(self) -> str:
        """The message without its traceback, in one line.

        Examples:
            >>> failure.sentence
            'worker ... failed: ...division by zero...'
        """
        kind = f"{self.error_type}: " if self.traceback else ""
        return clean_sentence(f"{self._head}: {kind}{self.error_message}")

    @property
    def _head(self) -> str:
        return f"worker {self.rank} failed{describe_place(self.stage, self.microbatch, self.module, self.source)}"

    def __str__(self) -> str:
        if self.traceback:
            return f"{self._head}\n\n{self.traceback.rstrip()}"
        return f"{self._head}: {self.error_message}"


class WorkerHung(WorkerFailed):
    """A worker did not go on, and the training was ended for that.

    Args:
        ranks: ranks of the workers to blame, or of all that wait for a link.
        sentence: which worker, where, since when, what it does, and who waits for it.
        stack: what its main thread was calling, the innermost call last; empty where that is not known.

    Examples:
        >>> from polylane.errors import WorkerHung
        >>> error = WorkerHung([1], "rank 1 has made no progress for 8.1 s")
        >>> print(error)
        the training hangs: rank 1 has made no progress for 8.1 s
    """

    def __init__(self, ranks: Sequence[int], sentence: str, stack: str = "") -> None:
        super().__init__(ranks[0], "WorkerHung", sentence, stack)
        self.ranks, self.args = tuple(ranks), (ranks, sentence, stack)

    def __str__(self) -> str:
        stack = f"\n\nIts main thread, the innermost call last:\n{self.traceback.rstrip()}" if self.traceback else ""
        return f"the training hangs: {self.error_message}{stack}"


class CallsDiffer(PolylaneError):
    """The workers of a script make different collective calls, so that each waits for the others for ever.

    Examples:
        >>> import polylane
        >>> from polylane.errors import CallsDiffer
        >>> issubclass(CallsDiffer, polylane.PolylaneError)
        True
    """


class MessageUnreadable(PolylaneError):
    """What another worker sent is no message for this place: it makes other calls, or is of another version."""


class ActionFailed(Exception):
    """An action of a worker's program raised; ``raise ActionFailed(...) from error`` adds where that was.

    It is pickled with its cause's traceback as text, since tracebacks cannot be pickled.

    Args:
        rank: rank of the worker that raised.
        stage: number of the stage, from 0; None for what is done once a step.
        microbatch: number of the microbatch, from 0; None for what is done once a step.
        module: path of the user's module, such as ``layers.3.attn``.
        source: line of the user's code, such as ``model.py:42: x = self.attn(x)``.
        cause_traceback: formatted traceback of the cause, after unpickling.

    Examples:
        >>> import torch, polylane
        >>> from polylane.errors import ActionFailed
        >>> class Picky(torch.nn.Module):
        ...     def forward(self, x):
        ...         if (x < 0).any():
        ...             raise ValueError("no negative inputs")
        ...         return x
        >>> model = torch.nn.Sequential(Picky(), torch.nn.Linear(8, 1))
        >>> batch = torch.ones(4, 8), torch.zeros(4, 1)
        >>> sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> job = polylane.parallelize(model, torch.nn.MSELoss(), sgd, example=batch, audit="off")
        >>> try:
        ...     job.step((-batch[0], batch[1]))
        ... except ActionFailed as error:
        ...     failure = error
        ...     print(f"rank {error.rank}, module {error.module}: {error.cause}")
        rank 0, module 0: ...no negative inputs...
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
        """The original exception; None in another process than the worker's.

        Examples:
            >>> failure.cause is None
            False
        """
        return self.__cause__

    @property
    def cause_traceback(self) -> str:
        """The original exception with its traceback, formatted; kept by pickling.

        Examples:
            >>> failure.cause_traceback.splitlines()[0]
            'Traceback (most recent call last):'
        """
        if self.__cause__ is None:
            return self._cause_traceback
        return "".join(traceback.format_exception(self.__cause__))

    def __str__(self) -> str:
        message = self.cause_traceback.strip().rsplit("\n", 1)[-1]
        message = message.removeprefix(f"{__name__}.{PolylaneError.__name__}: ")  # a sentence for the user as it is
        return f"rank {self.rank}{describe_place(self.stage, self.microbatch, self.module, self.source)}: {message}"

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


OTHERS_FAILED = (PeerLost, WorkerHung, CallsDiffer)  # what is no mistake of the operator in which it is raised


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
    location = f" at {', '.join(named)}" if named else ""
    return location + (f" ({source})" if source else "")


# ---- words for a sentence ------------------------------------------------------------------------------------------

_SHOWN = 60  # most characters of a wrong value that are quoted
_QUOTED = 200  # most characters of another exception's text that are quoted
_LONGEST_WORD = 300  # most characters of a word: more than a path has that somebody typed
_LONGEST_SENTENCE = 4000

# What a terminal takes for a command, or shows in another order or not at all: controls and escapes (C0, C1), marks of
# direction (a name could be made to read as another one), separators of lines, and halves of characters.
_UNFIT = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


LINES = "\n\t"  # what lines are made of: a traceback keeps it


def clean_text(text: str, keep: str = "") -> str:
    """Return text that is safe to print: what a terminal would obey is written as an escape, such as ``\\x1b``.

    Args:
        text: may come from a file, from the model's names or from another exception.
        keep: characters that stay as they are, such as the line breaks of a traceback.
    """
    return _UNFIT.sub(lambda match: match[0] if match[0] in keep else ascii(match[0])[1:-1], text)


def find_unfit(text: str) -> str | None:
    """Return the first character of a text that a terminal would obey, as an escape; None if there is none."""
    match = _UNFIT.search(text)
    return None if match is None else clean_text(match[0])


def clean_sentence(text: str) -> str:
    """Return a sentence on one line, clean, and with words and length within bounds."""
    text = clean_text(text.replace("\n", " "))
    if len(text) > _LONGEST_WORD:
        text = re.sub(rf"\S{{{_LONGEST_WORD + 1},}}", lambda match: shorten_text(match[0], _LONGEST_WORD), text)
    return shorten_text(text, _LONGEST_SENTENCE)


def shorten_text(text: str, limit: int) -> str:
    """Return a text of about ``limit`` characters at most: of a longer one the beginning, the end and the length."""
    if len(text) <= limit:
        return text
    return f"{text[: limit * 2 // 3]}…({len(text):,} characters)…{text[-limit // 4 :]}"


def describe_error(error: BaseException) -> str:
    """Return what was raised, on one line and shortened; of a :class:`PolylaneError` its sentence alone."""
    text = describe_message(error)
    return text if isinstance(error, PolylaneError) else f"{type(error).__name__}: {text}"


# What to do about a file that the system does not write, by the number of its error.
_REMEDIES = {
    errno.ENOSPC: "free some space on that disk, or choose a folder on another one",
    errno.EDQUOT: "free some space there, or choose a folder without that quota",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "make it writable, or choose another folder"),
    errno.EROFS: "choose a folder on a disk that can be written to",
}


def describe_disk_error(error: OSError) -> str:
    """Return why the system does not write a file, and what to do: ``No space left on device (free some ...)``."""
    remedy = _REMEDIES.get(error.errno or 0, "")
    return f"{error.strerror or error}" + (f" ({remedy})" if remedy else "")


def describe_message(error: BaseException) -> str:
    """Return the text of an exception, on one line, clean and shortened."""
    text = clean_text(" ".join(read_text(error).split())) or "no message"
    return text if len(text) <= _QUOTED else f"{text[:_QUOTED]}…"


def read_text(error: BaseException) -> str:
    """Return the text of an exception; of a user's own that fails to tell it, words about that."""
    try:
        return str(error)
    except Exception as failed:
        return f"its text cannot be told, for its __str__ raises {type(failed).__name__}"


def format_value(value: object) -> str:
    """Format a value for a sentence, shortened."""
    if value is None:
        return "empty"
    if isinstance(value, int) and abs(value) >= 10**_SHOWN:  # repr() refuses thousands of digits
        return f"a number of more than {_SHOWN} digits"
    # A long text is cut before repr(), which would copy it whole.
    text = clean_text(repr(value[: 2 * _SHOWN] if isinstance(value, str) else value))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def format_plural(number: int, word: str) -> str:
    """Return ``1 worker``, ``4 workers``."""
    return f"{number} {word}" + ("" if number == 1 else "s")


def suggest_name(name: str, known_names: Sequence[str]) -> str:
    """Return "; did you mean ...?" if a known name is similar, else an empty text."""
    completions = sorted(candidate for candidate in known_names if name and candidate.startswith(f"{name}-"))
    if completions:  # the name is a prefix of several, such as "h100" of "h100-80g": suggest all of them
        return f"; did you mean {' or '.join(completions)}?"
    close = difflib.get_close_matches(name, known_names, 1)
    return f"; did you mean {close[0]}?" if close else ""
