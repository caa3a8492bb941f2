"""Interpreter of the reference: a captured graph run whole, in one process, by other code than the runtime's.

A bug in the runtime's interpreter would otherwise be on both sides of the comparison.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.batch import sampled_leaves
from polylane.graph.graph import Code
from polylane.graph.interpreter import find_ancestors
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.whole_batch_counts import BatchShare, WholeBatchStatistic, statistics_of
from polylane.runtime.parameters.model_tensors import ModelTensors


def add_batch_counts(
    code: Code,
    tensors: ModelTensors,
    parts: Sequence[SampleSlice],
    leaves: Sequence[Sequence[Any]],
    sampled: Sequence[bool] | None = None,
) -> list[SampleSlice]:
    """Return sample slices that know the counts of the whole batch, such as the number of labels that are not ignored.

    The samples of all parts are joined and counted as one batch; the runtime adds up the counts of the parts.

    Args:
        code: the whole captured graph of model and loss.
        tensors: weights and buffers on which it runs.
        parts: the sample slice of each microbatch.
        leaves: the batch leaves of each microbatch, in the order of ``parts``.
        sampled: for each leaf, whether it has a row for each sample; None: derived from the first part.
    """
    counts = statistics_of(code.fx)
    if not counts or len(parts) < 2:
        return list(parts)
    split = sampled or sampled_leaves(leaves[0])
    joined = [torch.cat(rows) if cut else rows[0] for rows, cut in zip(zip(*leaves, strict=True), split, strict=True)]
    samples = sum(part.samples for part in parts)
    # Only the nodes that counts depend on are run: counts are functions of inputs, constants and buffers alone.
    values: dict[str, Tensor] = {}

    def look(name: str, value: Tensor) -> None:
        values[name] = value.clone()  # a buffer as it is before any part has written it

    with torch.no_grad():
        run_graph(code, tensors, joined, SampleSlice(samples, batch=samples), look, only=find_ancestors(counts))
    return [replace(part, whole=lambda key, local_value: values[key]) for part in parts]


def run_graph(
    code: Code,
    tensors: ModelTensors,
    leaves: Sequence[Any],
    part: SampleSlice,
    look: Callable[[str, Tensor], None] | None = None,
    only: Collection[fx.Node] | None = None,
) -> tuple[Tensor, ...]:
    """Run captured code node by node on the model's own tensors, and return the loss (and its count for polylane.Mean).

    Args:
        code: the whole captured graph of model and loss.
        tensors: weights and buffers on which it runs; buffers are written.
        leaves: the batch leaves of this part.
        part: the sample slice that ``leaves`` belong to.
        look: called with the name and value of every tensor as soon as it is computed; None: nobody looks.
        only: run these nodes alone, and return no loss; None: run all.
    """
    table: dict[str, Any] = {
        "parameter": tensors.parameters(),
        "buffer": tensors.buffers(),
        "constant": code.constants,
        "input": leaves,
        "part": [part],
    }
    values: dict[fx.Node, Any] = {}
    result: tuple[Tensor, ...] = ()
    for node in code.fx.nodes:
        if only is not None and node not in only:
            continue
        if node.op == "placeholder":
            # The graph's inputs are parameters, buffers, constants, batch leaves and the sample slice.
            kind, key = node.meta["role"]
            values[node] = table[kind][key]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            of_batch = isinstance(node.target, (WholeBatchStatistic, BatchShare))
            values[node] = _whole_batch_number(node, part, *args) if of_batch else node.target(*args, **kwargs)
            if look is not None and isinstance(values[node], Tensor):
                look(node.meta["name"], values[node])
        else:
            result = tuple(fx.map_arg(node.args[0], values.__getitem__))
    return result


def _whole_batch_number(node: fx.Node, part: SampleSlice, _: SampleSlice, local_value: Any = None) -> Any:
    """Return the value of an operator that stands for a number of the whole batch: a count, or the batch's share."""
    if isinstance(node.target, BatchShare):
        return float(((part.loss_samples or part.batch or part.samples) / part.samples) ** node.target.power)
    return local_value if part.whole is None else part.whole(str(node.meta["name"]), local_value)
