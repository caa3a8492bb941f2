"""Minimum samples: the least samples a graph takes in training; batch normalization needs two values per channel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.operators.sync_batch_norm import VALUES, batch_norm
from polylane.graph.precision import unwrap_settings
from polylane.graph.symbolic_sizes import size_function

MOST = 64  # samples that are tried


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
        each = f" in each of {self.replicas} replicas" if self.replicas > 1 else ""
        count = self.samples // self.replicas
        return f"{self.node} needs {count} samples at once in training{each}, for the variance of a channel's values"

    def for_local_replicas(self, replicas: int) -> MinSamples:
        """Return the least samples for replicas that each normalize over their own samples only."""
        return MinSamples(self.samples * replicas, self.node, replicas) if self.samples > 1 else self

    def check(self, samples: int, what: str, remedy: str) -> None:
        """Check that a batch has enough samples.

        Args:
            samples: number of samples of the batch.
            what: name of the batch, to begin a sentence with.
            remedy: what the user can do, to end the sentence.

        Raises:
            PolylaneError: the batch has too few samples.
        """
        if samples < self.samples:
            count = f"{samples} sample{'s' if samples != 1 else ''}"
            too = ", on one device too" if self.replicas == 1 else ""
            raise PolylaneError(f"{what} has {count}, but {self}{too}: {remedy}")


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
    own = getattr(target, "own", target)
    samples = _min_samples_of_norm(node) if target is batch_norm else int(getattr(own, "fewest", 1))
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
    tried = ((n, [size(n) for size in sizes]) for n in range(1, MOST + 1))
    return next((n for n, (rows, _, *space) in tried if rows * math.prod(space) >= VALUES), 1)
