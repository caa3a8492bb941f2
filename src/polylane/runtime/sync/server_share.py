"""What a parameter server and each worker give each other."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polylane.program.lower import differentiated
from polylane.runtime.pieces import Pieces
from polylane.runtime.prepare import Prepared


@dataclass(frozen=True)
class Slot:
    """A tensor, or a worker's part of it, as it travels."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def numel(self) -> int:
        """Elements."""
        return torch.Size(self.shape).numel()


class Packing:
    """Tensors laid end to end, one row for each dtype.

    Args:
        slots: in the order in which they lie.
    """

    def __init__(self, slots: Iterable[Slot]) -> None:
        self.rows: dict[torch.dtype, list[Slot]] = {}
        for slot in slots:
            self.rows.setdefault(slot.dtype, []).append(slot)
        self.sizes = tuple((sum(slot.numel for slot in row), dtype) for dtype, row in self.rows.items())
        self.names = tuple(slot.name for row in self.rows.values() for slot in row)

    @property
    def bytes(self) -> int:
        """Of all rows."""
        return sum(numel * dtype.itemsize for numel, dtype in self.sizes)

    def packed(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The rows, in new memory on the CPU; zeros for what is not there."""
        rows = []
        for dtype, slots in self.rows.items():
            flat = [tensors[s.name].detach().reshape(-1) if s.name in tensors else None for s in slots]
            device = next((f.device for f in flat if f is not None), torch.device("cpu"))
            zeros = (torch.zeros(slot.numel, dtype=dtype, device=device) for slot in slots)
            rows.append(torch.cat([z if f is None else f for f, z in zip(flat, zeros, strict=True)]).cpu())
        return rows

    def unpacked(self, rows: Sequence[Tensor], device: torch.device) -> dict[str, Tensor]:
        """The tensors, as views of the rows."""
        found: dict[str, Tensor] = {}
        for row, slots in zip(rows, self.rows.values(), strict=True):
            pieces = row.to(device).split([slot.numel for slot in slots])
            found |= {slot.name: piece.view(slot.shape) for slot, piece in zip(slots, pieces, strict=True)}
        return found


@dataclass(frozen=True)
class Trade:
    """What one worker and one server give each other.

    Attributes:
        rank, replica: the worker's.
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
        held = {n: _slot(n, parameters[n], pieces) for n in order if stage in holders[n]}
        speaks = [n for n in held if stage == min(holders[n]) and pieces.counts("parameter", n)]
        if not held:
            continue
        gives = {o: Packing(held[n] for n in speaks if n in names) for o, names in trained.items()}
        gets = {o: Packing(held[n] for n in held if n in names) for o, names in trained.items()}
        every = Packing(held[n] for n in speaks), Packing(held.values())
        place = stage, *plan.coordinates(rank).values()
        found.append(Trade(rank, replica, place, pieces, gives, gets, every))
    return tuple(found)


def _slot(name: str, parameter: nn.Parameter, pieces: Pieces) -> Slot:
    whole = torch.empty(pieces.shapes[name], device="meta")
    return Slot(name, tuple(pieces.of({name: whole}).get(name, whole).shape), parameter.dtype)
