"""Judgement: whether ranks that stand still hang, and which of them; the same for the ranks of one host and of all.

    what the walk (diagnosis/culprit.py) ends at      a hang once
    ranks that wait for nothing                       one of them has made no progress for its bound
    a link, or a circle                               none of its ranks has gone on for its bound, or in a step for
                                                      its patience
    ranks of hosts that nothing is heard of           such a host is silent, and somebody waits for it, for longer than
                                                      the patience of who waits, or has lost a connection

A host is silent where its watching process says nothing. If training went on for long after that, then the process
alone has ended, and what its workers do is not known: they are not blamed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from polylane.diagnosis.call_order import CallRecord, Parting, find_parting
from polylane.diagnosis.culprit import Finding, RankState, find_blockers, find_culprits
from polylane.diagnosis.page_layout import Phase
from polylane.diagnosis.patience import LONG_SECONDS
from polylane.diagnosis.report import Doing

# A host may have been silent for this much longer than somebody's patience, before training stood still.
LATE_SECONDS = 5.0
_IDLE = frozenset({Phase.SERVING, Phase.ENDING})
PARTING_SECONDS = 2.0  # without progress of a worker inside of a call, after which the calls of all are compared


@dataclass(frozen=True)
class RankRecord:
    """One rank at one moment, as far as a judgement needs it.

    Attributes:
        rank: rank of the worker.
        state: what it waits for, and what it has begun.
        doing: what its process does.
        phase: what its page says that it is in.
        stalled: seconds since its page changed.
        bound: seconds without progress after which it hangs.
        patience: seconds after which it need not wait any longer for a host that nothing is heard of.
        calls: the collective calls of its script.
        asks: whether it has lost another worker, and asks why.
    """

    rank: int
    state: RankState = field(default_factory=RankState)
    doing: Doing = Doing.COMPUTING
    phase: Phase = Phase.TRAINING
    stalled: float = 0.0
    bound: float = float("inf")
    patience: float = float("inf")
    calls: CallRecord = field(default_factory=CallRecord)
    asks: bool = False

    @property
    def is_hung(self) -> bool:
        """Whether it has made no progress for its bound."""
        return self.stalled >= self.bound

    @property
    def is_stuck(self) -> bool:
        """Whether it has waited for its bound for an operation that all have begun; what moves may be large elsewhere.

        In a step nobody need be waited for any longer than for a host that nothing is heard of.
        """
        return self.stalled >= (min(self.bound, self.patience) if self.bound < LONG_SECONDS else self.bound)


@dataclass(frozen=True)
class StallJudgement:
    """What is to be said of ranks that stand still.

    Attributes:
        finding: where the walk ended; of a hang with those ranks alone that hang.
        is_hang: whether that is a hang.
        is_lost: whether hosts are gone: they are silent, and a connection has broken.
    """

    finding: Finding
    is_hang: bool
    is_lost: bool = False

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to blame; empty where it is a link, or a host that may only not be reached."""
        return self.finding.elsewhere if self.is_lost else self.finding.culprits

    @property
    def victims(self) -> tuple[int, ...]:
        """The ranks whose end ends the hang: the culprits, all ranks of a link, or all who wait for a silent host."""
        finding = self.finding
        if finding.culprits:
            return finding.culprits
        if finding.elsewhere:
            return tuple(sorted(_waiting_for(finding, finding.elsewhere)))
        return tuple(sorted(finding.link.ranks if finding.link else finding.circle))


def judge(
    records: Iterable[RankRecord], silences: Mapping[int, float] | None = None, knows_lost: bool = True
) -> StallJudgement:
    """Judge ranks that stand still.

    Args:
        records: the ranks of which something is known: those of one host, or of all hosts that are heard.
        silences: by rank of a host that is silent, the seconds since it was heard of.
        knows_lost: whether a silent host may be called lost; False: nothing is heard of any host, also of those that
            live.
    """
    rank_records = {record.rank: record for record in records}
    states = {rank: record.state for rank, record in rank_records.items() if record.doing is not Doing.GONE}
    lost = tuple(sorted((silences or {}).keys() - rank_records.keys()))
    if lost and any(record.asks for record in rank_records.values()):
        return StallJudgement(Finding(elsewhere=lost, waits_for=dict.fromkeys(states, lost)), True, knows_lost)
    finding = find_culprits(without_onlookers(states, {rank: record.phase for rank, record in rank_records.items()}))
    if finding.elsewhere:
        silent = _find_silent(finding, rank_records, silences or {})
        return StallJudgement(replace(finding, elsewhere=silent) if silent else finding, bool(silent))
    suspects = finding.culprits or (finding.link.ranks if finding.link else finding.circle)
    suspect_records = [rank_records[rank] for rank in suspects if rank in rank_records]
    hung = tuple(record.rank for record in suspect_records if record.is_hung)
    if finding.culprits and hung:
        return StallJudgement(replace(finding, culprits=hung), True)
    return StallJudgement(finding, bool(suspect_records) and all(record.is_stuck for record in suspect_records))


def judge_calls(records: Iterable[RankRecord]) -> Parting | None:
    """Return where the calls of scripts differ, once a worker waits in such a call, or has lost another one there."""
    rank_records = {record.rank: record for record in records}
    parting = find_parting({rank: record.calls for rank, record in rank_records.items()})
    if parting is None:
        return None
    stuck = (rank_records[rank] for rank in parting.records)
    waits = any(record.asks or (record.calls.is_inside and record.stalled >= PARTING_SECONDS) for record in stuck)
    return parting if waits else None


def _waiting_for(finding: Finding, ranks: Iterable[int]) -> list[int]:
    """Return the ranks that wait for some ranks directly."""
    return [rank for rank, on in finding.waits_for.items() if {*on} & {*ranks}]


def _find_silent(finding: Finding, records: Mapping[int, RankRecord], silences: Mapping[int, float]) -> tuple[int, ...]:
    """Return the ranks of silent hosts that somebody has waited for long enough."""
    silent_ranks = []
    for rank in finding.elsewhere:
        silence = silences.get(rank, 0.0)
        waiting = [records[waiter] for waiter in _waiting_for(finding, (rank,))]
        # Silent for as long as it was waited for, and not since long before the training stood still.
        if any(
            min(record.stalled, silence) >= record.patience > silence - record.stalled - LATE_SECONDS
            for record in waiting
        ):
            silent_ranks.append(rank)
    return tuple(silent_ranks)


def without_onlookers(states: Mapping[int, RankState], phases: Mapping[int, Phase]) -> dict[int, RankState]:
    """Return the ranks that the walk to a culprit may pass: without those that do not go on and that nobody waits for.

        what the rank is in                      it counts
        a step, its loader, its start, ...       always
        a dedicated server, the end              if its process cannot run
        the user's own code in a script          if somebody waits for it: a script may do anything there

    Args:
        states: by rank, those whose processes have not ended.
        phases: by rank, what it is in.
    """
    counted = {rank: state for rank, state in states.items() if phases[rank] not in _IDLE or state.is_frozen}
    awaited = {blocker for rank in counted for blocker in find_blockers(counted, rank)}
    return {
        rank: state
        for rank, state in counted.items()
        if phases[rank] is not Phase.SCRIPT or state.is_waiting or rank in awaited
    }
