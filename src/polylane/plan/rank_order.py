"""Rank order: the default ranks of every stage; those that communicate the most are neighbours, so on one host."""

from __future__ import annotations

from collections.abc import Sequence

from polylane.plan.spec import Degrees

# One replica of a stage, whose ranks shard its operators: (first sample as a fraction of the batch, stage, replica).
_Group = tuple[float, int, int]


def assign_ranks(meshes: Sequence[Degrees]) -> tuple[tuple[int, ...], ...]:
    """Assign ranks to every stage, in the order of its mesh.

    Ranks are numbered host by host. Those that shard an operator are consecutive, and where their number is a power of
    two they begin at a multiple of it, so that they never straddle two hosts whose size is a multiple of that power.
    Stages come next, replicas are outermost: where all stages have equally many replicas, rank = (replica * stages +
    stage) * ranks of a replica + index. Else groups are ordered by their first sample, as far as alignment allows.
    """
    groups = sorted((r / mesh.data, s, r) for s, mesh in enumerate(meshes) for r in range(mesh.data))
    sizes = [mesh.sequence * mesh.tensor for mesh in meshes]
    found: list[list[int]] = [[] for _ in meshes]
    first = 0
    for _, stage, _ in _align_groups(groups, sizes):
        found[stage] += range(first, first + sizes[stage])
        first += sizes[stage]
    return tuple(map(tuple, found))


def _align_groups(groups: Sequence[_Group], sizes: Sequence[int]) -> list[_Group]:
    """Order groups so that each whose size is a power of two begins at a multiple of its size.

    As in a buddy allocator: two neighbours of one size are merged into one of twice the size, up to the largest size.
    What is left over, at most one bundle of each smaller size, comes last, the largest first; then groups of other
    sizes.
    """
    #   1  2  1  1  2   ->   1 1  2  2  1      (1, 2: groups of so many ranks)
    powers = [size for size in sizes if size & (size - 1) == 0]
    line: list[tuple[_Group, ...]] = []
    over: list[tuple[_Group, ...]] = []
    size = 1
    while powers and size <= max(powers):
        if len(line) % 2:
            over.insert(0, line.pop())
        pairs = [a + b for a, b in zip(line[::2], line[1::2], strict=True)]
        line = sorted([*pairs, *((group,) for group in groups if sizes[group[1]] == size)])
        size *= 2
    other = [group for group in groups if sizes[group[1]] not in powers]
    return [*(group for bundle in (*line, *over) for group in bundle), *other]
