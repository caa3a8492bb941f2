"""Automatic parallelization of a model that is here: measure its nodes, take the plan predicted fastest."""

from __future__ import annotations

import sys
from collections.abc import Collection
from dataclasses import replace

from torch import nn

from polylane.cluster.cluster import Cluster
from polylane.cost.method import Method
from polylane.cost.profile import Profile
from polylane.errors import PolylaneError
from polylane.graph.batch import few, part_count
from polylane.graph.fewest import Fewest, fewest_samples
from polylane.graph.graph import Graph
from polylane.graph.orders import Order, orders_of
from polylane.plan.plan import Plan
from polylane.planner import setup
from polylane.planner.candidate import Candidate
from polylane.planner.estimate import Estimates
from polylane.planner.search import Answer, Wish, search
from polylane.profiling.host_contention import together
from polylane.profiling.profile_model import profiled
from polylane.runtime.training_problem import TrainingProblem
from polylane.samples.derivation import derive, known_orders

# Samples of the graph that shapes are read from.
EXAMPLE = 4
# Parts of a batch at which nodes are measured: what a worker may have in hand.
PARTS = (1, 2, 4, 16)
# Copies of the model that run at once, to see what they slow each other by; between these on a line.
COPIES = (2, 4, 8)


def best_plan(problem: TrainingProblem, workers: Collection[int], cluster: Cluster, copies: bool = False) -> Plan:
    """The first of the plans that :func:`choose` finds, with the same arguments; says on stderr which one it is."""
    return announced(choose(problem, workers, cluster, copies=copies))


def choose(
    problem: TrainingProblem,
    workers: Collection[int],
    cluster: Cluster,
    profile: Profile | None = None,
    copies: bool = False,
) -> Answer:
    """The best plans on as many of a cluster's devices as they may take.

    Args:
        problem: what is to be trained; of its losses the first one counts.
        workers: the numbers of workers that a plan may have.
        cluster: the devices, of which a plan takes the first ones.
        profile: the times of the graph's nodes; default: measured here.
        copies: this process may fork copies of the model to see what they slow each other by.

    Raises:
        PolylaneError: nothing fits.
    """
    most = max(workers)
    graph, batch = problem.capture(EXAMPLE), problem.samples
    fewest = fewest_samples([graph])
    fewest.check(batch, "a batch", "take larger batches")
    if profile is None and _lies_on(cluster.device(0).type, problem.model):
        profile = measure(graph, problem, most if copies else 1)
    meets = _samples_meet(graph)
    captured = problem.captured(graph, profile=profile)
    basis = setup.basis(captured, cluster, Method())
    limit = float(min(device.memory for device in cluster.devices(range(min(most, cluster.count)))))
    wish = Wish(batch, tuple(sorted(workers)), most, (Method(),), limit, whole=meets)
    estimates = Estimates(basis, batch, _staying(graph))

    def keep(candidate: Candidate) -> bool:
        return candidate.workers in workers and _enough(batch, candidate, fewest)

    answer = search(estimates, setup.footprint(captured, cluster), wish, keep=keep)
    if not answer.found:
        raise PolylaneError(f"plan auto: {_nothing(answer, wish)}")
    return answer


def _enough(batch: int, candidate: Candidate, fewest: Fewest) -> bool:
    """Whether every microbatch has the samples that the model needs at once."""
    return part_count(batch, candidate.microbatches, fewest.samples) == candidate.microbatches


def _nothing(answer: Answer, wish: Wish) -> str:
    """Why no plan was found."""
    count = wish.workers[-1]
    workers = f"{count} worker{'s' if count != 1 else ''}"
    if not answer.excluded and wish.whole:
        return f"there is no plan for {workers} that keeps a batch whole, whose samples meet in the loss: give one"
    if not answer.excluded:
        return f"there is no plan for {workers} and batches of {wish.batch}: the model or the batch is too small"
    least = min(candidate.bytes for candidate in answer.excluded)
    return f"nothing fits on {workers} with {wish.limit / 1e9:.3g} GB each, the leanest plan needs {least / 1e9:.3g} GB"


def _lies_on(device: str, model: nn.Module) -> bool:
    """Whether a model's weights are where workers will have theirs: times of other devices say nothing."""
    return all(parameter.device.type == device for parameter in model.parameters())


def measure(graph: Graph, problem: TrainingProblem, copies: int = 1) -> Profile | None:
    """The times of a graph's nodes at the sizes that a worker may have in hand; None for a model without weights.

    Args:
        graph: of the problem's model and loss, captured with any number of samples.
        problem: its example has the samples that nodes are measured on.
        copies: up to so many are forked, to see what they slow each other by (on a CPU); 1: none.
    """
    model, objective, (leaves, rebuild) = problem.model, problem.objective, problem.flat_example
    parameters = list(model.parameters())
    if graph.opaque or any(parameter.is_meta for parameter in parameters):
        return None
    fewest = fewest_samples([graph]).samples
    sizes = sorted({max(fewest, -(-problem.samples // parts)) for parts in PARTS})
    found = profiled(graph, model, objective.loss, objective.optimizer, leaves, rebuild, sizes)
    if copies < 2 or any(parameter.device.type != "cpu" for parameter in parameters):
        return found
    half = few(leaves, max(fewest, problem.samples // 2))
    counts = {count for count in COPIES if count <= copies}
    return replace(found, together=together(model, objective.loss, half, rebuild, counts))


def _samples_meet(graph: Graph) -> bool:
    """Whether the loss of a batch is not made up of its parts' losses, so that it must not be divided."""
    return not derive(graph).holds


def _staying(graph: Graph) -> list[str]:
    """Values that may not cross between stages with other numbers of replicas."""
    return [name for name, order in orders_of(graph, known_orders(graph)).items() if order is Order.OTHER]


def announced(answer: Answer) -> Plan:
    """The first plan of a search; says on stderr which one it is."""
    print(told(answer), file=sys.stderr, flush=True)
    return answer.found[0].plan


def told(answer: Answer) -> str:
    """What was chosen, in one line."""
    best = answer.found[0]
    alone = next((c for c in answer.fitting if c.workers == 1), None)
    rate = f"{best.prediction.seconds * 1e3:.3g} ms a step"
    gain = ""
    if alone is not None and best.candidate.workers > 1:
        gain = f", {alone.seconds / best.candidate.seconds:.2f} times as fast as one worker"
    return f"plan auto: {best.plan.spec} ({rate} predicted{gain}; of {answer.looked} plans)"
