"""Page reader: what one worker's page says, read in another process, and its stacks on demand."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from polylane.diagnosis.call_order import CallRecord
from polylane.diagnosis.culprit import RankState, Wait
from polylane.diagnosis.page_layout import (
    ASKS,
    BEAT_WORD,
    CALL_WORD,
    COLLECTIVE_WORD,
    COUNTERS_WORD,
    DEVICE_WORD,
    END_WORD,
    MOST_LINES,
    NOTES_START,
    STATE_WORD,
    WAIT_WORD,
    PastAction,
    Record,
    read_calls,
    read_notes,
    read_record,
    read_ring,
    unpack_wait,
    write_verdict,
)
from polylane.errors import WorkerHung
from polylane.runtime.progress.processes import read_stacks, request_stacks
from polylane.runtime.progress_page import ProgressMemory
from polylane.schedule.action import Action


@dataclass(frozen=True)
class PageNotes:
    """What a page says of a worker that does not change.

    Attributes:
        worker: its process (``pid``), its main thread's identifier (``thread``) and the name of its host (``host``).
        lines: by number, name and ranks of every line, see :mod:`polylane.diagnosis.culprit`.
        programs: by number, the actions of every program.
        codes: by file name of generated code and number of a line, the operator and the user's line.
    """

    worker: Mapping[str, Any]
    lines: Mapping[int, tuple[str, tuple[int, ...]]]
    programs: Mapping[int, tuple[Action, ...]]
    codes: Mapping[str, Mapping[str, list[str]]]


class PageReader:
    """Reads one worker's page, and asks its process for its stacks.

    Args:
        rank: rank of the worker whose page it is.
        memory: page of the worker, and the file for its stacks.
    """

    def __init__(self, rank: int, memory: ProgressMemory) -> None:
        self.rank, self._memory = rank, memory
        self._page = memoryview(memory.page)
        self._words = self._page.cast("Q")
        self._notes: PageNotes | None = None
        self._notes_end = 0

    def close(self) -> None:
        """Let go of the memory."""
        self._words.release()
        self._page.release()
        self._memory.close()

    def signature(self) -> tuple[int, int, bytes]:
        """Return what differs once the worker has gone on."""
        counters = self._page[COUNTERS_WORD * 8 : (COUNTERS_WORD + MOST_LINES + 1) * 8]
        record, words = read_record(self._page).version, (self._words[STATE_WORD], self._words[CALL_WORD])
        return record, self._awaited, b"".join(word.to_bytes(8) for word in words) + bytes(counters)

    @property
    def _awaited(self) -> int:
        """The word of what the worker waits for; where it does not wait, that of what its device waits for."""
        return self._words[WAIT_WORD] or self._words[DEVICE_WORD]

    @property
    def record(self) -> Record:
        """Where the worker is."""
        return read_record(self._page)

    def notes(self) -> PageNotes | None:
        """Return what the worker has noted; None before it has said who it is."""
        if (end := self._words[NOTES_START // 8]) != self._notes_end:
            self._notes, self._notes_end = self._read_notes(), end
        return self._notes

    def _read_notes(self) -> PageNotes | None:
        worker: Mapping[str, Any] | None = None
        lines, programs, codes = {}, {}, {}
        for note in read_notes(self._page):
            if note["kind"] == "worker":
                worker = note
            elif note["kind"] == "line":
                lines[note["number"]] = note["name"], tuple(note["ranks"])
            elif note["kind"] == "program":
                programs[note["number"]] = tuple(map(Action.from_row, note["actions"]))
            else:
                codes[note["file"]] = note["lines"]
        return None if worker is None else PageNotes(worker, lines, programs, codes)

    def beat_late(self) -> float:
        """Return the seconds since the last beat of the worker's heartbeat; 0 before the first one."""
        beat = self._words[BEAT_WORD]
        return (time.monotonic_ns() - beat) / 1e9 if beat else 0.0

    def state(self, notes: PageNotes) -> RankState:
        """Return what the walk needs of the worker, as its page says it; whether it can run is not on the page."""
        counts = {name: self._words[COUNTERS_WORD + number] for number, (name, _) in notes.lines.items()}
        wait = None
        if (waited := unpack_wait(self._awaited)) is not None:
            name, ranks = notes.lines.get(waited[0], ("", ()))
            wait = Wait(name, waited[1], ranks)
        return RankState(wait, counts)

    def past_actions(self) -> list[PastAction]:
        """Return the last actions that the worker has finished."""
        return read_ring(self._page)

    def tell(self, hung: WorkerHung) -> None:
        """Tell the worker why the others are ended, see :meth:`.page.Progress.explain`."""
        write_verdict(self._page, {"hung": [hung.ranks, hung.error_message, hung.traceback]})

    def tell_parting(self, sentence: str, leaves_first: bool) -> None:
        """Tell the worker that others make other calls, see :mod:`.script_calls`; "" answers that nothing is known."""
        write_verdict(self._page, {"calls": sentence, "leaves": leaves_first} if sentence else {})

    def tell_ended(self, sentence: str) -> None:
        """Tell the worker, which has lost another one, whose workers have ended; "" answers that nothing is known."""
        write_verdict(self._page, {"ended": sentence} if sentence else {})

    @property
    def calls(self) -> CallRecord:
        """The last collective calls of the worker's script."""
        return read_calls(self._page)

    @property
    def asks(self) -> bool:
        """Whether the worker asks why it has lost another one."""
        return bool(self._words[END_WORD] & ASKS)

    @property
    def is_in_collective_of_all(self) -> bool:
        """Whether the script is in a collective of torch.distributed's that every rank must call."""
        return bool(self._words[COLLECTIVE_WORD])

    def ask_stacks(self, pid: int, continues: bool) -> int:
        """Ask the worker for its stacks; return where they will begin in its file."""
        start = os.fstat(self._memory.stacks).st_size
        request_stacks(pid, continues)
        return start

    def read_stacks(self, pid: int, start: int) -> str:
        """Return the stacks that were asked for."""
        return read_stacks(pid, self._memory.stacks, start)
