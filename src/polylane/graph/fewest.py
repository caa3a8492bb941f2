"""How few samples a graph takes in training: of one value per channel, batch normalization has no variance."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import fx

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.precision import innermost
from polylane.graph.sizes import size_function
from polylane.graph.statistics import VALUES, batch_norm

MOST = 64  # samples that are tried


@dataclass(frozen=True)
class Fewest:
    """How few samples may be computed on at once in training.

    Attributes:
        samples: so many, over all replicas.
        node: the operator that needs them, with the user's own line; "" where a single sample will do.
        replicas: that each need their part of them, for each sees its own samples alone; 1 where all see all.
    """

    samples: int = 1
    node: str = ""
    replicas: int = 1

    def __str__(self) -> str:
        each = f" in each of {self.replicas} replicas" if self.replicas > 1 else ""
        count = self.samples // self.replicas
        return f"{self.node} needs {count} samples at once in training{each}, for the variance of a channel's values"

    def apart(self, replicas: int) -> Fewest:
        """How few samples so many replicas take that each see their own alone."""
        return Fewest(self.samples * replicas, self.node, replicas) if self.samples > 1 else self

    def check(self, samples: int, what: str, remedy: str) -> None:
        """Refuse a batch on which one device would fail, too.

        Args:
            samples: how many it has.
            what: which batch, to begin a sentence with.
            remedy: what the user can do.

        Raises:
            PolylaneError: it is too short.
        """
        if samples < self.samples:
            count = f"{samples} sample{'s' if samples != 1 else ''}"
            too = ", on one device too" if self.replicas == 1 else ""
            raise PolylaneError(f"{what} has {count}, but {self}{too}: {remedy}")


def fewest_samples(graphs: Iterable[Graph]) -> Fewest:
    """How few samples all of a training's graphs take."""
    needs = [_of(graph, node) for graph in graphs for node in graph.code.fx.nodes if node.op == "call_function"]
    return max(needs, key=lambda need: need.samples, default=Fewest())


def _of(graph: Graph, node: fx.Node) -> Fewest:
    samples = _by_shape(node) if innermost(node.target) is batch_norm else _by_leaf(node)
    if samples == 1:
        return Fewest()
    name = str(node.meta["name"])
    source = next((own.source for own in graph.nodes if own.name == name), "")
    return Fewest(samples, f"{name} ({source})" if source else name)


def _by_leaf(node: fx.Node) -> int:
    """The user's own Python was seen at work."""
    return int(getattr(innermost(node.target), "fewest", 1))


def _by_shape(node: fx.Node) -> int:
    """Of a batch normalization over all replicas: (part, x, ...), x (N, C, ...)."""
    x = node.args[1]
    assert isinstance(x, fx.Node)
    try:
        sizes = [size_function(size) for size in x.meta["val"].shape]
    except ValueError:  # they depend on data
        return 1
    tried = ((n, [size(n) for size in sizes]) for n in range(1, MOST + 1))
    return next((n for n, (rows, _, *space) in tried if rows * math.prod(space) >= VALUES), 1)
