"""Shard units of ZeRO: which parameters are cut, summed and gathered together, and which ranks sum which part."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from polylane.compile.server_assignment import assign_longest_first
from polylane.graph.graph import TensorInfo
from polylane.plan.plan import Plan
from polylane.program.program import GradientBucket, Program
from polylane.schedule.action import Action, ActionKind


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are laid end to end and cut, summed and gathered as one.

    Attributes:
        name: that of the bucket that it was made of.
        parameters: canonical names, in their order in the unit.
        owners: of each the index of the one replica that updates it, ascending, where the optimizer must see it whole;
            empty: the unit is cut evenly, wherever parameters begin and end.
    """

    name: str
    parameters: tuple[str, ...]
    owners: tuple[int, ...] = ()

    def part_bounds(self, elements: Sequence[int], ranks: int) -> tuple[tuple[int, int], ...]:
        """Begin and end of each rank's part; even parts differ by at most one element.

        Args:
            elements: number of elements of each parameter of the unit.
            ranks: number of parts, one for each rank.
        """
        if self.owners:
            sizes = [sum(n for n, o in zip(elements, self.owners, strict=True) if o == rank) for rank in range(ranks)]
        else:
            each, rest = divmod(sum(elements), ranks)
            sizes = [each + (rank < rest) for rank in range(ranks)]
        return tuple(pairwise((0, *accumulate(sizes))))

    def part_range(self, name: str, elements: Sequence[int], ranks: int, index: int) -> tuple[int, int]:
        """Begin and end, in a parameter of the unit, of what a rank has of it; equal where that is nothing."""
        position = self.parameters.index(name)
        start, (begin, end) = sum(elements[:position]), self.part_bounds(elements, ranks)[index]
        low = min(max(start, begin), start + elements[position])
        return low - start, max(low, min(start + elements[position], end)) - start


def shard_group(plan: Plan, rank: int) -> tuple[int, ...]:
    """The ranks that hold one whole between them, by the index of their part: replicas of one place in the mesh."""
    replicas = plan.ranks_along(rank, "data")
    size = plan.sync.within or len(replicas)
    first = replicas.index(rank) // size * size
    return replicas[first : first + size]


def cross_shard_group(plan: Plan, rank: int, ranks: Collection[int]) -> tuple[int, ...] | None:
    """Those of a bucket's ranks that sum the same part of it as ``rank`` does, each for its own shard group.

    They are more than one where replicas are sharded in groups, where ranks along an operator axis each have a summand,
    and where several stages hold the same weights. None where the bucket's ranks do not fall into groups of one size.
    """
    index, size, found = shard_group(plan, rank).index(rank), len(shard_group(plan, rank)), list[int]()
    for other in ranks:
        group = shard_group(plan, other)
        if len(group) != size or not set(group) <= set(ranks):
            return None
        if group[index] == other:
            found.append(other)
    return tuple(sorted(found))


def all_shard_groups(plan: Plan, programs: Iterable[Sequence[Program]]) -> set[tuple[int, ...]]:
    """All groups of ranks that sum, or hold, parts of something."""
    if plan.sync.shard == "none":
        return set()
    found = {tuple(sorted(shard_group(plan, rank))) for rank in range(plan.workers)}
    seen = {(program.rank, bucket.ranks) for each in programs for program in each for bucket in program.buckets}
    crossing = {cross_shard_group(plan, rank, ranks) for rank, ranks in seen}
    return found | {group for group in crossing if group is not None}


def build_units(
    plan: Plan,
    programs: Mapping[str, Program],
    parameters: Mapping[str, TensorInfo],
    whole: Collection[str],
) -> tuple[ShardUnit, ...]:
    """The units of one rank; all who share in one find the same.

    Args:
        plan: how the training is split.
        programs: the rank's, by objective; what several objectives train is in the unit of the first.
        parameters: of the model, by canonical name.
        whole: those that their optimizer must see whole.
    """
    found, seen, loads = list[ShardUnit](), set[str](), dict[tuple[int, ...], list[int]]()
    for objective, program in programs.items():
        ranks = len(shard_group(plan, program.rank))
        for bucket in program.buckets:
            names = [name for name in bucket.parameters if name not in seen]
            seen.update(names)
            label = bucket.name if len(programs) == 1 else f"{objective}.{bucket.name}"
            if cut := tuple(name for name in names if name not in whole):
                found.append(ShardUnit(label, cut))
            if kept := [name for name in names if name in whole]:
                sizes = {name: parameters[name].bytes for name in sorted(kept)}
                owners = assign_longest_first(sizes, loads.setdefault(bucket.ranks, [0] * ranks))
                order = sorted(kept, key=owners.__getitem__)
                found.append(ShardUnit(f"{label}.whole", tuple(order), tuple(owners[name] for name in order)))
    return tuple(found)


@dataclass(frozen=True)
class ShardUnits:
    """The units of every rank, by rank; no ranks: nothing is cut."""

    units: tuple[tuple[ShardUnit, ...], ...] = ()

    def regroup_buckets(self, programs: Sequence[Program]) -> tuple[Program, ...]:
        """Programs with a bucket for every unit, so that what is summed together is what is cut together."""
        if not self.units:
            return tuple(programs)
        return tuple(_regroup_buckets(program, self.units[program.rank]) for program in programs)


WHOLE = ShardUnits()


def build_all_units(
    plan: Plan,
    programs: Mapping[str, Sequence[Program]],
    parameters: Mapping[str, TensorInfo],
    whole: Collection[str],
) -> ShardUnits:
    """What every rank holds parts of.

    Args:
        plan: how the training is split.
        programs: of all ranks, by objective.
        parameters: of the model, by canonical name.
        whole: those that their optimizer must see whole.
    """
    lanes = ({name: each[rank] for name, each in programs.items()} for rank in range(plan.workers))
    return ShardUnits(tuple(build_units(plan, lane, parameters, whole) for lane in lanes))


def _regroup_buckets(program: Program, units: Sequence[ShardUnit]) -> Program:
    of = {name: bucket for bucket in program.buckets for name in bucket.parameters}
    buckets, known = list[GradientBucket](), {name for unit in units for name in unit.parameters}
    for unit in units:
        alike: dict[tuple[tuple[int, ...], frozenset[int]], list[str]] = {}
        # In the order of the buckets, not of the unit: that may be another one on stages with other replicas.
        for name in (name for name in of if name in unit.parameters):
            alike.setdefault((of[name].ranks, of[name].zero_contributors), []).append(name)
        for number, ((ranks, silent), names) in enumerate(alike.items()):
            label = unit.name if not number else f"{unit.name}.{number}"
            buckets.append(GradientBucket(label, ranks, tuple(names), silent))
    for bucket in program.buckets:  # what no other graph had
        if rest := tuple(name for name in bucket.parameters if name not in known):
            buckets.append(replace(bucket, name=f"more.{bucket.name}", parameters=rest))
    reduces = [Action(ActionKind.REDUCE, program.stage, value=b.name) for b in buckets if len(b.ranks) > 1]
    first = next((i for i, a in enumerate(program.actions) if a.kind is ActionKind.REDUCE), len(program.actions) - 1)
    before = [a for a in program.actions[:first] if a.kind is not ActionKind.REDUCE]
    after = [a for a in program.actions[first:] if a.kind is not ActionKind.REDUCE]
    return replace(program, actions=(*before, *reduces, *after), buckets=tuple(buckets))
