"""Laws of what travels between stages: any graph of stages, any meshes, any cuts of the values, any samples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from boxes import read
from polylane.graph.partition import Partition
from polylane.graph.samples import Order
from polylane.placement.placement import REPLICATE, Placement, Shard, even
from polylane.plan.fit import from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.planner.layout import Layout
from polylane.planner.layouts import Layouts
from polylane.program.lower import lower
from polylane.program.relay import Box, shape_of, volume
from polylane.runtime.relays import Relays, place, taken
from polylane.schedule.action import Action, Kind
from synthetic import graph

WIDTH = 5  # of every value, beside its samples' rows


@dataclass
class Cut:
    """What relays ask of a layout: along which dimension each axis cuts each value."""

    splits: Mapping[str, int]  # axis -> degree
    dims: Mapping[tuple[str, str], int | None]  # (value, axis) -> dimension
    rows: int

    def state(self, value: str, samples: int) -> tuple[Placement, ...]:
        shape = (samples * self.rows, WIDTH)
        ways = {axis: self.dims[value, axis] for axis in self.splits}
        return tuple(
            REPLICATE if dim is None else Shard(dim, even(shape[dim], self.splits[axis])) for axis, dim in ways.items()
        )


@dataclass
class Meeting:
    plan: Plan
    partition: Partition
    samples: int
    relays: list[Relays]


@st.composite
def meetings(draw: st.DrawFn) -> Meeting:
    """A graph of up to 5 stages of one node each, each on a mesh of its own."""
    stages = draw(st.integers(2, 5))
    inputs = [draw(st.lists(st.sampled_from(range(i)), max_size=3, unique=True)) if i else [] for i in range(stages)]
    partition = Partition(graph(inputs), tuple(range(1, stages)))
    degrees = st.builds(Degrees, st.integers(1, 3), st.integers(1, 2), st.integers(1, 3))
    meshes = tuple(draw(degrees) for _ in range(stages))
    plan = from_partition(partition, Spec(pipeline=stages, schedule="afab", stages=meshes), 1)
    rows = draw(st.integers(1, 3))
    layouts: dict[Degrees, Cut] = {}
    for stage, mesh in enumerate(meshes):
        axes = {axis: plan.degree(axis, stage) for axis in plan.axes_of(stage)}
        dims = {}
        for node in partition.graph.nodes:
            ways = draw(st.permutations([0, 1, None]))
            dims |= {(node.name, axis): way for axis, way in zip(axes, ways, strict=False)}
        layouts.setdefault(mesh, Cut(axes, dims, rows))
    every = Layouts(cast(tuple[Layout, ...], tuple(layouts[mesh] for mesh in meshes)))
    names = [node.name for node in partition.graph.nodes]
    sizes = {name: (lambda n: n * rows, lambda n: WIDTH) for name in names}
    orders = dict.fromkeys(names, Order.ROWS)
    relays = [Relays(rank, plan, partition, every, sizes, orders) for rank in range(plan.workers)]
    return Meeting(plan, partition, draw(st.integers(1, 7)), relays)


def box(made: Meeting, value: str, rank: int) -> Box:
    return made.relays[rank]._box(value, rank, made.samples)


def exchanged(made: Meeting, gradient: bool) -> tuple[dict[tuple[str, int], list[Tensor]], int]:
    """Do what the programs say, each rank with what it really has: what each got from each stage; and bytes sent."""
    whole = {
        c.value: torch.arange(1.0, 1 + made.samples * made.relays[0].sizes[c.value][0](1) * WIDTH).reshape(-1, WIDTH)
        for c in made.partition.crossings
    }
    got: dict[tuple[str, int, int], Tensor] = {}
    sent = 0
    programs = lower(made.partition, made.plan)
    receives = {(p.rank, a): p for p in programs for a in p.actions if a.kind is Kind.RECEIVE}
    for program in programs:
        for action in program.actions:
            if action.kind is not Kind.SEND or action.gradient is not gradient:
                continue
            assert action.value is not None and action.peer is not None
            meant = (action.value, action.peer, made.samples, gradient)
            piece = made.relays[program.rank].sent(*meant)
            back = Action(Kind.RECEIVE, made.plan.place(action.peer)[0], 0, action.value, program.rank, gradient)
            assert (action.peer, back) in receives
            into = made.relays[action.peer].received(action.value, program.rank, made.samples, gradient)
            assert (piece is None) == (into is None)
            if piece is None or into is None:
                continue
            own = read(whole[action.value], box(made, action.value, program.rank))
            moved = taken(own, piece)
            assert moved.shape == shape_of(into)
            sent += moved.numel()
            key = (action.value, action.peer, program.stage)
            if key not in got:
                got[key] = torch.zeros(shape_of(box(made, action.value, action.peer)))
            place(got[key], into, moved, add=True)
    result: dict[tuple[str, int], list[Tensor]] = {}
    for (value, rank, _), tensor in got.items():
        result.setdefault((value, rank), []).append(tensor)
    for (value, rank), tensors in result.items():
        expected = read(whole[value], box(made, value, rank))
        assert all(torch.equal(tensor, expected) for tensor in tensors), (value, rank)
    return result, sent


def owed(made: Meeting, value: str, rank: int, gradient: bool) -> int:
    """Elements that a rank needs: who computes on another one's sample needs that, but no gradient of it."""
    alike = len({made.plan.degrees(s).data for s in range(made.plan.pipeline)}) == 1
    if gradient and not alike and not made.relays[rank]._counts(rank, made.samples):
        return 0
    return volume(box(made, value, rank))


@given(meetings())
@settings(deadline=None)
def test_every_stage_gets_its_part_of_what_it_reads_and_no_byte_too_many(made: Meeting) -> None:
    got, sent = exchanged(made, gradient=False)
    least = 0
    for crossing in made.partition.crossings:
        for stage in crossing.consumers:
            for rank in made.plan.stages[stage].devices:
                need = volume(box(made, crossing.value, rank))
                least += need
                assert ((crossing.value, rank) in got) == (need > 0)
    assert sent == least


@given(meetings())
@settings(deadline=None)
def test_gradients_come_back_the_same_way(made: Meeting) -> None:
    got, sent = exchanged(made, gradient=True)
    most, least = 0, 0
    for crossing in made.partition.crossings:
        for rank in made.plan.stages[crossing.producer].devices:
            need = volume(box(made, crossing.value, rank))
            counts = made.relays[rank]._counts(rank, made.samples)
            most += need * len(crossing.consumers)
            least += need * len(crossing.consumers) * counts
            if need and counts:
                assert len(got[crossing.value, rank]) == len(crossing.consumers)
    assert least <= sent <= most


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_taken_and_placed(data: st.DataObject, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    piece = tuple(
        tuple(sorted({(i, i + 1) for i in data.draw(st.sets(st.integers(0, n - 1), min_size=1))})) for n in shape
    )
    part = taken(value, piece)
    assert torch.equal(part, read(value, piece)) and part.numel() == prod(part.shape)
    into = torch.zeros(shape)
    place(into, piece, part)
    place(into, piece, part, add=True)
    assert torch.equal(read(into, piece), 2 * part) and int((into != 0).sum()) == int((part != 0).sum())
