"""Search: the plans that a cluster allows for a graph, compared by estimate, the best ones predicted exactly."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polylane.cost.footprint import Footprint
from polylane.cost.method import Method
from polylane.cost.predict import Prediction, predict
from polylane.graph.partition import Partition
from polylane.plan import fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.planner.branches import branched
from polylane.planner.candidate import Candidate, Uniform, estimated, uniforms
from polylane.planner.estimate import Estimates
from polylane.planner.hybrid import hybrids

# How many of the best estimates are predicted exactly.
FINALISTS = 12
# By how much a plan must be faster for twice the workers.
FRUGAL = 0.005
# Of plans with operators split over several ranks along both axes only those near the best single ones are looked at.
BOTH_AXES = 1


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
    """

    found: tuple[Found, ...]
    fitting: tuple[Candidate, ...]
    excluded: tuple[Candidate, ...]

    @property
    def looked(self) -> int:
        """How many plans were compared."""
        return len(self.fitting) + len(self.excluded)


def search(estimates: Estimates, footprint: Footprint, wish: Wish, finalists: int = FINALISTS) -> Answer:
    """The fastest plans that fit.

    Uniform plans of every degree are compared by formula, then plans whose stages have meshes of their own; the best of
    them are predicted exactly, and ranked by that.

    Args:
        estimates: of the graph on the cluster.
        footprint: memory of workers.
        wish: what is asked for.
        finalists: how many are predicted exactly; 0: none.
    """
    every = [each for workers in wish.workers for each in _uniform(estimates, footprint, wish, workers)]
    if not wish.whole:
        most = max(wish.workers)
        every += hybrids(estimates, footprint, most, wish.methods, wish.limit)
        every += branched(estimates, most, wish.methods, wish.limit)
    fitting = sorted((c for c in every if c.fits), key=lambda c: _weighed(c.seconds, c.workers))
    excluded = sorted((c for c in every if not c.fits), key=lambda c: c.seconds)
    chosen = _different(fitting)[: max(finalists, 2 * wish.top)] if finalists else []
    found = [realized(estimates, c) for c in chosen]
    found.sort(key=lambda f: _weighed(f.prediction.seconds, f.plan.workers))
    return Answer(tuple(found[: wish.top]), tuple(fitting), tuple(excluded))


def _weighed(seconds: float, workers: int) -> float:
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


def _uniform(estimates: Estimates, footprint: Footprint, wish: Wish, workers: int) -> list[Candidate]:
    """Uniform plans; those that split operators along two axes only where one axis alone is good."""
    single, double = list[Uniform](), list[Uniform]()
    for uniform in uniforms(workers, wish.inner, wish.batch, estimates.pieces, wish.methods):
        if not wish.whole or uniform.data == uniform.microbatches == 1:
            (double if uniform.sequence > 1 and uniform.tensor > 1 else single).append(uniform)
    found = [(u, c) for u in single if (c := estimated(estimates, footprint, u, wish.limit)) is not None]
    best = sorted((pair for pair in found if pair[1].fits), key=lambda pair: pair[1].seconds)
    inner = list(dict.fromkeys(u.sequence * u.tensor for u, _ in best if u.sequence * u.tensor > 1))[:BOTH_AXES]
    more = (u for u in double if u.sequence * u.tensor in inner)
    return [c for _, c in found] + [
        c for u in more if (c := estimated(estimates, footprint, u, wish.limit)) is not None
    ]


def realized(estimates: Estimates, candidate: Candidate) -> Found:
    """A candidate as a plan, predicted exactly."""
    partition = Partition(estimates.basis.stages.graph, candidate.cuts, candidate.owners)
    plan = plan_of(partition, candidate)
    basis = replace(estimates.basis, method=candidate.method)
    return Found(candidate, plan, partition, predict(basis, partition, plan, estimates.batch, exact=False))


def plan_of(partition: Partition, candidate: Candidate) -> Plan:
    """A candidate's plan, its workers ranked so that a host is filled with ranks that talk the most."""
    spec = Spec.of_meshes(candidate.meshes, candidate.schedule, candidate.microbatches, "float32")
    return fit.from_partition(partition, spec, candidate.microbatches)
