"""What a piece of work costs, whatever else this machine does."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable


def calls(work: Callable[[], object]) -> int:
    """How many functions `work` calls, in Python and in C; none that a collection of other tests' garbage calls."""
    count = 0

    def seen(_frame: object, event: str, _argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.collect()
    gc.disable()
    sys.setprofile(seen)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
