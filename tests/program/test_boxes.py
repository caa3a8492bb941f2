"""Relay: every element arrives once, from one who has it, and the work is shared."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.placement.placement import even_cuts, join_cuts
from polylane.program.boxes import (
    BoxTransfer,
    IndexBox,
    box_shape,
    box_volume,
    cut_box,
    intersect,
    plan_reshard,
    relative_box,
    whole_box,
)
from tests.support import subsets
from tests.support.reference.index_boxes import read, write


def relayed(
    value: Tensor, holders: Mapping[int, IndexBox], needs: Mapping[int, IndexBox]
) -> tuple[dict[int, Tensor], tuple[BoxTransfer, ...]]:
    """What arrives, from what each sender really has; NaN where nothing does."""
    have = {rank: read(value, box) for rank, box in holders.items()}
    got = {rank: torch.full(box_shape(box), torch.nan, dtype=torch.float64) for rank, box in needs.items()}
    transfers = plan_reshard(holders, needs)
    for t in transfers:
        into = got[t.receiver]
        place = relative_box(needs[t.receiver], t.box)
        assert read(into, place).isnan().all(), "an element arrives twice"
        write(into, place, read(have[t.sender], relative_box(holders[t.sender], t.box)))
    return got, transfers


@st.composite
def meshes(draw: st.DrawFn, shape: tuple[int, ...], first: int) -> dict[int, IndexBox]:
    """Boxes of the ranks of a random mesh: each axis cuts a dimension, evenly or in segments, or copies."""
    boxes = [whole_box(shape)]
    free = list(range(len(shape)))
    for degree in draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)):
        dim = draw(st.sampled_from([None, *free]))
        if dim is None:
            boxes = [box for box in boxes for _ in range(degree)]
            continue
        cuts = even_cuts(shape[dim], degree)
        if draw(st.booleans()) and shape[dim] >= 2:
            at = draw(st.integers(1, shape[dim] - 1))
            cuts = join_cuts([even_cuts(at, degree), even_cuts(shape[dim] - at, degree)])
        free.remove(dim)
        parts = [tuple((c[i], c[i + 1]) for c in cuts if c[i] < c[i + 1]) for i in range(degree)]
        boxes = [cut_box(box, dim, part) for box in boxes for part in parts]
    return {first + i: box for i, box in enumerate(boxes)}


@given(st.data(), st.lists(st.integers(0, 7), max_size=3).map(tuple))
@settings(max_examples=subsets.examples(300), deadline=None)
def test_relayed_is_a_direct_copy_at_the_least_bytes(data: st.DataObject, shape: tuple[int, ...]) -> None:
    value = torch.arange(1.0, 1.0 + torch.Size(shape).numel(), dtype=torch.float64).reshape(shape)
    holders = data.draw(meshes(shape, 0))
    needs = data.draw(meshes(shape, data.draw(st.sampled_from([0, 2, 100]))))  # some ranks may be of both meshes
    got, transfers = relayed(value, holders, needs)
    for rank, box in needs.items():
        assert torch.equal(got[rank], read(value, box)), rank
    sent = sum(box_volume(t.box) for t in transfers if t.sender != t.receiver)
    own = {rank: intersect(holders[rank], box) for rank, box in needs.items() if rank in holders}
    assert sent == sum(box_volume(box) - box_volume(own.get(rank, ((),))) for rank, box in needs.items())


@given(st.integers(1, 6), st.integers(1, 6), st.integers(12, 60))
@settings(deadline=None)
def test_those_who_have_the_same_share_the_work(senders: int, receivers: int, rows: int) -> None:
    shape = (rows, 3)
    holders = {i: whole_box(shape) for i in range(senders)}
    needs = {100 + i: whole_box(shape) for i in range(receivers)}
    transfers = plan_reshard(holders, needs)
    work = [sum(box_volume(t.box) for t in transfers if t.sender == i) for i in range(senders)]
    assert max(work) - min(work) <= 3  # a row
    assert len(transfers) <= senders + receivers - 1


def test_as_many_senders_as_receivers_exchange_in_pairs() -> None:
    transfers = plan_reshard({0: whole_box((4,)), 1: whole_box((4,))}, {2: whole_box((4,)), 3: whole_box((4,))})
    assert [(t.sender, t.receiver) for t in transfers] == [(0, 2), (1, 3)]


def test_a_number_without_dimensions_travels() -> None:
    assert [(t.sender, t.receiver) for t in plan_reshard({0: ()}, {1: (), 2: ()})] == [(0, 1), (0, 2)]


def test_what_nobody_has_is_refused() -> None:
    with pytest.raises(ValueError, match="nobody has"):
        plan_reshard({0: (((0, 2),),)}, {1: (((1, 3),),)})


def test_boxes_that_meet_without_being_equal_are_refused() -> None:
    with pytest.raises(ValueError, match="exactly once"):
        plan_reshard({0: (((0, 2),),), 1: (((1, 3),),)}, {2: (((0, 3),),)})


@given(st.data())
def test_inside_and_cut_are_inverse(data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple))
    box = whole_box(sizes)
    for dim, size in enumerate(sizes):
        start = data.draw(st.integers(0, size - 1))
        box = cut_box(box, dim, ((start, data.draw(st.integers(start + 1, size))),))
    inner = box
    for dim, size in itertools.islice(enumerate(box_shape(box)), 2):
        inner = cut_box(inner, dim, ((0, data.draw(st.integers(1, size))),))
    positions = relative_box(box, inner)
    back = box
    for dim, ranges in enumerate(positions):
        back = cut_box(back, dim, ranges)
    assert back == inner
