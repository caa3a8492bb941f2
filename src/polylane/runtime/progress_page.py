"""Progress page: a worker writes where it is into shared memory, at about a microsecond an action.

    what changes                                      how it is written
    step, program, usual time                         a record with its checksum, in two copies in turn
    phase, action, operations begun and waited for    single words of 8 bytes
    lines, programs, code                             notes, once

A thread beats four times a second. While its process runs and the beat stands still, nobody lets go of the
interpreter's lock. It also says what an accelerator waits for: the host only starts operations there, goes on, and
stands still much later, where it reads a result. Who reads: :mod:`polylane.runtime.progress.watch`.
"""

from __future__ import annotations

import faulthandler
import json
import mmap
import os
import signal
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from typing import Any, Protocol, TypeVar

import torch

from polylane.diagnosis.page_layout import (
    BEAT_WORD,
    COPY_BYTES,
    COUNTERS_WORD,
    DEVICE_WORD,
    MOST_LINES,
    PAGE_BYTES,
    RECORD_BYTES,
    RING,
    RING_ENTRIES,
    RING_START,
    STATE_WORD,
    WAIT_WORD,
    Phase,
    append_note,
    pack_record,
    pack_state,
    pack_wait,
)
from polylane.graph.graph import Node
from polylane.program.program import Program
from polylane.runtime.nameless_file import open_nameless_file
from polylane.runtime.progress.script_calls import ScriptCalls

T = TypeVar("T")

BEAT_SECONDS = 0.25  # interval of the beats by which a stopped process is known: far below any patience
MOST_STARTED = 1 << 14  # operations of a device that are followed, the latest
USUAL_DECAY = 0.95  # by which the longest step of late counts less with every further step

# The signal at which a worker writes its stacks: one that neither users nor schedulers of clusters send.
STACK_SIGNAL = signal.SIGRTMIN + 11 if hasattr(signal, "SIGRTMIN") else signal.SIGUSR2


# Phases that have all the time from their beginning to their end, whatever the worker does in it.
OUTER_PHASES = frozenset({Phase.EVALUATING, Phase.SAVING, Phase.AUDITING})


class GeneratedLines(Protocol):
    """Generated code, whose lines are operators."""

    @property
    def file(self) -> str:
        """The name of its file in a traceback."""

    @property
    def nodes_by_line(self) -> Mapping[int, Node]:
        """The operators by their line."""


class StartedWork(Protocol):
    """A backend's handle of an operation on a device."""

    def is_completed(self) -> bool:
        """Whether the device has ended it; asked by the heartbeat's thread."""


@dataclass(frozen=True)
class ProgressMemory:
    """The memory of one worker's page, and the file for its stacks: both without a name, so that nothing is left.

    Attributes:
        page: shared memory, all zeros at first.
        file: descriptor of the page; -1 where only this process and those that it forks can open it.
        stacks: descriptor of a file which the worker's stacks are appended to.
    """

    page: mmap.mmap
    file: int
    stacks: int

    @classmethod
    def allocate_for_fork(cls) -> ProgressMemory:
        """Make the page of a worker that this process will fork: memory that no limit on files applies to."""
        return cls(mmap.mmap(-1, PAGE_BYTES), -1, open_nameless_file("stacks"))

    @classmethod
    def allocate(cls) -> ProgressMemory:
        """Make the page of this process, which others can open."""
        file = open_nameless_file("page")
        os.ftruncate(file, PAGE_BYTES)
        return cls(mmap.mmap(file, PAGE_BYTES), file, open_nameless_file("stacks"))

    @classmethod
    def of_process(cls, pid: int, file: int, stacks: int) -> ProgressMemory:
        """Open the page that another process of this user on this host has made, by its descriptors there."""
        page, written = (os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR) for descriptor in (file, stacks))
        return cls(mmap.mmap(page, PAGE_BYTES), page, written)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle this for a process that multiprocessing starts, which gets the descriptors."""
        return _open_page, (DupFd(self.file), DupFd(self.stacks))

    def close(self) -> None:
        """Free the memory, and close the files."""
        self.page.close()
        for descriptor in (self.file, self.stacks):
            if descriptor >= 0:
                os.close(descriptor)


def _open_page(file: Any, stacks: Any) -> ProgressMemory:
    descriptor = file.detach()
    return ProgressMemory(mmap.mmap(descriptor, PAGE_BYTES), descriptor, stacks.detach())


class Progress:
    """Where a worker is; this one is for nobody to see, and does nothing.

    Attributes:
        is_watched: whether anybody can see it.
        words: the page as words of 8 bytes; empty where nobody can see it.
        calls: the collective calls of the user's script; None where there is no script, or nobody can see it.
        device: the accelerator whose operations are followed; None: there is none.
    """

    is_watched = False
    calls: ScriptCalls | None = None
    device: torch.device | None = None
    words = memoryview(b"").cast("Q")

    def enter(self, phase: Phase) -> None:
        """Begin a phase, outside of any program."""

    def phase_seconds(self, phase: Phase) -> float:
        """Return how long this worker has been in a phase so far; 0 where nobody can see it.

        What it loads, compiles and waits for during a test, a checkpoint or an audit counts as that.
        """
        return 0.0

    def serve(self) -> None:
        """Become a dedicated parameter server, which is in that phase all the time."""

    def during(self, phase: Phase) -> AbstractContextManager[None]:
        """Return a context manager around a phase; then the one before goes on."""
        return nullcontext()

    def loading(self, batches: Iterator[T]) -> Iterator[T]:
        """Return an iterator over batches, which are loaded in a phase of their own; then the one before goes on."""
        return batches

    def begin_round(self, program: int, step: int, is_new: bool) -> None:
        """Begin to run a program.

        Args:
            program: its number, see :meth:`describe_program`.
            step: number of the training step, from 0.
            is_new: whether the program runs for the first time.
        """

    def begin_action(self, action: int) -> None:
        """Begin the action at a position of the program."""

    def end_action(self) -> None:
        """End the action that was begun last."""

    def describe_program(self, program: Program) -> int:
        """Note a program, and return its number."""
        return 0

    def describe_code(self, codes: Iterable[GeneratedLines]) -> None:
        """Note which operator, and which line of the user's, each line of generated code belongs to."""

    def add_line(self, name: str, ranks: Sequence[int]) -> int | None:
        """Note a line of operations, see :mod:`polylane.diagnosis.culprit`; return its number, None without room."""
        return None

    def begin_operation(self, line: int) -> int:
        """Count an operation on a line; return its number, from 1."""
        return 0

    def begin_wait(self, line: int, number: int) -> None:
        """Begin to wait for an operation."""

    def end_wait(self) -> None:
        """End the wait that was begun last."""

    def follow_device(self, word: int, handle: StartedWork) -> None:
        """Follow an operation for which this worker's device waits, though the worker does not.

        Args:
            word: the operation as :func:`.page_layout.pack_wait` says it.
            handle: the backend's handle of it.
        """

    def explain(self, error: Exception) -> Exception:
        """Return why a peer is lost or does something else, where the watch has found it; else the same error."""
        return error


class ProgressWriter(Progress):
    """Where a worker is, written into its page.

    Args:
        memory: the page, and the file for stacks.
        rank: rank of this worker.
        serves: whether it is a dedicated parameter server, which is in that phase all the time.
        is_script: whether a script of the user's calls collective methods, and raises what the watch has found.
    """

    is_watched = True

    def __init__(self, memory: ProgressMemory, rank: int, serves: bool = False, is_script: bool = False) -> None:
        self._page = memoryview(memory.page)
        self.words = self._page.cast("Q")
        self._version, self._step, self._round, self._program = 0, 0, 0, 0
        self._phase, self._serves = Phase.SERVING if serves else Phase.STARTING, serves
        self.calls, self._names = ScriptCalls(self._page, self.words) if is_script else None, Counter[str]()
        self._action, self._is_new, self._state_of_round = -1, False, 0
        self._usual, self._is_first_usual = 0, False
        self._lines, self._programs, self._files = 0, dict[str, int](), set[str]()
        self._finished, self._action_began, self._round_began = 0, 0, 0
        self._phase_began, self._phase_seconds = time.perf_counter(), dict.fromkeys(Phase, 0.0)
        # Where time counts now, and the phase around it that has all of its time.
        self._counted_phase = self._phase
        self._outer_phase: Phase | None = None
        self._started = deque[tuple[int, StartedWork]](maxlen=MOST_STARTED)
        main = threading.main_thread().ident or 0
        append_note(
            self._page,
            {"kind": "worker", "rank": rank, "pid": os.getpid(), "host": socket.gethostname(), "thread": main},
        )
        faulthandler.register(STACK_SIGNAL, file=memory.stacks, all_threads=True)
        self._write()
        threading.Thread(target=self._beat, name="polylane-heartbeat", daemon=True).start()

    def _beat(self) -> None:
        while True:
            self.words[BEAT_WORD] = time.monotonic_ns()
            time.sleep(BEAT_SECONDS)
            with suppress(RuntimeError):  # the main thread raises what has failed there; the heart goes on
                self._note_device()
            if self.calls is not None:
                self.calls.note_collective()
                self.calls.obey()

    def _note_device(self) -> None:
        """Say the first operation that the device has not ended: whose partners it waits for."""
        if (started := self._started) and self.device is not None:  # that of a new thread is the host's first one
            torch.accelerator.set_device_index(self.device)
        while started and started[0][1].is_completed():
            started.popleft()
        self.words[DEVICE_WORD] = started[0][0] if started else 0

    def follow_device(self, word: int, handle: StartedWork) -> None:
        self._started.append((word, handle))

    def _write(self) -> None:
        self._version = version = self._version + 1
        start = (version & 1) * COPY_BYTES
        self._page[start : start + RECORD_BYTES] = pack_record(
            version,
            time.monotonic_ns(),
            self._phase,
            self._step,
            self._round,
            self._program,
            self._action,
            self._is_new,
            self._usual,
        )

    def enter(self, phase: Phase) -> None:
        moment = time.perf_counter()
        self._phase_seconds[self._counted_phase] += moment - self._phase_began
        self._phase_began = moment
        self._phase, self._action = Phase.SERVING if self._serves else phase, -1
        self._counted_phase = self._outer_phase or self._phase
        self.words[STATE_WORD] = pack_state(self._round, self._phase, -1)

    def phase_seconds(self, phase: Phase) -> float:
        latest = time.perf_counter() - self._phase_began if phase is self._counted_phase else 0.0
        return self._phase_seconds[phase] + latest

    def serve(self) -> None:
        self._serves = True
        self.enter(Phase.SERVING)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        old_phase, old_outer = self._phase, self._outer_phase
        if phase in OUTER_PHASES:
            self._outer_phase = old_outer or phase
        self.enter(phase)
        try:
            yield
        finally:
            self._outer_phase = old_outer
            self.enter(old_phase)

    def loading(self, batches: Iterator[T]) -> Iterator[T]:
        while True:
            old_phase = self._phase
            self.enter(Phase.LOADING)
            try:
                batch = next(batches, self)
            finally:
                self.enter(old_phase)
            if batch is self:
                return
            yield batch  # type: ignore[misc]

    def begin_round(self, program: int, step: int, is_new: bool) -> None:
        now = time.monotonic_ns()
        if self._round_began and not self._is_new:
            self._usual = max(now - self._round_began, int(self._usual * USUAL_DECAY) * (not self._is_first_usual))
            self._is_first_usual = False
        elif self._round_began and not self._usual:
            # A program's first run takes longer than others, but until one of these has ended nothing else is known.
            self._usual, self._is_first_usual = now - self._round_began, True
        self._round_began, self._round = now, self._round + 1
        self._program, self._step, self._action, self._is_new = program, step + 1, -1, is_new
        self._write()
        # The word of the round's first action, from which that of any other is a sum: one less is that of none.
        self._state_of_round = pack_state(self._round, self._phase, 0)
        self.words[STATE_WORD] = self._state_of_round - 1

    def begin_action(self, action: int) -> None:
        self._action, self._action_began = action, time.monotonic_ns()
        self.words[STATE_WORD] = self._state_of_round + action

    def end_action(self) -> None:
        start = RING_START + self._finished % RING_ENTRIES * RING.size
        now, begin = time.monotonic_ns(), self._action_began
        RING.pack_into(self._page, start, self._finished, self._round, self._program, max(self._action, 0), begin, now)
        self._finished += 1

    def describe_program(self, program: Program) -> int:
        note = {"kind": "program", "actions": [action.to_row() for action in program.actions]}
        key = json.dumps(note)
        if key not in self._programs:
            self._programs[key] = len(self._programs)
            append_note(self._page, {**note, "number": self._programs[key]})
        return self._programs[key]

    def describe_code(self, codes: Iterable[GeneratedLines]) -> None:
        for code in codes:
            if code.file not in self._files:
                self._files.add(code.file)
                lines = {str(line): [node.name, node.source] for line, node in code.nodes_by_line.items()}
                append_note(self._page, {"kind": "code", "file": code.file, "lines": lines})

    def add_line(self, name: str, ranks: Sequence[int]) -> int | None:
        if self._lines == MOST_LINES:
            return None
        self._lines += 1  # from 1: the word 0 is no wait
        # A script may have several jobs, with connections of their own between the same ranks, in the same order.
        earlier, self._names[name] = self._names[name], self._names[name] + 1
        name = f"{earlier}/{name}" if earlier else name
        append_note(self._page, {"kind": "line", "number": self._lines, "name": name, "ranks": list(ranks)})
        return self._lines

    def begin_operation(self, line: int) -> int:
        count = self.words[COUNTERS_WORD + line] + 1
        self.words[COUNTERS_WORD + line] = count
        return count

    def begin_wait(self, line: int, number: int) -> None:
        self.words[WAIT_WORD] = pack_wait(line, number)

    def end_wait(self) -> None:
        self.words[WAIT_WORD] = 0

    def explain(self, error: Exception) -> Exception:
        return error if self.calls is None else self.calls.explain(error)


UNWATCHED = Progress()
