"""Messages of one worker and one parameter server: which gradients it sends, and which weights it receives."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from torch import nn

from polylane.program.lower import differentiated
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import Prepared
from polylane.runtime.sync.flat_packing import Packing, Slot


@dataclass(frozen=True)
class Trade:
    """What one worker and one server give each other.

    Attributes:
        rank, replica: of the worker, and the number of its replica.
        place: what it has in common with its counterparts in other replicas, and with nobody else.
        pieces: which parts it holds.
        gives: by objective, the gradients that it sends: of a replica's workers that hold the same part, one does.
        gets: by objective, the weights that it receives.
        all: of all objectives, what it sends (to set the weights) and what it receives.
    """

    rank: int
    replica: int
    place: tuple[int, ...]
    pieces: Pieces
    gives: Mapping[str, Packing]
    gets: Mapping[str, Packing]
    all: tuple[Packing, Packing]

    def got(self, objectives: Collection[str]) -> Packing:
        """The weights of these objectives."""
        if len(objectives) == 1:
            return self.gets[next(iter(objectives))]
        names = {name for objective in objectives for name in self.gets[objective].names}
        return Packing(slot for row in self.all[1].rows.values() for slot in row if slot.name in names)

    @property
    def flags(self) -> int:
        """The most parameters that it and the server tell each other of at once."""
        return max(len(packing.names) for packing in (*self.gives.values(), *self.gets.values(), *self.all))


def trades(
    prepared: Prepared,
    share: Collection[str],
    holders: Mapping[str, Collection[int]],
    parameters: Mapping[str, nn.Parameter],
) -> tuple[Trade, ...]:
    """What a server that holds ``share`` and every worker give each other; without those that have nothing to give.

    Of weights that several stages hold, which they sum among themselves, the lowest one speaks.
    """
    plan = prepared.plan
    trained = {name: differentiated(each.graph) & set(share) for name, each in prepared.partitions.items()}
    order = [name for name in parameters if name in share]
    found = []
    for rank in range(plan.workers):
        stage, replica = plan.place(rank)
        pieces = Pieces(prepared, stage, plan.coordinates(rank))
        held = {n: Slot(n, pieces.local_shape(n), parameters[n].dtype) for n in order if stage in holders[n]}
        speaks = [n for n in held if stage == min(holders[n]) and pieces.counts("parameter", n)]
        if not held:
            continue
        gives = {o: Packing(held[n] for n in speaks if n in names) for o, names in trained.items()}
        gets = {o: Packing(held[n] for n in held if n in names) for o, names in trained.items()}
        every = Packing(held[n] for n in speaks), Packing(held.values())
        place = stage, *plan.coordinates(rank).values()
        found.append(Trade(rank, replica, place, pieces, gives, gets, every))
    return tuple(found)
