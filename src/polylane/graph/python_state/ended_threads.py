"""Ended threads: those that Python has joined, and the system may still be taking down."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

MOST_SECONDS = 1.0  # a number may be another thread's by then


def wait_gone(native_ids: Iterable[int | None]) -> None:
    """Wait until the system has taken threads down, a moment after Python has joined them; for Linux.

    What a library keeps for a thread goes last, perhaps under locks. A process that is forked meanwhile would inherit
    them locked by a thread that it does not have.

    Args:
        native_ids: numbers that the system gave the threads, all of which have been joined.
    """
    deadline = time.monotonic() + MOST_SECONDS
    for native_id in native_ids:
        while os.path.exists(f"/proc/self/task/{native_id}") and time.monotonic() < deadline:
            time.sleep(1e-4)
