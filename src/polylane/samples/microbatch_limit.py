"""Number of microbatches: as requested by a plan, limited by the samples that the model needs at once.

Batch normalization needs two values per channel in training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import fx, nn

from polylane.errors import PolylaneError, format_plural
from polylane.graph.batch import clone_leaves, count_parts, sample_count, take_first_samples
from polylane.graph.capture.export import Loss
from polylane.graph.graph import Graph
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.operators.sync_batch_norm import VALUES, batch_norm
from polylane.graph.symbolic_sizes import size_function
from polylane.plan.options import ROUND_ROBIN
from polylane.plan.plan import AnyPlan
from polylane.plan.spec import default_microbatches
from polylane.samples.mean_loss import splits_exactly

MAX_COUNT = 64  # samples that are tried


@dataclass(frozen=True)
class MinSamples:
    """Least number of samples that may be computed on at once in training.

    Attributes:
        samples: least number of samples, over all replicas.
        node: operator that needs them, with its source line; "" if one sample suffices.
        replicas: number of replicas that normalize over their own samples only; 1 if statistics are shared.
    """

    samples: int = 1
    node: str = ""
    replicas: int = 1

    def __str__(self) -> str:
        scope = f" in each of {self.replicas} replicas" if self.replicas > 1 else ""
        count = self.samples // self.replicas
        return f"{self.node} needs {count} samples at once in training{scope}, for the variance of a channel's values"

    def for_local_replicas(self, replicas: int) -> MinSamples:
        """Return the least samples for replicas that each normalize over their own samples only."""
        return MinSamples(self.samples * replicas, self.node, replicas) if self.samples > 1 else self

    def check(self, samples: int, batch_name: str, remedy: str) -> None:
        """Check that a batch has enough samples.

        Args:
            samples: number of samples of the batch.
            batch_name: name of the batch, to begin a sentence with.
            remedy: what the user can do, to end the sentence.

        Raises:
            PolylaneError: the batch has too few samples.
        """
        if samples < self.samples:
            too = ", on one device too" if self.replicas == 1 else ""
            raise PolylaneError(f"{batch_name} has {format_plural(samples, 'sample')}, but {self}{too}: {remedy}")


def min_samples(graphs: Iterable[Graph]) -> MinSamples:
    """Return the least samples that all graphs of a training need."""
    needs = [
        _min_samples_of_node(graph, node)
        for graph in graphs
        for node in graph.code.fx.nodes
        if node.op == "call_function"
    ]
    return max(needs, key=lambda need: need.samples, default=MinSamples())


def _min_samples_of_node(graph: Graph, node: fx.Node) -> MinSamples:
    target = unwrap_settings(node.target)
    # For the user's own Python the capture has observed it; other operators have no such attribute.
    call = getattr(target, "own", target)
    samples = _min_samples_of_norm(node) if target is batch_norm else int(getattr(call, "fewest", 1))
    if samples == 1:
        return MinSamples()
    name = str(node.meta["name"])
    source = graph.nodes[graph.positions[name]].source
    return MinSamples(samples, f"{name} ({source})" if source else name)


def _min_samples_of_norm(node: fx.Node) -> int:
    """Return the least samples of a batch normalization over all replicas; x is (N, C, ...)."""
    x = node.args[1]
    assert isinstance(x, fx.Node)
    try:
        sizes = [size_function(size) for size in x.meta["val"].shape]
    except ValueError:  # sizes depend on data: assume the best
        return 1
    tried = ((n, [size(n) for size in sizes]) for n in range(1, MAX_COUNT + 1))
    return next((n for n, (rows, _, *space) in tried if rows * math.prod(space) >= VALUES), 1)


def requested_microbatches(spec: AnyPlan, total: int) -> int:
    """Return the number of microbatches that a plan requests for a batch of ``total`` samples.

    Raises:
        PolylaneError: there are more microbatches, or more replicas, than samples.
    """
    microbatches = default_microbatches(spec, total)
    if microbatches > total:
        raise PolylaneError(
            f"microbatches={microbatches}: a batch of {format_plural(total, 'sample')} cannot be divided into so many"
        )
    if spec.data > total:
        raise PolylaneError(
            f"data={spec.data}: a batch of {format_plural(total, 'sample')} cannot be divided over so many replicas"
        )
    return microbatches


def captured_samples(spec: AnyPlan, total: int) -> int:
    """Return with how many samples a plan's graphs are captured: those of one rank in one microbatch, two at least.

    Time and memory depend on this number.

    Args:
        spec: the plan, with its replicas and microbatches.
        total: samples of a step, over all workers.

    Raises:
        PolylaneError: there are more microbatches, or more replicas, than samples.
    """
    replicas = 1 if spec.replicas == ROUND_ROBIN else spec.data
    return max(2, -(-total // (requested_microbatches(spec, total) * replicas)))


def min_samples_for(plan: AnyPlan, graphs: Iterable[Graph]) -> MinSamples:
    """Return the least samples that a microbatch of a plan may have in training."""
    fewest = min_samples(graphs)
    return fewest.for_local_replicas(plan.data) if plan.sync.is_replica_local else fewest


def limit_microbatches(count: int, total: int, fewest: MinSamples, fewer: bool) -> int:
    """Return the number of microbatches such that each has the samples that the model needs.

    Args:
        count: requested number of microbatches.
        total: samples of a full batch.
        fewest: least samples that the model needs at once.
        fewer: whether fewer are allowed, since the number is a default.

    Raises:
        PolylaneError: the batch is too small, or too small for the requested number.
    """
    fewest.check(total, "a batch", "take larger batches")
    possible = count_parts(total, count, fewest.samples)
    if possible < count and not fewer:
        raise PolylaneError(
            f"microbatches={count}: of a batch of {format_plural(total, 'sample')} some would have {total // count}, "
            f"but {fewest}: use microbatches={possible}, or larger batches"
        )
    return possible


def make_split_check(
    graph: Graph, model: nn.Module, loss: Loss, leaves: list[Any], in_float64: bool
) -> Callable[[], str | None]:
    """Return a function that runs an example batch whole and in parts and explains a difference, or returns None."""

    def look() -> str | None:
        try:
            return splits_exactly(
                graph, model, loss, clone_leaves(take_first_samples(leaves, min(sample_count(leaves), 6)))
            )
        except PolylaneError:
            raise
        except Exception as error:
            why = str(error).strip().partition("\n")[0]
            if in_float64:
                raise PolylaneError(f"the model does not run in float64, which a proof needs: {why}") from error
            warnings.warn(
                "whether your own Python treats each sample independently could not be seen: it does not run in "
                f"float64 ({why})",
                stacklevel=2,
            )
            return None

    return look
