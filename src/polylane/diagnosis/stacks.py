"""Stacks: what faulthandler or py-spy wrote of a process's threads, and where in the user's own code the main one is.

                     a thread                              a call, the innermost first
    faulthandler     Thread 0x00007f5 (most recent ...     File "/home/me/train.py", line 30 in main
    py-spy dump      Thread 4711 (idle): "MainThread"      main (/home/me/train.py:30)

faulthandler's number is Python's identifier of the thread; py-spy's, on Linux, is the system's, which of a main thread
is that of the process. What py-spy adds is passed over: native calls, and the values of local variables.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_THREAD = re.compile(r"^(?:Current thread|Thread) (0x[0-9a-fA-F]+|\d+)\b")
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<function>.*)$')
_SPY_FRAME = re.compile(r"^ {4}(?P<function>\S.*?) \((?P<file>.*):(?P<line>\d+)\)$")
_NATIVE = re.compile(r"\.(?:c|cc|cpp|cxx|cu|h|hh|hpp|inc|rs|s)$", re.IGNORECASE)
_OWN = str(Path(__file__).resolve().parent.parent) + "/"
_LIBRARIES = (_OWN, *(f"{folder}/" for name in ("stdlib", "scripts") if (folder := sysconfig.get_path(name))))


# The calls of torch.distributed that every rank of their group must make; others are between two ranks, or of one.
_NAMES = """
    all_gather all_gather_coalesced all_gather_into_tensor all_gather_object all_gather_single all_reduce
    all_reduce_coalesced all_to_all all_to_all_single barrier broadcast broadcast_object_list gather gather_object
    monitored_barrier reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter scatter_object_list
"""
COLLECTIVES = frozenset(_NAMES.split())


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
    def is_distributed(self) -> bool:
        """Whether the code is torch.distributed's of collectives and messages."""
        return self.file.endswith("/torch/distributed/distributed_c10d.py")

    @property
    def is_own(self) -> bool:
        """Whether the code is polylane's."""
        return self.file.startswith(_OWN)

    @property
    def is_users(self) -> bool:
        """Whether the code is the user's own: of no library, and of a file."""
        return not (self.file.startswith("<") or "-packages/" in self.file or self.file.startswith(_LIBRARIES))


def called_by_polylane(frames: list[Frame]) -> list[Frame]:
    """Return the calls that polylane makes, its own among them, without those that led to it; the innermost first."""
    indices = [index for index, frame in enumerate(frames) if frame.file.startswith(_OWN)]
    return frames[: indices[-1] + 1] if indices else []


def is_at_breakpoint(frames: list[Frame]) -> bool:
    """Return whether a thread is inside of a debugger for Python, at a line that somebody looks at."""
    for frame in frames:
        if frame.file.endswith("/bdb.py") or "/debugpy/" in frame.file:
            return True
        if frame.is_users:  # `python -m pdb` has called all of this
            return False
    return False


def find_own_collective(frames: list[Frame]) -> CodePlace | None:
    """Return where a thread is in a collective of torch.distributed that the user's code has called; None elsewhere."""
    function = ""
    for frame in frames:
        if frame.is_users:
            is_collective = function in COLLECTIVES
            return CodePlace(function, f"{Path(frame.file).name}:{frame.line}") if is_collective else None
        if frame.file.startswith(_OWN):
            return None
        # The outermost one of torch's own calls, which is the collective that the user's line names.
        if frame.is_distributed:
            function = frame.function
    return None


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
    """Return the frames of every thread by its number, the innermost first.

    Args:
        text: what faulthandler wrote, or ``py-spy dump --full-filenames``.
    """
    threads: dict[int, list[Frame]] = {}
    frames: list[Frame] = []
    for line in text.splitlines():
        if thread := _THREAD.match(line):
            number = thread[1]
            frames = threads.setdefault(int(number, 16 if number.startswith("0x") else 10), [])
        elif (frame := _FRAME.match(line) or _SPY_FRAME.match(line)) and not _NATIVE.search(frame["file"]):
            frames.append(Frame(frame["file"], int(frame["line"]), frame["function"]))
    return threads


def find_main_stack(text: str, thread: int, pid: int) -> list[Frame]:
    """Return the frames of a process's main thread, the innermost first; none where the text does not have it.

    Args:
        text: what faulthandler or py-spy wrote of the process.
        thread: Python's identifier of the main thread.
        pid: number of the process.
    """
    threads = parse_stacks(text)
    return threads.get(thread) or threads.get(pid, [])


def find_place(frames: list[Frame], codes: Mapping[str, Mapping[str, list[str]]]) -> CodePlace:
    """Return where a thread is: in the innermost line of the user's own, or in an operator that was captured.

    Args:
        frames: the thread's calls, the innermost first.
        codes: by file name of generated code and number of a line, the operator and the user's line.
    """
    for frame in frames:
        if frame.is_users:
            return CodePlace(frame.function, f"{Path(frame.file).name}:{frame.line}")
        if entry := codes.get(frame.file, {}).get(str(frame.line)):
            return CodePlace(*entry)
    return CodePlace()
