"""What workers hold of a tensor, cut into rectangles: every element once, where the worker has it."""

from __future__ import annotations

import itertools
import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from polylane.checkpoint.read_tensors import view_piece
from polylane.checkpoint.regions import Rectangle, cover_once, cut_pieces, cut_span, find_overlap
from polylane.program.boxes import IndexBox, box_shape

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@st.composite
def boxes(draw: st.DrawFn) -> tuple[tuple[int, ...], IndexBox]:
    """A shape, and some indices of each dimension, in any number of ranges."""
    shape = draw(SHAPES)
    box = []
    for size in shape:
        kept = sorted(draw(st.sets(st.integers(0, size - 1), min_size=1)))
        ranges: list[tuple[int, int]] = []
        for index in kept:
            if ranges and ranges[-1][1] == index:
                ranges[-1] = (ranges[-1][0], index + 1)
            else:
                ranges.append((index, index + 1))
        box.append(tuple(ranges))
    return shape, tuple(box)


def take(whole: torch.Tensor, box: IndexBox) -> torch.Tensor:
    for dim, ranges in enumerate(box):
        whole = torch.cat([whole.narrow(dim, start, stop - start) for start, stop in ranges], dim)
    return whole


@given(boxes(), st.data())
def test_pieces_hold_what_the_worker_has(case: tuple[tuple[int, ...], IndexBox], data: st.DataObject) -> None:
    shape, box = case
    whole = torch.arange(math.prod(shape)).view(shape)
    local = take(whole, box).contiguous()
    count = math.prod(box_shape(box))
    span = None
    if data.draw(st.booleans()):
        begin = data.draw(st.integers(0, count))
        span = (begin, data.draw(st.integers(begin, count)))
        local = local.reshape(-1)[slice(*span)].clone()
    seen = torch.zeros_like(local)
    for piece in cut_pieces(box, span):
        everywhere = Rectangle((0,) * len(shape), shape)
        assert torch.equal(view_piece(local, piece), whole[piece.rectangle.slices_in(everywhere)])
        view_piece(seen, piece).add_(1)
    assert bool((seen == 1).all())


@given(SHAPES, st.data())
def test_a_range_of_elements_is_few_blocks(shape: tuple[int, ...], data: st.DataObject) -> None:
    count = math.prod(shape)
    begin = data.draw(st.integers(0, count))
    end = data.draw(st.integers(begin, count))
    blocks = list(cut_span(shape, begin, end))
    assert sum(math.prod(each) for _, each in blocks) == end - begin
    assert len(blocks) <= max(1, 2 * len(shape) - 1)


def test_common_elements_of_rectangles() -> None:
    one, other = Rectangle((0, 2), (3, 4)), Rectangle((2, 0), (4, 3))
    assert one.intersect(other) == Rectangle((2, 2), (1, 1))
    assert one.intersect(Rectangle((3, 0), (1, 9))) is None
    assert Rectangle((), ()).intersect(Rectangle((), ())) == Rectangle((), ())


@st.composite
def covers(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Rectangle]]:
    """A shape, and rectangles within: cut from the whole again and again, and some of them then moved or doubled."""
    shape = draw(SHAPES)
    held = [Rectangle((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6)) if shape else 0):
        one = held.pop(draw(st.integers(0, len(held) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        at = draw(st.integers(0, one.shape[dim]))  # one of the halves may be empty
        for begin, length in ((0, at), (at, one.shape[dim] - at)):
            offsets, sizes = list(one.offsets), list(one.shape)
            offsets[dim], sizes[dim] = offsets[dim] + begin, length
            held.append(Rectangle(tuple(offsets), tuple(sizes)))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, len(held) - 1))
        one = held[place]
        moved = tuple(draw(st.integers(0, size - n)) for size, n in zip(shape, one.shape, strict=True))
        held[place] = Rectangle(moved, one.shape)
    return shape, draw(st.permutations(held))


@given(covers())
def test_each_element_is_held_once_or_it_is_told(case: tuple[tuple[int, ...], list[Rectangle]]) -> None:
    shape, held = case
    whole, counts = Rectangle((0,) * len(shape), shape), torch.zeros(shape, dtype=torch.int64)
    for each in held:
        counts[each.slices_in(whole)] += 1
    assert cover_once(shape, held) == bool((counts == 1).all())
    overlap = find_overlap(held)
    assert (overlap is not None) == bool((counts > 1).any())
    if overlap is not None:
        one, other = overlap
        assert one != other and held[one].intersect(held[other]) is not None


def test_no_cut_through_the_whole_is_needed() -> None:
    # Five tiles like a pinwheel: no straight cut parts them.
    held = [((0, 0), (1, 2)), ((0, 2), (2, 1)), ((2, 1), (1, 2)), ((1, 0), (2, 1)), ((1, 1), (1, 1))]
    assert cover_once((3, 3), [Rectangle(*each) for each in held])
    # A tensor of 20 dimensions, cut in each of them: a million corners, were they counted.
    borders = (0, 5, 99_999, 500_001, 2**20)
    spans = (cut_span((2,) * 20, begin, end) for begin, end in itertools.pairwise(borders))
    many = [Rectangle(offsets, shape) for offsets, shape in itertools.chain.from_iterable(spans)]
    assert cover_once((2,) * 20, many)
    assert not cover_once((2,) * 20, many[1:])
