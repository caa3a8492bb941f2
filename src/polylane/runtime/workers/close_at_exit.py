"""A script that ends without closing its job: the job leaves as if it had."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Protocol


class ClosedAtExit(Protocol):
    """What is to be closed."""

    def close(self) -> None:
        """Leave the other workers; the second time nothing happens."""
        ...


def close_at_exit(job: ClosedAtExit) -> None:
    """Close a job when the interpreter ends, before the process group does.

    Threads that serve parameters wait for messages in a backend's own code. An interpreter that ends around them is
    aborted. After an exception that nobody caught there is no leaving in order: the others see that this one is gone.
    """

    def leave() -> None:
        if getattr(sys, "last_value", None) is not None:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        job.close()

    atexit.register(leave)
