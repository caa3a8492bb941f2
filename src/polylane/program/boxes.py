"""Relay: what travels between two sets of ranks that each have a value in pieces of their own, and nothing twice.

Pieces are boxes of index ranges. Where a box of a sender meets a box of a receiver, that is what the one has and the
other needs; several ranks that have the same share the work.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]  # (start, stop), ascending, apart from each other
IndexBox = tuple[Ranges, ...]  # of every dimension what is there of it; of a number without dimensions nothing: ()


@dataclass(frozen=True, slots=True)
class BoxTransfer:
    """A box that goes from a rank to another, or stays where it is."""

    sender: int
    receiver: int
    box: IndexBox


def plan_reshard(holders: Mapping[int, IndexBox], needs: Mapping[int, IndexBox]) -> tuple[BoxTransfer, ...]:
    """Who sends what to whom, so that every receiver gets each element that it needs exactly once.

    Of what it has itself a receiver gets nothing from others. Where several ranks have the same box, they send equal
    parts of what is asked of it, and as few pieces as that takes.

    Args:
        holders: what each rank has; boxes are equal or do not meet.
        needs: what each rank is to have.

    Raises:
        ValueError: somebody needs what nobody has, or holders' boxes meet without being equal.
    """
    having, asking = _group_equal_boxes(holders), _group_equal_boxes(needs)
    transfers: list[BoxTransfer] = []
    for need, receivers in asking.items():
        found = 0
        for box, senders in having.items():
            atom = intersect(box, need)
            if box_volume(atom):
                found += box_volume(atom)
                own = [rank for rank in receivers if rank in senders]
                transfers += [BoxTransfer(rank, rank, atom) for rank in own]
                transfers += _spread_box(atom, senders, [rank for rank in receivers if rank not in senders])
        if found != box_volume(need):
            what = "has" if found < box_volume(need) else "has exactly once"
            raise ValueError(f"nobody {what} {need}, which ranks {receivers} need")
    return tuple(transfers)


def _group_equal_boxes(boxes: Mapping[int, IndexBox]) -> dict[IndexBox, list[int]]:
    groups: dict[IndexBox, list[int]] = {}
    for rank in sorted(boxes):
        if box_volume(boxes[rank]):
            groups.setdefault(boxes[rank], []).append(rank)
    return groups


def _spread_box(atom: IndexBox, senders: Sequence[int], receivers: Sequence[int]) -> list[BoxTransfer]:
    """Send a box to every receiver, each sender an equal part of the sum of it all.

    The receivers' copies are laid end to end and the line is cut into equal parts, one for each sender (McNaughton's
    wrap-around rule): with as many senders as receivers each pair exchanges one box.
    """
    if not receivers:
        return []
    along = max(range(len(atom)), key=lambda d: (min(ranges_length(atom[d]), len(senders)), -d), default=-1)
    size = ranges_length(atom[along]) if along >= 0 else 1
    ends = [round(size * len(receivers) * i / len(senders)) for i in range(len(senders) + 1)]
    result = []
    for number, receiver in enumerate(receivers):
        first, last = number * size, (number + 1) * size
        for sender, start, stop in zip(senders, ends, ends[1:], strict=False):
            a, b = max(start, first) - first, min(stop, last) - first
            if a < b:
                result.append(BoxTransfer(sender, receiver, atom if b - a == size else cut_box(atom, along, ((a, b),))))
    return result


def whole_box(shape: Iterable[int]) -> IndexBox:
    """All of a value."""
    return tuple(((0, n),) if n else () for n in shape)


def cut_box(box: IndexBox, dim: int, ranges: Iterable[tuple[int, int]]) -> IndexBox:
    """What is left of a box when only some of a dimension is kept, by positions inside the box."""
    return (*box[:dim], _to_global(box[dim], ranges), *box[dim + 1 :])


def intersect(a: IndexBox, b: IndexBox) -> IndexBox:
    """What two boxes have in common."""
    return tuple(_intersect_ranges(x, y) for x, y in zip(a, b, strict=True))


def box_volume(box: IndexBox) -> int:
    """How many elements there are in a box."""
    return math.prod(ranges_length(ranges) for ranges in box)


def box_shape(box: IndexBox) -> tuple[int, ...]:
    """The shape of the tensor that holds a box."""
    return tuple(ranges_length(ranges) for ranges in box)


def ranges_length(ranges: Ranges) -> int:
    """How many positions there are in ranges."""
    return sum(stop - start for start, stop in ranges)


def relative_box(outer: IndexBox, inner: IndexBox) -> IndexBox:
    """Where a box lies inside another one, by positions in the tensor that holds that."""
    return tuple(_to_local(a, b) for a, b in zip(outer, inner, strict=True))


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
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
    """Positions inside ranges as positions of the whole."""
    result, wanted = list[tuple[int, int]](), list(positions)
    at = 0
    for start, stop in ranges:
        for first, last in wanted:
            a, b = max(first, at), min(last, at + stop - start)
            if a < b:
                result.append((start + a - at, start + b - at))
        at += stop - start
    return _merge_ranges(result)


def _to_local(outer: Ranges, inner: Ranges) -> Ranges:
    """Positions of the whole as positions inside ranges that contain them."""
    result = list[tuple[int, int]]()
    at = 0
    for start, stop in outer:
        for first, last in inner:
            a, b = max(first, start), min(last, stop)
            if a < b:
                result.append((at + a - start, at + b - start))
        at += stop - start
    return _merge_ranges(result)
