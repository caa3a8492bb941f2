"""Culprit: the walk from workers that wait to the one whose needs are all met and that does not go on.

Operations between workers are counted on lines. A line is a channel of messages from one rank to another, or a group
of ranks that take part in collectives; all its members count the operations that they have begun, in the same order.

    a rank waits for operation n of a line, and           it waits for
    some members have begun fewer than n                  those members
    all have begun n, some are busy elsewhere             these, which must come back to it (a sum in several steps)
    all have begun n, and all wait                        nobody: the link between them
    no known member is behind, some are not known         these, which are on other hosts

Who waits for nothing is where the walk ends. A rank that cannot run, stopped or with its interpreter held, waits for
nothing either, whatever it was doing. This is how flight recorders of collectives are read (NCCL's in PyTorch), with
messages, and what is known of the processes, beside it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Wait:
    """What a rank waits for.

    Attributes:
        line: name of the line, the same at all its members.
        number: number of the operation on the line, from 1.
        ranks: all members of the line, this rank among them.
    """

    line: str
    number: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class RankState:
    """One rank, as far as it matters for the others.

    Attributes:
        wait: the operation that it waits for; None: it computes, loads, or is in other code of its own.
        begun: by name of a line, the number of operations that the rank has begun on it; 0 where it is missing.
        is_frozen: whether the process cannot run.
    """

    wait: Wait | None = None
    begun: Mapping[str, int] = field(default_factory=dict)
    is_frozen: bool = False

    @property
    def is_waiting(self) -> bool:
        """Whether the rank could go on, if only others did."""
        return self.wait is not None and not self.is_frozen


@dataclass(frozen=True)
class Finding:
    """Where the walk ended.

    Attributes:
        culprits: ranks that others wait for, and that wait for nothing; ascending, those that cannot run alone if there
            are any. Empty where a link or a circle is to blame.
        link: the operation that all of its ranks have begun and wait for; None where a rank is to blame.
        circle: ranks that wait for each other; empty where a rank or a link is to blame.
        elsewhere: ranks that are not known here, and that others wait for; empty where somebody here is to blame.
        waits_for: by rank that waits, the ranks that it waits for.
    """

    culprits: tuple[int, ...] = ()
    link: Wait | None = None
    circle: tuple[int, ...] = ()
    elsewhere: tuple[int, ...] = ()
    waits_for: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def waiting_for(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that wait for a rank, directly or over others; ascending."""
        waiters: set[int] = set()
        # Again until a round adds nobody: who waits for one that waits for the rank waits for the rank.
        while newcomers := {w for w, on in self.waits_for.items() if w not in waiters and ({rank, *waiters} & {*on})}:
            waiters |= newcomers
        return tuple(sorted(waiters - {rank}))


def find_blockers(states: Mapping[int, RankState], rank: int) -> tuple[int, ...]:
    """Return the ranks that a waiting rank waits for, directly; empty where only the link is left."""
    wait = states[rank].wait
    if wait is None or not states[rank].is_waiting:
        return ()
    peers = [peer for peer in wait.ranks if peer != rank and peer in states]
    behind = [peer for peer in peers if states[peer].begun.get(wait.line, 0) < wait.number]
    busy = [peer for peer in peers if not states[peer].is_waiting]
    # Who has begun the operation and is busy elsewhere counts only where nobody is behind, and ranks of other hosts, of
    # which nothing is known here, only where no known member explains the wait.
    return tuple(sorted(behind or busy or [peer for peer in wait.ranks if peer not in states]))


def find_culprits(states: Mapping[int, RankState]) -> Finding:
    """Walk from every waiting rank to those that it waits for.

    Args:
        states: by rank, all ranks of the job, or those of one host.
    """
    waits_for = {rank: find_blockers(states, rank) for rank, state in states.items() if state.is_waiting}
    idle = [rank for rank in states if rank not in waits_for]
    frozen = [rank for rank in idle if states[rank].is_frozen]
    reached = {rank for on in waits_for.values() for rank in on}
    # A process that cannot run is to blame before all that others wait for; with nobody waiting, all that do not go on.
    named = frozen or [rank for rank in idle if rank in reached] or ([] if waits_for else idle)
    if named:
        return Finding(tuple(sorted(named)), waits_for=waits_for)
    if elsewhere := reached - states.keys():
        return Finding(elsewhere=tuple(sorted(elsewhere)), waits_for=waits_for)
    for rank in sorted(waits_for):
        if not waits_for[rank]:
            return Finding(link=states[rank].wait, waits_for=waits_for)
    return Finding(circle=_find_circle(waits_for), waits_for=waits_for)


def _find_circle(waits_for: Mapping[int, Sequence[int]]) -> tuple[int, ...]:
    """Return the ranks of a circle, in order; every rank of ``waits_for`` waits for another one of it."""
    if not waits_for:
        return ()
    path = [min(waits_for)]
    # Every rank has one to follow, so that the path must come back to itself.
    while (following := waits_for[path[-1]][0]) not in path:
        path.append(following)
    return tuple(path[path.index(following) :])
