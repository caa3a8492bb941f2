"""Replicas in turn are compared unasked, chosen where they are faster, and kept or left out where the user says so."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.plan.fixed_keys import parse_fixed
from polylane.plan.spec import Degrees
from polylane.planner.advice import describe_candidate
from polylane.planner.ranked_plan import price_plan
from polylane.planner.schedule_options import usable_options
from polylane.planner.search import SearchRequest, SearchResult, may_take_turns, search
from polylane.planner.stage_curves import CurveCache
from polylane.planner.stage_meshes import StageMeshSearch, search_unequal_meshes
from polylane.planner.uniform_plans import UniformPlan, rate_uniform_plan, stage_curves_of
from polylane.schedule.live import peak_live
from polylane.schedule.round_robin import replica_lanes
from polylane.schedule.stage_graph import StageGraph
from tests.support import planning_graphs

AMPLE = 1e15
SLOW_LINKS = "3x1:a100-80g,hosts=ethernet-10g"


class Light(nn.Module):
    """Much work for few parameters, which take long in small parts."""

    def __init__(self, hidden: int, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.linear = norm, nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x)).relu()


def captured(model: nn.Module, *shape: int) -> Graph:
    names = [name for name, _ in model.named_parameters()]
    return capture(model, planning_graphs.mean_square, torch.zeros(2, *shape), trainable=names)


@cache
def light_then_heavy() -> Graph:
    """A body that computes and a head that has the parameters, as VGG-16 has: PipeDream's case for replicas."""
    with torch.device("meta"):
        body = [Light(64, nn.LayerNorm(64)) for _ in range(8)]
        head = [nn.Flatten(), nn.Linear(64 * 256, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
        return captured(nn.Sequential(*body, *head), 256, 64)


@cache
def normalized() -> Graph:
    """A network of batch normalizations, whose statistics replicas that split microbatches sum inside their passes."""
    with torch.device("meta"):
        return captured(nn.Sequential(*(Light(256, nn.BatchNorm1d(256)) for _ in range(6))), 256)


def answered(
    line: str, graph: Graph, cluster: str, batch: int, workers: int, limit: float = AMPLE, top: int = 6
) -> SearchResult:
    fixed = parse_fixed(line)
    estimates = CurveCache(planning_graphs.basis(graph, cluster), batch, sync=fixed.sync)
    return search(estimates, SearchRequest((workers,), workers, limit, top, shardings=fixed.shardings, fixed=fixed))


def test_they_are_chosen_unasked_where_they_are_faster() -> None:
    best = answered("", light_then_heavy(), SLOW_LINKS, 16, 3).ranked_plans[0]
    split = answered("replicas=split", light_then_heavy(), SLOW_LINKS, 16, 3)
    # Two workers share the body, whose gradients are few; the head, with most of the parameters, is on one.
    assert best.plan.takes_turns and [mesh.data for mesh in best.plan.group_meshes] == [2, 1]
    assert best.prediction.seconds < 0.95 * split.ranked_plans[0].prediction.seconds
    assert not any(found.plan.takes_turns for found in split.ranked_plans)
    assert not any(candidate.takes_turns for candidate in split.fitting_candidates)
    assert describe_candidate(best.candidate) == "[data=2 | 1],microbatches=2,replicas=round-robin"


def test_where_they_are_asked_for_no_replicas_split() -> None:
    found = answered("replicas=round-robin", light_then_heavy(), SLOW_LINKS, 16, 3)
    assert found.ranked_plans
    for each in found.fitting_candidates:
        assert each.takes_turns == any(mesh.data > 1 for mesh in each.meshes), describe_candidate(each)
        assert each.sync.is_plain_sum
    # A plan of one stage has turns too where they are asked for, and as many microbatches as replicas at least.
    alone = [each for each in found.fitting_candidates if each.takes_turns and len(each.meshes) == 1]
    assert 3 in {each.microbatches for each in alone}


@pytest.mark.slow
def test_equal_replicas_take_turns_unasked_only_where_they_spare_sums_of_statistics() -> None:
    """Else they are as fast as replicas that split; and statistics of whole batches are not given up for them."""
    for graph, useful in ((normalized(), True), (planning_graphs.blocks(4, 64), False)):
        every = answered("", graph, "4x1:a100-80g,hosts=ethernet-10g", 16, 4, top=1).fitting_candidates
        uniform = [each for each in every if each.takes_turns and len(set(each.meshes)) == 1]
        assert bool(uniform) == useful
        assert all(len(each.meshes) > 1 for each in uniform)


@pytest.mark.parametrize("microbatches", [2, 4])
def test_equal_replicas_in_turn_take_and_hold_what_each_would_alone(microbatches: int) -> None:
    """A replica has the samples, passes and messages of one that splits half as many microbatches, but no sums."""
    estimates = CurveCache(planning_graphs.basis(normalized(), "4x1:a100-80g,hosts=ethernet-10g"), 64)
    split = UniformPlan(2, 2, 1, 1, microbatches)
    turns = split.in_turn()
    assert turns.microbatches == 2 * microbatches and turns.own_microbatches == microbatches
    one, other = (stage_curves_of(estimates, each) for each in (split, turns))
    assert one is not None and other is not None
    assert (other.forward[-1] < one.forward[-1]) and (other.activation_bytes == one.activation_bytes).all()
    plain = rate_uniform_plan(estimates, split, AMPLE)
    found = rate_uniform_plan(estimates, turns, AMPLE)
    assert plain is not None and found is not None and found.seconds < plain.seconds
    exact = price_plan(estimates, found).simulate()
    assert exact.plan.takes_turns and exact.plan.turns(0) == microbatches
    # What a step costs them once, the means and variances of all microbatches, is known to the simulator alone.
    assert found.seconds <= exact.prediction.seconds < 1.25 * found.seconds


def test_estimates_of_unequal_stages_are_near_what_is_simulated() -> None:
    estimates = CurveCache(planning_graphs.basis(light_then_heavy(), SLOW_LINKS), 16)
    candidates = search_unequal_meshes(estimates, 3, AMPLE, in_turn=True)
    assert [each.microbatches for each in candidates] == [2, 4, 8, 16]
    for each in candidates:
        assert each.takes_turns and each.turns == tuple(mesh.data for mesh in each.meshes)
        exact = price_plan(estimates, each).simulate()
        assert each.seconds == pytest.approx(exact.prediction.seconds, rel=0.35)


@pytest.mark.parametrize("replicas", [(2, 1), (1, 3), (3, 2), (2, 1, 3), (3, 1, 1)])
@pytest.mark.parametrize("microbatches", [3, 8])
def test_a_stage_is_rated_with_the_microbatches_that_its_replicas_hold(
    replicas: tuple[int, ...], microbatches: int
) -> None:
    workers = sum(replicas)
    estimates = CurveCache(planning_graphs.basis(planning_graphs.blocks(3, 64), "8:a100-80g"), 64)
    looking = StageMeshSearch(estimates, workers, microbatches, AMPLE, in_turn=True)
    options = [next(each for each in looking.options if each.mesh == Degrees(count)) for count in replicas]
    held = [
        looking.count_live(option, len(replicas) - stage, sum(replicas[stage:])) for stage, option in enumerate(options)
    ]
    graph = StageGraph.chain(len(replicas))
    lanes = replica_lanes("1f1b", graph, microbatches, replicas, range(len(replicas)))
    assert held == [max(peak_live(of_stage)) for of_stage in lanes]


def test_the_memory_of_a_replica_bounds_them() -> None:
    """With no room for the head beside another stage nothing is chosen that would need it."""
    ample = answered("replicas=round-robin", light_then_heavy(), SLOW_LINKS, 16, 3).ranked_plans
    limit = 0.9 * max(each.peak_bytes for each in ample)
    for each in answered("replicas=round-robin", light_then_heavy(), SLOW_LINKS, 16, 3, limit).ranked_plans:
        assert each.peak_bytes <= limit


def test_only_schedules_that_they_may_have_are_compared() -> None:
    options = [("1f1b", 1), ("zb-h1", 1), ("afab", 1), ("pipedream", 1), ("pipedream-2bw", 1)]
    plain = parse_fixed("").sync
    assert usable_options(options, 2, 4, 9, plain, (2, 1)) == [("1f1b", 1), ("afab", 1)]
    assert usable_options(options, 2, 4, 9, plain, (2, 2)) == options
    # Updates are shared evenly: 3 microbatches over 2 replicas are not; and 2BW needs k - 1 for each replica.
    assert usable_options(options, 2, 3, 9, plain, (2, 2)) == options[:3]
    assert usable_options(options, 4, 4, 9, plain, (2, 2, 2, 2)) == options[:4]


def test_what_replicas_in_turn_cannot_do_is_not_searched() -> None:
    basis = planning_graphs.basis(light_then_heavy(), SLOW_LINKS)
    assert may_take_turns(CurveCache(basis, 16))
    assert not may_take_turns(CurveCache(basis, 16, sync=parse_fixed("every=4").sync))
    found = answered("every=4", light_then_heavy(), SLOW_LINKS, 16, 3)
    assert not any(each.takes_turns for each in found.fitting_candidates)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("replicas=in-turn", "replicas=in-turn is not known, known are split, round-robin"),
        ("replicas=round-robin,every=2", "replicas=round-robin: sync (every=2) is for replicas that split every"),
        ("replicas=round-robin,shard=optimizer", "replicas=round-robin: sync (shard=optimizer) is for replicas"),
        ("replicas=round-robin,data=4,microbatches=2", "4 replicas cannot compute microbatches=2 in turn"),
        ("schedule=pipedream-2bw,pipeline=4,microbatches=2", "pipedream-2bw of 4 stages needs at least 3"),
    ],
)
def test_bad_keys(line: str, told: str) -> None:
    with pytest.raises(PolylaneError) as error:
        parse_fixed(line)
    assert told in str(error.value)
    assert str(parse_fixed("data=2,replicas=round-robin")) == "data=2,replicas=round-robin"


@pytest.mark.parametrize("line", ["microbatches=3", "microbatches=5,replicas=round-robin", "microbatches=3,data=1"])
def test_any_number_of_microbatches_may_be_fixed(line: str) -> None:
    """Also one that makes parts of no power of two, of unequal sizes, or that replicas have unequally many of."""
    fixed = parse_fixed(line)
    found = answered(line, light_then_heavy(), SLOW_LINKS, 16, 3)
    assert found.ranked_plans
    for each in found.ranked_plans:
        assert each.plan.microbatches == fixed.counts["microbatches"]
    turning = [each for each in found.fitting_candidates if each.takes_turns]
    assert bool(turning) == ("data" not in fixed.counts)
