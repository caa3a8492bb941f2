"""Close at exit: what a worker does for an open job when its interpreter ends.

    how it ends                         what follows
    well, without a call of close()     the job is closed, with the other workers
    by an exception that nobody caught  the process ends at once, with code 1
    after :meth:`CloseAtExit.abandon`   the same

Threads of servers wait inside a backend's native code, where the interpreter's end would abort the process; and to
destroy a process group of NCCL waits for its kernels, of which one may wait for a worker that will not come. Where a
process ends at once, the other workers see its connections close; one that failed must not wait for them, since they
may be in a step that waits for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn


class CloseAtExit:
    """Closes a job when the interpreter ends, before the process group is destroyed.

    Args:
        close: closes the job, of which it is a method; a collective of all workers.
        keeps_job: whether the job stays until then though nobody refers to it: threads of its servers need their end.
            Another one that is dropped is freed, with its model.
    """

    def __init__(self, close: Callable[[], None], keeps_job: bool) -> None:
        self._close = (lambda: close) if keeps_job else weakref.WeakMethod(close)
        self._is_abandoned = False
        atexit.register(self._end)

    def abandon(self) -> None:
        """Do not close the job: this worker has failed, and the others may never come to that."""
        self._is_abandoned = True

    def mark_closed(self) -> None:
        """Have nothing follow at the interpreter's end: the job has been closed."""
        atexit.unregister(self._end)

    def _end(self) -> None:
        # Set by the interpreter for an uncaught exception, whose traceback has been printed by now.
        if self._is_abandoned or getattr(sys, "last_value", None) is not None:
            end_at_once()
        if (close := self._close()) is not None:
            close()


def end_at_once() -> NoReturn:
    """End this process with code 1, without the ends of anything but its output."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(1)
