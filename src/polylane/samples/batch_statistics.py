"""Statistics of the whole batch, counted from the inputs before a step's first pass.

Each worker counts over its own samples of every microbatch; replicas then add up what they have. A statistic that needs
another one (weights that are divided by their own sum, and summed again) waits for that one: they are counted level by
level, with one exchange between replicas for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.operators.whole_batch_counts import BatchSize, CombineParts, WholeBatchStatistic, statistics_of
from polylane.graph.sample_slice import SampleSlice

# What a placeholder of the graph stands for, by its role, given the leaves of a part.
Role = tuple[str, Any]


@dataclass(frozen=True)
class CountingReplicas:
    """The replicas that share a batch.

    Attributes:
        sum_over_replicas: sums a tensor over all of them, in place.
        index, count: of this one, and of all.
    """

    sum_over_replicas: Callable[[Tensor], Tensor]
    index: int
    count: int


class BatchStatistics:
    """What must be counted of a batch for some operators of a graph.

    Args:
        code: the whole graph.
        names: of the operators for which it is counted; default: all.
    """

    def __init__(self, code: fx.Graph, names: Collection[str] | None = None) -> None:
        wanted = [n for n in statistics_of(code) if names is None or n.meta["name"] in names]
        self._code, needed = code, find_ancestors(wanted)
        self._order = [node for node in code.nodes if node in needed]
        self.buffers = {n.meta["role"][1] for n in needed if n.op == "placeholder" and n.meta["role"][0] == "buffer"}
        depth: dict[fx.Node, int] = {}
        for node in self._order:
            before = max((depth[n] for n in node.all_input_nodes), default=0)
            depth[node] = before + isinstance(node.target, WholeBatchStatistic)
        self._levels = [[n for n in self._order if depth[n] == level and isinstance(n.target, WholeBatchStatistic)]
                        for level in range(1, max(depth.values(), default=0) + 1)]  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._levels)

    @torch.no_grad()
    def compute_statistics(
        self,
        parts: Sequence[SampleSlice],
        leaves: Sequence[Sequence[Any]],
        tensors: Mapping[Role, Tensor],
        replicas: CountingReplicas | None = None,
    ) -> Mapping[str, Any]:
        """The value of every statistic over the whole batch, by node name.

        Args:
            parts: the samples in hand, microbatch by microbatch; those of weight 0 are another replica's.
            leaves: of each part, the leaves of the batch.
            tensors: buffers and constants by role.
            replicas: who has the rest of the batch; None: nobody.
        """
        found: dict[str, Any] = {}
        of_parts = [
            _PartInterpreter(self._code, part, x, tensors, found) for part, x in zip(parts, leaves, strict=True)
        ]
        for level in self._levels:
            own = [one.values(self._order, [node.args[1] for node in level]) for one in of_parts]
            combined = [_combine_parts(n, [each[i] for each in own], parts) for i, n in enumerate(level)]
            if replicas is not None:
                combined = _combine_replicas(level, combined, replicas)
            for i, node in enumerate(level):
                found[str(node.meta["name"])] = combined[i].to(own[0][i].dtype)
        return found


class _PartInterpreter(GraphInterpreter):
    """Runs what statistics depend on for one part of the batch, as far as is known of the whole batch.

    Args:
        code: the whole graph.
        part, leaves: the samples of the part.
        tensors: buffers and constants by role.
        found: the statistics that are known already, by node name; others are added between calls.
    """

    def __init__(
        self,
        code: fx.Graph,
        part: SampleSlice,
        leaves: Sequence[Any],
        tensors: Mapping[Role, Tensor],
        found: dict[str, Any],
    ) -> None:
        super().__init__(code, self._placeholder, keep_values=True)
        self._part, self._leaves, self._tensors, self._found = part, leaves, tensors, found
        self._part = replace(part, whole=lambda key, own: found[key])

    def _placeholder(self, node: fx.Node) -> Any:
        kind, key = node.meta["role"]
        return self._part if kind == "part" else self._leaves[key] if kind == "input" else self._tensors[kind, key]

    def values(self, order: Sequence[fx.Node], wanted: Sequence[Any]) -> list[Tensor]:
        """The values of some nodes; all that can be computed by now of ``order`` is."""
        for node in order:
            unknown = isinstance(node.target, WholeBatchStatistic) and node.meta["name"] not in self._found
            if node not in self.env and not unknown and all(other in self.env for other in node.all_input_nodes):
                self.env[node] = self.run_node(node)
        return [torch.as_tensor(self.env[node]) for node in wanted]


def needs_batch_counts(code: fx.Graph) -> bool:
    """Whether a graph needs to know more of the whole batch than the samples in hand."""
    return any(isinstance(node.target, (WholeBatchStatistic, BatchSize)) for node in code.nodes)


def _combine_parts(node: fx.Node, own: Sequence[Tensor], parts: Sequence[SampleSlice]) -> Tensor:
    """A statistic over the parts in hand: a sum, a share of a mean, or an extreme; in float64."""
    combine = node.target.combine  # type: ignore[union-attr]
    stacked = torch.stack([each.double() for each in own])
    if combine is CombineParts.MAX:
        return stacked.amax(0)
    if combine is CombineParts.MIN:
        return stacked.amin(0)
    result = torch.zeros_like(stacked[0])
    for part, each in zip(parts, stacked, strict=True):
        if part.weight:
            result += each * (part.samples / part.count_loss_samples) if combine is CombineParts.MEAN else each
    return result


def _combine_replicas(level: Sequence[fx.Node], own: Sequence[Tensor], replicas: CountingReplicas) -> list[Tensor]:
    """The same over all replicas: one sum of a vector in which every replica has a place of its own."""
    flat = torch.cat([each.flatten() for each in own])
    places = flat.new_zeros(replicas.count, flat.numel())
    places[replicas.index] = flat
    every = replicas.sum_over_replicas(places.flatten()).view_as(places).split([each.numel() for each in own], 1)
    result = []
    for node, each, mine in zip(level, every, own, strict=True):
        combine = node.target.combine  # type: ignore[union-attr]
        whole = (
            each.amax(0)
            if combine is CombineParts.MAX
            else each.amin(0)
            if combine is CombineParts.MIN
            else each.sum(0)
        )
        result.append(whole.view_as(mine))
    return result


def find_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all on which they depend."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found
