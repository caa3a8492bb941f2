"""Update log of a parameter server: replica, step and versions of each update, enough to replay the training."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from polylane.runtime.plain_data.serialization import serializable

ALL = -1


@serializable
@dataclass(frozen=True, slots=True)
class ServerUpdate:
    """One update of a server's weights.

    Attributes:
        replica: number of the replica whose gradient it was, or :data:`ALL` for the sum over replicas.
        step: step of the replica, from 0.
        objective: number of the objective in the plan's order.
        read_version: updates that this server had made when the replica read the weights of the gradient.
        version: updates that this server has made, with this one.
        steps_ahead: steps by which the replica was ahead of the slowest one before this update.
    """

    replica: int
    step: int
    objective: int
    read_version: int
    version: int
    steps_ahead: int

    @property
    def staleness(self) -> int:
        """Number of updates between reading the weights and this update."""
        return self.version - 1 - self.read_version


class UpdateLog:
    """The updates of one server, stored as six 64-bit integers each: a training may have millions."""

    def __init__(self) -> None:
        self._numbers = array("q")

    def add(self, update: ServerUpdate) -> None:
        """Append an update to the log."""
        entry = (update.replica, update.step, update.objective, update.read_version, update.version, update.steps_ahead)
        self._numbers.extend(entry)

    def __len__(self) -> int:
        return len(self._numbers) // 6

    def __iter__(self) -> Iterator[ServerUpdate]:
        for at in range(0, len(self._numbers), 6):
            yield ServerUpdate(*self._numbers[at : at + 6])


def count_staleness(updates: Iterable[ServerUpdate]) -> dict[int, int]:
    """Return the number of updates of each staleness, ascending."""
    return dict(sorted(Counter(update.staleness for update in updates).items()))
