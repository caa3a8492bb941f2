"""Automatic parallelization: measure a model's operators on this machine, and take the plan predicted to be fastest."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from polylane.cluster.cluster import Cluster
from polylane.cluster.figures import format_size
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.profile import Profile
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.graph.batch import count_parts, take_first_samples
from polylane.graph.graph import Graph
from polylane.plan.fixed_keys import NOTHING_FIXED, FixedKeys
from polylane.plan.plan import Plan
from polylane.plan.recompute import NONE
from polylane.planner.memory_reserve import memory_limit
from polylane.planner.problem import build_cost_model
from polylane.planner.recompute_search import search_with_recomputation
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.search_progress import show_progress
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan
from polylane.profiling.host_contention import together
from polylane.profiling.profile_model import profiled
from polylane.runtime.workers import allocator
from polylane.samples.batch_layout import BatchLayout, batch_layouts
from polylane.samples.derivation import derive_composition
from polylane.samples.microbatch_limit import min_samples

# Samples with which the graph is captured whose shapes are read.
EXAMPLE = 4
# Nodes are measured at the whole batch and at these fractions of it: the local samples that plans lead to.
PARTS = (1, 2, 4, 16)
# Numbers of model copies that run side by side, to measure host contention; it is interpolated between them.
COPIES = (2, 4, 8)


def choose(
    problem: TrainingProblem,
    workers: Collection[int],
    cluster: Cluster,
    copies: bool = False,
    fixed: FixedKeys | None = None,
) -> SearchResult:
    """Return the best plans for as many of a cluster's devices as they may take.

    Args:
        problem: the model, its data and its losses, of which the first one counts.
        workers: the numbers of workers that a plan may have.
        cluster: the devices, of which a plan takes the first ones.
        copies: whether this process may fork copies of the model to measure host contention.
        fixed: keys that the plan must have; None: all are searched.

    Raises:
        PolylaneError: nothing fits into the devices' memory, or the batch is too small.
    """
    most = max(workers)
    graph, batch = problem.capture(EXAMPLE), problem.samples
    fewest = min_samples([graph])
    fewest.check(batch, "a batch", "take larger batches")
    # Times of another type of device than the workers' would be wrong.
    measurable = all(parameter.device.type == cluster.device(0).type for parameter in problem.model.parameters())
    profile = measure(graph, problem, most if copies else 1) if measurable else None
    # Where the loss couples samples, replicas and microbatches are not allowed, only splits of operators and stages.
    meets = not derive_composition(graph).is_proven
    fixed, captured = fixed or NOTHING_FIXED, problem.captured(graph, profile=profile)
    recompute: Any = fixed.recompute or NONE
    method = TrainingOptions(fixed.precision or "float32", recompute=recompute)
    basis = build_cost_model(captured, cluster, method)
    limit = memory_limit(cluster, most)
    # An optimizer that must see whole parameters cannot update shards of them.
    shardings = () if captured.whole else fixed.shardings
    counts = tuple(sorted(workers))
    wish = SearchRequest(counts, most, limit, batch_is_indivisible=meets, shardings=shardings, fixed=fixed)

    def keep(candidate: RatedPlan) -> bool:
        # Every microbatch needs as many samples as the model takes at once (BatchNorm needs two).
        enough = count_parts(batch, candidate.microbatches, fewest.samples) == candidate.microbatches
        return candidate.workers in workers and enough

    with show_progress() as told:
        answer = search_with_recomputation(
            basis,
            lambda prices: search(CurveCache(prices, batch, _staying(graph), fixed.sync), wish, keep=keep, told=told),
        )
    if not answer.ranked_plans:
        raise PolylaneError(f"plan auto: {_nothing(answer)}")
    return answer


def _nothing(answer: SearchResult) -> str:
    """Describe why no plan was found."""
    wish, count, batch = answer.wish, answer.wish.workers[-1], answer.estimates.batch
    workers = f"{count} worker{'s' if count != 1 else ''}"
    if not answer.too_large_candidates and wish.batch_is_indivisible:
        return f"there is no plan for {workers} that keeps a batch whole, whose samples meet in the loss: give one"
    if not answer.too_large_candidates and str(wish.fixed):
        return f"there is no plan for {workers} and batches of {batch} with {wish.fixed}: fix less, or other numbers"
    if not answer.too_large_candidates:
        return f"there is no plan for {workers} and batches of {batch}: the model or the batch is too small"
    least = min(candidate.peak_bytes for candidate in answer.too_large_candidates)
    return (
        f"nothing fits on {workers} with {format_size(wish.memory_limit)} each, the leanest plan needs "
        f"{format_size(least)}"
    )


def measure(graph: Graph, problem: TrainingProblem, copies: int = 1) -> Profile | None:
    """Return the times of a graph's nodes at the local batch sizes of possible plans; None for a model without weights.

    Args:
        graph: of the problem's model and loss, captured with any number of samples.
        problem: the training, whose example has the samples that nodes are measured on.
        copies: fork up to this many copies to measure host contention (on CPUs only); 1: none.
    """
    model, objective, (leaves, rebuild) = problem.model, problem.objective, problem.flat_example
    parameters = list(model.parameters())
    if graph.is_opaque or any(parameter.is_meta for parameter in parameters):
        return None
    on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
    if on_cpu:
        allocator.retain_freed_memory()  # nodes take longer where memory is mapped anew, which workers never do
    fewest = min_samples([graph]).samples
    sizes = sorted({max(fewest, -(-problem.samples // parts)) for parts in PARTS})
    found = profiled(graph, model, objective.loss, objective.optimizer, leaves, rebuild, sizes)
    if copies < 2 or not on_cpu:
        return found
    half = take_first_samples(leaves, max(fewest, problem.samples // 2))
    counts = {count for count in COPIES if count <= copies}
    return replace(found, host_contention=together(model, objective.loss, half, rebuild, counts))


def _staying(graph: Graph) -> list[str]:
    """Return the values that must not cross between stages with different numbers of replicas.

    Their batch layout is unknown, so that they cannot be divided among other replicas.
    """
    return [
        name
        for name, order in batch_layouts(graph, derive_composition(graph).batch_layouts).items()
        if order is BatchLayout.UNKNOWN
    ]


def announce_best(answer: SearchResult) -> Plan:
    """Return the first plan of a search, and describe it in one line on stderr."""
    best = answer.ranked_plans[0]
    alone = next((c for c in answer.fitting_candidates if c.workers == 1), None)
    rate = f"{best.prediction.seconds * 1e3:.3g} ms a step"
    gain = ""
    if alone is not None and best.candidate.workers > 1:
        gain = f", {alone.seconds / best.candidate.seconds:.2f} times as fast as one worker"
    line = f"plan auto: {best.plan.spec} ({rate} predicted{gain}; of {answer.compared_count} plans)"
    print(line, file=sys.stderr, flush=True)
    return best.plan
