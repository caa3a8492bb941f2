"""Search: the plans that a cluster allows for a graph, compared by estimate, the best ones predicted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polylane.cost.memory.search_bound import Footprint
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import Prediction, predict
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import PRECISIONS, Spec
from polylane.plan.sync import SUM, SyncOptions
from polylane.planner.branch_stages import plan_branches
from polylane.planner.stage_curves import CurveCache
from polylane.planner.stage_meshes import search_unequal_meshes
from polylane.planner.uniform_plans import (
    RatedPlan,
    UniformPlan,
    enumerate_uniform_plans,
    min_step_seconds,
    rate_uniform_plan,
)

# How many of the best estimates are predicted exactly: fewer where they have more passes than these together.
FINALISTS = 12
PASSES = 15_000
# By how much a plan must be faster for twice the workers.
FRUGAL = 0.01
# Of plans with operators split over several ranks along both axes only those near the best single ones are looked at.
BOTH_AXES = 1
# Plans that must take so many times as long as the best one found are passed over, if there is one of their kind.
FAR = 1.5


@dataclass(frozen=True)
class SearchRequest:
    """What is asked for.

    Attributes:
        batch: samples of a step.
        workers: numbers of workers that may be used.
        max_operator_ranks: the most ranks that may share an operator.
        methods: ways of training to choose from.
        memory_limit: bytes that a worker may have.
        plan_count: how many plans are wanted.
        batch_is_indivisible: a batch must not be divided, over replicas or into microbatches: its samples meet in the
            loss.
    """

    batch: int
    workers: tuple[int, ...]
    max_operator_ranks: int
    methods: tuple[TrainingOptions, ...]
    memory_limit: float
    plan_count: int = 5
    batch_is_indivisible: bool = False


@dataclass(frozen=True)
class RankedPlan:
    """A plan, and what it takes.

    Attributes:
        candidate: as it was found.
        plan: the same as a plan.
        partition: the graph with its cuts.
        prediction: of a step.
    """

    candidate: RatedPlan
    plan: Plan
    partition: Partition
    prediction: Prediction


@dataclass(frozen=True)
class SearchResult:
    """What a search found.

    Attributes:
        ranked_plans: the best plans, fastest first; empty where nothing fits.
        fitting_candidates: all that fit, fastest first by estimate.
        too_large_candidates: those that do not fit, likewise.
        skipped_count: how many more could not be among the best, whether they fit or not.
    """

    ranked_plans: tuple[RankedPlan, ...]
    fitting_candidates: tuple[RatedPlan, ...]
    too_large_candidates: tuple[RatedPlan, ...]
    skipped_count: int = 0

    @property
    def compared_count(self) -> int:
        """How many plans were compared."""
        return len(self.fitting_candidates) + len(self.too_large_candidates) + self.skipped_count


def search(
    estimates: CurveCache,
    footprint: Footprint,
    wish: SearchRequest,
    finalists: int = FINALISTS,
    keep: Callable[[RatedPlan], bool] = lambda candidate: True,
) -> SearchResult:
    """The fastest plans that fit.

    Uniform plans of every degree are compared by formula, then plans whose stages have meshes of their own; the best of
    them are predicted exactly, and ranked by that.

    Args:
        estimates: of the graph on the cluster.
        footprint: memory of workers.
        wish: what is asked for.
        finalists: how many are predicted exactly, about; 0: none.
        keep: which plans may be chosen at all.
    """
    answer = _search(estimates, footprint, wish, finalists, keep, FAR)
    if (
        finalists and answer.skipped_count and not answer.ranked_plans
    ):  # what was passed over for the sake of others may fit
        answer = _search(estimates, footprint, wish, finalists, keep, math.inf)
    return answer


def _search(
    estimates: CurveCache,
    footprint: Footprint,
    wish: SearchRequest,
    finalists: int,
    keep: Callable[[RatedPlan], bool],
    far: float,
) -> SearchResult:
    """As :func:`search`; plans are passed over that take more than ``far`` times as long as the best."""
    every, passed = list[RatedPlan](), 0
    for workers in wish.workers:
        looking = _UniformSearch(
            estimates, footprint, wish.memory_limit, keep, far if finalists else 1.0, finalists > 0
        )
        found, more = _rate_uniform_plans(looking, wish, workers)
        every, passed = every + found, passed + more
    if not wish.batch_is_indivisible:
        most = max(wish.workers)
        every += search_unequal_meshes(estimates, footprint, most, wish.methods, wish.memory_limit)
        every += plan_branches(estimates, most, wish.methods, wish.memory_limit)
    every = [candidate for candidate in every if keep(candidate)]
    fitting = sorted((c for c in every if c.fits), key=lambda c: weighted_seconds(c.seconds, c.workers))
    excluded = [c for c in every if not c.fits]
    exact, too_big = (
        _exact(estimates, _drop_near_duplicates(fitting), wish.plan_count, finalists) if finalists else ([], {})
    )
    exact.sort(key=lambda f: weighted_seconds(f.prediction.seconds, f.plan.workers))
    excluded = sorted([*excluded, *too_big.values()], key=lambda c: c.seconds)
    fitting = [c for c in fitting if id(c) not in too_big]
    return SearchResult(tuple(exact[: wish.plan_count]), tuple(fitting), tuple(excluded), passed)


def _exact(
    estimates: CurveCache, candidates: Sequence[RatedPlan], top: int, finalists: int
) -> tuple[list[RankedPlan], dict[int, RatedPlan]]:
    """The best candidates predicted exactly, and those that then turn out not to fit, by their identity.

    As many as are wanted, if so many fit, and further ones as long as that is not much work.
    """
    found, too_big, passes = list[RankedPlan](), dict[int, RatedPlan](), 0
    for candidate in candidates:
        enough = passes > PASSES or len(found) >= max(finalists, 2 * top)
        if len(found) >= top and (enough or len(too_big) >= finalists):
            break
        one = realize_plan(estimates, candidate)
        passes += one.plan.pipeline * one.plan.microbatches
        most = max(stage.memory.total for stage in one.prediction.stages)
        if most > candidate.memory_limit:
            too_big[id(candidate)] = replace(candidate, peak_bytes=float(most))
        else:
            found.append(one)
    return found, too_big


def weighted_seconds(seconds: float, workers: int) -> float:
    """Twice the workers must be worth it: of plans about as fast, the one with the fewest comes first."""
    return seconds * (1 + FRUGAL * math.log2(workers))


def _drop_near_duplicates(candidates: Sequence[RatedPlan]) -> list[RatedPlan]:
    """Of plans that differ in nothing but microbatches only the three best, so that others are looked at, too."""
    counts: dict[object, int] = {}
    kept = []
    for candidate in candidates:
        key = (candidate.meshes, candidate.stage_of_piece, candidate.method)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 3:
            kept.append(candidate)
    return kept


def _rate_uniform_plans(looking: _UniformSearch, wish: SearchRequest, workers: int) -> tuple[list[RatedPlan], int]:
    """Uniform plans, and how many more cannot be among the best.

    Those that split operators along two axes are looked at only where one axis alone is good.
    """
    single, double = list[UniformPlan](), list[UniformPlan]()
    for uniform in enumerate_uniform_plans(
        workers, wish.max_operator_ranks, wish.batch, looking.max_stages, wish.methods
    ):
        if not wish.batch_is_indivisible or uniform.data == uniform.microbatches == 1:
            (double if uniform.sequence > 1 and uniform.tensor > 1 else single).append(uniform)
    found = looking.at(single)
    best = sorted((pair for pair in found if pair[1].fits), key=lambda pair: pair[1].seconds)
    inner = list(dict.fromkeys(u.sequence * u.tensor for u, _ in best if u.sequence * u.tensor > 1))[:BOTH_AXES]
    found += looking.at([u for u in double if u.sequence * u.tensor in inner])
    return [c for _, c in found], looking.skipped_count


class _UniformSearch:
    """Goes through plans, those first that may be the fastest, and passes over those that cannot be among the best.

    Args:
        estimates, footprint: of the graph on the cluster.
        limit: bytes that a worker may have.
        keep: which plans may be chosen.
        far: plans that must take more than so many times as long as the best one are passed over.
        families: whether the best of every kind is wanted, rather than the best of all alone.

    Attributes:
        max_stages: into how many stages the graph can be cut.
        skipped_count: how many were passed over.
    """

    def __init__(
        self,
        estimates: CurveCache,
        footprint: Footprint,
        limit: float,
        keep: Callable[[RatedPlan], bool],
        far: float,
        families: bool,
    ) -> None:
        self._estimates, self._footprint, self._limit, self._keep = estimates, footprint, limit, keep
        self._far, self._families = far, families
        self._best: dict[object, float] = {}  # of those that fit, by the axes that they have
        self.max_stages, self.skipped_count = estimates.max_stages, 0

    def at(self, uniforms: Sequence[UniformPlan]) -> list[tuple[UniformPlan, RatedPlan]]:
        """Those that were looked at."""
        found = []
        for least, uniform in sorted(
            ((min_step_seconds(self._estimates, u), u) for u in uniforms), key=lambda pair: pair[0]
        ):
            axes = (uniform.data > 1, uniform.stages > 1, uniform.sequence > 1, uniform.tensor > 1)
            if self._is_hopeless(least, axes):
                self.skipped_count += 1
                continue
            candidate = rate_uniform_plan(self._estimates, self._footprint, uniform, self._limit)
            if candidate is not None:
                found.append((uniform, candidate))
                if candidate.fits and self._keep(candidate):
                    self._best[axes] = min(candidate.seconds, self._best.get(axes, math.inf))
        return found

    def _is_hopeless(self, least: float, axes: object) -> bool:
        """Whether a plan that takes at least so long need not be looked at."""
        kind = self._best.get(axes, math.inf) if self._families else 0.0
        return least > max(self._far * min(self._best.values(), default=math.inf), kind)


def realize_plan(estimates: CurveCache, candidate: RatedPlan) -> RankedPlan:
    """A candidate as a plan, predicted exactly."""
    partition = Partition(estimates.basis.stages.graph, candidate.cuts, candidate.stage_of_piece)
    plan = make_plan(partition, candidate)
    basis = replace(estimates.basis, method=candidate.method)
    return RankedPlan(candidate, plan, partition, predict(basis, partition, plan, estimates.batch, exact=False))


def make_plan(partition: Partition, candidate: RatedPlan) -> Plan:
    """A candidate's plan, its workers ranked so that a host is filled with ranks that talk the most."""
    dtype = candidate.method.dtype
    precision = dtype if dtype in PRECISIONS else PRECISIONS[0]
    shared = any(degrees.data > 1 for degrees in candidate.meshes)
    sync = SyncOptions(shard=candidate.method.shard) if shared else SUM
    spec = Spec.of_meshes(candidate.meshes, candidate.schedule, candidate.microbatches, precision, sync)
    return fit.plan_from_partition(partition, spec, candidate.microbatches)
