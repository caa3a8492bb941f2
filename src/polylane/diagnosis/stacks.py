"""Stacks: what faulthandler wrote of a process's threads, and where in the user's own code its main thread is."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-f]+)")
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$')
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
_LIBRARIES = (_OWN, *(f"{place}/" for name in ("stdlib", "scripts") if (place := sysconfig.get_path(name))))


@dataclass(frozen=True)
class Frame:
    """One call on a stack.

    Attributes:
        file: as the interpreter knows it; of generated code a name in angle brackets.
        line: number of the line.
        function: name of the function.
    """

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Whether the code is the user's own: of no library, and of a file."""
        return not (self.file.startswith("<") or "-packages/" in self.file or self.file.startswith(_LIBRARIES))


def called_by_polylane(frames: list[Frame]) -> list[Frame]:
    """Return the calls that polylane makes, its own among them, without those that led to it; the innermost first."""
    own = [index for index, frame in enumerate(frames) if frame.file.startswith(_OWN)]
    return frames[: own[-1] + 1] if own else []


def is_at_breakpoint(frames: list[Frame]) -> bool:
    """Return whether a thread is inside of a debugger for Python, at a line that somebody looks at."""
    for frame in frames:
        if frame.file.endswith("/bdb.py") or "/debugpy/" in frame.file:
            return True
        if frame.is_users:  # `python -m pdb` has called all of this
            return False
    return False


@dataclass(frozen=True)
class CodePlace:
    """Where a worker is in the model, as far as it is known.

    Attributes:
        operator: name of the captured operator, or of the user's function; "" where it is not known.
        source: file and line of the user's own code; "" where it is not known.
    """

    operator: str = ""
    source: str = ""


def parse_stacks(text: str) -> dict[int, list[Frame]]:
    """Return the frames of every thread by its identifier, the innermost first."""
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            frames = threads.setdefault(int(thread[1], 16), [])
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], int(frame[2]), frame[3]))
    return threads


def find_place(frames: list[Frame], codes: Mapping[str, Mapping[str, list[str]]]) -> CodePlace:
    """Return where a thread is: in the innermost line of the user's own, or in an operator that was captured.

    Args:
        frames: the thread's calls, the innermost first.
        codes: by file name of generated code and number of a line, the operator and the user's line.
    """
    for frame in frames:
        if frame.is_users:
            return CodePlace(frame.function, f"{Path(frame.file).name}:{frame.line}")
        if found := codes.get(frame.file, {}).get(str(frame.line)):
            return CodePlace(*found)
    return CodePlace()
