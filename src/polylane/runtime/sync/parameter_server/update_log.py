"""Update log of a parameter server: what it did, in its order, enough to do it again."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polylane.runtime.transport.serialization import serializable

ALL = -1


@serializable
@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """One update of a server's weights.

    Attributes:
        replica: whose gradient it was, or :data:`ALL` for the sum of all of them.
        step: of the replica, from 0.
        objective: number of the objective.
        read_version: updates that this server had made when the replica read the weights that the gradient belongs to.
        version: updates that it had made after this one.
        steps_ahead: steps that the replica had done before this one beyond those of the slowest replica.
    """

    replica: int
    step: int
    objective: int
    read_version: int
    version: int
    steps_ahead: int

    @property
    def staleness(self) -> int:
        """Updates by others between reading the weights and this one."""
        return self.version - 1 - self.read_version


class UpdateLog:
    """The updates of one server. Six numbers each, packed: a training has millions."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, update: ServerUpdate) -> None:
        """One more."""
        each = (update.replica, update.step, update.objective, update.read_version, update.version, update.steps_ahead)
        self._numbers.extend(each)

    def __len__(self) -> int:
        return len(self._numbers) // 6

    def __iter__(self) -> Iterator[ServerUpdate]:
        for at in range(0, len(self._numbers), 6):
            yield ServerUpdate(*self._numbers[at : at + 6])


def count_staleness(updates: Iterable[ServerUpdate]) -> dict[int, int]:
    """How many updates were how stale, ascending."""
    return dict(sorted(Counter(update.staleness for update in updates).items()))
