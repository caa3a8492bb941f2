"""Cross-stage values: their dtypes and shapes, and which box of one goes between which ranks of two stages.

Between stages with the same mesh each rank exchanges its whole shard with its counterpart. Else transfers are planned
by :func:`polylane.program.boxes.plan_reshard` among groups of senders and receivers, which depend on the number of
replicas (the "data" degree) of both stages and on the batch layout of the value:

    replicas     batch layout                   from                       to
    equal        any                            replica i                  replica i
    different    MEAN, SUM                      each replica               all ranks, which add up what they receive
    different    REPLICATED, its gradient       each replica               one replica; they are summed in the end
    different    else, the value                all ranks with samples     all ranks
    different    else, the gradient             all ranks with samples     all ranks with samples
    in turn      any                            the replica of the one     that of the other stage, of a microbatch

A value split by sample (6 samples) from data=2, ranks 0 and 1, to data=3, ranks 2 to 4:

    sample       0  1  2  3  4  5
    sender       0  0  0  1  1  1
    receiver     2  2  3  3  4  4          0 -> 2: 0, 1     0 -> 3: 2     1 -> 3: 3     1 -> 4: 4, 5
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from polylane.compile.sample_shares import compute_shares
from polylane.graph.open_sizes import SizeFunction
from polylane.graph.partition import Partition
from polylane.graph.symbolic_sizes import open_size_function, size_function
from polylane.placement.placement import Shard
from polylane.plan.plan import Plan
from polylane.program.boxes import BoxTransfer, IndexBox, box_volume, cut_box, plan_reshard, relative_box, whole_box
from polylane.samples.batch_layout import BatchLayout
from polylane.sharding.layout import Layout
from polylane.sharding.stage_layouts import StageLayouts


@dataclass(frozen=True)
class ValueSpec:
    """Dtype and shape of a value that crosses between stages, for any number of samples.

    Attributes:
        name: name of the node that computes the value.
        dtype: dtype in which it is computed and sent.
        sizes: for each dimension of the whole value, its size as a function of the number of samples and of the
            batch's open sizes.
        layout: how this worker's stage shards its operators; None where it does not.
        coordinates: this worker's index on each axis of its mesh.
        open_sizes: the sizes of the batch that the graph leaves open.
    """

    name: str
    dtype: torch.dtype
    sizes: tuple[SizeFunction, ...]
    layout: Layout | None = None
    coordinates: Mapping[str, int] = field(default_factory=dict)
    open_sizes: tuple[int, ...] = ()

    def whole_shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of the whole value, for that number of samples."""
        return tuple(size(samples, *self.open_sizes) for size in self.sizes)

    def shape(self, samples: int) -> tuple[int, ...]:
        """Return the shape of this worker's shard, for that number of samples."""
        full_shape = self.whole_shape(samples)
        if self.layout is None:
            return full_shape
        return self.layout.local_shape(self.name, full_shape, samples, self.coordinates, self.open_sizes)


def value_specs(
    partition: Partition,
    dtypes: Mapping[str, torch.dtype],
    layout: Layout | None = None,
    coordinates: Mapping[str, int] | None = None,
) -> dict[str, ValueSpec]:
    """Describe every crossing value, by name; ``dtypes`` overrides those of the capture (autocast changes them)."""
    code, crossing = partition.graph.code, {c.value for c in partition.crossings}
    nodes = [n for n in code.fx.nodes if n.op == "call_function" and n.meta["name"] in crossing]
    values = {n.meta["name"]: n.meta.get("open", n.meta["val"]) for n in nodes}

    def sizes_of(value: Tensor) -> tuple[SizeFunction, ...]:
        if code.open is None:
            return tuple(size_function(size) for size in value.shape)
        return tuple(open_size_function(size, code.open_symbols) for size in value.shape)

    return {
        name: ValueSpec(name, dtypes.get(name, val.dtype), sizes_of(val), layout, coordinates or {}, code.nominal_sizes)
        for name, val in values.items()
    }


@dataclass(frozen=True)
class SentShare:
    """The share of a summed value that is sent: some of a microbatch's samples of all of them.

    Attributes:
        start, stop: range of samples; empty for nothing.
        samples: number of samples of the whole microbatch.
    """

    start: int
    stop: int
    samples: int

    def take_from(self, value: Tensor) -> Tensor:
        """Return the share of a value, in its dtype.

        Of integers (counts), which have no fractions, each range of samples gets a part such that all add up to the
        value: 7 for three samples are 2, 2 and 3.
        """
        if self.stop - self.start == self.samples:
            return value
        if value.is_floating_point() or value.is_complex():
            return value * ((self.stop - self.start) / self.samples)
        wide = value.to(torch.int64)
        begin, behind = (torch.div(wide * end, self.samples, rounding_mode="floor") for end in (self.start, self.stop))
        return (behind - begin).to(value.dtype)


@dataclass
class Resharder:
    """Boxes that one worker sends and receives of every crossing value, for any number of samples.

    Where two stages have the same mesh, each rank exchanges with the one that has the same coordinates. Elsewhere each
    element goes from one of the ranks that have it to each rank that needs it.

    Attributes:
        rank: rank of this worker.
        plan: the plan, for the mesh of every stage.
        partition: the graph and its cuts, for the batch dimension of each value.
        layouts: for every stage, how its operators are sharded.
        value_specs: by value, its dtype and its sizes for any number of samples.
        batch_layouts: by value, how the parts of a batch make it up.
    """

    rank: int
    plan: Plan
    partition: Partition
    layouts: StageLayouts
    value_specs: Mapping[str, ValueSpec]
    batch_layouts: Mapping[str, BatchLayout]
    _known_transfers: dict[tuple[str, int, int, int, bool, int, int], tuple[BoxTransfer, ...]] = field(
        default_factory=dict
    )
    _boxes: dict[tuple[str, int, int], IndexBox] = field(default_factory=dict)

    def at_sizes(self, open_sizes: tuple[int, ...]) -> Resharder:
        """Return the resharder for batches of which the sizes that the graph leaves open are these."""
        if not open_sizes:
            return self
        specs = {name: replace(spec, open_sizes=open_sizes) for name, spec in self.value_specs.items()}
        return replace(self, value_specs=specs, _known_transfers={}, _boxes={})

    def box_to_send(self, value: str, peer: int, samples: int, gradient: bool) -> IndexBox | None:
        """Return the box that this worker sends to a peer, by positions in its own shard; None: nothing.

        Args:
            value: name of the value that crosses.
            peer: rank of the receiver, on another stage.
            samples: number of samples of the whole microbatch, over all replicas.
            gradient: whether the value's gradient is sent, not the value itself.
        """
        return self._cached_piece(value, self.rank, peer, samples, gradient)

    def box_to_receive(self, value: str, peer: int, samples: int, gradient: bool) -> IndexBox | None:
        """Return the box that a peer sends to this worker, by positions in this worker's own shard; None: nothing."""
        return self._cached_piece(value, peer, self.rank, samples, gradient)

    def is_summed(self, value: str) -> bool:
        """Return whether a stage with another number of replicas receives the sum of what all replicas send."""
        return self.batch_layouts[value] in (BatchLayout.MEAN, BatchLayout.SUM)

    def sent_share(self, value: str, peer: int, samples: int, gradient: bool) -> SentShare | None:
        """Return the share that this worker sends to a peer of what it has; None: all.

        It is all but for means and sums over samples between different numbers of replicas. With n samples, of which
        the producer of the value has p and the consumer c, it is p/n for a mean: the consumers' sums are the mean over
        all samples. For a sum it is c/n: each consumer gets its share of the sum over all samples. The loss weights
        replicas by samples, so it is that of one device. Gradients get the same factors on the way back.
        """
        stages = [self.plan.stage_and_replica(rank)[0] for rank in (self.rank, peer)]
        is_equal = len(self._replica_ranks(stages[0])) == len(self._replica_ranks(stages[1]))
        if is_equal or self.plan.takes_turns or not self.is_summed(value):
            return None
        producer, consumer = (peer, self.rank) if gradient else (self.rank, peer)
        start, stop, weight = self._sample_range(
            producer if self.batch_layouts[value] is BatchLayout.MEAN else consumer, samples
        )
        counts = weight and self._has_own_samples(producer, samples)
        return SentShare(start, stop if counts else start, samples)

    def _cached_piece(self, value: str, sender: int, receiver: int, samples: int, gradient: bool) -> IndexBox | None:
        (start, first), (end, second) = map(self.plan.stage_and_replica, (sender, receiver))
        own_box = self._cached_box(value, self.rank, samples)
        # Same mesh: all of this worker's shard goes to its counterpart. An empty shard makes no message.
        if self.plan.exchanges_shards(start, end):
            return relative_box(own_box, own_box) if box_volume(own_box) else None
        # Only where replicas take turns does it matter which of them it is: each has the whole microbatch.
        turns = (first, second) if self.plan.takes_turns else (0, 0)
        for transfer in self._plan_transfers(value, start, end, samples, gradient, turns):
            if (transfer.sender, transfer.receiver) == (sender, receiver):
                return relative_box(own_box, transfer.box)
        return None

    def _plan_transfers(
        self, value: str, start: int, end: int, samples: int, gradient: bool, turns: tuple[int, int] = (0, 0)
    ) -> tuple[BoxTransfer, ...]:
        key = (value, start, end, samples, gradient, *turns)
        if key not in self._known_transfers:
            self._known_transfers[key] = tuple(
                transfer
                for senders, receivers in self._exchange_groups(value, start, end, samples, gradient, turns)
                for transfer in plan_reshard(
                    {rank: self._cached_box(value, rank, samples) for rank in senders},
                    {rank: self._cached_box(value, rank, samples) for rank in receivers},
                )
            )
        return self._known_transfers[key]

    def _exchange_groups(
        self, value: str, start: int, end: int, samples: int, gradient: bool, turns: tuple[int, int]
    ) -> list[tuple[list[int], list[int]]]:
        """Return (senders, receivers) of each group among which a value is resharded; the table of the module."""
        replicas = [self._replica_ranks(stage) for stage in (start, end)]
        if self.plan.takes_turns:
            return [(replicas[0][turns[0]], replicas[1][turns[1]])]
        if len(replicas[0]) == len(replicas[1]):
            return list(zip(*replicas, strict=True))
        senders, receivers = replicas
        # One group for each sending replica: within a group no element is sent twice, over all groups they are summed.
        if self.is_summed(value):
            everyone = [rank for ranks in receivers for rank in ranks]
            return [(ranks, everyone) for ranks in senders]
        if gradient and self.batch_layouts[value] is BatchLayout.REPLICATED:
            # Every replica has the partial sum over its own samples. It may go to any one replica, because the
            # gradients of all replicas are summed in the end.
            return [(ranks, receivers[i * len(receivers) // len(senders)]) for i, ranks in enumerate(senders)]
        # Ranks without samples run on a padding sample; they send no values and get no gradients. They do receive
        # values, to run on. As senders their boxes would overlap those of the rank that has this sample.
        counting = [[r for rank in groups for r in rank if self._has_own_samples(r, samples)] for groups in replicas]
        all_ranks = [r for rank in replicas[1] for r in rank]
        return [(counting[0], counting[1] if gradient else all_ranks)]

    def _replica_ranks(self, stage: int) -> list[list[int]]:
        """Return the ranks of each of a stage's replicas; all of them as one if the batch dimension is sharded."""
        devices = self.plan.stages[stage].devices
        if self.layouts.batch_is_sharded:
            return [list(devices)]
        size = len(devices) // self.plan.stages[stage].degree("data")
        return [list(devices[i : i + size]) for i in range(0, len(devices), size)]

    def _sample_range(self, rank: int, samples: int) -> tuple[int, int, int]:
        stage, replica = self.plan.stage_and_replica(rank)
        if self.layouts.batch_is_sharded or self.plan.takes_turns:
            return 0, samples, 1
        (share,) = compute_shares(samples, 1, self.plan.shares or self.plan.degree("data", stage), replica)
        return share.start, share.stop, share.weight

    def _has_own_samples(self, rank: int, samples: int) -> bool:
        return bool(self._sample_range(rank, samples)[2])

    def _cached_box(self, value: str, rank: int, samples: int) -> IndexBox:
        """Return the box that a rank has of a value of a whole microbatch."""
        if (value, rank, samples) not in self._boxes:
            self._boxes[value, rank, samples] = self._find_box(value, rank, samples)
        return self._boxes[value, rank, samples]

    def _find_box(self, value: str, rank: int, samples: int) -> IndexBox:
        # The rank's shard of its own samples first, by the placements of its stage, with its first sample at index 0.
        start, stop, _ = self._sample_range(rank, samples)
        spec = self.value_specs[value]
        box = whole_box(spec.whole_shape(stop - start))
        layout = self.layouts[self.plan.stage_and_replica(rank)[0]]
        if layout is not None:
            at = self.plan.indices(rank)
            for axis, placement in zip(layout.splits, layout.state(value, stop - start, spec.open_sizes), strict=True):
                if isinstance(placement, Shard):
                    box = cut_box(box, placement.dim, placement.ranges(at[axis]))
        graph = self.partition.graph
        dim = graph.nodes[graph.positions[value]].batch_dim
        if dim is None or not start:
            return box
        # Then moved along the batch dimension to where its samples are in the microbatch. A value may have several rows
        # for each sample.
        offset = start * (spec.whole_shape(samples)[dim] // samples)
        moved = tuple((begin + offset, end + offset) for begin, end in box[dim])
        return (*box[:dim], moved, *box[dim + 1 :])


def extract_box(tensor: Tensor, box: IndexBox) -> Tensor:
    """Copy a box out of a tensor, by positions; a view of the tensor where each dimension has one range."""
    pieces = [tensor]
    for dim, ranges in enumerate(box):
        pieces = [piece.narrow(dim, begin, end - begin) for piece in pieces for begin, end in ranges]
    if len(pieces) == 1:
        return pieces[0]
    result = tensor.new_empty([sum(end - begin for begin, end in ranges) for ranges in box])
    for into, piece in zip(_split_by_ranges(result, box), pieces, strict=True):
        into.copy_(piece)
    return result


def write_box(tensor: Tensor, box: IndexBox, piece: Tensor, add: bool = False) -> None:
    """Write a piece to the positions of a box in a tensor, or add it to what is there."""
    targets = [tensor]
    for dim, ranges in enumerate(box):
        targets = [target.narrow(dim, begin, end - begin) for target in targets for begin, end in ranges]
    for target, part in zip(targets, _split_by_ranges(piece, box), strict=True):
        target.add_(part) if add else target.copy_(part)


def _split_by_ranges(piece: Tensor, box: IndexBox) -> list[Tensor]:
    """Split a piece, in which the ranges of a box are side by side, into one part for each combination of ranges."""
    parts = [piece]
    for dim, ranges in enumerate(box):
        ends = list(itertools.accumulate((end - begin for begin, end in ranges), initial=0))
        parts = [part.narrow(dim, a, b - a) for part in parts for a, b in itertools.pairwise(ends)]
    return parts
