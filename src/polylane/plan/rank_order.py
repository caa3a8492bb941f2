"""Ranks: which workers each stage has, where nobody says it: those that talk the most are neighbours."""

from __future__ import annotations

from collections.abc import Sequence

from polylane.plan.spec import Degrees

# One replica of a stage, whose ranks split its operators: (which part of all samples it begins with, stage, replica).
_Group = tuple[float, int, int]


def assign_ranks(meshes: Sequence[Degrees]) -> tuple[tuple[int, ...], ...]:
    """The ranks of every stage, in the order of its mesh.

    Ranks are numbered host by host. Those that split an operator follow each other, and where their number is a power
    of two they begin at a multiple of it: a host with a power of two of ranks that could hold them does. Replicas are
    outermost, and stages between: of stages with as many replicas each, rank = (replica * stages + stage) * ranks of a
    replica + index. Of others, what computes on the first samples comes first, as far as it stays on its hosts.
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
    """Groups one behind the other, so that each whose size is a power of two begins at a multiple of its size.

    Two neighbours of one size go together as one of twice the size, up to the largest size. What is left over, one of
    each smaller size at most, ends the line, the largest first; then come groups of other sizes.
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
