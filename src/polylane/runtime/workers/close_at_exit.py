"""Shutdown at interpreter exit: closes a job that the script did not close."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol


class ClosedAtExit(Protocol):
    """A job that can be closed."""

    def close(self) -> None:
        """Leave the other workers; idempotent."""
        ...


def close_at_exit(job: ClosedAtExit) -> None:
    """Close a job when the interpreter ends, before the process group does.

    Threads of parameter servers wait for messages inside a backend's native code, where the end of the interpreter
    would abort the process. After an uncaught exception an orderly shutdown is impossible: the process exits at once,
    and the other workers see its connections close.
    """

    def leave() -> None:
        # Set by the interpreter for an uncaught exception, whose traceback has been printed by now.
        if getattr(sys, "last_value", None) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        job.close()

    atexit.register(leave)
