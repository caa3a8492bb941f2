"""Update log of a parameter server: what it did, in its order, enough to do it again."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polylane.values import travels

ALL = -1


@travels
@dataclass(frozen=True, slots=True)
class Update:
    """One update of a server's weights.

    Attributes:
        replica: whose gradient it was, or :data:`ALL` for the sum of all of them.
        step: of the replica, from 0.
        objective: number of the objective.
        read: updates that this server had made when the replica read the weights that the gradient belongs to.
        version: updates that it had made after this one.
        ahead: steps that the replica had done before this one beyond those of the slowest replica.
    """

    replica: int
    step: int
    objective: int
    read: int
    version: int
    ahead: int

    @property
    def staleness(self) -> int:
        """Updates by others between reading the weights and this one."""
        return self.version - 1 - self.read


class Log:
    """The updates of one server. Six numbers each, packed: a training has millions."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, update: Update) -> None:
        """One more."""
        each = (update.replica, update.step, update.objective, update.read, update.version, update.ahead)
        self._numbers.extend(each)

    def __len__(self) -> int:
        return len(self._numbers) // 6

    def __iter__(self) -> Iterator[Update]:
        for at in range(0, len(self._numbers), 6):
            yield Update(*self._numbers[at : at + 6])


def distribution(updates: Iterable[Update]) -> dict[int, int]:
    """How many updates were how stale, ascending."""
    return dict(sorted(Counter(update.staleness for update in updates).items()))
