"""Whole-batch statistics: counts and sums over all samples of a batch, computed before a step's first pass.

Each worker counts over its own samples of every microbatch, and replicas combine their results. A statistic may need
another one (weights that are divided by their own sum, and summed again): statistics are therefore computed level by
level, with one all-reduce between replicas for each level.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.interpreter import GraphInterpreter, find_ancestors
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.whole_batch_counts import BatchSize, CombineParts, WholeBatchStatistic, statistics_of

# Role of a placeholder: its kind ("input", "buffer", ...), and its name or index.
Role = tuple[str, Any]


@dataclass(frozen=True)
class CountingReplicas:
    """The replicas that share a batch, seen from one of them.

    Attributes:
        sum_over_replicas: all-reduces a tensor over the replicas, in place.
        index, count: index of this replica, and number of all.
    """

    sum_over_replicas: Callable[[Tensor], Tensor]
    index: int
    count: int


class BatchStatistics:
    """Computes the whole-batch statistics that some operators of a graph need.

    Args:
        code: FX graph of the model and loss, unsharded.
        names: names of the statistics to compute; default: all.
    """

    def __init__(self, code: fx.Graph, names: Collection[str] | None = None) -> None:
        statistics = [n for n in statistics_of(code) if names is None or n.meta["name"] in names]
        self._code, needed = code, find_ancestors(statistics)
        self._order = [node for node in code.nodes if node in needed]
        self.buffers = {n.meta["role"][1] for n in needed if n.op == "placeholder" and n.meta["role"][0] == "buffer"}
        # Level of a node: how many statistics are on the longest path to it, itself included.
        depth: dict[fx.Node, int] = {}
        for node in self._order:
            input_depth = max((depth[n] for n in node.all_input_nodes), default=0)
            depth[node] = input_depth + isinstance(node.target, WholeBatchStatistic)
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
        """Return the value of every statistic over the whole batch by node name.

        Args:
            parts: local samples of each microbatch; those of weight 0 belong to another replica and do not count.
            leaves: flat inputs of each part.
            tensors: buffers and constants of the graph by role.
            replicas: replicas that have the rest of the batch; None if there are none.
        """
        statistics: dict[str, Any] = {}
        of_parts = []
        for part, inputs in zip(parts, leaves, strict=True):
            of_inputs: dict[Role, Any] = {("input", i): leaf for i, leaf in enumerate(inputs)}
            sample_slice = replace(part, whole=lambda key, part_value: statistics[key])
            of_parts.append(
                _PartInterpreter(self._code, {**tensors, **of_inputs, ("part", 0): sample_slice}, statistics)
            )
        for level in self._levels:
            part_values = [
                interpreter.values(self._order, [node.args[1] for node in level]) for interpreter in of_parts
            ]
            # What all parts have alike is copied: the passes of this step write the tensor itself.
            same_flags = [_is_same(node) for node in level]
            statistics |= {str(n.meta["name"]): part_values[0][i].clone() for i, n in enumerate(level) if same_flags[i]}
            joined = [(i, node) for i, node in enumerate(level) if not same_flags[i]]
            combined = [_combine_parts(node, [values[i] for values in part_values], parts) for i, node in joined]
            if replicas is not None and joined:
                combined = _combine_replicas([node for _, node in joined], combined, replicas)
            for (i, node), value in zip(joined, combined, strict=True):
                statistics[str(node.meta["name"])] = value.to(part_values[0][i].dtype)
        return statistics


class _PartInterpreter(GraphInterpreter):
    """Runs the ancestors of statistics on one part of the batch, level by level.

    Args:
        code: FX graph of the model and loss, unsharded.
        values: value of every placeholder of the part by role.
        statistics: statistics known so far by node name; the caller adds to it between levels.
    """

    def __init__(self, code: fx.Graph, values: Mapping[Role, Any], statistics: dict[str, Any]) -> None:
        super().__init__(code, lambda node: values[node.meta["role"]], keep_values=True)
        self._found = statistics

    def values(self, order: Sequence[fx.Node], nodes: Sequence[Any]) -> list[Tensor]:
        """Return the values of some nodes; run all nodes of ``order`` whose statistics are known by now."""
        for node in order:
            unknown = isinstance(node.target, WholeBatchStatistic) and node.meta["name"] not in self._found
            if (
                node not in self.env
                and not unknown
                and all(input_node in self.env for input_node in node.all_input_nodes)
            ):
                self.env[node] = self.run_node(node)
        return [torch.as_tensor(self.env[node]) for node in nodes]


def needs_batch_counts(code: fx.Graph) -> bool:
    """Return whether a graph needs statistics or the size of the whole batch, not only its local samples."""
    return any(isinstance(node.target, (WholeBatchStatistic, BatchSize)) for node in code.nodes)


def _is_same(node: fx.Node) -> bool:
    return node.target.combine is CombineParts.SAME  # type: ignore[union-attr]


_EXTREMES: dict[CombineParts, Callable[..., Tensor]] = {CombineParts.MAX: torch.amax, CombineParts.MIN: torch.amin}


def _combine_parts(node: fx.Node, part_values: Sequence[Tensor], parts: Sequence[SampleSlice]) -> Tensor:
    """Combine a statistic over the local parts in float64: a sum, a share of a mean, or an extreme."""
    combine = node.target.combine  # type: ignore[union-attr]
    stacked = torch.stack([value.double() for value in part_values])
    if combine in _EXTREMES:
        return _EXTREMES[combine](stacked, 0)
    result = torch.zeros_like(stacked[0])
    for part, value in zip(parts, stacked, strict=True):
        if part.weight:
            result += value * (part.samples / part.count_loss_samples) if combine is CombineParts.MEAN else value
    return result


def _combine_replicas(level: Sequence[fx.Node], values: Sequence[Tensor], replicas: CountingReplicas) -> list[Tensor]:
    """Combine statistics over all replicas, with one all-reduce."""
    flat = torch.cat([value.flatten() for value in values])
    # One row per replica, zero but for the own one: the sum is an all-gather, and extremes need no other
    # collective.
    places = flat.new_zeros(replicas.count, flat.numel())
    places[replicas.index] = flat
    columns = replicas.sum_over_replicas(places.flatten()).view_as(places).split([value.numel() for value in values], 1)
    combines = [_EXTREMES.get(node.target.combine, torch.sum) for node in level]  # type: ignore[union-attr]
    return [combine(column, 0).view_as(value) for combine, column, value in zip(combines, columns, values, strict=True)]
