"""What workers hold of a tensor, cut into rectangles: every element once, where the worker has it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from polylane.checkpoint.read_tensors import view_piece
from polylane.checkpoint.regions import Rectangle, cut_pieces, cut_span
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
