"""Automatic parallelization: measure a model's operators on this machine, and take the plan predicted to be fastest."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace

from polylane.cluster.cluster import Cluster
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.profile import Profile
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.graph.batch import take_first_samples
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.graph import Graph
from polylane.plan.fixed_keys import NOTHING_FIXED, FixedKeys
from polylane.plan.plan import Plan
from polylane.planner.find_plans import check_batch, find_plans
from polylane.planner.search import SearchResult
from polylane.profiling.host_contention import measure_model_contention
from polylane.profiling.machine_load import SO_WHAT, LoadWatch, measure_undisturbed
from polylane.profiling.profile_model import profiled
from polylane.runtime.workers import allocator
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
        workers: the numbers of workers that a plan may have: one, or all up to the most.
        cluster: the devices, of which a plan takes the first ones.
        copies: whether this process may fork copies of the model to measure host contention.
        fixed: keys that the plan must have; None: all are searched.

    Raises:
        PolylaneError: nothing fits into the devices' memory, or the batch is too small.
    """
    max_workers = max(workers)
    graph = problem.capture(EXAMPLE)
    check_batch(graph, problem.samples)  # before anything is measured
    # Times of another type of device than the workers' would be wrong.
    measurable = all(parameter.device.type == cluster.device(0).type for parameter in problem.model.parameters())
    profile = measure(graph, problem, max_workers if copies else 1) if measurable else None
    try:
        return find_plans(
            problem.captured(graph, profile=profile),
            cluster,
            problem.samples,
            TrainingOptions(),
            workers=max_workers,
            fewer=min(workers) < max_workers,
            fixed=fixed or NOTHING_FIXED,
        )
    except PolylaneError as error:
        raise PolylaneError(f"plan auto: {error}") from None


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
    factory = objective.optimizer

    def measure_once(watch: LoadWatch) -> Profile:
        return profiled(graph, model, objective.loss, factory, leaves, rebuild, sizes, watch)

    profile, load = measure_undisturbed(measure_once)
    if load.is_disturbing:
        profile = replace(profile, disturbance=str(load))
        print(f"while the model was measured, {load}: {SO_WHAT}", file=sys.stderr, flush=True)
    if copies < 2 or not on_cpu:
        return profile
    half = take_first_samples(leaves, max(fewest, problem.samples // 2))
    counts = {count for count in COPIES if count <= copies}
    model_with_loss = ModelWithLoss(model, objective.loss, rebuild)
    return replace(profile, host_contention=measure_model_contention(model_with_loss, half, counts))


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
