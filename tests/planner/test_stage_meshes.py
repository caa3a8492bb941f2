"""Unequal stages: dynamic programming finds what brute force finds."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from polylane.planner.stage_meshes import BOUNDS, Chosen, StageMeshSearch, choose_positions, search_unequal_meshes
from tests.support import planning_graphs


def found(workers: int, microbatches: int, limit: float = 1e12, in_turn: bool = False) -> StageMeshSearch:
    graph = planning_graphs.blocks(3, 64)
    return StageMeshSearch(planning_graphs.estimates(graph, "8:a100-80g", 32), workers, microbatches, limit, in_turn)


def every(search: StageMeshSearch, bound: float) -> list[Chosen]:
    """All ways to cut at a few places, with all meshes, that keep the bound and the memory."""
    ways, last = [], len(search.places) - 1
    numbers = range(len(search.options))
    for stages in range(1, 4):
        for cuts in itertools.combinations(range(1, last), stages - 1):
            ends = (0, *cuts, last)
            for options in itertools.product(numbers, repeat=stages):
                if sum(search.options[o].mesh.workers for o in options) != search.workers:
                    continue
                way = [(ends[i], ends[i + 1], search.options[o]) for i, o in enumerate(options)]
                used = [sum(o.mesh.workers for _, _, o in way[i:]) for i in range(stages)]
                live = [search.count_live(o, stages - i, used[i]) for i, (_, _, o) in enumerate(way)]
                if all(o.period[a, b] <= bound for a, b, o in way) and all(
                    search.stage_bytes(options[i], live[i])[a, b] <= search.limit for i, (a, b, _) in enumerate(way)
                ):
                    ways.append(way)
    return ways


@pytest.mark.parametrize("share", [0.4, 0.6, 1.0])
@pytest.mark.parametrize("limit", [1e12, 3e5])
@pytest.mark.parametrize("in_turn", [False, True])
def test_the_least_sum_under_a_bound(share: float, limit: float, in_turn: bool) -> None:
    search = found(3, 4, limit, in_turn)
    search.places = search.places[:1] + search.places[1:-1:3] + search.places[-1:]
    bound = share * min(float(option.seconds[0, -1]) for option in search.options)

    def cost(way: Chosen) -> float:
        return sum(float(o.seconds[a, b] + o.closing_seconds[a, b] / search.microbatches) for a, b, o in way)

    chosen, ways = search.choose_stages(bound), every(search, bound)
    if chosen is None:
        assert not ways
        return
    assert sum(option.mesh.workers for _, _, option in chosen) == 3
    assert all(a[1] == b[0] for a, b in itertools.pairwise(chosen))
    assert cost(chosen) == pytest.approx(min(map(cost, ways), default=cost(chosen)))


@pytest.mark.parametrize("in_turn", [False, True])
def test_the_best_is_that_of_all_bounds(in_turn: bool) -> None:
    """A bound is left out only where it admits nothing: from the loosest down, none follows one that admits nothing."""
    fitting = []
    for limit in (1e3, 2e5, 3e5, 1e12):
        search = found(4, 4, limit, in_turn)
        one = min(float(option.seconds[0, -1]) for option in search.options)
        each = [search.choose_stages(float(bound)) for bound in np.geomspace(one / 4, one, BOUNDS)]
        admitted = [chosen is not None for chosen in each]
        assert admitted == sorted(admitted)
        ways = [chosen for chosen in each if chosen is not None]
        fitting.append(len(ways))
        best = min(ways, key=search.step_seconds, default=None)
        meshes = [] if best is None else [option.mesh for _, _, option in best]
        unequal = len(set(meshes)) > 1 and (not in_turn or any(mesh.data > 1 for mesh in meshes))
        assert [list(one.meshes) for one in search.find_best()] == ([meshes] if unequal else [])
    assert fitting[0] == 0 < fitting[-1]


def test_candidates_use_all_workers_on_unequal_meshes() -> None:
    graph = planning_graphs.blocks(3, 64)
    estimates = planning_graphs.estimates(graph, "4:a100-80g", 32)
    for candidate in search_unequal_meshes(estimates, 4, 1e12):
        assert candidate.workers == 4 and len(set(candidate.meshes)) > 1
        assert list(candidate.cuts) == sorted(set(candidate.cuts))
    assert search_unequal_meshes(estimates, 2, 1e12) == [], "two workers are equal or one stage"
    assert search_unequal_meshes(estimates, 64, 1e12) == []


def test_of_many_places_some_are_looked_at() -> None:
    estimates = planning_graphs.estimates(planning_graphs.blocks(40, 16), "4:a100-80g", 32)
    places = choose_positions(estimates)
    assert len(places) <= 48 and places[0] == 0 and places[-1] == len(estimates.positions) - 1
