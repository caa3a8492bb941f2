"""Output that cannot be written: what stdout or stderr does not take is dropped, and that is said once on stderr.

Python raises at a full disk, at a terminal that is gone and at a pipe whose reader has left, wherever the next line is
printed: a training would end for a line about its progress. A descriptor that is closed at the start is worse: the
next file that is opened gets its number, and what is printed lands in that file.

    what is printed                 full disk, lost terminal    a reader left (`| head -1`)    a reader does not read
    a command's result (`lanes`)    exit code 2 at the end      exit code 0                    is waited for
    `train`: beside the result      the training goes on        the training goes on           dropped after PATIENCE
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import select
import sys
from contextlib import suppress
from typing import Any

from polylane.errors import LINES, clean_text

PATIENCE = 5.0  # seconds that a training waits for a reader: Ctrl-S stops a terminal, a pager reads page by page
CHUNK = 512  # bytes that a pipe or a terminal takes without waiting, once it says that it is ready (POSIX's least one)

_is_said = mmap.mmap(-1, 1)  # shared with processes that are forked later, so that one of them all says what is lost
_is_others_to_say = False  # whether this is one of torchrun's workers, which share no memory, but not its host's first

_guarded: list[Any] = []


class OutputFile(io.FileIO):
    """A descriptor below a text stream, whose writes do not fail.

    Args:
        descriptor: the open file; it stays open.
        label: name of the stream in the sentence about what is lost.

    Attributes:
        patience: seconds that a reader is waited for; None: as long as it takes.
        loss: why something was dropped of a result; empty if nothing was, or its reader had left.
    """

    def __init__(self, descriptor: int, label: str) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self._label, self._is_read = label, True
        self.patience: float | None = None
        self.loss = ""

    def write(self, content: Any, /) -> int:
        """Write all, but for what cannot be written, which is dropped; return the number of bytes."""
        remainder = memoryview(content).cast("B")
        size = len(remainder)
        try:
            while remainder:
                self._wait_for_reader()
                # None: the descriptor does not block, and somebody else has filled it meanwhile.
                remainder = remainder[super().write(remainder if self.patience is None else remainder[:CHUNK]) or 0 :]
        except OSError as error:
            self._drop(error)
        return size

    def _wait_for_reader(self) -> None:
        """Wait until the descriptor takes a few bytes; once nobody has read for too long, only look whether it does.

        Raises:
            TimeoutError: the reader has taken nothing for the time that it has.
        """
        poll = select.poll()
        poll.register(self.fileno(), select.POLLOUT)
        seconds = self.patience if self._is_read else 0.0
        self._is_read = bool(poll.poll(None if seconds is None else seconds * 1000))
        if not self._is_read:
            raise TimeoutError(errno.ETIMEDOUT, "nobody reads it")

    def _drop(self, error: OSError) -> None:
        if self.patience is None:
            if error.errno != errno.EPIPE:  # a reader that left has what it wanted
                self.loss = f"{self._label} cannot be written: {error.strerror or error}"
        elif not _is_said[0] and not _is_others_to_say:
            _is_said[0] = 1
            say_at_once(f"{self._label} cannot be written: {error.strerror or error}; training continues without it")


class _OpenStream(io.TextIOWrapper):
    """A text stream that a recipe cannot close for what others print."""

    def close(self) -> None:
        """Write what is in its buffer."""
        self.flush()


def guard_streams() -> None:
    """Put files whose writes do not fail below stdout and stderr, and open standard descriptors that are closed.

    Streams that are no plain files, such as those of a notebook or of a test, stay as they are.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:  # whoever started this process has closed it; the lowest number is given to the next file
            os.open(os.devnull, os.O_RDWR)
    sys.stdout = _guard(sys.stdout, 1, "stdout")
    sys.stderr = _guard(sys.stderr, 2, "stderr")


def _guard(stream: Any, descriptor: int, label: str) -> Any:
    if stream is None:  # Python's own, where the descriptor was closed
        return open_output(descriptor, label)
    raw = getattr(stream, "buffer", None)
    raw = getattr(raw, "raw", raw)  # there is no buffer between under `python -u`
    if type(stream) is not io.TextIOWrapper or type(raw) is not io.FileIO:
        return stream
    with suppress(OSError, ValueError):  # what is in its buffer cannot be written
        stream.flush()
    replaced = open_output(stream.fileno(), label, stream.encoding, stream.line_buffering, stream.write_through)
    _guarded.append(stream)  # at its own end it would close the descriptor
    return replaced


def open_output(
    descriptor: int, label: str, encoding: str = "utf-8", by_line: bool = True, unbuffered: bool = False
) -> io.TextIOWrapper:
    """Return a text stream over a descriptor, whose writes do not fail.

    Args:
        descriptor: the open file; it stays open.
        label: name of the stream in the sentence about what is lost.
        encoding: the encoding of its text.
        by_line: whether every line is written at once.
        unbuffered: whether every character is written at once.
    """
    file = OutputFile(descriptor, label)
    buffer: Any = file if unbuffered else io.BufferedWriter(file)
    # Names of files need not be text in the terminal's encoding.
    return _OpenStream(buffer, encoding, "backslashreplace", line_buffering=by_line, write_through=unbuffered)


def _find_file(stream: Any) -> OutputFile | None:
    raw = getattr(stream, "buffer", None)
    raw = getattr(raw, "raw", raw)
    return raw if isinstance(raw, OutputFile) else None


def put_work_first(speaks: bool = True) -> None:
    """Have what is printed from now on be beside the matter: nobody waits long for its reader, and its loss is said.

    Args:
        speaks: whether this process says it; of workers that share no memory, the first one of a host does.
    """
    global _is_said, _is_others_to_say
    _is_others_to_say = not speaks
    _is_said = mmap.mmap(-1, 1)  # of this training and its workers
    for stream in (sys.stdout, sys.stderr):
        if (file := _find_file(stream)) is not None:
            file.patience = PATIENCE


def find_loss() -> str:
    """Return the sentence about a result that could not be printed on stdout; empty where all was."""
    file = _find_file(sys.stdout)
    if file is None:
        return ""
    sys.stdout.flush()
    return file.loss


def say_at_once(sentence: str) -> None:
    """Print a sentence on stderr, past the buffers of Python's streams: a signal may come while these are written to.

    Where stderr cannot be written either, nothing is said, and that is no reason to fail.
    """
    content = f"polylane: {clean_text(sentence, keep=LINES)}\n".encode(errors="backslashreplace")
    if (file := _find_file(sys.stderr)) is not None:
        file.write(content)
        return
    with suppress(OSError):  # a script's own stderr
        os.write(2, content)
