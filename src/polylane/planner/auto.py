"""The plan that is best on this machine, for a model that is here: its nodes are measured, then plans are compared."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from polylane.cluster.cluster import Cluster
from polylane.cost.method import Method
from polylane.cost.profile import Profile
from polylane.cost.profiling import profiled
from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, cloned, few, sample_count
from polylane.graph.capture import capture
from polylane.graph.export import Loss
from polylane.graph.graph import Graph
from polylane.graph.orders import Order, orders_of, seen_orders
from polylane.graph.samples import splits_exactly
from polylane.planner import setup
from polylane.planner.search import Answer, Wish, search

# Samples of the graph that shapes are read from.
EXAMPLE = 4
# Parts of a batch at which nodes are measured: what a worker may have in hand.
PARTS = (1, 2, 4, 16)


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


def choose(subject: Subject, workers: int, cluster: Cluster, profile: Profile | None = None) -> Answer:
    """The best plans on up to so many of a cluster's devices.

    Raises:
        PolylaneError: nothing fits.
    """
    leaves = few(subject.leaves, min(EXAMPLE, sample_count(subject.leaves)))
    graph = capture(subject.model, subject.loss, subject.rebuild(cloned(leaves)), trainable=subject.trainable)
    measured = measure(graph, subject) if profile is None else profile
    meets = _samples_meet(graph, subject)
    job = setup.Job(graph, subject.optimizer, subject.whole, {}, measured)
    basis = setup.basis(job, cluster, Method())
    limit = float(min(device.memory for device in cluster.devices(range(min(workers, cluster.count)))))
    wish = Wish(subject.batch, tuple(range(1, workers + 1)), workers, (Method(),), limit, whole=meets)
    answer = search(
        setup.estimates(basis, subject.batch, _staying(graph, subject)), setup.footprint(job, cluster), wish
    )
    if not answer.found:
        raise PolylaneError(f"plan auto: nothing fits on {workers} workers with {limit / 1e9:.1f} GB each")
    return answer


def measure(graph: Graph, subject: Subject) -> Profile | None:
    """The times of a graph's nodes at the sizes that a worker may have in hand; None for a model without weights."""
    if graph.opaque or any(parameter.is_meta for parameter in subject.model.parameters()):
        return None
    sizes = sorted({max(1, -(-subject.batch // parts)) for parts in PARTS})
    return profiled(graph, subject.model, subject.loss, subject.optimizer, subject.leaves, subject.rebuild, sizes)


def _samples_meet(graph: Graph, subject: Subject) -> bool:
    """Whether the loss of a batch is not made up of its parts' losses, so that it must not be divided."""
    leaves = cloned(few(subject.leaves, min(sample_count(subject.leaves), 6)))
    try:
        return splits_exactly(graph, subject.model, subject.loss, leaves) is not None
    except PolylaneError:
        raise
    except Exception:  # it does not run in float64, where that could be seen
        return False


def _staying(graph: Graph, subject: Subject) -> list[str]:
    """Values that may not cross between stages with other numbers of replicas."""
    seen = seen_orders(graph, subject.model, subject.loss, cloned(few(subject.leaves, 6)))
    return [name for name, order in orders_of(graph, seen).items() if order is Order.OTHER]


def told(answer: Answer) -> str:
    """What was chosen, in one line."""
    best = answer.found[0]
    alone = next((c for c in answer.fitting if c.workers == 1), None)
    rate = f"{best.prediction.seconds * 1e3:.3g} ms a step"
    gain = ""
    if alone is not None and best.candidate.workers > 1:
        gain = f", {alone.seconds / best.candidate.seconds:.2f} times as fast as one worker"
    return f"plan auto: {best.plan.spec} ({rate} predicted{gain}; of {answer.looked} plans)"
