"""Placements: how a value, and its gradient, is laid out over the ranks of one mesh axis (as DTensor's, torch 2)."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from polylane.graph.traced_sizes import traced_max, traced_min

# Positions at which a dimension is cut: for each segment, one more than there are ranks. A plain dimension is one
# segment; three projections in one matrix (q, k and v) are three, each cut separately. With ((0, 2, 4), (4, 6, 8)),
# rank 0 has the positions 0, 1, 4 and 5, and rank 1 has 2, 3, 6 and 7.
Cuts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole value.

    Attributes:
        partial_gradient: True if each rank computes a partial sum of the gradient, because the value feeds operators of
            which the rank computes a part; False if each rank computes the whole gradient.
    """

    partial_gradient: bool = False

    def __str__(self) -> str:
        return "replicate*" if self.partial_gradient else "replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank has a part along one dimension, possibly an empty one; the gradient is sharded in the same way.

    Attributes:
        dim: index of the sharded dimension, from 0.
        cuts: positions at which the dimension is cut, see :data:`Cuts`.
    """

    dim: int
    cuts: Cuts

    def __str__(self) -> str:
        return f"shard({self.dim})"

    @property
    def size(self) -> int:
        """Length of the whole dimension."""
        return self.cuts[-1][-1]

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """Return the ranges of rank ``index`` as (start, stop), ascending, without empty ones."""
        return tuple((c[index], c[index + 1]) for c in self.cuts if c[index] < c[index + 1])

    def local_length(self, index: int) -> int:
        """Return the length of rank ``index``'s part of the dimension."""
        return sum(stop - start for start, stop in self.ranges(index))

    @property
    def ranges_by_rank(self) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The ranges of every rank, in the order of ranks."""
        return tuple(self.ranges(index) for index in range(len(self.cuts[0]) - 1))

    @property
    def largest_share(self) -> float:
        """Length of the largest part over the length of the whole."""
        return _largest_share(self.cuts)


@lru_cache(maxsize=2**14)
def _largest_share(cuts: Cuts) -> float:
    shard = Shard(0, cuts)
    return max(shard.local_length(i) for i in range(len(cuts[0]) - 1)) / max(shard.size, 1)


@dataclass(frozen=True)
class Partial:
    """Every rank has a partial sum of the value, in its whole shape; each rank's gradient is the whole value's."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
REPLICATE_PARTIAL_GRAD = Replicate(partial_gradient=True)
PARTIAL = Partial()


def gradient_placement(placement: Placement) -> Placement:
    """Return the placement of a value's gradient: Partial becomes Replicate and the reverse, Shard stays."""
    if isinstance(placement, Shard):
        return placement
    # Duality: every rank's partial sum has the gradient of the sum itself, so that a Partial's gradient is replicated.
    return PARTIAL if placement == REPLICATE_PARTIAL_GRAD else REPLICATE


def even_cuts(size: int, degree: int) -> Cuts:
    """Return cuts of one segment, as even as possible, over ``degree`` ranks; the first ranks get the longer parts."""
    return _even_cuts(size, degree) if isinstance(size, int) else _cut_evenly(size, degree)


def _cut_evenly(size: int, degree: int) -> Cuts:
    # The sizes of split_bounds, without deciding anything: a traced size then stands for even and odd ones.
    return ((0, *itertools.accumulate((size + degree - 1 - i) // degree for i in range(degree))),)


_even_cuts = lru_cache(maxsize=1 << 16)(_cut_evenly)


def join_cuts(pieces: Sequence[Cuts]) -> Cuts:
    """Return the cuts of a dimension that consists of ``pieces``, one after the other, each with its own cuts."""
    result: list[tuple[int, ...]] = []
    for cuts in pieces:
        offset = result[-1][-1] if result else 0
        result += [tuple(position + offset for position in segment) for segment in cuts]
    return simplify_cuts(tuple(result))


def simplify_cuts(cuts: Cuts) -> Cuts:
    """Return the same parts in as few segments as possible: neighbouring segments merge while the ranks ascend.

    Equal parts have equal simplified cuts, so that cuts can be compared by ``==``.
    """
    result: list[tuple[int, ...]] = []
    last_owner = -1
    for segment in cuts:
        # The ranks that have something of this segment, ascending; it can be joined if none of them precedes the last
        # owner.
        owners = [i for i in range(len(segment) - 1) if segment[i] < segment[i + 1]]
        if not owners:
            continue
        if result and owners[0] >= last_owner:
            # Positions up to the first owner's start come from the segment before, the others from this one.
            previous_segment = result.pop()
            segment = (*previous_segment[: owners[0] + 1], *segment[owners[0] + 1 :])
        result.append(segment)
        last_owner = owners[-1]
    return tuple(result) or cuts[:1]


def scale_cuts(cuts: Cuts, unit: int) -> Cuts:
    """Return the cuts after every element of the dimension becomes ``unit`` elements."""
    return tuple(tuple(position * unit for position in segment) for segment in cuts)


def divide_cuts(cuts: Cuts, unit: int) -> Cuts | None:
    """Return the cuts after each ``unit`` elements become one, or None if a cut goes through such a unit."""
    if any(position % unit for segment in cuts for position in segment):
        return None
    return tuple(tuple(position // unit for position in segment) for segment in cuts)


def repeat_cuts(cuts: Cuts, size: int, times: int) -> Cuts:
    """Return the cuts of ``times`` copies of a dimension of length ``size``, one after the other."""
    return join_cuts([cuts] * times) if size else cuts


def slice_cuts(cuts: Cuts, start: int, stop: int) -> Cuts:
    """Return the cuts of the slice [start, stop) of a dimension; ranks that have nothing of it get empty parts."""
    clipped = [tuple(traced_min(traced_max(p, start), stop) - start for p in segment) for segment in cuts]
    return simplify_cuts(tuple(clipped))


def with_offsets(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Yield the ranges (start, stop) of a rank's part, each with the position of its start in the part."""
    offset = 0
    for start, stop in ranges:
        yield start, stop, offset
        offset += stop - start


def contiguous_ranges(positions: Iterable[int]) -> list[tuple[int, int]]:
    """Return the disjoint ranges that hold these positions, in ascending order."""
    ranges = list[tuple[int, int]]()
    for p in sorted(set(positions)):
        if ranges and ranges[-1][1] == p:
            ranges[-1] = (ranges[-1][0], p + 1)
        else:
            ranges.append((p, p + 1))
    return ranges


def shard_same_dim(a: Placement, b: Placement) -> bool:
    """Return whether both shard the same dimension: two mesh axes must not do so at the same time."""
    return isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim


def local_shape(shape: Sequence[int], placement: Placement, index: int) -> tuple[int, ...]:
    """Return the shape of rank ``index``'s part of a value."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    return tuple(placement.local_length(index) if d == placement.dim else n for d, n in enumerate(shape))


def is_valid_placement(placement: Placement, shape: Sequence[int], degree: int) -> bool:
    """Return whether a placement fits a value of this shape on an axis of ``degree`` ranks."""
    if not isinstance(placement, Shard):
        return True
    if not 0 <= placement.dim < len(shape) or placement.size != shape[placement.dim] or placement.cuts[0][0] != 0:
        return False
    # Segments join without gaps, and no rank has a negative length.
    ends = all(a[-1] == b[0] for a, b in pairwise(placement.cuts))
    return ends and all(len(s) == degree + 1 and list(s) == sorted(s) for s in placement.cuts)
