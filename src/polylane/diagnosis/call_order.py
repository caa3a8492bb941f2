"""Call order: whether the workers of a script make the same collective calls in the same order (SPMD), and who not.

Every worker numbers its calls of collective methods. Calls of one number meet each other, hence at the first number

    workers are in calls of different methods           neither call ever ends
    a worker has left the script, others are in a call   it never begins that call

Both are certain at once, where a worker that loads data or computes for a minute has only not begun its call yet: of
that nothing is said here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Calls that a script makes without a condition: where others differ from them, these are what somebody left out.
_USUAL = (
    "torch.distributed's",
    "job.close",
    "replicas.close",
    "the end of the script",
    "job.step",
    "optimizer.step",
    "loss.backward",
)


@dataclass(frozen=True)
class Call:
    """A collective call of a script.

    Attributes:
        number: which one of its worker, from 1.
        method: name of the method, as a script writes it: ``job.save``.
        line: the user's line that it is in, ``train.py line 12``; "" where that is not known.
    """

    number: int
    method: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.method} ({self.line})" if self.line else self.method


@dataclass(frozen=True)
class CallRecord:
    """The calls of one worker.

    Attributes:
        calls: the last ones, ascending.
        is_inside: whether the last one has not ended.
        has_left: whether the worker's script has come to its end.
    """

    calls: tuple[Call, ...] = ()
    is_inside: bool = False
    has_left: bool = False

    @property
    def last(self) -> int:
        """The number of the last call; 0 before the first."""
        return self.calls[-1].number if self.calls else 0

    def find(self, number: int) -> Call | None:
        """Return the call with a number; None if it was not made yet, or is long ago."""
        return next((call for call in self.calls if call.number == number), None)


@dataclass(frozen=True)
class Parting:
    """The first call at which workers differ.

    Attributes:
        number: number of the call.
        records: by rank, those that have made it, and those that have left and never will.
    """

    number: int
    records: Mapping[int, CallRecord]

    def describe(self) -> str:
        """Return the sentence for the user: every rank's method and line, and what to do."""
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, record in sorted(self.records.items()):
            groups.setdefault(self._describe_rank(record), []).append(rank)
        clauses, last_doing = list[str](), ""
        for (doing, call), ranks in groups.items():
            # "rank 0 is in job.save, rank 1 in job.step"
            verb = "in" if doing == last_doing == "is in" else doing.replace("is", "are") if len(ranks) > 1 else doing
            clauses.append(f"{format_ranks(ranks)} {verb} {call}".rstrip())
            last_doing = doing
        return f"{', '.join(clauses)}: every rank must call {self._remedy()}{self._describe_origin()}"

    def _describe_rank(self, record: CallRecord) -> tuple[str, str]:
        call = record.find(self.number)
        if call is not None:
            return "is in" if record.is_inside and record.last == self.number else "went on with", str(call)
        return ("left the script after", str(record.calls[-1])) if record.calls else ("left the script", "")

    def _remedy(self) -> str:
        methods = {call.method for record in self.records.values() if (call := record.find(self.number))}
        usual = [method for word in _USUAL for method in methods if method.startswith(word)]
        rare = sorted(methods.difference(usual)) or usual[-1:]
        if len(rare) > 1:
            return "the same methods in the same order"
        has_left = any(record.has_left and not record.find(self.number) for record in self.records.values())
        return f"{rare[0]} as often as the others" if has_left and rare[0] in usual else rare[0]

    def _describe_origin(self) -> str:
        """Return the lines at which ranks parted, if they have made calls of the same methods since then."""
        number = self.number
        # Calls of the same methods from different lines: the scripts parted earlier than they came to wait.
        if not all(record.find(number) for record in self.records.values()):
            return ""
        while len({str(record.find(number - 1)) for record in self.records.values() if record.find(number - 1)}) > 1:
            number -= 1
        calls = [(rank, record.find(number)) for rank, record in sorted(self.records.items())]
        lines = [f"rank {rank} came to {call.line}" for rank, call in calls if call is not None]
        return "" if number == self.number else f"; they parted where {' and '.join(lines)}"


def find_parting(records: Mapping[int, CallRecord]) -> Parting | None:
    """Return where the calls of workers differ for certain; None where they do not, or not yet.

    Args:
        records: by rank, the workers of which something is known.
    """
    numbers = sorted({call.number for record in records.values() for call in record.calls})
    for number in numbers:
        # Of a rank that has made fewer calls, and has not left, nothing is certain: it may be about to make this one.
        reached = {
            rank: record
            for rank, record in records.items()
            if record.find(number) or (record.has_left and record.last < number)
        }
        if len({_method_at(record, number) for record in reached.values()}) > 1:
            return Parting(number, reached)
    return None


def _method_at(record: CallRecord, number: int) -> str:
    call = record.find(number)
    return "" if call is None else call.method


def choose_first_to_leave(parting: Parting) -> Sequence[int]:
    """Return the ranks that make the call which the fewest make; of as many, those with the highest ranks."""
    by_method: dict[str, list[int]] = {}
    for rank, record in sorted(parting.records.items()):
        by_method.setdefault(_method_at(record, parting.number), []).append(rank)
    return min(by_method.values(), key=lambda ranks: (len(ranks), -ranks[0]))


def format_ranks(ranks: Sequence[int]) -> str:
    """Return ``rank 1``, ``ranks 0 and 2``, ``ranks 0 to 13``."""
    ranks = sorted(ranks)
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 2 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"ranks {ranks[0]} to {ranks[-1]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
