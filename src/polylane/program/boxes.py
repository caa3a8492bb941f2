"""Resharding: which part of a value goes from which rank to which, between two sets of ranks that shard it differently.

Shards are boxes of index ranges. The intersection of a sender's box and a receiver's box is what the one has and the
other needs; ranks with the same box split the work. No element is sent twice to the same rank. A value of 4 rows and 6
columns, sharded by columns over ranks 0 and 1, then by rows over ranks 2 and 3:

    held by                  needed by                transfers
         0 1 2 3 4 5              0 1 2 3 4 5
    0    0 0 0 1 1 1         0    2 2 2 2 2 2         0 -> 2    rows 0:2, columns 0:3
    1    0 0 0 1 1 1         1    2 2 2 2 2 2         1 -> 2    rows 0:2, columns 3:6
    2    0 0 0 1 1 1         2    3 3 3 3 3 3         0 -> 3    rows 2:4, columns 0:3
    3    0 0 0 1 1 1         3    3 3 3 3 3 3         1 -> 3    rows 2:4, columns 3:6

The box of rank 1 is (((0, 4),), ((3, 6),)): one range in each dimension. A dimension may have several ranges; in the
tensor that holds such a box they are side by side:

    index of the whole value     0 1 2 3 4 5 6 7 8 9
    ((2, 5), (8, 10))                2 3 4       8 9
    position in the tensor           0 1 2       3 4
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # (start, stop), ascending, neither overlapping nor adjacent
IndexBox = tuple[Ranges, ...]  # for every dimension the indices that are in the box; () for a scalar


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """A box that is sent from one rank to another, or kept where sender and receiver are the same rank."""

    sender: int
    receiver: int
    box: IndexBox


def plan_reshard(holders: Mapping[int, IndexBox], needs: Mapping[int, IndexBox]) -> tuple[BoxTransfer, ...]:
    """Plan the transfers by which every receiver gets each element that it needs exactly once.

    A receiver gets nothing from others that it has itself. Where several ranks have the same box, they send equal parts
    of what is needed of it, in as few messages as possible.

    Args:
        holders: by rank, the box that it has; boxes must be identical or disjoint.
        needs: by rank, the box that it shall have; these may overlap.

    Raises:
        ValueError: a rank needs elements that no rank has, or holders' boxes overlap without being identical.
    """
    # Ranks with equal boxes are replicas of a shard: each pair of boxes is planned for once.
    having, asking = _group_equal_boxes(holders), _group_equal_boxes(needs)
    transfers: list[BoxTransfer] = []
    for need, receivers in asking.items():
        volume = 0
        for box, senders in having.items():
            atom = intersect(box, need)
            if box_volume(atom):
                volume += box_volume(atom)
                local_ranks = [rank for rank in receivers if rank in senders]
                transfers += [BoxTransfer(rank, rank, atom) for rank in local_ranks]
                transfers += _spread_box(atom, senders, [rank for rank in receivers if rank not in senders])
        # The holders' boxes are disjoint if the parts of a need add up to it; more than that means that they overlap.
        if volume != box_volume(need):
            verb = "has" if volume < box_volume(need) else "has exactly once"
            raise ValueError(f"nobody {verb} {need}, which ranks {receivers} need")
    return tuple(transfers)


def _group_equal_boxes(boxes: Mapping[int, IndexBox]) -> dict[IndexBox, list[int]]:
    groups: dict[IndexBox, list[int]] = {}
    for rank in sorted(boxes):
        if box_volume(boxes[rank]):
            groups.setdefault(boxes[rank], []).append(rank)
    return groups


def _spread_box(atom: IndexBox, senders: Sequence[int], receivers: Sequence[int]) -> list[BoxTransfer]:
    """Send a box to every receiver, with equal shares of the total volume for the senders.

    The receivers' copies are put end to end and cut into equal parts, one for each sender (McNaughton's wrap-around
    rule). With as many senders as receivers each pair exchanges one whole box. Two senders, three receivers, a box of
    length 4:

        receiver     0             1             2
        position     0  1  2  3    0  1  2  3    0  1  2  3
        sender       0  0  0  0    0  0  1  1    1  1  1  1
    """
    if not receivers:
        return []
    # Cut along the first dimension that is long enough for all senders, or along the longest.
    along = max(range(len(atom)), key=lambda d: (min(ranges_length(atom[d]), len(senders)), -d), default=-1)
    size = ranges_length(atom[along]) if along >= 0 else 1
    ends = [round(size * len(receivers) * i / len(senders)) for i in range(len(senders) + 1)]
    result = []
    for number, receiver in enumerate(receivers):
        begin, end = number * size, (number + 1) * size
        for sender, start, stop in zip(senders, ends, ends[1:], strict=False):
            a, b = max(start, begin) - begin, min(stop, end) - begin
            if a < b:
                result.append(BoxTransfer(sender, receiver, atom if b - a == size else cut_box(atom, along, ((a, b),))))
    return result


def whole_box(shape: Iterable[int]) -> IndexBox:
    """Return the box of all elements of a value of that shape."""
    return tuple(((0, n),) if n else () for n in shape)


def cut_box(box: IndexBox, dim: int, ranges: Iterable[tuple[int, int]]) -> IndexBox:
    """Return a box with only some of one dimension kept; ``ranges`` are positions inside the box."""
    return (*box[:dim], _to_global(box[dim], ranges), *box[dim + 1 :])


def intersect(a: IndexBox, b: IndexBox) -> IndexBox:
    """Return the intersection of two boxes."""
    return tuple(_intersect_ranges(x, y) for x, y in zip(a, b, strict=True))


def box_volume(box: IndexBox) -> int:
    """Return the number of elements in a box."""
    return math.prod(ranges_length(ranges) for ranges in box)


def box_shape(box: IndexBox) -> tuple[int, ...]:
    """Return the shape of the tensor that holds a box."""
    return tuple(ranges_length(ranges) for ranges in box)


def ranges_length(ranges: Ranges) -> int:
    """Return the number of indices in ranges."""
    return sum(stop - start for start, stop in ranges)


def relative_box(outer: IndexBox, inner: IndexBox) -> IndexBox:
    """Return the positions of a box in the tensor that holds an outer box; it must be inside of that."""
    return tuple(_translate(with_positions(a), b) for a, b in zip(outer, inner, strict=True))


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Join adjacent ranges and drop empty ones: equal sets of indices then compare equal, and hash equal."""
    result: list[tuple[int, int]] = []
    for start, stop in ranges:
        if result and result[-1][1] == start:
            start = result.pop()[0]
        if start < stop:
            result.append((start, stop))
    return tuple(result)


def _intersect_ranges(a: Ranges, b: Ranges) -> Ranges:
    pairs = ((max(s, t), min(e, f)) for (s, e), (t, f) in itertools.product(a, b))
    return _merge_ranges(sorted((start, stop) for start, stop in pairs if start < stop))


def _to_global(ranges: Ranges, positions: Iterable[tuple[int, int]]) -> Ranges:
    """Convert positions in the tensor that holds ranges to indices of the whole value.

    ((2, 5), (8, 10)) and position range (1, 4) give ((3, 5), (8, 9)).
    """
    return _translate([(at, start, length) for start, at, length in with_positions(ranges)], positions)


def with_positions(ranges: Ranges) -> list[tuple[int, int, int]]:
    """Return for each range its first index, the position of that in the tensor that holds ranges, and its length."""
    lengths = [stop - start for start, stop in ranges]
    ats = itertools.accumulate(lengths, initial=0)
    return [(start, at, length) for (start, _), at, length in zip(ranges, ats, lengths, strict=False)]


def _translate(pieces: Iterable[tuple[int, int, int]], ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return the images of ranges under a map that shifts each piece (begin, its image, length)."""
    result, ranges = list[tuple[int, int]](), list(ranges)
    for begin, image, length in pieces:
        for start, stop in ranges:
            a, b = max(start, begin), min(stop, begin + length)
            if a < b:
                result.append((image + a - begin, image + b - begin))
    return _merge_ranges(result)
