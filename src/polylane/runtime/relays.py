"""Relays: which piece of a value, or of its gradient, goes between which ranks of two stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polylane.graph.orders import Order
from polylane.graph.partition import Partition
from polylane.placement.placement import Shard
from polylane.plan.plan import Plan
from polylane.planner.layouts import Layouts
from polylane.program.relay import Box, Transfer, cut, inside, relay, volume, whole
from polylane.runtime.division import shares

Sizes = Mapping[str, tuple[Callable[[int], int], ...]]


@dataclass
class Relays:
    """What one worker sends and receives of every value that crosses, for whatever number of samples.

    Where two stages have the same mesh, each rank talks to the one with the same coordinates. Elsewhere every element
    goes from one of those who have it to each of those who need it.

    Attributes:
        rank: this worker.
        plan: which rank is where.
        partition: for where the samples of a value lie.
        layouts: of every stage, how its operators are split.
        sizes: shapes of the values, for any number of samples.
        orders: how the parts of a batch make up a value.
    """

    rank: int
    plan: Plan
    partition: Partition
    layouts: Layouts
    sizes: Sizes
    orders: Mapping[str, Order]
    _known: dict[tuple[str, int, int, int, bool], tuple[Transfer, ...]] = field(default_factory=dict)
    _boxes: dict[tuple[str, int, int], Box] = field(default_factory=dict)

    def sent(self, value: str, peer: int, samples: int, gradient: bool) -> Box | None:
        """What of its own part of a value this worker sends to a peer, by positions in that part; None: nothing.

        Args:
            samples: of the whole microbatch.
            gradient: whether it is the value's gradient that travels.
        """
        return self._piece(value, self.rank, peer, samples, gradient)

    def received(self, value: str, peer: int, samples: int, gradient: bool) -> Box | None:
        """What a peer sends of this worker's part, by positions in that; None: nothing."""
        return self._piece(value, peer, self.rank, samples, gradient)

    def summed(self, value: str) -> bool:
        """Whether replicas of another stage with another number of them get the sum of what all replicas send."""
        return self.orders[value] in (Order.MEAN, Order.SUM)

    def factor(self, value: str, peer: int, samples: int, gradient: bool) -> float:
        """By what this worker multiplies what it sends to a peer.

        Of a mean over the samples in hand every consumer gets the mean over all samples, and of a sum its share of the
        sum over all: the loss, in which they count by samples, is the same, and so are the gradients.
        """
        stages = [self.plan.place(rank)[0] for rank in (self.rank, peer)]
        if not self.summed(value) or len(self._replicas(stages[0])) == len(self._replicas(stages[1])):
            return 1.0
        producer, consumer = (peer, self.rank) if gradient else (self.rank, peer)
        start, stop, weight = self._share(producer if self.orders[value] is Order.MEAN else consumer, samples)
        return self._counts(producer, samples) * weight * (stop - start) / samples

    def _piece(self, value: str, sender: int, receiver: int, samples: int, gradient: bool) -> Box | None:
        stages = self.plan.place(sender)[0], self.plan.place(receiver)[0]
        own = self._box(value, self.rank, samples)
        if self.plan.aligned(*stages):
            return inside(own, own) if volume(own) else None
        for transfer in self._transfers(value, *stages, samples, gradient):
            if (transfer.sender, transfer.receiver) == (sender, receiver):
                return inside(own, transfer.box)
        return None

    def _transfers(self, value: str, start: int, end: int, samples: int, gradient: bool) -> tuple[Transfer, ...]:
        key = (value, start, end, samples, gradient)
        if key not in self._known:
            self._known[key] = tuple(
                transfer
                for senders, receivers in self._meeting(value, start, end, samples, gradient)
                for transfer in relay(
                    {rank: self._box(value, rank, samples) for rank in senders},
                    {rank: self._box(value, rank, samples) for rank in receivers},
                )
            )
        return self._known[key]

    def _meeting(
        self, value: str, start: int, end: int, samples: int, gradient: bool
    ) -> list[tuple[list[int], list[int]]]:
        """Senders and receivers, in groups among which a value is exchanged."""
        replicas = [self._replicas(stage) for stage in (start, end)]
        if len(replicas[0]) == len(replicas[1]):
            return list(zip(*replicas, strict=True))
        senders, receivers = replicas
        if self.summed(value):
            everyone = [rank for ranks in receivers for rank in ranks]
            return [(ranks, everyone) for ranks in senders]
        if gradient and self.orders[value] is Order.ALIKE:
            # Every replica has a summand, of its own samples; whoever gets it, they are summed in the end.
            return [(ranks, receivers[i * len(receivers) // len(senders)]) for i, ranks in enumerate(senders)]
        # Who computes on another one's sample, for want of one of its own, is asked for nothing and owed no gradient.
        counting = [[r for rank in each for r in rank if self._counts(r, samples)] for each in replicas]
        every = [r for rank in replicas[1] for r in rank]
        return [(counting[0], counting[1] if gradient else every)]

    def _replicas(self, stage: int) -> list[list[int]]:
        """The ranks of each of a stage's replicas; replicas that split operators between them are one."""
        devices = self.plan.stages[stage].devices
        if self.layouts.together:
            return [list(devices)]
        size = len(devices) // self.plan.stages[stage].degree("data")
        return [list(devices[i : i + size]) for i in range(0, len(devices), size)]

    def _batch_dim(self, value: str) -> int | None:
        graph = self.partition.graph
        return graph.nodes[graph.positions[value]].batch_dim

    def _share(self, rank: int, samples: int) -> tuple[int, int, int]:
        stage, replica = self.plan.place(rank)
        if self.layouts.together:
            return 0, samples, 1
        (share,) = shares(samples, 1, self.plan.stages[stage].degree("data"), replica)
        return share.start, share.stop, share.weight

    def _counts(self, rank: int, samples: int) -> bool:
        return bool(self._share(rank, samples)[2])

    def _box(self, value: str, rank: int, samples: int) -> Box:
        """What a rank has of a value of a whole microbatch."""
        if (value, rank, samples) not in self._boxes:
            self._boxes[value, rank, samples] = self._found_box(value, rank, samples)
        return self._boxes[value, rank, samples]

    def _found_box(self, value: str, rank: int, samples: int) -> Box:
        start, stop, _ = self._share(rank, samples)
        box = whole(size(stop - start) for size in self.sizes[value])
        layout = self.layouts[self.plan.place(rank)[0]]
        if layout is not None:
            at = self.plan.indices(rank)
            for axis, placement in zip(layout.splits, layout.state(value, stop - start), strict=True):
                if isinstance(placement, Shard):
                    box = cut(box, placement.dim, placement.ranges(at[axis]))
        dim = self._batch_dim(value)
        if dim is None or not start:
            return box
        before = start * (self.sizes[value][dim](samples) // samples)
        moved = tuple((first + before, last + before) for first, last in box[dim])
        return (*box[:dim], moved, *box[dim + 1 :])


def taken(tensor: Tensor, box: Box) -> Tensor:
    """A box of a tensor, by positions; the tensor itself where it is all of it."""
    pieces = [tensor]
    for dim, ranges in enumerate(box):
        pieces = [piece.narrow(dim, first, last - first) for piece in pieces for first, last in ranges]
    if len(pieces) == 1:
        return pieces[0]
    result = tensor.new_empty([sum(last - first for first, last in ranges) for ranges in box])
    for into, piece in zip(_places(result, box), pieces, strict=True):
        into.copy_(piece)
    return result


def place(tensor: Tensor, box: Box, piece: Tensor, add: bool = False) -> None:
    """Write a piece to its positions in a tensor, or add it to what is there."""
    targets = [tensor]
    for dim, ranges in enumerate(box):
        targets = [target.narrow(dim, first, last - first) for target in targets for first, last in ranges]
    for target, own in zip(targets, _places(piece, box), strict=True):
        target.add_(own) if add else target.copy_(own)


def _places(piece: Tensor, box: Box) -> list[Tensor]:
    """The parts of a piece that its ranges lay side by side."""
    parts = [piece]
    for dim, ranges in enumerate(box):
        ends = list(itertools.accumulate((last - first for first, last in ranges), initial=0))
        parts = [part.narrow(dim, a, b - a) for part in parts for a, b in itertools.pairwise(ends)]
    return parts
