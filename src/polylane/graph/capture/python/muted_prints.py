"""Muted prints: what the user's code prints while it runs on trial, which is of no step, and of made-up values.

A capture runs a loss several times, also on tensors without values. What it prints then would stand between the lines
of the training. It is held back, and printed after all where the trial fails: it may tell why.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polylane.graph.python_state.own_objects import is_project_file

_MOST = 1_000  # writes that are kept of a failing trial, the last ones


class _HeldOutput:
    """Standard output that holds back what the user's own lines write from one thread.

    What libraries write is passed on: a debugger's prompt, a progress bar.
    """

    def __init__(self, stream: Any) -> None:
        self.stream, self.held, self.holds = stream, deque[str](maxlen=_MOST), True
        self._thread = threading.get_ident()

    def write(self, text: str) -> Any:
        is_own = threading.get_ident() == self._thread and is_project_file(sys._getframe(1).f_code.co_filename)
        if not is_own or not self.holds:  # somebody may keep it beyond the trial
            return self.stream.write(text)
        self.held.append(text)
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def prints_muted() -> Iterator[None]:
    """Context manager: hold back what the user's code prints, unless it raises."""
    if sys.stdout is None or isinstance(sys.stdout, _HeldOutput):
        yield
        return
    output: Any = _HeldOutput(sys.stdout)
    sys.stdout = output
    try:
        yield
    except BaseException:  # Ctrl-C too: the prints may say what took so long
        output.stream.write("".join(output.held))
        raise
    finally:
        output.holds = False
        if sys.stdout is output:  # the user's code may have put another one there
            sys.stdout = output.stream
