"""Observer: what the workers of this host do, from their pages and their processes, for whoever judges that."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from polylane.diagnosis.call_order import format_ranks
from polylane.diagnosis.culprit import RankState, Wait
from polylane.diagnosis.judgement import RankRecord
from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.patience import choose_bound, note_bound, silence_bound
from polylane.diagnosis.report import FROZEN, Doing, HangReport, RankReport, classify
from polylane.diagnosis.stacks import (
    called_by_polylane,
    find_main_stack,
    find_own_collective,
    find_place,
    is_at_breakpoint,
)
from polylane.observe.timeline import Span, Timeline
from polylane.runtime.progress.page_reader import PageNotes, PageReader
from polylane.runtime.progress.processes import read_state
from polylane.runtime.progress_page import ProgressMemory
from polylane.schedule.action import Action

PAUSE_SECONDS = 5.0  # a longer time between two looks: this process itself did not run
CALLS_SHOWN = 8  # innermost calls in the message; the report has all
ROUNDS_SHOWN = 2  # steps that the picture shows before the moment of the report


@dataclass(frozen=True)
class SeenWorker:
    """What is known of one worker at one moment, from its page and its process.

    Attributes:
        reader: reader of its page.
        notes: what its page says of it that does not change.
        record: its phase, step and action, and what it waits for.
        state: what the walk needs of it.
        doing: what its process does.
        stalled: seconds since its page changed.
    """

    reader: PageReader
    notes: PageNotes
    record: Record
    state: RankState
    doing: Doing
    stalled: float

    @cached_property
    def pid(self) -> int:
        """The number of its process."""
        return int(self.notes.worker["pid"])

    @property
    def action(self) -> Action | None:
        """The action that it has begun and not ended; None outside of a program."""
        program, at = self.notes.programs.get(self.record.program, ()), self.record.action
        is_running = self.record.phase in (Phase.TRAINING, Phase.EVALUATING)
        return program[at] if is_running and 0 <= at < len(program) else None

    def to_record(self, hang_after: float | None) -> RankRecord:
        """Return what a judgement needs of it.

        Args:
            hang_after: the user's bound; None: from the step times.
        """
        return RankRecord(
            self.reader.rank,
            self.state,
            self.doing,
            self.record.phase,
            self.stalled,
            choose_bound(self.record, self.doing, hang_after),
            silence_bound(self.record, hang_after),
            self.reader.calls,
            self.reader.asks,
        )

    def to_report(self, stacks: str, host: str) -> RankReport:
        """Return the worker's part of a report.

        Args:
            stacks: what its threads were calling; "" where that could not be read.
            host: name of its host.
        """
        frames = find_main_stack(stacks, int(self.notes.worker["thread"]), self.pid)
        location, doing = find_place(frames, self.notes.codes), self.doing
        # That a script of the user's has called the job says nothing of what the job does.
        if doing is Doing.COMPUTING and any(frame.is_users for frame in called_by_polylane(frames)):
            doing = Doing.IN_USER_CODE
        if doing not in FROZEN and is_at_breakpoint(frames):
            doing = Doing.AT_BREAKPOINT
        if doing is Doing.IN_SCRIPT and (called := find_own_collective(frames)) is not None:
            location, doing = called, Doing.IN_COLLECTIVE
        return RankReport(
            self.reader.rank,
            host,
            self.pid,
            self.record.phase.name.lower(),
            self.record.step,
            self.action,
            self.stalled,
            doing,
            location.operator,
            location.source,
            _describe_wait(self.state.wait),
            stacks,
        )


def _describe_wait(wait: Wait | None) -> str:
    """Return the operation that is waited for, in words; "" where there is none."""
    if wait is None:
        return ""
    sender, arrow, receiver = wait.line.partition(": ")[2].partition(" > ")
    if arrow:
        return f"message {wait.number} from rank {sender} to rank {receiver}"
    return f"collective {wait.number} of {format_ranks(wait.ranks)}"


class Observer:
    """Looks at the workers of this host.

    Args:
        memories: by rank, the page of each worker and the file for its stacks; closed with the observer.
        hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.
        host: name of this host, as others know it; "": as its workers do.
    """

    def __init__(self, memories: Mapping[int, ProgressMemory], hang_after: float | None, host: str = "") -> None:
        self.readers = {rank: PageReader(rank, memory) for rank, memory in memories.items()}
        self.hang_after, self.host = hang_after, host
        now = time.monotonic()
        self.since = dict.fromkeys(memories, now)
        self._signatures: dict[int, tuple[int, int, bytes]] = {}
        self._looked = now

    def close(self) -> None:
        """Let go of the pages, and close the files."""
        for reader in self.readers.values():
            reader.close()

    def look(self) -> tuple[list[int], float]:
        """Look at all pages; return the ranks that have gone on, and the seconds for which this process did not run."""
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        pause = pause if pause > PAUSE_SECONDS else 0.0
        changed = []
        for rank, reader in self.readers.items():
            signature = reader.signature()
            if signature != self._signatures.get(rank):
                self._signatures[rank], self.since[rank] = signature, now
                changed.append(rank)
            else:  # if this process was stopped, then perhaps the workers were, too
                self.since[rank] += pause
        return changed, pause

    def longest_stall(self) -> float:
        """Return the seconds since the page changed that has stood still for longest."""
        return time.monotonic() - min(self.since.values())

    def least_bound(self) -> float:
        """Return the seconds without progress before which no worker of this host hangs."""
        return min(choose_bound(reader.record, Doing.STOPPED, self.hang_after) for reader in self.readers.values())

    def note_bound(self, worker: SeenWorker) -> float:
        """Return the seconds without progress after which it is said what a worker is doing."""
        return note_bound(worker.record, self.hang_after)

    def see(self, looks_at_processes: bool = True) -> dict[int, SeenWorker]:
        """Return what is known of every worker that has said who it is.

        Args:
            looks_at_processes: whether to look at their processes, too; else they are taken to have ended.
        """
        workers, now = {}, time.monotonic()
        for rank, reader in self.readers.items():
            notes = reader.notes()
            if notes is None:
                continue
            record = reader.record
            state = read_state(int(notes.worker["pid"])) if looks_at_processes else ""
            counted = reader.state(notes)
            doing = classify(state, reader.beat_late(), record.phase, counted.wait is not None)
            counted = replace(counted, is_frozen=doing in FROZEN)
            workers[rank] = SeenWorker(reader, notes, record, counted, doing, now - self.since[rank])
        return workers

    def report_rank(self, worker: SeenWorker) -> RankReport:
        """Return the report of one worker, which is not continued for it if it is stopped."""
        stacks = worker.reader.read_stacks(worker.pid, worker.reader.ask_stacks(worker.pid, False))
        return worker.to_report(stacks, self._host_of(worker))

    def report(self, workers: Mapping[int, SeenWorker], continues: bool) -> HangReport:
        """Return the report of this moment, with the stacks of all workers and without a sentence.

        Args:
            workers: what is known of every worker.
            continues: whether a worker that is stopped is continued, so that it writes its stacks.
        """
        wall, now = time.time(), time.monotonic()
        timeline, unfinished = self._timeline(workers)  # before the stacks, for which a stopped worker goes on
        alive = {rank: worker for rank, worker in workers.items() if worker.doing is not Doing.GONE}
        starts = {rank: worker.reader.ask_stacks(worker.pid, continues) for rank, worker in alive.items()}
        stacks = {
            rank: worker.reader.read_stacks(worker.pid, starts[rank])
            if continues or worker.doing is not Doing.STOPPED
            else ""
            for rank, worker in alive.items()
        }
        ranks = (
            workers[rank].to_report(stacks.get(rank, ""), self._host_of(workers[rank])) for rank in sorted(workers)
        )
        return HangReport("", (), tuple(ranks), timeline, unfinished, now, wall)

    def _host_of(self, worker: SeenWorker) -> str:
        return self.host or str(worker.notes.worker["host"])

    def _timeline(self, workers: Mapping[int, SeenWorker]) -> tuple[Timeline, dict[int, tuple[Action, float]]]:
        """Return the last actions of all workers, and those that had not ended."""
        spans, unfinished = [], {}
        last_round = max((worker.record.round for worker in workers.values()), default=0)
        for rank, worker in workers.items():
            end = self.since[rank]
            for past in worker.reader.past_actions():
                program = worker.notes.programs.get(past.program, ())
                if past.round > last_round - ROUNDS_SHOWN and past.action < len(program):
                    spans.append(Span(rank, program[past.action], past.start / 1e9, past.end / 1e9))
                    end = past.end / 1e9
            if worker.action is not None:
                unfinished[rank] = worker.action, end
        return Timeline(tuple(spans), max(self.since) + 1), unfinished


def main_stack(report: HangReport, workers: Mapping[int, SeenWorker], rank: int) -> str:
    """Return the innermost calls of a worker's main thread, the innermost one last, as Python prints them."""
    stacks = next((entry.stacks for entry in report.ranks if entry.rank == rank), "")
    if rank not in workers:
        return ""
    frames = find_main_stack(stacks, int(workers[rank].notes.worker["thread"]), workers[rank].pid)[:CALLS_SHOWN]
    return "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in reversed(frames))


def name_hang(report: HangReport, sentence: str, culprits: tuple[int, ...]) -> HangReport:
    """Return a report that says who is to blame."""
    return replace(report, sentence=sentence, culprits=culprits)
