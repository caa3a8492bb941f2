"""ZeRO shard units: which parameters are cut, reduced and gathered as one, and which ranks sum which shard."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch

from polylane.graph.graph import TensorInfo
from polylane.plan.plan import Plan
from polylane.program import lower
from polylane.program.program import GradientBucket, Program
from polylane.program.server_assignment import assign_longest_first
from polylane.runtime.connections.shard_groups import shard_group
from polylane.schedule.action import Action, ActionKind


@dataclass(frozen=True)
class ShardUnit:
    """Parameters that are concatenated, and cut, reduced and gathered as one.

    Attributes:
        name: name of the unit, that of the bucket it was made of.
        parameters: canonical names, in their order in the unit.
        owners: for parameters that the optimizer can only update as a whole, the index in the shard group of the rank
            that owns each, ascending; empty: the unit is cut evenly, regardless of where parameters begin.
        cast: dtype to which passes cast all of its parameters, and in which they gather it; None: in its own.
    """

    name: str
    parameters: tuple[str, ...]
    owners: tuple[int, ...] = ()
    cast: torch.dtype | None = None

    def part_bounds(self, elements: Sequence[int], ranks: int) -> tuple[tuple[int, int], ...]:
        """Return (begin, end) of each rank's shard in elements of the unit; even ones are equal but for the last ones.

        So a unit is gathered as equal parts, one behind the other: without any copy, however long it is.

        Args:
            elements: number of elements of each parameter of the unit.
            ranks: number of ranks in the shard group.
        """
        if self.owners:
            sizes = [sum(n for n, o in zip(elements, self.owners, strict=True) if o == rank) for rank in range(ranks)]
        else:
            total = sum(elements)
            share = -(-total // ranks)
            sizes = [min(share, max(0, total - share * rank)) for rank in range(ranks)]
        return tuple(pairwise((0, *accumulate(sizes))))

    def part_range(self, name: str, elements: Sequence[int], ranks: int, index: int) -> tuple[int, int]:
        """Return (begin, end) of a rank's elements of one parameter; equal if it has none.

        Args:
            name: canonical name of a parameter of the unit.
            elements: number of elements of each parameter of the unit.
            ranks: number of ranks in the shard group.
            index: index of the rank in the shard group.
        """
        position = self.parameters.index(name)
        start, (begin, end) = sum(elements[:position]), self.part_bounds(elements, ranks)[index]
        # Both ends in the unit, clamped to the parameter's span; relative to its begin at the end.
        low = min(max(start, begin), start + elements[position])
        return low - start, max(low, min(start + elements[position], end)) - start


@dataclass(frozen=True)
class ShardUnits:
    """The units of every rank, by rank; empty without ZeRO."""

    units: tuple[tuple[ShardUnit, ...], ...] = ()

    def regroup_buckets(self, programs: Sequence[Program]) -> tuple[Program, ...]:
        """Return programs with buckets inside units, so that what is reduced as one is also cut as one."""
        if not self.units:
            return tuple(programs)
        return tuple(_regroup_buckets(program, self.units[program.rank]) for program in programs)


WHOLE = ShardUnits()


def build_all_units(
    plan: Plan,
    programs: Mapping[str, Sequence[Program]],
    parameters: Mapping[str, TensorInfo],
    whole_names: Collection[str],
    cast_names: Collection[str] = (),
    cast: torch.dtype | None = None,
) -> ShardUnits:
    """Build the units of every rank; all ranks of a shard group have the same ones.

    Args:
        plan: the parallelization plan of the training.
        programs: the programs of all ranks, by objective.
        parameters: shape and dtype of the model's parameters, by canonical name.
        whole_names: names of parameters that their optimizer can only update as a whole.
        cast_names: names of parameters that passes read in the dtype ``cast`` alone: they have units of their own.
        cast: dtype of autocast; None without it.
    """
    programs_by_rank = (
        {name: objective_programs[rank] for name, objective_programs in programs.items()}
        for rank in range(plan.workers)
    )
    return ShardUnits(
        tuple(
            tuple(
                _divide_by_dtype(
                    _build_rank_units(plan, rank_programs, parameters, whole_names), parameters, cast_names, cast
                )
            )
            for rank_programs in programs_by_rank
        )
    )


def _build_rank_units(
    plan: Plan, programs: Mapping[str, Program], parameters: Mapping[str, TensorInfo], whole_names: Collection[str]
) -> tuple[ShardUnit, ...]:
    """Return the units of one rank: a parameter of several objectives is in the first one's unit."""
    units, seen_names, loads = list[ShardUnit](), set[str](), dict[tuple[int, ...], list[int]]()
    for objective, program in programs.items():
        ranks = len(shard_group(plan, program.rank))
        for bucket in program.buckets:
            names = [name for name in bucket.parameters if name not in seen_names]
            seen_names.update(names)
            label = bucket.name if len(programs) == 1 else f"{objective}.{bucket.name}"
            aligned = sorted(names, key=lambda name: -_alignment(parameters[name]))
            if cut := tuple(name for name in aligned if name not in whole_names):
                units.append(ShardUnit(label, cut))
            if uncut_names := [name for name in aligned if name in whole_names]:
                sizes = {name: parameters[name].bytes for name in sorted(uncut_names)}
                # Whole parameters cannot be cut evenly: give each to the rank with the fewest bytes so far.
                owners = assign_longest_first(sizes, loads.setdefault(bucket.ranks, [0] * ranks))
                order = sorted(uncut_names, key=owners.__getitem__)
                units.append(ShardUnit(f"{label}.whole", tuple(order), tuple(owners[name] for name in order)))
    return tuple(units)


def _divide_by_dtype(
    units: Iterable[ShardUnit],
    parameters: Mapping[str, TensorInfo],
    cast_names: Collection[str],
    cast: torch.dtype | None,
) -> Iterator[ShardUnit]:
    """Yield units of which each is gathered in one dtype: its own, or that to which passes cast it.

    What is left of units of both, weights of normalizations mostly, is little: it is joined, up to a bucket, and takes
    one collective instead of one for each of them. It comes behind the last of them, as its gradients do.
    """
    remainder: ShardUnit | None = None
    for unit in units:
        indices = {True: list[int](), False: list[int]()}
        for index, name in enumerate(unit.parameters):
            indices[name in cast_names].append(index)
        if not indices[True] or not indices[False]:
            yield replace(unit, cast=cast if indices[True] else None)
            continue
        part, uncast = (
            replace(
                unit,
                parameters=tuple(unit.parameters[i] for i in indices[is_cast]),
                owners=tuple(unit.owners[i] for i in indices[is_cast]) if unit.owners else (),
            )
            for is_cast in (True, False)
        )
        yield replace(part, name=f"{unit.name}.{str(cast).removeprefix('torch.')}", cast=cast)
        if remainder is not None and _fit_together(remainder, uncast, parameters):
            names = (*remainder.parameters, *uncast.parameters)
            remainder = replace(
                remainder, parameters=tuple(sorted(names, key=lambda name: -_alignment(parameters[name])))
            )
            continue
        if remainder is not None:
            yield remainder
        remainder = uncast
    if remainder is not None:
        yield remainder


def _fit_together(remainder: ShardUnit, uncast: ShardUnit, parameters: Mapping[str, TensorInfo]) -> bool:
    """Return whether two units, of buckets whose gradients the same ranks sum, are not more than a bucket."""
    are_alike = remainder.name.rpartition(".")[0] == uncast.name.rpartition(".")[0] and not (
        remainder.owners or uncast.owners
    )
    size = sum(parameters[name].bytes for name in (*remainder.parameters, *uncast.parameters))
    return are_alike and size <= lower.BUCKET_BYTES


def _alignment(info: TensorInfo) -> int:
    """Return the largest power of two by which the number of elements can be divided.

    In descending order of it each parameter begins at a multiple of its own, as views of it as another dtype
    (``torch.view_as_complex``) need it.
    """
    elements = math.prod(info.shape)
    return elements & -elements if elements else 1 << 62


def _regroup_buckets(program: Program, units: Sequence[ShardUnit]) -> Program:
    of = {name: bucket for bucket in program.buckets for name in bucket.parameters}
    buckets, unit_names = list[GradientBucket](), {name for unit in units for name in unit.parameters}
    for unit in units:
        names_by_ranks: dict[tuple[tuple[int, ...], frozenset[int]], list[str]] = {}
        # Parameters of a unit may be summed over different ranks: one bucket for each set. In the order of the buckets,
        # which is equal on all ranks; a unit's order may differ on stages with other numbers of replicas.
        for name in (name for name in of if name in unit.parameters):
            names_by_ranks.setdefault((of[name].ranks, of[name].zero_contributors), []).append(name)
        for number, ((ranks, silent), names) in enumerate(names_by_ranks.items()):
            label = unit.name if not number else f"{unit.name}.{number}"
            buckets.append(GradientBucket(label, ranks, tuple(names), silent))
    for bucket in program.buckets:  # parameters in no unit
        if other_names := tuple(name for name in bucket.parameters if name not in unit_names):
            buckets.append(replace(bucket, name=f"more.{bucket.name}", parameters=other_names))
    # The REDUCE actions of the new buckets take the place of the old ones.
    reduces = [Action(ActionKind.REDUCE, program.stage, value=b.name) for b in buckets if len(b.ranks) > 1]
    index = next((i for i, a in enumerate(program.actions) if a.kind is ActionKind.REDUCE), len(program.actions) - 1)
    earlier_actions = [a for a in program.actions[:index] if a.kind is not ActionKind.REDUCE]
    later_actions = [a for a in program.actions[index:] if a.kind is not ActionKind.REDUCE]
    return replace(program, actions=(*earlier_actions, *reduces, *later_actions), buckets=tuple(buckets))
