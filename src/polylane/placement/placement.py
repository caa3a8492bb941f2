"""Replicate, Shard, Partial: how one value lies on the ranks of one mesh axis, and so does its gradient."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

from polylane.graph.batch import split_bounds

# Where a dimension is cut: for each of its segments one position more than there are ranks. A plain dimension is one
# segment; three projections in one matrix (q, k and v) are three, each cut for itself.
Cuts = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Replicate:
    """Every rank has the whole value.

    Attributes:
        partial_gradient: whether the gradient that each rank computes is only a summand (it feeds operators of which
            the rank computes a part), or the whole gradient.
    """

    partial_gradient: bool = False

    def __str__(self) -> str:
        return "replicate*" if self.partial_gradient else "replicate"


@dataclass(frozen=True)
class Shard:
    """Every rank has a part along one dimension, possibly an empty one; its gradient lies alike.

    Attributes:
        dim: which dimension, from 0.
        cuts: where it is cut.
    """

    dim: int
    cuts: Cuts

    def __str__(self) -> str:
        return f"shard({self.dim})"

    @property
    def size(self) -> int:
        """Of the whole dimension."""
        return self.cuts[-1][-1]

    def ranges(self, index: int) -> tuple[tuple[int, int], ...]:
        """What rank ``index`` has of the dimension, as (start, stop), in ascending order; without empty ones."""
        return tuple((c[index], c[index + 1]) for c in self.cuts if c[index] < c[index + 1])

    def local_length(self, index: int) -> int:
        """How much rank ``index`` has of the dimension."""
        return sum(stop - start for start, stop in self.ranges(index))

    @property
    def largest_share(self) -> float:
        """The largest part, as a share of the whole."""
        return _largest_share(self.cuts)


@lru_cache(maxsize=2**14)
def _largest_share(cuts: Cuts) -> float:
    shard = Shard(0, cuts)
    return max(shard.local_length(i) for i in range(len(cuts[0]) - 1)) / max(shard.size, 1)


@dataclass(frozen=True)
class Partial:
    """Every rank has a summand of the value, in the whole shape; the gradient of each summand is that of the value."""

    def __str__(self) -> str:
        return "partial"


Placement = Replicate | Shard | Partial

REPLICATE = Replicate()
REPLICATE_PARTIAL_GRAD = Replicate(partial_gradient=True)
PARTIAL = Partial()


def gradient_placement(placement: Placement) -> Placement:
    """How the gradient of a value lies that lies so."""
    if isinstance(placement, Shard):
        return placement
    return PARTIAL if placement == REPLICATE_PARTIAL_GRAD else REPLICATE


@lru_cache(maxsize=1 << 16)
def even_cuts(size: int, degree: int, unit: int = 1) -> Cuts:
    """One segment, cut as evenly as whole units allow; the first ranks get more.

    Args:
        size: of the dimension, a multiple of ``unit``.
        unit: what must stay together (a head's features, say).
    """
    return ((0, *(stop * unit for _, stop in split_bounds(size // unit, degree))),)


def join_cuts(pieces: Sequence[Cuts]) -> Cuts:
    """Dimensions laid one behind the other, each with its own cuts, as one."""
    result: list[tuple[int, ...]] = []
    for cuts in pieces:
        offset = result[-1][-1] if result else 0
        result += [tuple(position + offset for position in segment) for segment in cuts]
    return simplify_cuts(tuple(result))


def simplify_cuts(cuts: Cuts) -> Cuts:
    """The same parts in as few segments as there can be: where the ranks only ascend, two segments are one.

    Parts that are equal have equal shortest forms, however they came about.
    """
    result: list[tuple[int, ...]] = []
    last = -1
    for segment in cuts:
        owners = [i for i in range(len(segment) - 1) if segment[i] < segment[i + 1]]
        if not owners:
            continue
        if result and owners[0] >= last:
            before = result.pop()
            segment = (*before[: owners[0] + 1], *segment[owners[0] + 1 :])
        result.append(segment)
        last = owners[-1]
    return tuple(result) or cuts[:1]


def scale_cuts(cuts: Cuts, unit: int) -> Cuts:
    """Cuts of a dimension whose every element becomes ``unit`` elements."""
    return tuple(tuple(position * unit for position in segment) for segment in cuts)


def divide_cuts(cuts: Cuts, unit: int) -> Cuts | None:
    """Cuts of a dimension of which ``unit`` elements become one, or None if a unit is cut through."""
    if any(position % unit for segment in cuts for position in segment):
        return None
    return tuple(tuple(position // unit for position in segment) for segment in cuts)


def repeat_cuts(cuts: Cuts, size: int, times: int) -> Cuts:
    """Cuts of ``times`` copies of a dimension of ``size``, one behind the other."""
    return join_cuts([cuts] * times) if size else cuts


def slice_cuts(cuts: Cuts, start: int, stop: int) -> Cuts:
    """Cuts of the piece from ``start`` to ``stop`` of a dimension; ranks that have nothing of it get empty parts."""
    clipped = [tuple(min(max(p, start), stop) - start for p in segment) for segment in cuts]
    return simplify_cuts(tuple(clipped))


def shard_same_dim(a: Placement, b: Placement) -> bool:
    """Whether both cut the same dimension: two axes cannot at a time."""
    return isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim


def local_shape(shape: Sequence[int], placement: Placement, index: int) -> tuple[int, ...]:
    """The shape that rank ``index`` has of a value."""
    if not isinstance(placement, Shard):
        return tuple(shape)
    return tuple(placement.local_length(index) if d == placement.dim else n for d, n in enumerate(shape))


def is_valid_placement(placement: Placement, shape: Sequence[int], degree: int) -> bool:
    """Whether a placement fits a value of this shape on so many ranks."""
    if not isinstance(placement, Shard):
        return True
    if not 0 <= placement.dim < len(shape) or placement.size != shape[placement.dim] or placement.cuts[0][0] != 0:
        return False
    ends = all(a[-1] == b[0] for a, b in pairwise(placement.cuts))
    return ends and all(len(s) == degree + 1 and list(s) == sorted(s) for s in placement.cuts)
