"""Relays: which piece of a value, or of its gradient, goes between which ranks of two stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from polylane.compile.batch_split import compute_shares
from polylane.graph.partition import Partition
from polylane.placement.placement import Shard
from polylane.plan.plan import Plan
from polylane.program.boxes import BoxTransfer, IndexBox, box_volume, cut_box, plan_reshard, relative_box, whole_box
from polylane.samples.batch_layout import BatchLayout
from polylane.sharding.stage_layouts import StageLayouts

Sizes = Mapping[str, tuple[Callable[[int], int], ...]]


@dataclass
class Resharder:
    """What one worker sends and receives of every value that crosses, for whatever number of samples.

    Where two stages have the same mesh, each rank talks to the one with the same coordinates. Elsewhere every element
    goes from one of those who have it to each of those who need it.

    Attributes:
        rank: this worker.
        plan: which rank is where.
        partition: for where the samples of a value lie.
        layouts: of every stage, how its operators are split.
        value_sizes: shapes of the values, for any number of samples.
        batch_layouts: how the parts of a batch make up a value.
    """

    rank: int
    plan: Plan
    partition: Partition
    layouts: StageLayouts
    value_sizes: Sizes
    batch_layouts: Mapping[str, BatchLayout]
    _known_transfers: dict[tuple[str, int, int, int, bool], tuple[BoxTransfer, ...]] = field(default_factory=dict)
    _boxes: dict[tuple[str, int, int], IndexBox] = field(default_factory=dict)

    def box_to_send(self, value: str, peer: int, samples: int, gradient: bool) -> IndexBox | None:
        """What of its own part of a value this worker sends to a peer, by positions in that part; None: nothing.

        Args:
            samples: of the whole microbatch.
            gradient: whether it is the value's gradient that travels.
        """
        return self._cached_piece(value, self.rank, peer, samples, gradient)

    def box_to_receive(self, value: str, peer: int, samples: int, gradient: bool) -> IndexBox | None:
        """What a peer sends of this worker's part, by positions in that; None: nothing."""
        return self._cached_piece(value, peer, self.rank, samples, gradient)

    def is_summed(self, value: str) -> bool:
        """Whether replicas of another stage with another number of them get the sum of what all replicas send."""
        return self.batch_layouts[value] in (BatchLayout.MEAN, BatchLayout.SUM)

    def send_factor(self, value: str, peer: int, samples: int, gradient: bool) -> float:
        """By what this worker multiplies what it sends to a peer.

        Of a mean over the samples in hand every consumer gets the mean over all samples, and of a sum its share of the
        sum over all: the loss, in which they count by samples, is the same, and so are the gradients.
        """
        stages = [self.plan.stage_and_replica(rank)[0] for rank in (self.rank, peer)]
        if not self.is_summed(value) or len(self._replica_ranks(stages[0])) == len(self._replica_ranks(stages[1])):
            return 1.0
        producer, consumer = (peer, self.rank) if gradient else (self.rank, peer)
        start, stop, weight = self._sample_range(
            producer if self.batch_layouts[value] is BatchLayout.MEAN else consumer, samples
        )
        return self._has_own_samples(producer, samples) * weight * (stop - start) / samples

    def _cached_piece(self, value: str, sender: int, receiver: int, samples: int, gradient: bool) -> IndexBox | None:
        stages = self.plan.stage_and_replica(sender)[0], self.plan.stage_and_replica(receiver)[0]
        own = self._cached_box(value, self.rank, samples)
        if self.plan.have_same_mesh(*stages):
            return relative_box(own, own) if box_volume(own) else None
        for transfer in self._plan_transfers(value, *stages, samples, gradient):
            if (transfer.sender, transfer.receiver) == (sender, receiver):
                return relative_box(own, transfer.box)
        return None

    def _plan_transfers(
        self, value: str, start: int, end: int, samples: int, gradient: bool
    ) -> tuple[BoxTransfer, ...]:
        key = (value, start, end, samples, gradient)
        if key not in self._known_transfers:
            self._known_transfers[key] = tuple(
                transfer
                for senders, receivers in self._exchange_groups(value, start, end, samples, gradient)
                for transfer in plan_reshard(
                    {rank: self._cached_box(value, rank, samples) for rank in senders},
                    {rank: self._cached_box(value, rank, samples) for rank in receivers},
                )
            )
        return self._known_transfers[key]

    def _exchange_groups(
        self, value: str, start: int, end: int, samples: int, gradient: bool
    ) -> list[tuple[list[int], list[int]]]:
        """Senders and receivers, in groups among which a value is exchanged."""
        replicas = [self._replica_ranks(stage) for stage in (start, end)]
        if len(replicas[0]) == len(replicas[1]):
            return list(zip(*replicas, strict=True))
        senders, receivers = replicas
        if self.is_summed(value):
            everyone = [rank for ranks in receivers for rank in ranks]
            return [(ranks, everyone) for ranks in senders]
        if gradient and self.batch_layouts[value] is BatchLayout.REPLICATED:
            # Every replica has a summand, of its own samples; whoever gets it, they are summed in the end.
            return [(ranks, receivers[i * len(receivers) // len(senders)]) for i, ranks in enumerate(senders)]
        # Who computes on another one's sample, for want of one of its own, is asked for nothing and owed no gradient.
        counting = [[r for rank in each for r in rank if self._has_own_samples(r, samples)] for each in replicas]
        every = [r for rank in replicas[1] for r in rank]
        return [(counting[0], counting[1] if gradient else every)]

    def _replica_ranks(self, stage: int) -> list[list[int]]:
        """The ranks of each of a stage's replicas; replicas that split operators between them are one."""
        devices = self.plan.stages[stage].devices
        if self.layouts.batch_is_sharded:
            return [list(devices)]
        size = len(devices) // self.plan.stages[stage].degree("data")
        return [list(devices[i : i + size]) for i in range(0, len(devices), size)]

    def _batch_dim(self, value: str) -> int | None:
        graph = self.partition.graph
        return graph.nodes[graph.positions[value]].batch_dim

    def _sample_range(self, rank: int, samples: int) -> tuple[int, int, int]:
        stage, replica = self.plan.stage_and_replica(rank)
        if self.layouts.batch_is_sharded:
            return 0, samples, 1
        (share,) = compute_shares(samples, 1, self.plan.stages[stage].degree("data"), replica)
        return share.start, share.stop, share.weight

    def _has_own_samples(self, rank: int, samples: int) -> bool:
        return bool(self._sample_range(rank, samples)[2])

    def _cached_box(self, value: str, rank: int, samples: int) -> IndexBox:
        """What a rank has of a value of a whole microbatch."""
        if (value, rank, samples) not in self._boxes:
            self._boxes[value, rank, samples] = self._find_box(value, rank, samples)
        return self._boxes[value, rank, samples]

    def _find_box(self, value: str, rank: int, samples: int) -> IndexBox:
        start, stop, _ = self._sample_range(rank, samples)
        box = whole_box(size(stop - start) for size in self.value_sizes[value])
        layout = self.layouts[self.plan.stage_and_replica(rank)[0]]
        if layout is not None:
            at = self.plan.indices(rank)
            for axis, placement in zip(layout.splits, layout.state(value, stop - start), strict=True):
                if isinstance(placement, Shard):
                    box = cut_box(box, placement.dim, placement.ranges(at[axis]))
        dim = self._batch_dim(value)
        if dim is None or not start:
            return box
        before = start * (self.value_sizes[value][dim](samples) // samples)
        moved = tuple((first + before, last + before) for first, last in box[dim])
        return (*box[:dim], moved, *box[dim + 1 :])


def extract_box(tensor: Tensor, box: IndexBox) -> Tensor:
    """A box of a tensor, by positions; the tensor itself where it is all of it."""
    pieces = [tensor]
    for dim, ranges in enumerate(box):
        pieces = [piece.narrow(dim, first, last - first) for piece in pieces for first, last in ranges]
    if len(pieces) == 1:
        return pieces[0]
    result = tensor.new_empty([sum(last - first for first, last in ranges) for ranges in box])
    for into, piece in zip(_split_by_ranges(result, box), pieces, strict=True):
        into.copy_(piece)
    return result


def write_box(tensor: Tensor, box: IndexBox, piece: Tensor, add: bool = False) -> None:
    """Write a piece to its positions in a tensor, or add it to what is there."""
    targets = [tensor]
    for dim, ranges in enumerate(box):
        targets = [target.narrow(dim, first, last - first) for target in targets for first, last in ranges]
    for target, own in zip(targets, _split_by_ranges(piece, box), strict=True):
        target.add_(own) if add else target.copy_(own)


def _split_by_ranges(piece: Tensor, box: IndexBox) -> list[Tensor]:
    """The parts of a piece that its ranges lay side by side."""
    parts = [piece]
    for dim, ranges in enumerate(box):
        ends = list(itertools.accumulate((last - first for first, last in ranges), initial=0))
        parts = [part.narrow(dim, a, b - a) for part in parts for a, b in itertools.pairwise(ends)]
    return parts
