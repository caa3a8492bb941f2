"""Host post: what the watching process of one host tells those of the others, as plain data.

Every host has one post, which it writes anew about once a second; each is all that the host says:

    number       by which a later post is known, and with it that the host can be heard
    ranks        its workers, while one of them stands still; none while all go on
    verdict      of the host that judges: who is to blame, and the sentence once there is one
    answer       to a verdict: what its workers were doing, with their stacks

There are no times of clocks in it, which differ from host to host, but ages. What comes over a network may be of
anybody: it is JSON, of which every part is checked, and with a secret the bytes begin with an HMAC of the rest.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from polylane.diagnosis import report_file
from polylane.diagnosis.call_order import Call, CallRecord
from polylane.diagnosis.culprit import RankState, Wait
from polylane.diagnosis.judgement import RankRecord
from polylane.diagnosis.page_layout import Phase
from polylane.diagnosis.report import Doing, HangReport
from polylane.errors import clean_sentence
from polylane.observe.timeline import Timeline

MOST_CALLS = 8  # of a rank, the last ones
MOST_BYTES = 4 << 20  # of a post: the store refuses texts of more than 8 MiB
_PROOF_BYTES = hashlib.sha256().digest_size


@dataclass(frozen=True)
class HangVerdict:
    """What the host that judges has found.

    Attributes:
        number: which one of that host, from 1.
        victims: the ranks whose end ends the hang.
        culprits: those of them that are to blame; empty where it is a link or another host.
        sentence: what is said of it, the same on every host; "" while answers are collected.
        is_parting: whether it is of calls that differ, of which the victims end first, and the others then too.
    """

    number: int
    victims: tuple[int, ...]
    culprits: tuple[int, ...] = ()
    sentence: str = ""
    is_parting: bool = False


@dataclass(frozen=True)
class Answer:
    """What a host knows of its workers once there is a verdict.

    Attributes:
        judge: number of the host whose verdict it answers.
        number: number of the verdict.
        report: what its workers were doing; times count from the moment of the answer, and are negative.
    """

    judge: int
    number: int
    report: HangReport


@dataclass(frozen=True)
class HostPost:
    """What one host says.

    Attributes:
        number: which one of that host, from 1.
        has_ended: whether its workers have ended well.
        ranks: its workers; empty while all of them go on.
        verdict: the verdict that it has come to; None: none.
        answer: its answer to a verdict; None: there is none to answer.
    """

    number: int = 0
    has_ended: bool = False
    ranks: tuple[RankRecord, ...] = ()
    verdict: HangVerdict | None = None
    answer: Answer | None = None

    def to_bytes(self, label: str, secret: bytes = b"") -> bytes:
        """Return the post as bytes.

        Args:
            label: name of the training, of this start of it, and of the host: a proof for one place is none for others.
            secret: secret that the hosts share; empty: nothing is proved.
        """
        verdict, answer = self.verdict, self.answer
        # The post of a host whose workers all go on is its number alone: it is written once a second.
        plain: dict[str, Any] = {"number": self.number}
        if self.has_ended:
            plain["ended"] = True
        if self.ranks:
            plain["ranks"] = [_record_row(record) for record in self.ranks]
        if verdict is not None:
            ranks = list(verdict.victims), list(verdict.culprits)
            plain["verdict"] = [verdict.number, *ranks, verdict.sentence, verdict.is_parting]
        if answer is not None:
            plain["answer"] = [answer.judge, answer.number, report_file.to_dict(answer.report)]
        text = json.dumps(plain, separators=(",", ":")).encode()
        if len(text) > MOST_BYTES and answer is not None:
            # The timeline goes first, then the stacks, then the answer; the ranks, which name the culprit, stay.
            shorter = _shorten(answer.report)
            short_answer = None if shorter == answer.report else replace(answer, report=shorter)
            return replace(self, answer=short_answer).to_bytes(label, secret)
        return (_prove(secret, label, text) if secret else b"") + text

    @staticmethod
    def from_bytes(data: bytes, label: str, ranks: Iterable[int], secret: bytes = b"") -> HostPost:
        """Return the post that :meth:`to_bytes` wrote.

        Args:
            data: what was found at the host's place.
            label, secret: the same arguments as of :meth:`to_bytes`.
            ranks: ranks of the host's workers; it says nothing of others.

        Raises:
            ValueError: this is no such post, or not of somebody who knows the secret.
        """
        if secret:
            proof, data = data[:_PROOF_BYTES], data[_PROOF_BYTES:]
            if not hmac.compare_digest(proof, _prove(secret, label, data)):
                raise ValueError("who wrote this does not know the secret")
        try:
            return _read_post(json.loads(data), frozenset(ranks))
        except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"a part of it is missing or wrong: {type(error).__name__}") from None


def _prove(secret: bytes, label: str, text: bytes) -> bytes:
    return hmac.digest(secret, f"polylane watch {label}: ".encode() + text, hashlib.sha256)


def _shorten(report: HangReport) -> HangReport:
    """Return a report without what takes most of its room, if it has anything of that."""
    if report.timeline.spans:
        return replace(report, timeline=Timeline((), report.timeline.ranks))
    return replace(report, ranks=tuple(replace(worker, stacks="") for worker in report.ranks))


def _check_ranks(report: HangReport, host_ranks: frozenset[int]) -> HangReport:
    """Return a report, which must be of some ranks alone, with lanes for these."""
    named = [entry.rank for entry in report.ranks] + [entry.rank for entry in report.timeline.spans]
    if not host_ranks.issuperset([*named, *report.unfinished]):
        raise ValueError("it speaks for workers of another host")
    return replace(report, timeline=Timeline(report.timeline.spans, max(host_ranks, default=0) + 1))


def abbreviate_lines(record: RankRecord) -> RankRecord:
    """Return a record with a digest for each line's name, which for a group is as long as the list of its ranks."""
    state = record.state
    wait = None if state.wait is None else replace(state.wait, line=_abbreviate(state.wait.line))
    counts = {_abbreviate(line): count for line, count in state.begun.items()}
    return replace(record, state=replace(state, wait=wait, begun=counts))


@cache
def _abbreviate(line: str) -> str:
    return hashlib.blake2s(line.encode(), digest_size=8).hexdigest()


def _record_row(record: RankRecord) -> list[Any]:
    wait = record.state.wait
    return [
        record.rank,
        None if wait is None else [wait.line, wait.number, list(wait.ranks)],
        {line: count for line, count in record.state.begun.items() if count},
        record.state.is_frozen,
        record.doing.name,
        int(record.phase),
        record.stalled,
        record.bound,
        record.patience,
        [[call.number, call.method, call.line] for call in record.calls.calls[-MOST_CALLS:]],
        [record.calls.is_inside, record.calls.has_left, record.asks],
    ]


def _read_record(row: list[Any]) -> RankRecord:
    rank, wait, counts, is_frozen, doing, phase, *seconds, entries, flags = row
    line = None if wait is None else Wait(str(wait[0]), int(wait[1]), tuple(map(int, wait[2])))
    state = RankState(line, {str(name): int(count) for name, count in counts.items()}, bool(is_frozen))
    stalled, bound, patience = map(float, seconds)
    if not math.isfinite(stalled):
        raise ValueError("its time is no number")
    is_inside, has_left, asks = map(bool, flags)
    calls = tuple(Call(int(number), clean_sentence(method), clean_sentence(name)) for number, method, name in entries)
    record = CallRecord(calls, is_inside, has_left)
    return RankRecord(int(rank), state, Doing[doing], Phase(phase), stalled, bound, patience, record, asks)


def _read_post(plain: Mapping[str, Any], host_ranks: frozenset[int]) -> HostPost:
    ranks = tuple(_read_record(row) for row in plain.get("ranks", ()))
    if not host_ranks.issuperset(record.rank for record in ranks):
        raise ValueError("it speaks for workers of another host")
    verdict, answer = plain.get("verdict"), plain.get("answer")
    if verdict is not None:
        number, victims, culprits, sentence, parts = verdict
        named = tuple(map(int, victims)), tuple(map(int, culprits))
        verdict = HangVerdict(int(number), *named, str(sentence), bool(parts))
    if answer is not None:
        judge, number, report = answer
        answer = Answer(int(judge), int(number), _check_ranks(report_file.from_dict(report), host_ranks))
    return HostPost(int(plain["number"]), bool(plain.get("ended")), ranks, verdict, answer)


def shift_report(report: HangReport, seconds: float) -> HangReport:
    """Return a report on a clock that is ahead by some seconds."""
    spans = tuple(replace(span, start=span.start + seconds, end=span.end + seconds) for span in report.timeline.spans)
    unfinished = {rank: (action, since + seconds) for rank, (action, since) in report.unfinished.items()}
    timeline = replace(report.timeline, spans=spans)
    return replace(report, timeline=timeline, unfinished=unfinished, now=report.now + seconds)


def join_reports(reports: Iterable[HangReport]) -> HangReport:
    """Return the report of several hosts, whose times are on one clock; sentence and moment are those of the first."""
    host_reports = list(reports)
    ranks = sorted((worker for report in host_reports for worker in report.ranks), key=lambda worker: worker.rank)
    spans = tuple(span for report in host_reports for span in report.timeline.spans)
    lanes = max(report.timeline.ranks for report in host_reports)
    unfinished = {rank: entry for report in host_reports for rank, entry in report.unfinished.items()}
    return replace(host_reports[0], ranks=tuple(ranks), timeline=Timeline(spans, lanes), unfinished=unfinished)
