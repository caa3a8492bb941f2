"""Watch: looks at the pages of all workers, and says which of them does not go on and what it does.

It runs in another process than the workers, so that one that is stopped, or that holds its interpreter's lock, is seen;
and in a thread there, for whoever reads a message of a worker that stopped in the midst of it waits for the rest. It
looks four times a second; only where nothing has changed for longer than steps take does it look closer:

    the pages that stand still → the walk and its judgement (diagnosis/judgement.py) → stacks → a sentence
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Literal

from polylane.diagnosis.call_order import Call, CallRecord, Parting, choose_first_to_leave, format_ranks
from polylane.diagnosis.culprit import Finding
from polylane.diagnosis.judgement import PARTING_SECONDS, StallJudgement, judge, judge_calls
from polylane.diagnosis.report import Doing, HangReport, RankReport, describe_finding, describe_rank
from polylane.errors import CallsDiffer, WorkerHung
from polylane.output import say_at_once
from polylane.runtime.progress.observer import Observer, SeenWorker, main_stack, name_hang
from polylane.runtime.progress_page import ProgressMemory

OnHang = Literal["stop", "restart", "wait"]

LOOK_SECONDS = 0.25  # as often as workers write their beats: looking more often shows nothing new
TELL_SECONDS = 1.0  # wait for the thread that handles a hang, before the workers are killed
END_SECONDS = 3.0  # wait for a look at the workers to end: of a process that the system holds it may not


class HangWatch:
    """The watch over all workers of this host.

    Args:
        memories: by rank, the page of each worker and the file for its stacks; closed with the watch.
        on_hang: what to do once a worker hangs: "wait" says it and goes on looking, the others end the training.
        hang_after: seconds without progress after which a worker hangs; None: from the run's own step times.
        keep: called with every report of a hang, to keep it.
        say: called with a sentence for the user.
        host: name of this host, as others know it; "": as its workers do.
    """

    # Seconds from the sentence to the end of those who hang: others may have to read it first.
    spread_seconds = 0.0

    def __init__(
        self,
        memories: Mapping[int, ProgressMemory],
        on_hang: OnHang,
        hang_after: float | None,
        keep: Callable[[HangReport], None],
        say: Callable[[str], None] = say_at_once,
        host: str = "",
    ) -> None:
        self._observer = Observer(memories, hang_after, host)
        self._on_hang, self._hang_after, self._keep, self._say = on_hang, hang_after, keep, say
        self._noted, self._hung = set[tuple[int, int]](), dict[int, float]()
        self._partings = set[str]()  # what was said of workers that make different calls
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
            except BaseException as error:  # raised in the main thread, by whoever looks there
                self._found.append(error)
                break
        if self._found and not self._is_told.wait(TELL_SECONDS) and not self._ends.is_set():
            # The thread that would handle it waits for a worker: the end of that worker ends the waiting.
            for reader in self._observer.readers.values():
                if (notes := reader.notes()) is not None:
                    with suppress(ProcessLookupError):
                        os.kill(int(notes.worker["pid"]), signal.SIGKILL)

    def close(self) -> None:
        """End the watch, let go of the pages, and close the files, unless a look at these does not end."""
        self._ends.set()
        if self._thread is not None:
            self._thread.join(END_SECONDS)
            if self._thread.is_alive():
                return
        self._observer.close()

    def look(self) -> None:
        """Look at all workers.

        Raises:
            WorkerHung: a worker hangs, and the training is to end for that.
            CallsDiffer: workers of a script make different calls, and the training is to end for that.
        """
        self.look_at_calls()
        if self._observer.longest_stall() >= self._observer.least_bound():
            workers = self._observer.see()
            judgement = judge(worker.to_record(self._hang_after) for worker in workers.values())
            if judgement.is_hang:
                self._hang(judgement, workers)
            else:
                self._note(judgement.finding, workers)

    def look_at_calls(self) -> None:
        """Look whether the workers of a script make the same calls, if one asks that, or waits for others.

        Raises:
            CallsDiffer: they do not, and the training is to end for that.
        """
        self._look_at_pages()
        if not self._must_compare_calls():
            return
        parting = judge_calls(worker.to_record(self._hang_after) for worker in self._observer.see().values())
        if parting is not None:
            self._end_calls(parting.describe(), choose_first_to_leave(parting))
        for reader in self._observer.readers.values():
            if reader.asks:  # of a worker that has ended by itself
                reader.tell_parting("", False)

    def _must_compare_calls(self) -> bool:
        """Return whether a worker has lost another one, or stands still."""
        asks = any(reader.asks for reader in self._observer.readers.values())
        return asks or self._observer.longest_stall() >= PARTING_SECONDS

    def _end_calls(self, sentence: str, leaves: Sequence[int]) -> None:
        """Say once that workers of a script make different calls, and end their waits for each other.

        Args:
            sentence: what each of them does.
            leaves: ranks that end first where a backend cannot be told, so that the others lose them.

        Raises:
            CallsDiffer: unless the training is to wait.
        """
        waits = self._on_hang == "wait"
        for rank, reader in self._observer.readers.items():
            if reader.asks or not waits:
                reader.tell_parting(sentence, rank in leaves)
        if not waits:
            raise CallsDiffer(sentence)
        if sentence not in self._partings:
            self._partings.add(sentence)
            self._say(f"{sentence}; the training waits, as it is to (on hang: wait)")

    def _look_at_pages(self) -> float:
        """Look which workers have gone on; return the seconds for which this process itself did not run."""
        changed, pause = self._observer.look()
        for rank in changed:
            if (since := self._hung.pop(rank, None)) is not None:
                self._say(f"rank {rank} makes progress again after {time.monotonic() - since:.1f} s")
        return pause

    def _note(self, finding: Finding, workers: Mapping[int, SeenWorker]) -> None:
        """Say once of each worker to blame what it is doing that takes long and is no hang; at once of those alike."""
        for rank in finding.culprits:
            worker, behind = workers[rank], finding.waiting_for(rank)
            if worker.stalled >= self._observer.note_bound(worker) and self._is_new([worker]):
                report = self._observer.report_rank(worker)
                calls = {rank: workers[rank].reader.calls for rank in behind if rank in workers}
                suffix = next((f" in {record.calls[-1]}" for record in calls.values() if record.is_inside), "")
                # One of fewer ranks may need none of those that wait, and a message may be under way.
                if report.doing is Doing.IN_COLLECTIVE and suffix and worker.reader.is_in_collective_of_all:
                    self._end_collective(report, calls)
                companions = [workers[n] for n in finding.culprits if self._is_alike(workers[n], worker)]
                sentence = describe_rank(report, behind, time.time())
                self._say(f"{sentence}{suffix}{_so_do(companions)} ({self._describe_bound(worker)})")
        waiting = [workers[rank] for rank in finding.waits_for if rank in workers] if finding.elsewhere else []
        if waiting and all(worker.stalled >= self._observer.note_bound(worker) for worker in waiting):
            self._note_elsewhere(finding.elsewhere, waiting)

    def _is_alike(self, worker: SeenWorker, reference: SeenWorker) -> bool:
        """Return whether a worker of which nothing was said stands still where another one does, for about as long."""
        places = [(w.record.phase, w.record.round, w.doing) for w in (worker, reference)]
        is_long = worker.stalled >= self._observer.note_bound(worker) / 2
        return places[0] == places[1] and is_long and self._is_new([worker])

    def _describe_bound(self, worker: SeenWorker) -> str:
        """Return what is said of the time after which a worker that stands still is ended for it."""
        text, bound = "this takes long, and is no hang yet", worker.to_record(self._hang_after).bound
        if self._on_hang == "wait":
            return text
        duration = f"{bound:.0f} s" if bound < 100 else f"{bound / 60:.1f} min"
        return f"{text}: the run ends after {duration} of it (--hang-after, hang_after=)"

    def _end_collective(self, report: RankReport, calls: Mapping[int, CallRecord]) -> None:
        """Say of a rank in a collective of the user's own that it needs the ranks which wait for it; end their wait."""
        records = {rank: record for rank, record in calls.items() if record.is_inside}
        number = max(record.last for record in records.values())
        line = report.source.replace(":", " line ")
        records[report.rank] = CallRecord((Call(number, f"torch.distributed's {report.operator}", line),), True)
        self._end_calls(Parting(number, records).describe(), [])

    def _note_elsewhere(self, elsewhere: Sequence[int], waiting: Sequence[SeenWorker]) -> None:
        """Say once that workers of this host wait for those of another one, whose own watch says why."""
        if self._is_new(waiting):
            ranks = format_ranks([worker.reader.rank for worker in waiting])
            stalled = min(worker.stalled for worker in waiting)
            self._say(f"{ranks} of this host have waited for {format_ranks(elsewhere)} for {stalled:.1f} s")

    def _is_new(self, workers: Sequence[SeenWorker]) -> bool:
        """Return whether nothing was said yet of these workers where they are."""
        key = min((worker.reader.rank, worker.record.version) for worker in workers)
        is_new = key not in self._noted
        self._noted.add(key)
        return is_new

    def _hang(self, judgement: StallJudgement, workers: Mapping[int, SeenWorker]) -> None:
        victims = [rank for rank in judgement.victims if rank in workers]
        if all(rank in self._hung for rank in victims):
            return
        report = self._observer.report(workers, self._on_hang != "wait")
        sentence = describe_finding(judgement.finding, {entry.rank: entry for entry in report.ranks}, report.wall)
        report = name_hang(report, sentence, judgement.finding.culprits)
        self._keep(report)
        self._end(victims, report, workers)

    def _end(self, victims: Sequence[int], report: HangReport, workers: Mapping[int, SeenWorker]) -> None:
        """Say of a hang what is said of it, and end those workers of this host whose end ends it.

        Args:
            victims: those workers, of which there are some.
            report: report of the hang, with its sentence.
            workers: the workers of this host.

        Raises:
            WorkerHung: unless the training is to wait.
        """
        victim = victims[0]
        if waiting := self._describe_waiting(victim, report):
            for rank in victims:
                self._hung.setdefault(rank, self._observer.since[rank])
            self._say(f"{report.sentence}{waiting}")
            return
        stack = main_stack(report, workers, victim) if victim in report.culprits else ""
        hung = WorkerHung(victims, report.sentence, stack)
        for reader in self._observer.readers.values():
            reader.tell(hung)
        raise hung

    def _describe_waiting(self, victim: int, report: HangReport) -> str:
        """Return what is said of a training that waits for a worker that hangs; "" if the worker is to be ended."""
        if self._on_hang == "wait":
            return "; the training waits for it, as it is to (on hang: wait)"
        # Who is at a breakpoint is waited for: somebody is looking at it.
        at_breakpoint = any(entry.rank == victim and entry.doing is Doing.AT_BREAKPOINT for entry in report.ranks)
        return "; the training waits for it" if at_breakpoint else ""

    def report_failure(self, rank: int, sentence: str) -> HangReport:
        """Return the report of a worker that failed, from the pages that it and the others have left.

        Their processes are not asked: numbers of those that have ended may be others' by now.

        Args:
            rank: rank of the worker that failed.
            sentence: what is known of the failure.
        """
        workers = self._observer.see(looks_at_processes=False)
        return name_hang(self._observer.report(workers, False), sentence, (rank,))


def _so_do(workers: Sequence[SeenWorker]) -> str:
    """Return what follows a sentence about one worker that is true of others as well."""
    verb = "does" if len(workers) == 1 else "do"
    return f"; so {verb} {format_ranks([worker.reader.rank for worker in workers])}" if workers else ""
