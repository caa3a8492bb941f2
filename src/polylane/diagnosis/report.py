"""Report: what every rank was doing when a training stood still or failed, as one sentence, a table and plain data."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from polylane.diagnosis.call_order import format_ranks
from polylane.diagnosis.culprit import Finding
from polylane.diagnosis.page_layout import Phase
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind

BEATS_LATE_SECONDS = 2.5  # a heartbeat that is later than this is held up


class Doing(StrEnum):
    """What a worker's process does; the words follow "it"."""

    STOPPED = "is stopped (SIGSTOP, or Ctrl-Z)"
    DEBUGGED = "is held by a debugger"
    HOLDS_INTERPRETER = "holds Python's interpreter lock (GIL) in native code and lets no other thread run"
    HELD = "is held by the system with all its threads (a frozen cgroup, or a disk that does not answer)"
    IN_SYSTEM = "waits inside the operating system (a disk, or a file system over the network)"
    LOADING = "is in its loader"
    COMPILING = "captures or compiles"
    SAVING = "writes weights or a checkpoint"
    STARTING = "starts"
    AUDITING = "waits for the audit of a step, which another process computes again"
    IN_USER_CODE = "is in the user's code"
    AT_BREAKPOINT = "is at a breakpoint of Python's debugger"
    IN_SCRIPT = "is between steps, in your code"
    IN_COLLECTIVE = "is in a collective of torch.distributed, which your code calls"
    COMPUTING = "computes"
    WAITING = "waits for others"
    GONE = "has ended"


ENDED_STATES = frozenset({"", "Z", "X"})  # of a process, as /proc/PID/stat names them; "" where there is none
FROZEN = frozenset({Doing.STOPPED, Doing.DEBUGGED, Doing.HOLDS_INTERPRETER, Doing.HELD})
_BY_PHASE = {
    Phase.LOADING: Doing.LOADING,
    Phase.COMPILING: Doing.COMPILING,
    Phase.SAVING: Doing.SAVING,
    Phase.STARTING: Doing.STARTING,
    Phase.AUDITING: Doing.AUDITING,
    Phase.SCRIPT: Doing.IN_SCRIPT,
}


def classify(state: str, beat_late: float, phase: Phase, is_waiting: bool) -> Doing:
    """Return what a process does.

    Args:
        state: the letter of /proc/PID/stat; "" where there is no such process.
        beat_late: seconds since the last beat of its heartbeat.
        phase: what its page says.
        is_waiting: whether its page says that it waits for others.
    """
    if state in ENDED_STATES:
        return Doing.GONE
    if state == "T":
        return Doing.STOPPED
    if state == "t":
        return Doing.DEBUGGED
    if beat_late > BEATS_LATE_SECONDS:
        return Doing.HELD if state == "D" else Doing.HOLDS_INTERPRETER
    if is_waiting:
        return Doing.WAITING
    return Doing.IN_SYSTEM if state == "D" else _BY_PHASE.get(phase, Doing.COMPUTING)


@dataclass(frozen=True)
class RankReport:
    """One rank at the moment of a report.

    Attributes:
        rank, host, pid: rank of the worker, name of its host, number of its process.
        phase: name of what it is doing, in lower case.
        step: number of the training step, from 1; 0 before the first one.
        action: the action that it has begun and not ended; None outside of a program.
        stalled: seconds since its page changed.
        doing: what the process does.
        operator: name of the operator, or of the user's function; "" where it is not known.
        source: the user's own line; "" where it is not known.
        waits_on: the operation that it waits for, in words; "" where it waits for nothing.
        stacks: what its threads were calling; "" where that could not be read.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    action: Action | None
    stalled: float
    doing: Doing
    operator: str = ""
    source: str = ""
    waits_on: str = ""
    stacks: str = ""

    @property
    def place(self) -> str:
        """Where in the training it is, in words, as they follow a comma."""
        is_between = self.phase == Phase.SCRIPT.name.lower()
        parts = [f"{'after' if is_between else 'in'} step {self.step}"] if self.step else []
        if self.action is not None:
            parts.append(describe_action(self.action))
        elif not (self.step or is_between):
            parts.append(f"in {self.phase}")
        if self.operator or self.source:
            parts.append(f"at {self.operator or 'a line'}{f' ({self.source})' if self.source else ''}")
        return ", ".join(parts)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        action = None if self.action is None else self.action.to_row()
        return {**self.__dict__, "doing": self.doing.name, "action": action}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> RankReport:
        """Return the report that :meth:`to_dict` wrote."""
        action = None if data["action"] is None else Action.from_row(data["action"])
        return RankReport(**{**data, "doing": Doing[data["doing"]], "action": action})


def describe_action(action: Action) -> str:
    """Describe an action, as ``forward of microbatch 0 on stage 1``."""
    text = str(action.kind).replace("_", " ")
    if action.kind in (ActionKind.SEND, ActionKind.RECEIVE):
        towards = "to" if action.kind is ActionKind.SEND else "from"
        text += f" of {'the gradient of ' if action.gradient else ''}{action.value} {towards} rank {action.peer}"
    elif action.kind is ActionKind.REDUCE:
        text += f" of {action.value}"
    elif action.kind is ActionKind.STEP:
        return "the optimizer's step"
    microbatch = "" if action.microbatch is None else f" of microbatch {action.microbatch}"
    return f"{text}{microbatch} on stage {action.stage}"


@dataclass(frozen=True)
class HangReport:
    """What was found of a training that stood still, or failed.

    Attributes:
        sentence: what happened, for people.
        culprits: the ranks to blame; empty where it is a link.
        ranks: a report of every rank, by ascending rank.
        timeline: the last actions of all ranks up to that moment, without those that had not ended.
        unfinished: by rank, the action that had not ended, and since when on the timeline's clock.
        now: the moment on the timeline's clock.
        wall: the moment, in seconds since 1970.
    """

    sentence: str
    culprits: tuple[int, ...]
    ranks: tuple[RankReport, ...]
    timeline: Timeline
    unfinished: Mapping[int, tuple[Action, float]] = field(default_factory=dict)
    now: float = 0.0
    wall: float = field(default_factory=time.time)


def describe_rank(report: RankReport, waiting: Sequence[int], wall: float) -> str:
    """Return one sentence about a rank that does not go on.

    Args:
        report: what is known of the rank.
        waiting: ranks that wait for it.
        wall: the moment of the report, in seconds since 1970.
    """
    since = time.strftime("%H:%M:%S", time.localtime(wall - report.stalled))
    location = f" {report.place}" if report.place else ""
    remedy = f"; kill -CONT {report.pid} lets it go on" if report.doing is Doing.STOPPED else ""
    verb = "waits" if len(waiting) == 1 else "wait"
    waiters = f"; {format_ranks(waiting)} {verb} for it" if waiting else ""
    return (
        f"rank {report.rank} (process {report.pid} on {report.host}) has made no progress for {report.stalled:.1f} s, "
        f"since {since},{location}: it {report.doing}{remedy}{waiters}"
    )


def describe_finding(
    finding: Finding, ranks: Mapping[int, RankReport], wall: float, hosts: Mapping[int, str] | None = None
) -> str:
    """Return one sentence about what the walk has found.

    Args:
        finding: where the walk ended.
        ranks: the report of every rank, by rank.
        wall: the moment of the report, in seconds since 1970.
        hosts: by rank, the name of its host, where there are several.
    """
    if finding.culprits:
        known_ranks = [rank for rank in finding.culprits if rank in ranks]
        if not known_ranks:
            return f"{_on_hosts(finding.culprits, hosts)} {_have(finding.culprits)} not gone on"
        # One of them is described in full, so that it stays a sentence; the report has all.
        culprits = [rank for rank in finding.culprits if rank != known_ranks[0]]
        also = f"; so {'does' if len(culprits) == 1 else 'do'} {_on_hosts(culprits, hosts)}" if culprits else ""
        return describe_rank(ranks[known_ranks[0]], finding.waiting_for(known_ranks[0]), wall) + also
    stuck = finding.link.ranks if finding.link else finding.circle
    known_ranks = [rank for rank in stuck if rank in ranks]
    stalled = min((ranks[rank].stalled for rank in known_ranks), default=0.0)
    since = time.strftime("%H:%M:%S", time.localtime(wall - stalled))
    location = f", {ranks[known_ranks[0]].place}" if known_ranks else ""
    if finding.link is not None:
        names = list(dict.fromkeys(hosts[rank] for rank in stuck)) if hosts else []
        between = f"between {_join_words(names)}" if len(names) > 1 else "between them"
        return (
            f"{_on_hosts(stuck, hosts)} have all begun 1 operation between them and have waited "
            f"for it for {stalled:.1f} s, since {since}{location}: no worker is to blame, the link {between} carries "
            f"nothing"
        )
    return f"{_on_hosts(stuck, hosts)} wait for each other since {since}{location}"


def describe_silence(
    finding: Finding,
    ranks: Mapping[int, RankReport],
    hosts: Mapping[int, str],
    silences: Mapping[str, float],
    is_lost: bool = False,
) -> str:
    """Return one sentence about hosts that nothing is heard of, and that others wait for.

    Args:
        finding: where the walk ended, with the ranks of these hosts.
        ranks: the reports of the ranks of other hosts, by rank.
        hosts: by rank, the name of its host.
        silences: by name of a host, the seconds since it was heard of.
        is_lost: whether a connection with them has broken.
    """
    names = list(dict.fromkeys(hosts[rank] for rank in finding.elsewhere))
    description = _join_words(
        [
            f"{name}, with {format_ranks([rank for rank in hosts if hosts[rank] == name])}, has not been heard from "
            f"for {silences.get(name, 0.0):.1f} s"
            for name in names
        ]
    )
    subject, pronoun = ("it is", "it") if len(names) == 1 else ("they are", "them")
    cause = f": {subject} down or stopped as a whole, or the link to {pronoun} carries nothing"
    if is_lost:
        cause = f", and connections with {pronoun} have broken: {subject} down, or all workers there have ended"
    return f"{description}{cause}; {_describe_waiting(finding, ranks, hosts)}"


def describe_unanswered(
    finding: Finding, ranks: Mapping[int, RankReport], hosts: Mapping[int, str], store_state: tuple[str, str, float]
) -> str:
    """Return one sentence about a host that hears nothing of the others, since the store does not answer.

    Args:
        finding: where the walk ended, with ranks of other hosts that somebody waits for.
        ranks: the reports of the ranks of this host, by rank.
        hosts: by rank, the name of its host.
        store_state: name of this host, what the store is called, and the seconds since it has answered.
    """
    host, store, seconds = store_state
    peers = _join_words(list(dict.fromkeys(hosts[rank] for rank in finding.elsewhere)))
    return (
        f"{host} has not heard of {peers} for {seconds:.1f} s, nor has {store} answered: the link from {host} to the "
        f"others carries nothing, or they are down; {_describe_waiting(finding, ranks, hosts)}"
    )


def _describe_waiting(finding: Finding, ranks: Mapping[int, RankReport], hosts: Mapping[int, str]) -> str:
    """Return who waits for ranks of other hosts, since when, and where."""
    waiting = sorted(rank for rank, on in finding.waits_for.items() if {*on} & {*finding.elsewhere})
    reports = [ranks[rank] for rank in waiting if rank in ranks]
    stalled = min((report.stalled for report in reports), default=0.0)
    location = f", {reports[0].place}" if reports and reports[0].place else ""
    return (
        f"{_on_hosts(waiting, hosts)} {_have(waiting)} waited for {format_ranks(finding.elsewhere)} for {stalled:.1f} s"
        f"{location}"
    )


def _have(ranks: Sequence[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


def _on_hosts(ranks: Sequence[int], hosts: Mapping[int, str] | None) -> str:
    """Return ``ranks 0 and 1 on a and ranks 2 and 3 on b``; the ranks alone where no hosts are given."""
    if not hosts:
        return format_ranks(ranks)
    names = list(dict.fromkeys(hosts.get(rank, "?") for rank in sorted(ranks)))
    of = {name: [rank for rank in ranks if hosts.get(rank, "?") == name] for name in names}
    return _join_words([f"{format_ranks(of[name])} on {name}" for name in names])


def _join_words(words: Sequence[str]) -> str:
    """Return ``a``, ``a and b``, ``a, b and c``."""
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}" if words else ""
