"""Laws of what travels between stages: any graph of stages, any meshes, any cuts of the values, any samples.

Of a value that is the same on all replicas, or holds their samples one behind the other, there is one whole; of any
other, each replica has one of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import cast

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from polylane.compile.reshard import Resharder, ValueSpec, extract_box, write_box
from polylane.compile.sample_shares import compute_shares
from polylane.graph.partition import Partition
from polylane.placement.placement import REPLICATE, Cuts, Placement, Shard, join_cuts
from polylane.plan.fit_to_graph import plan_from_partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Degrees, Spec
from polylane.program.boxes import IndexBox, box_shape, box_volume
from polylane.program.lower import lower
from polylane.samples.batch_layout import BatchLayout
from polylane.schedule.action import Action, ActionKind
from polylane.sharding.layout import Layout
from polylane.sharding.stage_layouts import StageLayouts
from tests.support.reference.index_boxes import read
from tests.support.synthetic_graphs import graph

MOST_RANKS = 36


@dataclass(frozen=True)
class Form:
    """The shape of a value: along one dimension so many rows for each sample, if any; all others are fixed."""

    fixed: tuple[int, ...]
    batch_dim: int | None
    rows: int

    def shape(self, samples: int) -> tuple[int, ...]:
        return tuple(samples * self.rows if d == self.batch_dim else n for d, n in enumerate(self.fixed))


@dataclass(frozen=True)
class Split:
    """How an axis cuts a dimension: in one segment or two, somewhere; ranks may get nothing."""

    dim: int
    segments: tuple[tuple[float, ...], ...]

    def cuts(self, size: int) -> Cuts:
        ends = [round(size * i / len(self.segments)) for i in range(len(self.segments) + 1)]
        parts = zip(self.segments, pairwise(ends), strict=True)
        return join_cuts([((0, *(round(at * (b - a)) for at in segment), b - a),) for segment, (a, b) in parts])


@dataclass(frozen=True)
class Cut:
    """What relays ask of a layout: along which dimension each axis cuts each value, and where."""

    splits: Mapping[str, int]  # axis -> degree
    ways: Mapping[tuple[str, str], Split | None]  # (value, axis)
    forms: Mapping[str, Form]

    def state(self, value: str, samples: int, open_sizes: tuple[int, ...] = ()) -> tuple[Placement, ...]:
        shape = self.forms[value].shape(samples)
        ways = [self.ways[value, axis] for axis in self.splits]
        return tuple(REPLICATE if way is None else Shard(way.dim, way.cuts(shape[way.dim])) for way in ways)


@dataclass
class Meeting:
    plan: Plan
    partition: Partition
    samples: int
    forms: Mapping[str, Form]
    orders: Mapping[str, BatchLayout]
    together: bool
    relays: list[Resharder]

    def box(self, value: str, rank: int) -> IndexBox:
        return self.relays[rank]._cached_box(value, rank, self.samples)

    def replicas(self, stage: int) -> list[tuple[int, ...]]:
        """The ranks of each; those that split operators between them are one."""
        devices, count = self.plan.stages[stage].devices, self.count(stage)
        size = len(devices) // count
        return [devices[i * size : (i + 1) * size] for i in range(count)]

    def count(self, stage: int) -> int:
        return 1 if self.together else self.plan.degree("data", stage)

    def share(self, stage: int, replica: int) -> tuple[int, int]:
        """How many samples a replica has, and whether they count."""
        (own,) = compute_shares(self.samples, 1, self.count(stage), replica)
        return own.samples, own.weight

    def pairs(self) -> Iterator[tuple[str, int, int]]:
        for crossing in self.partition.crossings:
            for stage in crossing.consumers:
                yield crossing.value, crossing.producer, stage

    def alike(self, start: int, end: int) -> bool:
        """Whether each replica's part stays with that replica."""
        return self.count(start) == self.count(end)

    def one_whole(self, value: str) -> bool:
        return self.together or self.forms[value].batch_dim is not None or self.orders[value] is BatchLayout.REPLICATED


@st.composite
def forms(draw: st.DrawFn, sampled: bool) -> Form:
    fixed = tuple(draw(st.lists(st.integers(1, 5), min_size=int(sampled), max_size=3)))
    return Form(fixed, draw(st.integers(0, len(fixed) - 1)) if sampled else None, draw(st.integers(1, 3)))


@st.composite
def splits(draw: st.DrawFn, degree: int, dim: int) -> Split:
    inner = st.lists(st.floats(0, 1), min_size=degree - 1, max_size=degree - 1).map(sorted).map(tuple)
    return Split(dim, tuple(draw(st.lists(inner, min_size=1, max_size=2))))


@st.composite
def cuts_of(draw: st.DrawFn, axes: Mapping[str, int], every: Mapping[str, Form], data: Mapping) -> Cut:
    """No two axes cut the same dimension of a value; ``data``: how that axis does, which is the same for all stages."""
    ways: dict[tuple[str, str], Split | None] = {}
    for name, form in every.items():
        taken = data[name].get(axes.get("data", 1))
        free = draw(st.permutations([d for d in range(len(form.fixed)) if taken is None or d != taken.dim]))
        dims = iter([*free, *[None] * len(axes)] if draw(st.booleans()) else [None, *free, *[None] * len(axes)])
        for axis, degree in axes.items():
            dim = None if axis == "data" else next(dims)
            ways[name, axis] = taken if axis == "data" else None if dim is None else draw(splits(degree, dim))
    return Cut(axes, ways, every)


@st.composite
def meetings(draw: st.DrawFn) -> Meeting:
    """A graph of up to 5 stages of one node each, each on a mesh of its own; values of any form, in any order."""
    stages = draw(st.integers(2, 5))
    inputs = [draw(st.lists(st.sampled_from(range(i)), max_size=3, unique=True)) if i else [] for i in range(stages)]
    made = graph(inputs)
    names = [node.name for node in made.nodes]
    degrees = st.builds(Degrees, st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
    meshes = tuple(draw(degrees) for _ in range(stages))
    assume(sum(mesh.workers for mesh in meshes) <= MOST_RANKS)
    orders = {
        name: draw(
            st.sampled_from(
                [
                    BatchLayout.SHARDED_BY_SAMPLE,
                    BatchLayout.SHARDED_BY_SAMPLE,
                    BatchLayout.REPLICATED,
                    BatchLayout.MEAN,
                    BatchLayout.SUM,
                ]
            )
        )
        for name in names
    }
    every = {name: draw(forms(orders[name] is BatchLayout.SHARDED_BY_SAMPLE)) for name in names}
    nodes = tuple(replace(node, batch_dim=every[node.name].batch_dim) for node in made.nodes)
    partition = Partition(replace(made, nodes=nodes), tuple(range(1, stages)))
    plan = plan_from_partition(partition, Spec(schedule="afab", stages=meshes), 1)
    if not plan.resplits_batch:
        orders = dict.fromkeys(names, BatchLayout.SHARDED_BY_SAMPLE)
    together = draw(st.booleans()) and plan.data > 1
    data: dict[str, dict[int, Split]] = {name: {} for name in names}
    for degree in {mesh.data for mesh in meshes} - {1} if together else ():
        for name in names:
            if every[name].fixed and draw(st.booleans()):
                data[name][degree] = draw(splits(degree, draw(st.integers(0, len(every[name].fixed) - 1))))
    layouts: dict[Degrees, Cut] = {}
    for stage, mesh in enumerate(meshes):
        axes = {axis: plan.degree(axis, stage) for axis in plan.axes_of(stage)}
        axes = {"data": mesh.data, **axes} if together and mesh.data > 1 else axes
        if mesh not in layouts:
            layouts[mesh] = draw(cuts_of(axes, every, data))
    own = StageLayouts(cast(tuple[Layout, ...], tuple(layouts[mesh] for mesh in meshes)))
    samples = draw(st.integers(1, 7))
    relays = [Resharder(rank, plan, partition, own, _specs(every), orders) for rank in range(plan.workers)]
    return Meeting(plan, partition, samples, every, orders, together, relays)


def _specs(every: Mapping[str, Form]) -> dict[str, ValueSpec]:
    def size(form: Form, dim: int):
        return lambda samples, *_: form.shape(samples)[dim]

    return {
        name: ValueSpec(name, torch.float64, tuple(size(form, dim) for dim in range(len(form.fixed))))
        for name, form in every.items()
    }


Wholes = dict[tuple[str, int], list[Tensor]]  # (value, a stage that has it): of each of its replicas


def wholes(made: Meeting, gradient: bool) -> Wholes:
    """What replicas have of each value where it is made, or of its gradient on each stage that reads it."""
    random = torch.Generator().manual_seed(0)
    result: Wholes = {}
    for value, start, end in made.pairs():
        shape, stage = made.forms[value].shape(made.samples), end if gradient else start
        if (value, stage) not in result:
            count = made.count(stage)
            drawn = [torch.randint(-9, 10, shape, generator=random).double() for _ in range(count)]
            one = made.one_whole(value) and not (gradient and made.orders[value] is BatchLayout.REPLICATED)
            result[value, stage] = drawn[:1] * count if one else drawn
    return result


def exchanged(made: Meeting, given: Wholes, gradient: bool) -> tuple[dict[tuple[str, int, int], Tensor], int]:
    """Do what the programs say, each rank with what it has: what each got from each stage; and how much was sent."""
    got: dict[tuple[str, int, int], Tensor] = {}
    sent = 0
    programs = lower(made.partition, made.plan)
    receives = {(p.rank, a) for p in programs for a in p.actions if a.kind is ActionKind.RECEIVE}
    for program in programs:
        replica = 0 if made.together else program.replica
        for action in program.actions:
            if action.kind is not ActionKind.SEND or action.gradient is not gradient:
                continue
            assert action.value is not None and action.peer is not None
            own, other = made.relays[program.rank], made.relays[action.peer]
            piece = own.box_to_send(action.value, action.peer, made.samples, gradient)
            back = Action(
                ActionKind.RECEIVE, made.plan.stage_and_replica(action.peer)[0], 0, action.value, program.rank, gradient
            )
            assert (action.peer, back) in receives
            into = other.box_to_receive(action.value, program.rank, made.samples, gradient)
            assert (piece is None) == (into is None)
            if piece is None or into is None:
                continue
            part = read(given[action.value, program.stage][replica], made.box(action.value, program.rank))
            share = own.sent_share(action.value, action.peer, made.samples, gradient)
            moved = extract_box(part, piece)
            moved = moved if share is None else share.take_from(moved)
            assert moved.shape == box_shape(into) and moved.numel()
            sent += moved.numel()
            key = (action.value, action.peer, program.stage)
            if key not in got:
                got[key] = torch.zeros(box_shape(made.box(action.value, action.peer)), dtype=torch.float64)
            write_box(got[key], into, moved, add=True)
    return got, sent


def meant(made: Meeting, given: Wholes, value: str, start: int, end: int, replica: int) -> Tensor:
    """What a replica of a stage that reads a value is to have of it."""
    own = given[value, start]
    if made.alike(start, end):
        return own[replica]
    parts = [made.share(start, i) for i in range(made.count(start))]
    if made.orders[value] is BatchLayout.MEAN:
        return sum((x * n * counts for x, (n, counts) in zip(own, parts, strict=True)), 0 * own[0]) / made.samples
    if made.orders[value] is BatchLayout.SUM:
        samples, counts = made.share(end, replica)
        return sum((x * c for x, (_, c) in zip(own, parts, strict=True)), 0 * own[0]) * counts * samples / made.samples
    return own[0]


def meant_gradient(made: Meeting, given: Wholes, value: str, start: int, end: int, replica: int) -> Tensor | None:
    """The gradient that a stage is to give a replica of the one that made the value: by the chain rule."""
    own = given[value, end]
    if made.alike(start, end):
        return own[replica]
    samples, counts = made.share(start, replica)
    if made.orders[value] is BatchLayout.MEAN:
        return sum(own, 0 * own[0]) * counts * samples / made.samples
    if made.orders[value] is BatchLayout.SUM:
        every = (made.share(end, j) for j in range(made.count(end)))
        return sum((g * n * c for g, (n, c) in zip(own, every, strict=True)), 0 * own[0]) * counts / made.samples
    return own[0] if counts else None  # who computes on another one's sample is owed none


def owed(made: Meeting, value: str, start: int, end: int, gradient: bool) -> int:
    """The elements that must travel between two stages."""
    senders, receivers = (end, start) if gradient else (start, end)
    needs = [[box_volume(made.box(value, rank)) for rank in ranks] for ranks in made.replicas(receivers)]
    if made.alike(start, end):
        return sum(map(sum, needs))
    if made.orders[value] in (BatchLayout.MEAN, BatchLayout.SUM):  # every replica's own to every other one
        return sum(map(sum, needs)) * made.count(senders)
    if gradient and made.orders[value] is BatchLayout.REPLICATED:  # every replica's own to one other
        return sum(needs[0]) * made.count(senders)
    return sum(sum(each) for i, each in enumerate(needs) if not gradient or made.share(receivers, i)[1])


@given(meetings())
@settings(deadline=None)
def test_every_stage_gets_what_it_reads_and_no_byte_too_many(made: Meeting) -> None:
    given = wholes(made, gradient=False)
    got, sent = exchanged(made, given, gradient=False)
    for value, start, end in made.pairs():
        for replica, ranks in enumerate(made.replicas(end)):
            whole = meant(made, given, value, start, end, replica)
            for rank in ranks:
                box = made.box(value, rank)
                assert ((value, rank, start) in got) == (box_volume(box) > 0)
                if box_volume(box):
                    torch.testing.assert_close(got[value, rank, start], read(whole, box))
    assert sent == sum(owed(made, *pair, gradient=False) for pair in made.pairs())


@given(meetings())
@settings(deadline=None)
def test_gradients_come_back_the_same_way(made: Meeting) -> None:
    given = wholes(made, gradient=True)
    got, sent = exchanged(made, given, gradient=True)
    for value, start, end in made.pairs():
        if made.orders[value] is BatchLayout.REPLICATED and not made.alike(start, end):
            summands_arrive(made, given, got, value, start, end)
            continue
        for replica, ranks in enumerate(made.replicas(start)):
            whole = meant_gradient(made, given, value, start, end, replica)
            for rank in ranks:
                box = made.box(value, rank)
                assert ((value, rank, end) in got) == (box_volume(box) > 0 and whole is not None)
                if box_volume(box) and whole is not None:
                    torch.testing.assert_close(got[value, rank, end], read(whole, box))
    assert sent == sum(owed(made, *pair, gradient=True) for pair in made.pairs())


def summands_arrive(
    made: Meeting, given: Wholes, got: Mapping[tuple[str, int, int], Tensor], value: str, start: int, end: int
) -> None:
    """Of what is the same everywhere every gradient goes to one replica or another: theirs are summed in the end."""
    total = sum(given[value, end], 0 * given[value, end][0])
    for ranks in zip(*made.replicas(start), strict=True):  # the same place in every replica
        box = made.box(value, ranks[0])
        parts = [got[value, rank, end] for rank in ranks if (value, rank, end) in got]
        assert bool(parts) == (box_volume(box) > 0)
        if parts:
            torch.testing.assert_close(sum(parts, 0 * parts[0]), read(total, box))


@given(meetings())
@settings(deadline=None)
def test_ranks_that_have_nothing_for_each_other_are_silent(made: Meeting) -> None:
    """Whatever has to travel goes between ranks that the programs let talk."""
    for value, start, end in made.pairs():
        for gradient, senders, receivers in ((False, start, end), (True, end, start)):
            if made.plan.have_same_mesh(start, end):
                continue
            rank = made.plan.stages[senders].devices[0]
            for transfer in made.relays[rank]._plan_transfers(value, senders, receivers, made.samples, gradient):
                assert transfer.receiver in made.plan.peers(transfer.sender, receivers)
                assert transfer.sender in made.plan.peers(transfer.receiver, senders)


@given(st.data(), st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
def test_taken_and_placed(data: st.DataObject, shape: tuple[int, ...]) -> None:
    value = torch.randn(shape)
    piece = tuple(
        tuple(sorted({(i, i + 1) for i in data.draw(st.sets(st.integers(0, n - 1), min_size=1))})) for n in shape
    )
    part = extract_box(value, piece)
    assert torch.equal(part, read(value, piece)) and part.numel() == prod(part.shape)
    into = torch.zeros(shape)
    write_box(into, piece, part)
    write_box(into, piece, part, add=True)
    assert torch.equal(read(into, piece), 2 * part) and int((into != 0).sum()) == int((part != 0).sum())
