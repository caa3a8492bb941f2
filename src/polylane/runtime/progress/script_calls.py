"""Collective calls of a script, on the worker's page; and how a worker learns that another one makes other calls.

a call begins      its number, method and line of the user's go on the page, where the watch compares them
calls differ       the watch writes a sentence on the page of every worker (diagnosis/call_order.py)
a worker waits     its heartbeat wakes the main thread up by a signal, whose handler raises the sentence
... in a backend   that runs no Python: the ranks that few others agree with end, and the others raise for that
a peer is lost     a worker asks the watch why, which knows what the peer's last call was, and whether its host is
                   heard of; also where the peer sent what is no message for this call
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, wraps
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from torch.distributed import GroupMember

from polylane.diagnosis.page_layout import (
    ASKS,
    CALL_WORD,
    COLLECTIVE_WORD,
    COUNTERS_WORD,
    END_WORD,
    HAS_LEFT,
    MOST_LINES,
    WAIT_WORD,
    read_verdict,
    write_call,
)
from polylane.diagnosis.stacks import COLLECTIVES, Frame
from polylane.errors import CallsDiffer, MessageUnreadable, PeerLost, PolylaneError, WorkerHung
from polylane.faults import explain_fault

P = ParamSpec("P")
R = TypeVar("R")

# The signal that wakes the main thread of a worker up, sent by another of its threads alone.
WAKE_SIGNAL = signal.SIGRTMIN + 12 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR1

ANSWER_SECONDS = 8.0  # wait for the watch, which knows after some seconds that another host is silent
POLL_SECONDS = 0.02
LEAVE_SECONDS = 1.0  # wait for the main thread to raise, before the process is ended


class ScriptCalls:
    """The calls of this worker's script, written into its page.

    Args:
        page: the page, see :mod:`polylane.diagnosis.page_layout`.
        words: the page as words of 8 bytes.
    """

    def __init__(self, page: memoryview, words: memoryview) -> None:
        self._page, self._words = page, words
        self._count, self._is_inside, self._begun_before = 0, False, b""
        self._told_at, self._has_raised = 0.0, False
        with suppress(ValueError):  # another thread makes this job: its waits end as those of other backends
            signal.signal(WAKE_SIGNAL, self._raise_told)

    def begin(self, method: str) -> bool:
        """Begin a call; return whether it is to be ended, for one inside of another is no call of the script's."""
        if self._is_inside:
            return False
        self._is_inside, self._begun_before = True, self._begun()
        self._count += 1
        write_call(self._page, self._count, f"{method}\n{find_user_line()}".encode(errors="replace"))
        return True

    def end(self, has_failed: bool) -> None:
        """End the call; one that failed before it met other workers is as if it was not made."""
        if has_failed and self._begun() == self._begun_before:
            self._count -= 1
        self._is_inside = False
        self._words[CALL_WORD] = self._count << 1

    def _begun(self) -> bytes:
        """Return how many operations were begun on every line."""
        return bytes(self._page[COUNTERS_WORD * 8 : (COUNTERS_WORD + MOST_LINES + 1) * 8])

    def leave(self) -> None:
        """Note that the script has come to its end, unless an exception of its own has ended it."""
        if getattr(sys, "last_value", None) is None:
            self._words[END_WORD] |= HAS_LEFT

    def note_collective(self) -> None:
        """Note whether the main thread is in a collective of the script's own that needs all; called by another thread.

        Of which group it is, no stack that is read from outside says.
        """
        frame = None if self._is_inside else sys._current_frames().get(threading.main_thread().ident or 0)
        self._words[COLLECTIVE_WORD] = int(is_in_collective(frame, GroupMember.WORLD))

    # ---- what the watch says -----------------------------------------------------------------------------------------

    def explain(self, error: Exception) -> Exception:
        """Return why a peer is lost or does something else, as the watch knows it; else the same error."""
        verdict = ask_watch(self._words)
        if "hung" in verdict:
            return WorkerHung(*verdict["hung"])
        if "calls" not in verdict:
            return error
        self._has_raised = True
        return CallsDiffer(verdict["calls"])

    def obey(self) -> None:
        """End the main thread's wait, if the watch has found that calls differ; called by another thread."""
        verdict = None if self._has_raised else read_verdict(self._page)
        if not verdict or "calls" not in verdict:
            return
        now = time.monotonic()
        self._told_at = self._told_at or now
        patience = LEAVE_SECONDS if verdict["leaves"] else 4 * LEAVE_SECONDS
        if self._words[WAIT_WORD] and now - self._told_at > patience:
            for stream in (sys.stdout, sys.stderr):
                with suppress(Exception):
                    stream.flush()
            os._exit(1)
        if signal.getsignal(WAKE_SIGNAL) == self._raise_told:
            signal.pthread_kill(threading.main_thread().ident or 0, WAKE_SIGNAL)

    def _raise_told(self, number: int, frame: object) -> None:
        verdict = read_verdict(self._page)
        if self._words[WAIT_WORD] and self._is_inside and not self._has_raised and verdict and "calls" in verdict:
            self._has_raised = True
            raise CallsDiffer(verdict["calls"])


def ask_watch(words: memoryview) -> dict[str, Any]:
    """Return what the watch knows of a peer that this worker has lost; empty where it knows nothing.

    Args:
        words: the worker's page as words of 8 bytes; empty where nobody watches.

    Returns:
        By kind: "hung", arguments of :class:`.WorkerHung`; "calls", a sentence; "ended", whose workers have.
    """
    page, end = words.cast("B"), time.monotonic() + ANSWER_SECONDS
    while words and (verdict := read_verdict(page)) is None and time.monotonic() < end:
        words[END_WORD] |= ASKS  # it answers in any case
        time.sleep(POLL_SECONDS)
    if words:
        words[END_WORD] &= HAS_LEFT
    return (verdict or {}) if words else {}


# ---- the methods that are calls --------------------------------------------------------------------------------------


class _Progress(Protocol):
    @property
    def calls(self) -> ScriptCalls | None: ...


class _World(Protocol):
    @property
    def progress(self) -> _Progress: ...


class _InWorld(Protocol):
    @property
    def world(self) -> _World: ...


W = TypeVar("W", bound=_InWorld)


def collective(name: str) -> Callable[[Callable[Concatenate[W, P], R]], Callable[Concatenate[W, P], R]]:
    """Decorate a method that every worker must call, under the name that scripts call it by: ``job.save``.

    Raises:
        PolylaneError: when it is called of a job that is closed.
    """

    def decorate(method: Callable[Concatenate[W, P], R]) -> Callable[Concatenate[W, P], R]:
        @wraps(method)
        def call(self: W, /, *args: P.args, **kwargs: P.kwargs) -> R:
            if getattr(self, "_is_closed", False) and name != "job.close":
                raise PolylaneError(
                    f"{name}: the job is closed, and its workers have left: call it before job.close(), or inside of "
                    "the job's with block"
                )
            calls = self.world.progress.calls
            is_begun, has_failed = calls is not None and calls.begin(name), True
            try:
                result = method(self, *args, **kwargs)
                has_failed = False
                return result
            except (PeerLost, MessageUnreadable) as error:  # perhaps it has only left the script, or is in another call
                raise error if calls is None or not is_begun else calls.explain(error) from None
            except Exception as error:
                if (fault := explain_fault(error, f"{name}({find_user_line()})")) is None:
                    raise
                raise fault from None
            finally:
                if calls is not None and is_begun:
                    calls.end(has_failed)

        return call

    return decorate


def find_user_line() -> str:
    """Return the innermost line of the user's own code that led here; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame.f_code):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name} line {frame.f_lineno}"


def is_in_collective(frame: FrameType | None, world: object) -> bool:
    """Return whether a thread is in a collective of torch.distributed of one group, which the user's code has called.

    Args:
        frame: the thread's innermost call; None: it has none.
        world: the group; it is the one that calls are made in which name none.
    """
    called: FrameType | None = None
    while frame is not None and not _is_users(frame.f_code):
        called = frame if Frame(frame.f_code.co_filename, 0, "").is_distributed else called
        frame = frame.f_back
    if called is None or called.f_code.co_name not in COLLECTIVES:
        return False
    group = called.f_locals.get("group")
    return group is None or group is world


@cache
def _is_users(code: CodeType) -> bool:
    return Frame(code.co_filename, 0, "").is_users
