"""System limits: what the system refuses to a process but memory (open files, processes, threads), in one sentence."""

from __future__ import annotations

import errno
import resource
import traceback
from typing import Any

from polylane.errors import PolylaneError, describe_place
from polylane.runtime.workers.out_of_memory import out_of_memory

# How native libraries say it, which raise no OSError: torch's stores, gloo, and the system's loader of libraries.
_FILES_WORDS = "Too many open files"
_THREAD_WORDS = ("can't start new thread", "can't create new thread", "thread: Resource temporarily unavailable")
# Functions that fork: of multiprocessing, subprocess and this package. EAGAIN is also what a pipe says that is full.
_FORKING = ("_launch", "_execute_child", "fork_process")


class LimitReached(PolylaneError):
    """A worker, or the process that starts them, is refused a file, a process or a thread."""


def explain_refusal(error: BaseException, rank: int | None, **place: Any) -> PolylaneError | None:
    """Return the error for the user if an exception says that the system refused memory or another thing; else None.

    Args:
        error: what torch, Python or the system raised.
        rank: rank of the worker that raised; None for another process.
        place: stage, microbatch, module and source where it happened, as far as they are known.
    """
    if (memory := out_of_memory(error, rank, **place)) is not None:
        return memory
    if (refused := _describe_limit(error)) is None:
        return None
    name = "this process" if rank is None else f"worker {rank}"
    return LimitReached(f"{name} {refused[0]}{describe_place(**place) if place else ''}: {refused[1]}")


def _describe_limit(error: BaseException) -> tuple[str, str] | None:
    """Return what was refused, and what to do about it; None where an exception says something else."""
    number = error.errno if isinstance(error, OSError) else None
    is_native = isinstance(error, OSError | RuntimeError | ImportError)
    if number in (errno.EMFILE, errno.ENFILE) or (is_native and _FILES_WORDS in str(error)):
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        return f"cannot open another file, {limit} at once are its limit", "raise it with ulimit -n, 1024 or more"
    if (number == errno.EAGAIN and _was_starting(error)) or (
        is_native and any(words in str(error) for words in _THREAD_WORDS)
    ):
        return (
            "cannot start another process or thread",
            "the limit of this user (ulimit -u) or of the container (pids.max) is reached: raise it, or train with "
            "fewer workers",
        )
    return None


def _was_starting(error: BaseException) -> bool:
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name in _FORKING for frame in frames[-2:])
