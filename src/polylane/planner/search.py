"""Plan search: rate all plans that a cluster allows by estimate, then predict and rank the best exactly."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fit_to_graph import check_asynchronous
from polylane.plan.fixed_keys import NOTHING_FIXED, FixedKeys
from polylane.plan.options import ROUND_ROBIN, SPLIT
from polylane.plan.plan import Plan
from polylane.plan.sync import Shard
from polylane.planner import uniform_plans
from polylane.planner.branch_stages import plan_branches
from polylane.planner.ranked_plan import PricedPlan, RankedPlan, price_plan, weigh
from polylane.planner.schedule_options import PLAIN_SCHEDULE, usable_options
from polylane.planner.schedule_trials import choose_schedule, simulate_runner_up, with_schedule
from polylane.planner.search_progress import Told, tell_nobody
from polylane.planner.stage_curves import CurveCache
from polylane.planner.stage_meshes import MICROBATCHES, search_unequal_meshes
from polylane.planner.uniform_plans import RatedPlan, UniformPlan
from polylane.samples.running_norms import find_running_norms
from polylane.schedule.schedules import ASYNCHRONOUS

# Share of the memory within which a plan that is estimated to fit will fit.
SURE = 0.85
# How many of the best estimates are predicted exactly; fewer once their schedules add up to this many passes.
FINALISTS = 12
PASSES = 15_000
# Plans that differ in microbatches alone, of which so many are predicted exactly.
_OF_A_KIND = 3
# Plans that shard operators along both axes are rated only for this many rank counts, the best of single-axis plans.
BOTH_AXES = 1
# Plans are skipped if their lower bound exceeds the best time by this factor and their family has a plan already.
FAR = 1.5


@dataclass(frozen=True)
class SearchRequest:
    """Constraints of a search.

    Attributes:
        workers: numbers of workers to try.
        max_operator_ranks: most ranks over which an operator may be sharded.
        memory_limit: bytes that a worker may have.
        plan_count: number of plans to return.
        shardings: kinds of sharding that are tried beside the estimates' own, those that share out less first; each is
            rated only as far as those before it do not fit, for it sends as much or more.
        fixed: keys that a plan must have.
        batch_is_indivisible: whether the loss couples the samples of a batch, which then must not be divided over
            replicas or into microbatches.
        takes_whole_batches: whether others than one microbatch would change what is computed, and must be asked for.
        check: raises a PolylaneError for a full plan that the training would refuse.
    """

    workers: tuple[int, ...]
    max_operator_ranks: int
    memory_limit: float
    plan_count: int = 5
    batch_is_indivisible: bool = False
    takes_whole_batches: bool = False
    shardings: tuple[Shard, ...] = ()
    fixed: FixedKeys = NOTHING_FIXED
    check: Callable[[Plan, Partition], None] = lambda plan, partition: None

    @property
    def microbatches(self) -> int | None:
        """The number of microbatches that a plan must have; None: it is searched."""
        return self.fixed.counts.get("microbatches", 1 if self.takes_whole_batches else None)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Attributes:
        estimates: cost curves of the graph on the cluster, by which the plans were rated.
        wish: constraints of the search.
        ranked_plans: the best plans, fastest first; empty if nothing fits.
        fitting_candidates: all candidates that fit in memory, fastest first by estimate.
        too_large_candidates: candidates that do not fit, fastest first by estimate.
        skipped_count: number of plans skipped by their lower bound, whether they fit or not.
    """

    estimates: CurveCache
    wish: SearchRequest
    ranked_plans: tuple[RankedPlan, ...]
    fitting_candidates: tuple[RatedPlan, ...]
    too_large_candidates: tuple[RatedPlan, ...]
    skipped_count: int = 0

    @property
    def compared_count(self) -> int:
        """Number of plans compared, skipped ones included."""
        return self.rated_count + self.skipped_count

    @property
    def rated_count(self) -> int:
        """Number of plans of which it is known whether they fit: all but those skipped by their lower bound."""
        return len(self.fitting_candidates) + len(self.too_large_candidates)


def search(
    estimates: CurveCache,
    wish: SearchRequest,
    finalists: int = FINALISTS,
    keep: Callable[[RatedPlan], bool] = lambda candidate: True,
    told: Told = tell_nobody,
) -> SearchResult:
    """Return the fastest plans that fit in memory.

    Uniform plans of every degree are rated by formula, then plans with unequal meshes and plans of branches; the best
    are simulated and ranked by that.

    Args:
        estimates: cost curves of the graph on the cluster.
        wish: constraints of the search.
        finalists: about how many are predicted exactly; 0: none, estimates only.
        keep: filter of the candidates that may be chosen.
        told: progress callback, called with every plan that is compared or simulated.
    """
    # First pass with skipping; it may be repeated without.
    answer = _search(estimates, wish, finalists, keep, FAR, told)
    # Where only plans that do not fit were kept, the skipped ones may fit.
    if finalists and answer.skipped_count and not answer.ranked_plans:
        answer = _search(estimates, wish, finalists, keep, math.inf, told)
    return answer


def _search(
    estimates: CurveCache,
    wish: SearchRequest,
    finalists: int,
    keep: Callable[[RatedPlan], bool],
    far: float,
    tick: Told,
) -> SearchResult:
    """Search once, skipping plans whose lower bound is more than ``far`` times the best time."""
    candidates, passed, max_workers = list[RatedPlan](), 0, max(wish.workers)
    for workers in wish.workers:
        looking = _UniformSearch(estimates, wish, keep, far if finalists else 1.0, finalists > 0, tick)
        candidates += looking.rate(workers)
        passed += looking.skipped_count
    # Both searches divide the batch over replicas or microbatches.
    if not wish.batch_is_indivisible:
        unequal_plans = _search_unequal(estimates, wish, max_workers)
        if not wish.fixed.degrees:
            unequal_plans += plan_branches(estimates, max_workers, wish.memory_limit)
        candidates += _with_fixed_schedule(unequal_plans, wish, estimates.max_stages)
    candidates = [c for c in candidates if wish.fixed.allows(c.meshes, c.microbatches, max_workers) and keep(c)]
    fitting = sorted((c for c in candidates if c.fits), key=_weighted_estimate)
    excluded = [c for c in candidates if not c.fits]
    exact, too_big = _exact(estimates, fitting, wish, finalists, tick) if finalists else ([], {})
    exact.sort(key=lambda f: weigh(f.candidate, f.prediction.seconds))
    exact[:1] = [simulate_runner_up(estimates, best) for best in exact[:1]]
    excluded = sorted([*excluded, *too_big.values()], key=lambda c: c.seconds)
    fitting = [c for c in fitting if id(c) not in too_big]
    return SearchResult(estimates, wish, tuple(exact[: wish.plan_count]), tuple(fitting), tuple(excluded), passed)


def _exact(
    estimates: CurveCache,
    candidates: Sequence[RatedPlan],
    wish: SearchRequest,
    finalists: int,
    tick: Told = tell_nobody,
) -> tuple[list[RankedPlan], dict[int, RatedPlan]]:
    """Predict the best candidates exactly; return them, and by id() those that turn out not to fit.

    At least the plans that are wanted if that many fit; more as long as that is little work. Of plans that differ in
    microbatches alone the three best that fit, so that finalists are diverse.
    """
    ranked_plans, too_big, passes, top = list[RankedPlan](), dict[int, RatedPlan](), 0, wish.plan_count
    # What does not fit fits even less in fewer microbatches, which are larger: they are not tried.
    tried, fewest = Counter[object](), dict[object, int]()
    for candidate in candidates:
        kind = candidate.division
        if tried[kind] == _OF_A_KIND or candidate.microbatches < fewest.get(kind, 0):
            continue
        enough = passes > PASSES or len(ranked_plans) >= max(finalists, 2 * top)
        if len(ranked_plans) >= top and (enough or len(too_big) >= finalists):
            break
        tick("simulated", len(ranked_plans) + len(too_big))
        # The estimate's memory is a bound of the search; only the prediction's peak decides.
        priced = _price_where_it_fits(estimates, candidate, wish)
        if priced.peak_bytes <= candidate.memory_limit:
            tried[kind] += 1
        if not _can_run(priced, wish):
            continue
        if priced.peak_bytes > candidate.memory_limit:
            fewest[kind] = max(candidate.microbatches, fewest.get(kind, 0))
            too_big[id(candidate)] = replace(candidate, peak_bytes=float(priced.peak_bytes))
            continue
        ranked_plan = priced.simulate()
        passes += ranked_plan.plan.pipeline * ranked_plan.plan.microbatches
        beat = min((plan.prediction.seconds for plan in ranked_plans), default=math.inf)
        ranked_plan, extra_passes = choose_schedule(estimates, ranked_plan, wish.fixed.schedules, beat)
        passes += extra_passes
        ranked_plans.append(ranked_plan)
    return ranked_plans, too_big


def _can_run(priced: PricedPlan, wish: SearchRequest) -> bool:
    """Return whether the training allows a plan; and a pipeline without a flush its cuts: no stages share a weight."""
    try:
        check_asynchronous(priced.plan, priced.partition)
        wish.check(priced.plan, priced.partition)
    except PolylaneError:  # the reason is shown only where no plan at all is left
        return False
    return True


def _price_where_it_fits(estimates: CurveCache, candidate: RatedPlan, wish: SearchRequest) -> PricedPlan:
    """Return a candidate as a full plan; with another schedule, the plainest, where its own does not fit."""
    full_plan, limit = price_plan(estimates, candidate), candidate.memory_limit
    options = wish.fixed.schedules if full_plan.peak_bytes > limit else ()
    stages, max_stages = len(candidate.meshes), estimates.max_stages
    for option in usable_options(options, stages, candidate.microbatches, max_stages, candidate.sync, candidate.turns):
        changed = None if option == candidate.option else with_schedule(estimates, candidate, option)
        priced = None if changed is None else price_plan(estimates, changed)
        if priced is not None and priced.peak_bytes <= limit:
            return priced
        # Where 1F1B does not fit, no other does.
        if option == PLAIN_SCHEDULE:
            break
    return full_plan


def _with_fixed_schedule(candidates: Sequence[RatedPlan], wish: SearchRequest, max_stages: int) -> list[RatedPlan]:
    """Return those of candidates rated as 1F1B that may have one of the fixed schedules, with the first such one.

    Their stages are not divided into chunks. Estimates stay those of 1F1B.
    """
    if PLAIN_SCHEDULE in wish.fixed.schedules:
        return list(candidates)
    rated_plans = []
    for candidate in candidates:
        options = [option for option in wish.fixed.schedules if option[1] == 1]
        stages, turns = len(candidate.meshes), candidate.turns
        usable = usable_options(options, stages, candidate.microbatches, max_stages, candidate.sync, turns)
        rated_plans += [replace(candidate, option=option) for option in usable[:1]]
    return rated_plans


def _weighted_estimate(candidate: RatedPlan) -> float:
    return weigh(candidate, candidate.seconds)


class _UniformSearch:
    """Branch and bound over uniform plans: rate them in the order of their lower bounds, skip hopeless ones.

    Args:
        estimates: cost curves and memory bound on the cluster.
        wish: constraints of the search.
        keep: filter of the candidates that may be chosen.
        far: skip plans whose lower bound exceeds the best time by this factor.
        families: whether to find the best plan of every family, not only the best of all.
        tick: progress callback, called with every plan that is rated.

    Attributes:
        skipped_count: number of plans skipped so far.
    """

    def __init__(
        self,
        estimates: CurveCache,
        wish: SearchRequest,
        keep: Callable[[RatedPlan], bool],
        far: float,
        families: bool,
        tick: Told = tell_nobody,
    ) -> None:
        self._estimates, self._wish, self._keep, self._far, self._families = estimates, wish, keep, far, families
        self._told, self._rated = tick, 0
        self._variants = sharding_variants(estimates, wish)
        self._best: dict[object, float] = {}  # best seconds that fit, by family (axes in use)
        self.skipped_count = 0

    def rate(self, workers: int) -> list[RatedPlan]:
        """Rate the uniform plans of so many workers.

        Plans that shard operators along both axes are rated only for the rank counts at which one axis alone is best.
        """
        single, double = list[UniformPlan](), list[UniformPlan]()
        wish, estimates = self._wish, self._estimates
        for uniform in uniform_plans.enumerate_uniform_plans(
            workers,
            wish.max_operator_ranks,
            estimates.batch,
            estimates.max_stages,
            wish.microbatches,
            1 if wish.fixed.schedule in ASYNCHRONOUS else 2,
        ):
            for plan in self._divide_work(uniform):
                if not wish.fixed.allows((plan.mesh,) * plan.stages, plan.microbatches, max(wish.workers)):
                    continue
                if not wish.batch_is_indivisible or plan.data == plan.microbatches == 1:
                    (double if plan.sequence > 1 and plan.tensor > 1 else single).append(plan)
        pairs = self._rate_best_first(single)
        best = sorted((pair for pair in pairs if pair[1].fits), key=lambda pair: pair[1].seconds)
        # Products sequence x tensor of the fastest plans that shard operators at all, in the order of their seconds.
        inner = list(dict.fromkeys(u.sequence * u.tensor for u, _ in best if u.sequence * u.tensor > 1))[:BOTH_AXES]
        pairs += self._rate_best_first([u for u in double if u.sequence * u.tensor in inner])
        return [candidate for _, candidate in pairs]

    def _divide_work(self, uniform: UniformPlan) -> list[UniformPlan]:
        """Return a uniform plan with what its replicas may do with a microbatch: split it, or take turns.

        Equal numbers of replicas in turn are faster only where replicas that split sum statistics inside their passes.
        Without a pipeline those of the whole batch are kept: turns are not compared unasked.
        """
        fixed, code = self._wish.fixed, self._estimates.basis.stages.graph.code
        # A number of microbatches that is fixed is that of the step, whatever a replica has of them.
        turning = replace(uniform, takes_turns=True) if "microbatches" in fixed.counts else uniform.in_turn()
        useful = uniform.stages > 1 and code.has_batch_statistics and self._turns_are_possible
        plans = [uniform] if uniform.data == 1 or fixed.replicas != ROUND_ROBIN else []
        if uniform.data > 1 and (fixed.replicas == ROUND_ROBIN or (fixed.replicas is None and useful)):
            plans.append(turning)
        return [plan for plan in plans if plan.divides(self._estimates.batch)]

    @cached_property
    def _turns_are_possible(self) -> bool:
        return may_take_turns(self._estimates)

    def _rate_best_first(self, uniforms: Sequence[UniformPlan]) -> list[tuple[UniformPlan, RatedPlan]]:
        """Rate plans in the order of their lower bounds; return those that were not skipped."""
        pairs, options = [], self._wish.fixed.schedules
        for lower_bound, uniform in sorted(
            ((uniform_plans.min_step_seconds(self._estimates, u, options), u) for u in uniforms),
            key=lambda pair: pair[0],
        ):
            axes = (uniform.data > 1, uniform.stages > 1, uniform.sequence > 1, uniform.tensor > 1)
            if self._is_hopeless(lower_bound, axes):
                self.skipped_count += 1
                continue
            for candidate in self._rate_variants(uniform):
                self._rated += 1
                self._told("compared", self._rated + self.skipped_count)
                pairs.append((uniform, candidate))
                if candidate.fits and self._keep(candidate):
                    self._best[axes] = min(candidate.seconds, self._best.get(axes, math.inf))
        return pairs

    def _rate_variants(self, uniform: UniformPlan) -> Iterator[RatedPlan]:
        """Yield a uniform plan with every kind of sharding that may be worth it."""
        shares = uniform.data > 1 and not uniform.takes_turns
        for number, estimates in enumerate(self._variants if shares else self._variants[:1]):
            wish = self._wish
            candidate = uniform_plans.rate_uniform_plan(estimates, uniform, wish.memory_limit, wish.fixed.schedules)
            if candidate is None:
                return
            yield candidate
            # The first kind beside plain replicas may be faster than they are, since each updates its share only. What
            # shares out more sends more: it is worth it only where the kind before it does not fit, or may turn out not
            # to, when its memory is traced and not estimated.
            if number and candidate.peak_bytes <= SURE * candidate.memory_limit:
                return

    def _is_hopeless(self, lower_bound: float, axes: object) -> bool:
        """Return whether a plan with this lower bound can be skipped."""
        kind = self._best.get(axes, math.inf) if self._families else 0.0
        return lower_bound > max(self._far * min(self._best.values(), default=math.inf), kind)


def sharding_variants(estimates: CurveCache, wish: SearchRequest) -> list[CurveCache]:
    """Return the estimates, and those of further kinds of sharding, what shares out the least first."""
    return [estimates, *(estimates.with_sync(estimates.sync.changed(shard=kind)) for kind in wish.shardings)]


def _search_unequal(estimates: CurveCache, wish: SearchRequest, workers: int) -> list[RatedPlan]:
    """Return the best plans with unequal meshes, of the first kind of sharding with which some fit."""
    # Replicas with steps of their own, or that servers count, must be replicas of the whole model; and a fixed degree
    # is that of every stage.
    if estimates.sync.is_replica_local or estimates.sync.has_servers or wish.fixed.degrees:
        return []
    variants = sharding_variants(estimates, wish) if wish.fixed.replicas != ROUND_ROBIN else []
    # One microbatch fills a pipeline whose steps follow each other without a flush.
    counts: Sequence[int] = (1, *MICROBATCHES) if wish.fixed.schedule in ASYNCHRONOUS else MICROBATCHES
    if wish.microbatches is not None:
        counts = (wish.microbatches,)
    split = (search_unequal_meshes(variant, workers, wish.memory_limit, counts) for variant in variants)
    best_plans = next((plans for plans in split if plans), [])
    if wish.fixed.replicas != SPLIT and may_take_turns(estimates):
        best_plans += search_unequal_meshes(estimates, workers, wish.memory_limit, counts, in_turn=True)
    return best_plans


def may_take_turns(estimates: CurveCache) -> bool:
    """Return whether replicas may compute whole microbatches in turn: as far as their synchronization and norms go."""
    graph = estimates.basis.stages.graph
    try:
        find_running_norms(graph.code.fx, {node.name for node in graph.nodes})
    except PolylaneError:  # its running statistics depend on who computes which microbatch
        return False
    return estimates.sync.is_plain_sum
