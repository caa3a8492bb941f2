"""Watch: looks at the pages of all workers, and says which of them does not go on and what it does.

It runs in another process than the workers, so that one that is stopped, or that holds its interpreter's lock, is seen;
and in a thread there, for whoever reads a message of a worker that stopped in the midst of it waits for the rest. It
looks four times a second; only where nothing has changed for longer than steps take does it look closer:

    the pages that stand still → the walk (diagnosis/culprit.py) → what that process does → its stacks → a sentence
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from polylane.diagnosis.culprit import Finding, RankState, Wait, find_culprits
from polylane.diagnosis.onlookers import without_onlookers
from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.patience import choose_bound, note_bound
from polylane.diagnosis.report import (
    FROZEN,
    Doing,
    HangReport,
    RankReport,
    classify,
    describe_finding,
    describe_rank,
    format_ranks,
)
from polylane.diagnosis.stacks import called_by_polylane, find_place, is_at_breakpoint, parse_stacks
from polylane.errors import WorkerHung
from polylane.observe.timeline import Span, Timeline
from polylane.runtime.progress.page import ProgressMemory
from polylane.runtime.progress.page_reader import PageNotes, PageReader
from polylane.runtime.progress.processes import read_state
from polylane.schedule.action import Action

OnHang = Literal["stop", "restart", "wait"]

LOOK_SECONDS = 0.25
TELL_SECONDS = 1.0  # wait for the thread that is told of a hang, before the workers are killed
PAUSE_SECONDS = 5.0  # a longer time between two looks: this process itself did not run
CALLS_SHOWN = 8  # innermost calls in the message; the report has all
ROUNDS_SHOWN = 2  # steps that the picture shows before the moment of the report


@dataclass(frozen=True)
class _Seen:
    """What is known of one worker at one moment, from its page and its process."""

    reader: PageReader
    notes: PageNotes
    record: Record
    state: RankState
    doing: Doing
    stalled: float

    @cached_property
    def pid(self) -> int:
        return int(self.notes.worker["pid"])

    @property
    def action(self) -> Action | None:
        program = self.notes.programs.get(self.record.program, ())
        at = self.record.action
        return (
            program[at] if self.record.phase in (Phase.TRAINING, Phase.EVALUATING) and 0 <= at < len(program) else None
        )

    def report(self, stacks: str) -> RankReport:
        """Return the worker's part of a report."""
        frames = parse_stacks(stacks).get(int(self.notes.worker["thread"]), [])
        place, doing = find_place(frames, self.notes.codes), self.doing
        # That a script of the user's has called the job says nothing of what the job does.
        if doing is Doing.COMPUTING and any(frame.is_users for frame in called_by_polylane(frames)):
            doing = Doing.IN_USER_CODE
        if doing not in FROZEN and is_at_breakpoint(frames):
            doing = Doing.AT_BREAKPOINT
        return RankReport(
            self.reader.rank,
            str(self.notes.worker["host"]),
            self.pid,
            self.record.phase.name.lower(),
            self.record.step,
            self.action,
            self.stalled,
            doing,
            place.operator,
            place.source,
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


def _print(text: str) -> None:
    print(f"polylane: {text}", file=sys.stderr, flush=True)


class HangWatch:
    """The watch over all workers of this host.

    Args:
        memories: by rank, the page of each worker and the file for its stacks; closed with the watch.
        on_hang: what to do once a worker hangs: "wait" says it and goes on looking, the others end the training.
        hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.
        keep: called with every report of a hang, to keep it.
        say: called with a sentence for the user.
    """

    def __init__(
        self,
        memories: Mapping[int, ProgressMemory],
        on_hang: OnHang,
        hang_after: float | None,
        keep: Callable[[HangReport], None],
        say: Callable[[str], None] = _print,
    ) -> None:
        self._readers = [PageReader(rank, memory) for rank, memory in memories.items()]
        self._on_hang, self._hang_after, self._keep, self._say = on_hang, hang_after, keep, say
        now = time.monotonic()
        self._since = dict.fromkeys(memories, now)
        self._signatures: dict[int, tuple[int, int, bytes]] = {}
        self._looked, self._noted, self._hung = now, set[tuple[int, int]](), dict[int, float]()
        self._thread: threading.Thread | None = None
        self._ends, self._is_told, self._found = threading.Event(), threading.Event(), list[BaseException]()

    def check(self) -> None:
        """Begin to watch at the first call, which is after the workers were forked; then say what was found.

        Raises:
            WorkerHung: a worker hangs, and the training is to end for that.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="polylane-watch", daemon=True)
            self._thread.start()
        if self._found:
            self._is_told.set()
            raise self._found[0]

    def _watch(self) -> None:
        while not self._ends.wait(LOOK_SECONDS):
            try:
                self.look()
            except BaseException as error:
                self._found.append(error)
                break
        if self._found and not self._is_told.wait(TELL_SECONDS) and not self._ends.is_set():
            # Whoever would be told waits for a worker: its end ends that.
            for reader in self._readers:
                if (notes := reader.notes()) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(int(notes.worker["pid"]), signal.SIGKILL)

    def close(self) -> None:
        """End the watch, let go of the pages, and close the files."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join()
        for reader in self._readers:
            reader.close()

    def look(self) -> None:
        """Look at all workers.

        Raises:
            WorkerHung: a worker hangs, and the training is to end for that.
        """
        now = time.monotonic()
        pause, self._looked = now - self._looked, now
        for reader in self._readers:
            signature = reader.signature()
            if signature != self._signatures.get(reader.rank):
                self._signatures[reader.rank], self._since[reader.rank] = signature, now
                if (since := self._hung.pop(reader.rank, None)) is not None:
                    self._say(f"rank {reader.rank} goes on after {now - since:.1f} s")
            elif pause > PAUSE_SECONDS:  # this process was stopped, and perhaps the workers with it
                self._since[reader.rank] += pause
        least = min(choose_bound(reader.record, Doing.STOPPED, self._hang_after) for reader in self._readers)
        if now - min(self._since.values()) >= least:
            self._look_closer()

    def _see(self, looks_at_processes: bool = True) -> dict[int, _Seen]:
        """Return what is known of every worker that has said who it is.

        Args:
            looks_at_processes: whether to look at their processes, too; else they are taken to have ended.
        """
        found, now = {}, time.monotonic()
        for reader in self._readers:
            notes = reader.notes()
            if notes is None:
                continue
            record = reader.record
            state = read_state(int(notes.worker["pid"])) if looks_at_processes else ""
            wait = reader.state(notes, False).wait
            doing = classify(state, reader.beat_late(), record.phase, wait is not None)
            found[reader.rank] = _Seen(
                reader, notes, record, reader.state(notes, doing in FROZEN), doing, now - self._since[reader.rank]
            )
        return found

    def _look_closer(self) -> None:
        seen = self._see()
        states = {rank: each.state for rank, each in seen.items() if each.doing is not Doing.GONE}
        finding = find_culprits(without_onlookers(states, {rank: each.record.phase for rank, each in seen.items()}))
        suspects = finding.culprits or (finding.link.ranks if finding.link else finding.circle)
        suspects = tuple(rank for rank in suspects if rank in seen)
        hung = [rank for rank in suspects if seen[rank].stalled >= self._bound(seen[rank])]
        if finding.culprits and hung:
            self._hang(replace(finding, culprits=tuple(hung)), seen)
        elif suspects and len(hung) == len(suspects):
            self._hang(finding, seen)
        else:
            for rank in finding.culprits:
                self._note(finding, seen[rank])
            if finding.elsewhere:
                self._note_elsewhere(finding, seen)

    def _bound(self, seen: _Seen) -> float:
        return choose_bound(seen.record, seen.doing, self._hang_after)

    def _note(self, finding: Finding, seen: _Seen) -> None:
        """Say once what a worker is doing that takes long and is no hang."""
        rank, key = seen.reader.rank, (seen.reader.rank, seen.record.version)
        if seen.stalled < note_bound(seen.record, self._hang_after) or key in self._noted:
            return
        self._noted.add(key)
        stacks = seen.reader.read_stacks(seen.pid, seen.reader.ask_stacks(seen.pid, False))
        sentence = describe_rank(seen.report(stacks), finding.waiting_for(rank), time.time())
        self._say(f"{sentence} (this takes long, and is no hang yet)")

    def _note_elsewhere(self, finding: Finding, seen: Mapping[int, _Seen]) -> None:
        """Say once that workers of this host wait for those of another one, whose own watch says why."""
        waiting = [seen[rank] for rank in finding.waits_for if rank in seen]
        stalled = min(each.stalled for each in waiting)
        key = min((each.reader.rank, each.record.version) for each in waiting)
        if stalled >= max(note_bound(each.record, self._hang_after) for each in waiting) and key not in self._noted:
            self._noted.add(key)
            ranks = format_ranks([each.reader.rank for each in waiting])
            self._say(f"{ranks} of this host have waited for {format_ranks(finding.elsewhere)} for {stalled:.1f} s")

    def _hang(self, finding: Finding, seen: Mapping[int, _Seen]) -> None:
        named = finding.culprits or tuple(seen)
        if all(rank in self._hung for rank in named):
            return
        report = self._report(seen, finding)
        self._keep(report)
        first = report.ranks[[each.rank for each in report.ranks].index(named[0])]
        if self._on_hang == "wait" or first.doing is Doing.AT_BREAKPOINT:
            for rank in named:
                self._hung.setdefault(rank, self._since[rank])
            told = ", as it is to (on hang: wait)" if self._on_hang == "wait" else ""
            self._say(f"{report.sentence}; the training waits for it{told}")
            return
        hung = WorkerHung(named, report.sentence, _main_stack(first, seen[first.rank].notes))
        for reader in self._readers:
            reader.tell(hung)
        raise hung

    def _report(self, seen: Mapping[int, _Seen], finding: Finding, sentence: str = "") -> HangReport:
        """Return the report of this moment, with the stacks of all workers."""
        wall, now = time.time(), time.monotonic()
        timeline, unfinished = self._timeline(seen)  # before the stacks, for which a stopped worker goes on
        alive = {rank: each for rank, each in seen.items() if each.doing is not Doing.GONE}
        continues = self._on_hang != "wait"
        begun = {rank: each.reader.ask_stacks(each.pid, continues) for rank, each in alive.items()}
        stacks = {
            rank: each.reader.read_stacks(each.pid, begun[rank]) if continues or each.doing is not Doing.STOPPED else ""
            for rank, each in alive.items()
        }
        ranks = {rank: each.report(stacks.get(rank, "")) for rank, each in seen.items()}
        sentence = sentence or describe_finding(finding, ranks, wall)
        return HangReport(
            sentence,
            finding.culprits,
            tuple(ranks[rank] for rank in sorted(ranks)),
            timeline,
            unfinished,
            now,
            wall,
        )

    def report_failure(self, rank: int, sentence: str) -> HangReport:
        """Return the report of a worker that failed, from the pages that it and the others have left.

        Their processes are not asked: numbers of those that have ended may be others' by now.

        Args:
            rank: rank of the worker that failed.
            sentence: what is known of the failure.
        """
        return self._report(self._see(looks_at_processes=False), Finding((rank,)), sentence)

    def _timeline(self, seen: Mapping[int, _Seen]) -> tuple[Timeline, dict[int, tuple[Action, float]]]:
        """Return the last actions of all workers, and those that had not ended."""
        spans, unfinished = [], {}
        last = max((each.record.round for each in seen.values()), default=0)
        for rank, each in seen.items():
            end = self._since[rank]
            for past in each.reader.past_actions():
                program = each.notes.programs.get(past.program, ())
                if past.round > last - ROUNDS_SHOWN and past.action < len(program):
                    spans.append(Span(rank, program[past.action], past.start / 1e9, past.end / 1e9))
                    end = past.end / 1e9
            if each.action is not None:
                unfinished[rank] = each.action, end
        return Timeline(tuple(spans), max(self._since) + 1), unfinished


def _main_stack(report: RankReport, notes: PageNotes) -> str:
    """Return the innermost calls of a worker's main thread, the innermost one last, as Python prints them."""
    frames = parse_stacks(report.stacks).get(int(notes.worker["thread"]), [])[:CALLS_SHOWN]
    return "".join(f'  File "{frame.file}", line {frame.line}, in {frame.function}\n' for frame in reversed(frames))
