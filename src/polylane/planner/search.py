"""Search: the plans that a cluster allows for a graph, compared by estimate, the best ones predicted exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polylane.cost.footprint import Footprint
from polylane.cost.method import Method
from polylane.cost.predict import Prediction, predict
from polylane.graph.partition import Partition
from polylane.plan import fit
from polylane.plan.plan import Plan
from polylane.plan.spec import PRECISIONS, Spec
from polylane.plan.sync import SUM, Sync
from polylane.planner.branches import branched
from polylane.planner.candidate import Candidate, Uniform, estimated, floor, uniforms
from polylane.planner.estimate import Estimates
from polylane.planner.hybrid import hybrids

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
class Wish:
    """What is asked for.

    Attributes:
        batch: samples of a step.
        workers: numbers of workers that may be used.
        inner: the most ranks that may share an operator.
        methods: ways of training to choose from.
        limit: bytes that a worker may have.
        top: how many plans are wanted.
        whole: a batch must not be divided, over replicas or into microbatches: its samples meet in the loss.
    """

    batch: int
    workers: tuple[int, ...]
    inner: int
    methods: tuple[Method, ...]
    limit: float
    top: int = 5
    whole: bool = False


@dataclass(frozen=True)
class Found:
    """A plan, and what it takes.

    Attributes:
        candidate: as it was found.
        plan: the same as a plan.
        partition: the graph with its cuts.
        prediction: of a step.
    """

    candidate: Candidate
    plan: Plan
    partition: Partition
    prediction: Prediction


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        found: the best plans, fastest first; empty where nothing fits.
        fitting: all that fit, fastest first by estimate.
        excluded: those that do not fit, likewise.
        passed: how many more could not be among the best, whether they fit or not.
    """

    found: tuple[Found, ...]
    fitting: tuple[Candidate, ...]
    excluded: tuple[Candidate, ...]
    passed: int = 0

    @property
    def looked(self) -> int:
        """How many plans were compared."""
        return len(self.fitting) + len(self.excluded) + self.passed


def search(
    estimates: Estimates,
    footprint: Footprint,
    wish: Wish,
    finalists: int = FINALISTS,
    keep: Callable[[Candidate], bool] = lambda candidate: True,
) -> Answer:
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
    answer = _searched(estimates, footprint, wish, finalists, keep, FAR)
    if finalists and answer.passed and not answer.found:  # what was passed over for the sake of others may fit
        answer = _searched(estimates, footprint, wish, finalists, keep, math.inf)
    return answer


def _searched(
    estimates: Estimates,
    footprint: Footprint,
    wish: Wish,
    finalists: int,
    keep: Callable[[Candidate], bool],
    far: float,
) -> Answer:
    """As :func:`search`; plans are passed over that take more than ``far`` times as long as the best."""
    every, passed = list[Candidate](), 0
    for workers in wish.workers:
        looking = _Looking(estimates, footprint, wish.limit, keep, far if finalists else 1.0, finalists > 0)
        found, more = _uniform(looking, wish, workers)
        every, passed = every + found, passed + more
    if not wish.whole:
        most = max(wish.workers)
        every += hybrids(estimates, footprint, most, wish.methods, wish.limit)
        every += branched(estimates, most, wish.methods, wish.limit)
    every = [candidate for candidate in every if keep(candidate)]
    fitting = sorted((c for c in every if c.fits), key=lambda c: weighed(c.seconds, c.workers))
    excluded = [c for c in every if not c.fits]
    exact, too_big = _exact(estimates, _different(fitting), wish.top, finalists) if finalists else ([], {})
    exact.sort(key=lambda f: weighed(f.prediction.seconds, f.plan.workers))
    excluded = sorted([*excluded, *too_big.values()], key=lambda c: c.seconds)
    fitting = [c for c in fitting if id(c) not in too_big]
    return Answer(tuple(exact[: wish.top]), tuple(fitting), tuple(excluded), passed)


def _exact(
    estimates: Estimates, candidates: Sequence[Candidate], top: int, finalists: int
) -> tuple[list[Found], dict[int, Candidate]]:
    """The best candidates predicted exactly, and those that then turn out not to fit, by their identity.

    As many as are wanted, if so many fit, and further ones as long as that is not much work.
    """
    found, too_big, passes = list[Found](), dict[int, Candidate](), 0
    for candidate in candidates:
        enough = passes > PASSES or len(found) >= max(finalists, 2 * top)
        if len(found) >= top and (enough or len(too_big) >= finalists):
            break
        one = realized(estimates, candidate)
        passes += one.plan.pipeline * one.plan.microbatches
        most = max(stage.memory.total for stage in one.prediction.stages)
        if most > candidate.limit:
            too_big[id(candidate)] = replace(candidate, bytes=float(most))
        else:
            found.append(one)
    return found, too_big


def weighed(seconds: float, workers: int) -> float:
    """Twice the workers must be worth it: of plans about as fast, the one with the fewest comes first."""
    return seconds * (1 + FRUGAL * math.log2(workers))


def _different(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Of plans that differ in nothing but microbatches only the three best, so that others are looked at, too."""
    counts: dict[object, int] = {}
    kept = []
    for candidate in candidates:
        key = (candidate.meshes, candidate.owners, candidate.method)
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= 3:
            kept.append(candidate)
    return kept


def _uniform(looking: _Looking, wish: Wish, workers: int) -> tuple[list[Candidate], int]:
    """Uniform plans, and how many more cannot be among the best.

    Those that split operators along two axes are looked at only where one axis alone is good.
    """
    single, double = list[Uniform](), list[Uniform]()
    for uniform in uniforms(workers, wish.inner, wish.batch, looking.pieces, wish.methods):
        if not wish.whole or uniform.data == uniform.microbatches == 1:
            (double if uniform.sequence > 1 and uniform.tensor > 1 else single).append(uniform)
    found = looking.at(single)
    best = sorted((pair for pair in found if pair[1].fits), key=lambda pair: pair[1].seconds)
    inner = list(dict.fromkeys(u.sequence * u.tensor for u, _ in best if u.sequence * u.tensor > 1))[:BOTH_AXES]
    found += looking.at([u for u in double if u.sequence * u.tensor in inner])
    return [c for _, c in found], looking.passed


class _Looking:
    """Goes through plans, those first that may be the fastest, and passes over those that cannot be among the best.

    Args:
        estimates, footprint: of the graph on the cluster.
        limit: bytes that a worker may have.
        keep: which plans may be chosen.
        far: plans that must take more than so many times as long as the best one are passed over.
        families: whether the best of every kind is wanted, rather than the best of all alone.

    Attributes:
        pieces: into how many stages the graph can be cut.
        passed: how many were passed over.
    """

    def __init__(
        self,
        estimates: Estimates,
        footprint: Footprint,
        limit: float,
        keep: Callable[[Candidate], bool],
        far: float,
        families: bool,
    ) -> None:
        self._estimates, self._footprint, self._limit, self._keep = estimates, footprint, limit, keep
        self._far, self._families = far, families
        self._best: dict[object, float] = {}  # of those that fit, by the axes that they have
        self.pieces, self.passed = estimates.pieces, 0

    def at(self, uniforms: Sequence[Uniform]) -> list[tuple[Uniform, Candidate]]:
        """Those that were looked at."""
        found = []
        for least, uniform in sorted(((floor(self._estimates, u), u) for u in uniforms), key=lambda pair: pair[0]):
            axes = (uniform.data > 1, uniform.stages > 1, uniform.sequence > 1, uniform.tensor > 1)
            if self._hopeless(least, axes):
                self.passed += 1
                continue
            candidate = estimated(self._estimates, self._footprint, uniform, self._limit)
            if candidate is not None:
                found.append((uniform, candidate))
                if candidate.fits and self._keep(candidate):
                    self._best[axes] = min(candidate.seconds, self._best.get(axes, math.inf))
        return found

    def _hopeless(self, least: float, axes: object) -> bool:
        """Whether a plan that takes at least so long need not be looked at."""
        kind = self._best.get(axes, math.inf) if self._families else 0.0
        return least > max(self._far * min(self._best.values(), default=math.inf), kind)


def realized(estimates: Estimates, candidate: Candidate) -> Found:
    """A candidate as a plan, predicted exactly."""
    partition = Partition(estimates.basis.stages.graph, candidate.cuts, candidate.owners)
    plan = plan_of(partition, candidate)
    basis = replace(estimates.basis, method=candidate.method)
    return Found(candidate, plan, partition, predict(basis, partition, plan, estimates.batch, exact=False))


def plan_of(partition: Partition, candidate: Candidate) -> Plan:
    """A candidate's plan, its workers ranked so that a host is filled with ranks that talk the most."""
    dtype = candidate.method.dtype
    precision = dtype if dtype in PRECISIONS else PRECISIONS[0]
    shared = any(degrees.data > 1 for degrees in candidate.meshes)
    sync = Sync(shard=candidate.method.shard) if shared else SUM
    spec = Spec.of_meshes(candidate.meshes, candidate.schedule, candidate.microbatches, precision, sync)
    return fit.from_partition(partition, spec, candidate.microbatches)
