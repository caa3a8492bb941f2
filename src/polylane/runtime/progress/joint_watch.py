"""Joint watch: the watch over the workers of one host that knows of those of other hosts, and says what all say.

While a worker stands still, every host posts what its workers do (:mod:`.host_board`). One host judges all of them:

    the host that judges     verdict ─▶             joins the answers, one sentence ─▶       ends its victims
    every other host                   answer ─▶                                says it too, ends its victims

Where no verdict comes, a host names its own workers by itself. One that the store does not answer says that. A worker
whose connection has broken asks why: of a host that is silent then nobody waits for more.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from polylane.diagnosis.call_order import Parting, choose_first_to_leave, format_ranks
from polylane.diagnosis.culprit import Finding
from polylane.diagnosis.host_post import Answer, HangVerdict, HostPost, abbreviate_lines, join_reports, shift_report
from polylane.diagnosis.judgement import RankRecord, StallJudgement, judge, judge_calls
from polylane.diagnosis.report import Doing, HangReport, describe_finding, describe_silence, describe_unanswered
from polylane.errors import clean_sentence
from polylane.output import say_at_once
from polylane.runtime.progress.host_board import Board, Heard, HostBoard
from polylane.runtime.progress.observer import SeenWorker, name_hang
from polylane.runtime.progress.watch import HangWatch, OnHang
from polylane.runtime.progress_page import ProgressMemory

STALL_SECONDS = 2.0  # without progress after which a host says what its workers do
FRESH_SECONDS = 3.0  # a post that is older says nothing of its host's workers
LOST_SECONDS = 2.5  # a store that has not answered for longer is not waited for
UNANSWERED_SECONDS = 1.5  # beyond the patience, before the store is blamed: others may have been told of a cause
ALONE_SECONDS = 3.0  # wait for a verdict, before a host judges its own workers
ANSWER_SECONDS = 2.5  # wait for the others' answers to a verdict, and then for its sentence
ASKED_SECONDS = 5.0  # wait for an answer to a worker that has lost another one: a host is silent after three
SPREAD_SECONDS = 0.8  # for the others to read the sentence, before this host's workers end
POLL_SECONDS = 0.05


class JointWatch(HangWatch):
    """The watch over the workers of one host of several.

    Args:
        board: the hosts, and the store.
        memories, on_hang, hang_after, keep, say: the same arguments as of :class:`.watch.HangWatch`.
    """

    def __init__(
        self,
        board: Board,
        memories: Mapping[int, ProgressMemory],
        on_hang: OnHang,
        hang_after: float | None,
        keep: Callable[[HangReport], None],
        say: Callable[[str], None] = say_at_once,
    ) -> None:
        super().__init__(memories, on_hang, hang_after, keep, say, board.hosts[board.own].name)
        self.spread_seconds = SPREAD_SECONDS
        self._place, self._board = board, HostBoard(board, self._observer.least_bound())
        self._is_started = False
        self._followed = dict[int, int]()  # by judging host, its latest verdict that this host knows
        self._count, self._named = 0, dict[int, float]()
        self._alone_since: float | None = None
        self._asked_since: float | None = None
        self._lost = set[int]()  # hosts of which it was said that they are not heard of

    def look(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._board.start()
        if pause := self._look_at_pages():
            self._board.pass_over(pause)
        self._board.patience = self._observer.least_bound()
        heard = self._board.heard()
        stands_still = self._observer.longest_stall() >= min(STALL_SECONDS, self._observer.least_bound() / 2)
        stands_still = stands_still or self._must_compare_calls()
        if not stands_still:
            self._alone_since = None
            self._board.post(HostPost(), hurries=False)
            self._note_lost(heard)
        verdict = self._find_verdict(heard)
        if not stands_still and verdict is None:
            return
        workers = self._observer.see()
        records = self._records(workers)
        if verdict is not None:
            self._follow(heard.judge, verdict, workers, records)
            return
        self._board.post(HostPost(ranks=records), hurries=True)
        self._decide(heard, workers, records)

    def end(self, seconds: float, is_well: bool = True) -> None:
        """Tell the other hosts that the workers of this one have ended.

        Args:
            seconds: longest wait for the store.
            is_well: whether they have ended as they should.
        """
        if self._is_started:
            post = HostPost(has_ended=True) if is_well else HostPost(ranks=self._records(self._observer.see()))
            self._board.end(seconds, post)

    def _records(self, workers: Mapping[int, SeenWorker]) -> tuple[RankRecord, ...]:
        return tuple(abbreviate_lines(worker.to_record(self._hang_after)) for worker in workers.values())

    def _report(self, workers: Mapping[int, SeenWorker]) -> HangReport:
        """Return what the workers of this host were doing; who is continued for that is stopped again until its end."""
        report = self._observer.report(workers, self._on_hang != "wait")
        for worker in workers.values():
            if self._on_hang != "wait" and worker.doing is Doing.STOPPED:
                with suppress(ProcessLookupError):
                    os.kill(worker.pid, signal.SIGSTOP)
        return report

    # ---- judging -----------------------------------------------------------------------------------------------------

    def _decide(self, heard: Heard, workers: Mapping[int, SeenWorker], records: Sequence[RankRecord]) -> None:
        """Judge what is known, and say it if that is this host's part."""
        is_store_silent = heard.unanswered > LOST_SECONDS
        other_records, silences = self._know(heard, is_store_silent)
        parting = judge_calls((*records, *other_records))
        if parting is not None and (is_store_silent or heard.judge == self._place.own or self._has_waited()):
            self._lead_calls(parting)
        # Of several others nothing is heard through a silent store, also of those that live.
        knows_lost = not is_store_silent or len(self._place.hosts) == 2
        judgement = judge((*records, *other_records), silences, knows_lost)
        self._forget_named((*records, *other_records))
        if not judgement.is_hang:
            self._alone_since = None
            self._answer_asking(records, other_records)
            self._note_own(judgement.finding, workers)
        elif is_store_silent or heard.judge == self._place.own or self._has_waited():
            self._lead(judgement, heard, is_store_silent, workers)

    def _know(self, heard: Heard, is_store_silent: bool) -> tuple[list[RankRecord], dict[int, float]]:
        """Return what is known of the workers of other hosts, and by rank of a silent host since when it is silent."""
        records, silences = list[RankRecord](), dict[int, float]()
        for number, host in enumerate(self._place.hosts):
            if number == self._place.own:
                continue
            post, silence = heard.posts.get(number), heard.silences.get(number, 0.0)
            if is_store_silent:
                silences |= dict.fromkeys(host.ranks, heard.unanswered - UNANSWERED_SECONDS)
            elif post is not None and post.has_ended:
                continue
            elif silence > FRESH_SECONDS:
                silences |= dict.fromkeys(host.ranks, silence)
                # Whose last words were that they have ended are not lost.
                records += [record for record in (post.ranks if post else ()) if record.doing is Doing.GONE]
            elif post is not None and number in heard.silences:  # what it says nothing of goes on
                record_of = {record.rank: record for record in post.ranks}
                records += [record_of.get(rank, RankRecord(rank)) for rank in host.ranks]
        return records, silences

    def _answer_asking(self, records: Sequence[RankRecord], other_records: Sequence[RankRecord]) -> None:
        """Tell workers of this host that have lost another one which have ended, or in time that nothing is known."""
        if not any(record.asks for record in records):
            self._asked_since = None
            return
        now = time.monotonic()
        self._asked_since = self._asked_since or now
        gone = [record.rank for record in other_records if record.doing is Doing.GONE]
        if not gone and now - self._asked_since < ASKED_SECONDS:
            return
        names = {host.name: [rank for rank in host.ranks if rank in gone] for host in self._place.hosts}
        words = [f"{format_ranks(ranks)} on {name}" for name, ranks in names.items() if ranks]
        for reader in filter(lambda reader: reader.asks, self._observer.readers.values()):
            reader.tell_ended(" and ".join(words))

    def _has_waited(self) -> bool:
        """Return whether this host has waited long enough for a verdict on a hang that it sees itself."""
        now = time.monotonic()
        self._alone_since = now if self._alone_since is None else self._alone_since
        return now - self._alone_since > ALONE_SECONDS

    def _note_own(self, finding: Finding, workers: Mapping[int, SeenWorker]) -> None:
        """Say once what workers of this host do that takes long; other hosts say it of theirs."""
        culprits = tuple(rank for rank in finding.culprits if rank in workers)
        self._note(replace(finding, culprits=culprits, elsewhere=()), workers)

    def _forget_named(self, records: Sequence[RankRecord]) -> None:
        for record in records:
            if not record.is_hung and time.monotonic() - self._named.get(record.rank, 0.0) > ANSWER_SECONDS:
                self._named.pop(record.rank, None)

    def _lead(
        self, judgement: StallJudgement, heard: Heard, is_store_silent: bool, workers: Mapping[int, SeenWorker]
    ) -> None:
        """Give a verdict, join the answers of all hosts, and say the sentence."""
        if all(rank in self._named for rank in judgement.victims):
            return
        self._named |= dict.fromkeys(judgement.victims, time.monotonic())
        self._count += 1
        verdict = HangVerdict(self._count, judgement.victims, judgement.culprits)
        post = HostPost(ranks=self._records(workers), verdict=verdict)
        if not is_store_silent:
            self._board.post(post, hurries=True)
        report = self._report(workers)
        if not is_store_silent:
            report = join_reports([report, *self._await_answers(verdict.number)])
        sentence = clean_sentence(self._describe(judgement, report, heard, is_store_silent))  # of others' words, too
        report = name_hang(report, sentence, judgement.culprits)
        self._keep(report)
        if not is_store_silent:
            self._board.post(replace(post, verdict=replace(verdict, sentence=report.sentence)), hurries=True)
        self._say_or_end(judgement.victims, report, workers)
        if not is_store_silent:  # before the next look posts something else
            time.sleep(SPREAD_SECONDS)

    def _lead_calls(self, parting: Parting) -> None:
        """Give the verdict that calls differ, which needs no answers, and end this host's workers."""
        sentence, leaves = clean_sentence(parting.describe()), choose_first_to_leave(parting)
        if sentence not in self._partings:
            self._count += 1
            verdict = HangVerdict(self._count, tuple(leaves), (), sentence, is_parting=True)
            self._board.post(HostPost(verdict=verdict), hurries=True)
            time.sleep(SPREAD_SECONDS)
        self._end_calls(sentence, leaves)

    def _await_answers(self, number: int) -> list[HangReport]:
        """Return the reports of the hosts that answer a verdict of this one."""
        deadline, reports = time.monotonic() + ANSWER_SECONDS, dict[int, HangReport]()
        while time.monotonic() < deadline:
            heard = self._board.heard()
            hosts = {host for host, silence in heard.silences.items() if silence < FRESH_SECONDS}
            for host in hosts - reports.keys():
                answer = heard.posts[host].answer if host in heard.posts else None
                if answer is not None and (answer.judge, answer.number) == (self._place.own, number):
                    reports[host] = shift_report(answer.report, time.monotonic() - answer.report.now)
            if hosts <= reports.keys() | {host for host in hosts if _has_ended(heard, host)}:
                break
            time.sleep(POLL_SECONDS)
        return [reports[host] for host in sorted(reports)]

    def _describe(self, judgement: StallJudgement, report: HangReport, heard: Heard, is_store_silent: bool) -> str:
        finding, ranks = judgement.finding, {entry.rank: entry for entry in report.ranks}
        hosts = {rank: host.name for host in self._place.hosts for rank in host.ranks}
        if not finding.elsewhere:
            return describe_finding(finding, ranks, report.wall, hosts)
        if is_store_silent:
            host_name = self._place.hosts[self._place.own].name
            return describe_unanswered(finding, ranks, hosts, (host_name, self._place.store_name, heard.unanswered))
        silences = {self._place.hosts[host].name: silence for host, silence in heard.silences.items()}
        return describe_silence(finding, ranks, hosts, silences, judgement.is_lost)

    # ---- following ---------------------------------------------------------------------------------------------------

    def _find_verdict(self, heard: Heard) -> HangVerdict | None:
        """Return the verdict of the host that judges, if this host has not followed it yet."""
        if heard.judge == self._place.own or heard.judge not in heard.posts:
            return None
        verdict = heard.posts[heard.judge].verdict
        is_new = verdict is not None and verdict.number > self._followed.get(heard.judge, 0)
        return verdict if is_new else None

    def _follow(
        self, host: int, verdict: HangVerdict, workers: Mapping[int, SeenWorker], records: Sequence[RankRecord]
    ) -> None:
        """Answer a verdict, wait for its sentence, and do here what it says."""
        self._followed[host], self._alone_since = verdict.number, None
        if verdict.is_parting:
            self._end_calls(clean_sentence(verdict.sentence), verdict.victims)
            return
        self._named |= dict.fromkeys(verdict.victims, time.monotonic())  # they need no verdict of this host
        report = self._report(workers)
        answer = Answer(host, verdict.number, shift_report(report, -report.now))
        self._board.post(HostPost(ranks=tuple(records), answer=answer), hurries=True)
        deadline = time.monotonic() + 2 * ANSWER_SECONDS
        while not verdict.sentence and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            posts = self._board.heard().posts
            if host in posts and (update := posts[host].verdict) is not None and update.number == verdict.number:
                verdict = update
        named = [rank for rank in verdict.victims if rank in workers]
        if not verdict.sentence:  # the host that judged has ended before it could say it
            if not named:
                return
            ranks = {entry.rank: entry for entry in report.ranks}
            verdict = replace(verdict, sentence=describe_finding(Finding(tuple(named)), ranks, report.wall))
        report = name_hang(report, clean_sentence(verdict.sentence), verdict.culprits)
        self._say_or_end(verdict.victims, report, workers)

    def _say_or_end(self, victims: Sequence[int], report: HangReport, workers: Mapping[int, SeenWorker]) -> None:
        own_victims = [rank for rank in victims if rank in workers]
        if own_victims:
            self._end(own_victims, report, workers)
        elif waiting := self._describe_waiting(victims[0], report):
            self._say(f"{report.sentence}{waiting}")
        else:
            self._say(f"the training hangs: {report.sentence}")

    # ---- hosts that are not heard of while the training goes on ------------------------------------------------------

    def _note_lost(self, heard: Heard) -> None:
        """Say once of a host, on the one that judges, that its watching process is not heard of."""
        if heard.judge != self._place.own or heard.unanswered > LOST_SECONDS:
            return
        for number, silence in heard.silences.items():
            if silence < self._board.patience:
                self._lost.discard(number)
            elif number not in self._lost and not _has_ended(heard, number):
                self._lost.add(number)
                name = self._place.hosts[number].name
                self._say(
                    f"the process that watches {name} has not been heard from for {silence:.1f} s; training continues, "
                    f"but a worker that hangs there would not be named"
                )


def _has_ended(heard: Heard, host: int) -> bool:
    return host in heard.posts and heard.posts[host].has_ended
