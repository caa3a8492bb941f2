"""Laws of which ranks each stage has: operators inside a host, replicas outermost, and every rank once."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from hypothesis import assume, given
from hypothesis import strategies as st

from polylane.plan.fit_to_graph import assign_ranks
from polylane.plan.spec import Degrees

powers = st.sampled_from([1, 2, 4, 8])
any_mesh = st.builds(Degrees, st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
power_mesh = st.builds(Degrees, st.integers(1, 6), powers, powers)


def inner(mesh: Degrees) -> int:
    return mesh.sequence * mesh.tensor


def groups(meshes: Sequence[Degrees]) -> list[list[tuple[int, ...]]]:
    """Of every stage, the ranks of each replica."""
    found = []
    for mesh, own in zip(meshes, assign_ranks(meshes), strict=True):
        found.append([own[i : i + inner(mesh)] for i in range(0, len(own), inner(mesh))])
    return found


@given(st.lists(any_mesh, min_size=1, max_size=5))
def test_every_rank_has_one_place(meshes: list[Degrees]) -> None:
    found = assign_ranks(meshes)
    assert [len(own) for own in found] == [mesh.workers for mesh in meshes]
    assert sorted(rank for own in found for rank in own) == list(range(sum(mesh.workers for mesh in meshes)))
    assert all(own == tuple(sorted(own)) for own in found)  # a later replica has later ranks
    for replicas in groups(meshes):
        assert all(own == tuple(range(own[0], own[0] + len(own))) for own in replicas)


@given(any_mesh, st.integers(1, 5))
def test_of_stages_that_are_alike_replicas_are_outermost_then_stages(mesh: Degrees, pipeline: int) -> None:
    """rank = (replica * pipeline + stage) * inner + index."""
    assert assign_ranks([mesh] * pipeline) == tuple(
        tuple((r * pipeline + s) * inner(mesh) + i for r in range(mesh.data) for i in range(inner(mesh)))
        for s in range(pipeline)
    )


@given(st.lists(power_mesh, min_size=1, max_size=6), st.sampled_from([1, 2, 4, 8, 16, 64]))
def test_ranks_that_split_operators_are_on_one_host(meshes: list[Degrees], host: int) -> None:
    """As far as it holds them: else at least those along tensor, which talk the most, if it holds these."""
    for mesh, replicas in zip(meshes, groups(meshes), strict=True):
        for own in replicas:
            for size in (inner(mesh), mesh.tensor):
                if size <= host:
                    for first in range(0, inner(mesh), size):
                        assert len({rank // host for rank in own[first : first + size]}) == 1


@given(st.lists(power_mesh, min_size=1, max_size=5), st.integers(1, 4))
def test_what_all_stages_have_so_many_times_is_outermost(meshes: list[Degrees], times: int) -> None:
    """Of outer, the greatest common divisor of the replicas: the first 1/outer of each stage come first."""
    meshes = [mesh._replace(data=mesh.data * times) for mesh in meshes]
    outer = gcd(*(mesh.data for mesh in meshes))
    block = sum(mesh.workers for mesh in meshes) // outer
    assume(block % max(map(inner, meshes)) == 0)
    for own in assign_ranks(meshes):
        share = len(own) // outer
        assert [rank // block for rank in own] == [index // share for index in range(len(own))]


def test_hosts_of_two() -> None:
    """The pair that splits operators is on one host, and one more stage turns nothing round."""
    one, two, pair = Degrees(), Degrees(2), Degrees(tensor=2)
    assert assign_ranks([one, pair, one]) == ((0,), (2, 3), (1,))
    assert assign_ranks([two, two]) == ((0, 2), (1, 3))
    assert assign_ranks([two, two, one]) == ((0, 3), (1, 4), (2,))
    assert assign_ranks([two, Degrees(2, 1, 2)]) == ((0, 1), (2, 3, 4, 5))
    assert assign_ranks([Degrees(tensor=3), one, pair]) == ((3, 4, 5), (2,), (0, 1))
