"""Regions: which elements of a global tensor a worker holds, as rectangles that files can be cut into and read from.

A worker holds an index box of a tensor (tensor parallelism), and under ZeRO a range of the box's elements in row-major
order. Both become rectangles, each with an offset and a shape in the global tensor. Elements 3 to 9 of a tensor of 3
rows and 4 columns are three:

    . . . a         offset (0, 3), shape (1, 1)
    b b b b         offset (1, 0), shape (1, 4)
    c . . .         offset (2, 0), shape (1, 1)
"""

from __future__ import annotations

import itertools
import math
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from polylane.program.boxes import IndexBox, box_shape, with_positions

Span = tuple[int, int]  # (begin, end) of elements in row-major order

_PRIME = 2**127 - 1  # of a field so large that different polynomials practically never have equal values
_MOST_COMPARED = 2**20  # pairs of rectangles, in search of two that overlap


@dataclass(frozen=True, slots=True)
class Rectangle:
    """A block of consecutive indices in every dimension of a global tensor.

    Attributes:
        offsets: first index in each dimension.
        shape: length in each dimension.
    """

    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Rectangle) -> Rectangle | None:
        """Return the common rectangle; None if there is none."""
        begins = tuple(map(max, self.offsets, other.offsets))
        pairs = zip(self.offsets, self.shape, other.offsets, other.shape, begins, strict=True)
        shape = tuple(min(a + n, b + m) - begin for a, n, b, m, begin in pairs)
        return Rectangle(begins, shape) if all(length > 0 for length in shape) else None

    def slices_in(self, outer: Rectangle) -> tuple[slice, ...]:
        """Return the slices of this rectangle in the tensor that holds an outer one."""
        starts = [offset - outer_offset for offset, outer_offset in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + length) for start, length in zip(starts, self.shape, strict=True))


def cover_once(shape: Sequence[int], rectangles: Iterable[Rectangle]) -> bool:
    """Return whether each element of a tensor is in exactly one of some rectangles; in time linear in their number.

    A rectangle is the product of differences p(end) - p(begin) over the dimensions, where p of each coordinate is an
    unknown. Rectangles hold every element once exactly where the sum of their products is the product of the whole
    tensor as a polynomial: what is common to neighbours cancels out, and nothing else does. Two polynomials are equal
    if they are at a random point (Schwartz and Zippel), but for a chance of 64 dimensions in 2^127.

    Args:
        shape: number of elements of the tensor in each dimension.
        rectangles: parts of the tensor, which may overlap and leave gaps.
    """
    points: defaultdict[tuple[int, int], int] = defaultdict(lambda: secrets.randbelow(_PRIME))

    def product(begins: Sequence[int], lengths: Sequence[int]) -> int:
        value = 1
        for dim, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            value = value * (points[dim, begin + length] - points[dim, begin]) % _PRIME
        return value

    total = sum(product(rectangle.offsets, rectangle.shape) for rectangle in rectangles)
    return (total - product((0,) * len(shape), shape)) % _PRIME == 0


def find_overlap(rectangles: Sequence[Rectangle]) -> tuple[int, int] | None:
    """Return the indices of two rectangles with common elements; None where none were found in bounded time."""
    # A sweep along the first dimension: rectangles that end before the present one begins are dropped for good.
    active, compared = list[int](), 0
    for index in sorted(range(len(rectangles)), key=lambda index: rectangles[index].offsets[:1]):
        rectangle = rectangles[index]
        if rectangle.offsets:
            active = [i for i in active if rectangles[i].offsets[0] + rectangles[i].shape[0] > rectangle.offsets[0]]
        for candidate in active:
            if rectangles[candidate].intersect(rectangle) is not None:
                return candidate, index
        active.append(index)
        compared += len(active)
        if compared > _MOST_COMPARED:
            break
    return None


@dataclass(frozen=True, slots=True)
class LocalPiece:
    """A rectangle of a global tensor, and where a worker has it in its local tensor.

    Attributes:
        rectangle: the block of the global tensor.
        start: element of the local vector at which ``block`` begins; None: the block is the whole local tensor.
        block: shape of the consecutive elements of the local vector that the rectangle is in.
        slices: the rectangle in the block.
    """

    rectangle: Rectangle
    start: int | None
    block: tuple[int, ...]
    slices: tuple[slice, ...]


def cut_pieces(box: IndexBox, span: Span | None = None) -> list[LocalPiece]:
    """Cut what a worker holds of a tensor into rectangles.

    Args:
        box: indices of the global tensor in the worker's part, side by side in its local tensor.
        span: the elements of that part that the worker has as a vector; None: it has all, in the part's own shape.
    """
    shape = box_shape(box)
    if span is None:
        return list(_cut_block(box, (0,) * len(shape), shape, None))
    pieces, start = list[LocalPiece](), 0
    for offsets, block in cut_span(shape, *span):
        pieces += _cut_block(box, offsets, block, start)
        start += math.prod(block)
    return pieces


def cut_span(shape: Sequence[int], begin: int, end: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield (offsets, shape) of the blocks that hold elements ``begin`` to ``end`` of a tensor, in row-major order."""
    if end <= begin:
        return
    if len(shape) <= 1:
        yield ((begin,), (end - begin,)) if shape else ((), ())
        return
    row = math.prod(shape[1:])
    (first_row, skipped), (last_row, remainder) = divmod(begin, row), divmod(end, row)
    if first_row == last_row:
        yield from _in_row(first_row, cut_span(shape[1:], skipped, remainder))
        return
    if skipped:  # the end of a row
        yield from _in_row(first_row, cut_span(shape[1:], skipped, row))
        first_row += 1
    if first_row < last_row:  # full rows
        yield (first_row, *(0 for _ in shape[1:])), (last_row - first_row, *shape[1:])
    if remainder:  # the beginning of a row
        yield from _in_row(last_row, cut_span(shape[1:], 0, remainder))


def _in_row(
    row: int, blocks: Iterator[tuple[tuple[int, ...], tuple[int, ...]]]
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    return (((row, *offsets), (1, *shape)) for offsets, shape in blocks)


def _cut_block(
    box: IndexBox, offsets: Sequence[int], block: tuple[int, ...], start: int | None
) -> Iterator[LocalPiece]:
    """Yield the rectangles of a block of the local tensor: one for each choice of a range of the box in each dimension.

    Args:
        box: indices of the global tensor in the worker's part.
        offsets: first index of the block in the local tensor, in each dimension.
        block: shape of the block.
        start: element of the local vector at which the block begins, or None.
    """
    # By dimension: (first global index, first index in the block, length) of every range in the block.
    dim_parts = []
    for ranges, low, length in zip(box, offsets, block, strict=True):
        parts = []
        for first_index, at, size in with_positions(ranges):
            begin, end = max(at, low), min(at + size, low + length)
            if begin < end:
                parts.append((first_index + begin - at, begin - low, end - begin))
        dim_parts.append(parts)
    for choice in itertools.product(*dim_parts):
        rectangle = Rectangle(tuple(c[0] for c in choice), tuple(c[2] for c in choice))
        yield LocalPiece(rectangle, start, block, tuple(slice(c[1], c[1] + c[2]) for c in choice))
