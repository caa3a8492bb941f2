"""The plan that is best on this machine, for a model that is here: its nodes are measured, then plans are compared."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from polylane.cluster.cluster import Cluster
from polylane.cost.method import Method
from polylane.cost.profile import Profile
from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, cloned, few, part_count, sample_count
from polylane.graph.export import Loss
from polylane.graph.fewest import Fewest, fewest_samples
from polylane.graph.graph import Graph
from polylane.graph.orders import Order, orders_of
from polylane.planner import setup
from polylane.planner.candidate import Candidate
from polylane.planner.search import Answer, Wish, search
from polylane.profiling.host_contention import together
from polylane.profiling.profile_model import profiled
from polylane.samples.counts import capture_with_counts
from polylane.samples.derivation import derive, known_orders

# Samples of the graph that shapes are read from.
EXAMPLE = 4
# Parts of a batch at which nodes are measured: what a worker may have in hand.
PARTS = (1, 2, 4, 16)
# Copies of the model that run at once, to see what they slow each other by; between these on a line.
COPIES = (2, 4, 8)


@dataclass(frozen=True)
class Subject:
    """What is to be trained.

    Attributes:
        model, loss: the user's.
        optimizer: makes the optimizer.
        trainable: names of the parameters that it takes.
        whole: parameters that every rank must hold whole, and why.
        leaves, rebuild: a batch.
        batch: samples of a step.
    """

    model: nn.Module
    loss: Loss
    optimizer: Callable[[list[tuple[str, nn.Parameter]]], Any]
    trainable: Sequence[str]
    whole: dict[str, str]
    leaves: Sequence[Any]
    rebuild: Rebuild
    batch: int


def choose(
    subject: Subject, workers: Collection[int], cluster: Cluster, profile: Profile | None = None, copies: bool = False
) -> Answer:
    """The best plans on as many of a cluster's devices as they may take.

    Args:
        subject: what is to be trained.
        workers: the numbers of workers that a plan may have.
        cluster: on what.
        profile: the times of the graph's nodes; default: measured here.
        copies: this process may fork copies of the model to see what they slow each other by.

    Raises:
        PolylaneError: nothing fits.
    """
    most = max(workers)
    leaves = few(subject.leaves, min(EXAMPLE, sample_count(subject.leaves)))
    graph = capture_with_counts(
        subject.model, subject.loss, subject.rebuild(cloned(leaves)), trainable=subject.trainable
    )
    fewest = fewest_samples([graph])
    fewest.check(subject.batch, "a batch", "take larger batches")
    if profile is None and _lies_on(cluster.device(0).type, subject.model):
        profile = measure(graph, subject, most if copies else 1)
    meets = _samples_meet(graph)
    job = setup.Job(graph, subject.optimizer, subject.whole, {}, profile)
    basis = setup.basis(job, cluster, Method())
    limit = float(min(device.memory for device in cluster.devices(range(min(most, cluster.count)))))
    wish = Wish(subject.batch, tuple(sorted(workers)), most, (Method(),), limit, whole=meets)
    estimates = setup.estimates(basis, subject.batch, _staying(graph))

    def keep(candidate: Candidate) -> bool:
        return candidate.workers in workers and _enough(subject.batch, candidate, fewest)

    answer = search(estimates, setup.footprint(job, cluster), wish, keep=keep)
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


def measure(graph: Graph, subject: Subject, copies: int = 1) -> Profile | None:
    """The times of a graph's nodes at the sizes that a worker may have in hand; None for a model without weights.

    Args:
        copies: up to so many are forked, to see what they slow each other by (on a CPU); 1: none.
    """
    parameters = list(subject.model.parameters())
    if graph.opaque or any(parameter.is_meta for parameter in parameters):
        return None
    fewest = fewest_samples([graph]).samples
    sizes = sorted({max(fewest, -(-subject.batch // parts)) for parts in PARTS})
    found = profiled(graph, subject.model, subject.loss, subject.optimizer, subject.leaves, subject.rebuild, sizes)
    if copies < 2 or any(parameter.device.type != "cpu" for parameter in parameters):
        return found
    half = few(subject.leaves, max(fewest, subject.batch // 2))
    counts = {count for count in COPIES if count <= copies}
    return replace(found, together=together(subject.model, subject.loss, half, subject.rebuild, counts))


def _samples_meet(graph: Graph) -> bool:
    """Whether the loss of a batch is not made up of its parts' losses, so that it must not be divided."""
    return not derive(graph).holds


def _staying(graph: Graph) -> list[str]:
    """Values that may not cross between stages with other numbers of replicas."""
    return [name for name, order in orders_of(graph, known_orders(graph)).items() if order is Order.OTHER]


def told(answer: Answer) -> str:
    """What was chosen, in one line."""
    best = answer.found[0]
    alone = next((c for c in answer.fitting if c.workers == 1), None)
    rate = f"{best.prediction.seconds * 1e3:.3g} ms a step"
    gain = ""
    if alone is not None and best.candidate.workers > 1:
        gain = f", {alone.seconds / best.candidate.seconds:.2f} times as fast as one worker"
    return f"plan auto: {best.plan.spec} ({rate} predicted{gain}; of {answer.looked} plans)"
