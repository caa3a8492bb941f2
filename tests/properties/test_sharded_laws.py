"""Laws of what replicas hold parts of, for any graph, any cuts and meshes, and any parameters that must stay whole."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.plan.plan import Plan
from polylane.plan.sync import SyncOptions
from polylane.runtime.connections.shard_groups import cross_shard_group, shard_group
from polylane.runtime.parameters.zero_units import ShardUnit, build_all_units
from polylane.runtime.transport.pending_work import is_filled
from polylane.schedule.action import ActionKind
from tests.properties.test_program_laws import Lowered, any_lowereds


@given(
    elements=st.lists(st.integers(0, 40), min_size=1, max_size=6),
    ranks=st.integers(1, 5),
    owners=st.lists(st.integers(0, 4), min_size=6, max_size=6),
)
def test_parts_follow_one_another_and_leave_nothing_out(elements: list[int], ranks: int, owners: list[int]) -> None:
    names = tuple(f"w{i}" for i in range(len(elements)))
    even = ShardUnit("even", names).part_bounds(elements, ranks)
    owned = ShardUnit("owned", names, tuple(sorted(o % ranks for o in owners[: len(names)]))).part_bounds(
        elements, ranks
    )
    for bounds in (even, owned):
        assert len(bounds) == ranks and bounds[0][0] == 0 and bounds[-1][1] == sum(elements)
        assert all(a[1] == b[0] for a, b in pairwise(bounds))
    # No rank holds more than it must; padded to the longest, shards are one behind the other: no copy joins them.
    sizes = [end - begin for begin, end in even]
    assert max(sizes) == ceil(sum(elements) / ranks)
    assert is_filled(sizes, max(sizes))


def sharded(lowered: Lowered, within: int | None) -> Plan:
    fits = within is not None and all(degrees.data % within == 0 for degrees in lowered.plan.meshes)
    return lowered.plan.model_copy(update={"sync": SyncOptions(shard="parameters", within=within if fits else None)})


@settings(deadline=None)
@given(lowered=any_lowereds, within=st.sampled_from([None, 1, 2]), whole=st.sets(st.sampled_from(["w0", "w2", "w3"])))
def test_what_is_summed_together_is_cut_together_by_all(lowered: Lowered, within: int | None, whole: set[str]) -> None:
    plan, parameters = sharded(lowered, within), lowered.partition.graph.parameters
    # A second objective has buckets of its own, and none of some parameters.
    second = tuple(
        replace(p, buckets=tuple(replace(b, name=f"{b.name}.") for b in reversed(p.buckets[1:])))
        for p in lowered.programs
    )
    layout = build_all_units(plan, {"one": lowered.programs, "two": second}, parameters, whole)
    known = dict(enumerate(layout.regroup_buckets(lowered.programs)))
    for rank, program in known.items():
        before = lowered.programs[rank]
        told = {(name, b.ranks, b.zero_contributors) for b in program.buckets for name in b.parameters}
        assert told == {(name, b.ranks, b.zero_contributors) for b in before.buckets for name in b.parameters}
        assert len({b.name for b in program.buckets}) == len(program.buckets)
        units = {name: unit for unit in layout.units[rank] for name in unit.parameters}
        assert sum(len(unit.parameters) for unit in layout.units[rank]) == len(units)
        assert [a for a in program.actions if a.kind is not ActionKind.REDUCE] == [
            a for a in before.actions if a.kind is not ActionKind.REDUCE
        ]
        summed = [b.name for b in program.buckets if len(b.ranks) > 1]
        assert [a.value for a in program.actions if a.kind is ActionKind.REDUCE] == summed
        for bucket in program.buckets:
            (unit,) = {units[name] for name in bucket.parameters}
            assert all((name in whole) == bool(unit.owners) for name in bucket.parameters)
            for other in bucket.ranks:
                assert bucket in known[other].buckets  # alike at all who sum
            crossing = cross_shard_group(plan, rank, bucket.ranks)
            if crossing is None:
                continue
            sizes = {len(shard_group(plan, other)) for other in bucket.ranks}
            assert len(sizes) == 1
            for other in crossing:
                assert cross_shard_group(plan, other, bucket.ranks) == crossing
                (theirs,) = {u for u in layout.units[other] if u.name == unit.name}
                assert theirs == unit  # the same elements, then, are in the same part
            for other in shard_group(plan, rank):
                assert unit in layout.units[other]
