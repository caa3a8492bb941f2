"""The reference's own interpreter: a captured graph run whole, in one process, by other code than a plan's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.batch import sampled_leaves
from polylane.graph.capture.assign_keys import draws_by_sample
from polylane.graph.graph import Code
from polylane.graph.operators.whole_batch_counts import BatchShare, WholeBatchStatistic
from polylane.graph.sample_slice import SampleSlice
from polylane.runtime.pipeline.bound_program import ModelTensors


def depends_on_split(code: Code) -> bool:
    """Whether a model computes something else on a batch in parts: statistics of each, or random numbers for each."""
    return code.has_batch_statistics or (code.random and not draws_by_sample(code.fx))


def add_batch_counts(
    code: Code,
    tensors: ModelTensors,
    parts: Sequence[SampleSlice],
    leaves: Sequence[Sequence[Any]],
    sampled: Sequence[bool] | None = None,
) -> list[SampleSlice]:
    """Parts that know what all of them count together.

    A part's own count is of no use here: samples are put together again, and counted as the one batch that they are.

    Args:
        code: the whole graph.
        tensors: on which it runs.
        parts: with their samples.
        leaves: of each part.
        sampled: which of the leaves are split with the samples.
    """
    counts = [node for node in code.fx.nodes if isinstance(node.target, WholeBatchStatistic)]
    if not counts or len(parts) < 2:
        return list(parts)
    split = sampled or sampled_leaves(leaves[0])
    joined = [torch.cat(each) if cut else each[0] for each, cut in zip(zip(*leaves, strict=True), split, strict=True)]
    samples = sum(part.samples for part in parts)
    found: dict[str, Tensor] = {}

    def look(name: str, value: Tensor) -> None:
        found[name] = value

    with torch.no_grad():
        run_graph(code, tensors, joined, SampleSlice(samples, batch=samples), look, only=_find_ancestors(counts))
    return [replace(part, whole=lambda key, own: found[key]) for part in parts]


def _find_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all on which they depend."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def run_graph(
    code: Code,
    tensors: ModelTensors,
    leaves: Sequence[Any],
    part: SampleSlice,
    look: Callable[[str, Tensor], None] | None = None,
    only: Collection[fx.Node] | None = None,
) -> tuple[Tensor, ...]:
    """Run captured code node by node on the model's own tensors: the loss.

    What a part needs to know of the whole batch is found here by other code than a plan's.

    Args:
        code: the whole graph.
        tensors, leaves, part: on what it runs.
        look: sees every tensor value as soon as it is there: node name, value.
        only: run these nodes, and do not ask for the loss.
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
            kind, key = node.meta["role"]
            values[node] = table[kind][key]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = (
                _whole_batch_number(node, part, *args) if _needs_whole_batch(node) else node.target(*args, **kwargs)
            )
            if look is not None and isinstance(values[node], Tensor):
                look(node.meta["name"], values[node])
        else:
            result = tuple(fx.map_arg(node.args[0], values.__getitem__))
    return result


def _needs_whole_batch(node: fx.Node) -> bool:
    return isinstance(node.target, (WholeBatchStatistic, BatchShare))


def _whole_batch_number(node: fx.Node, part: SampleSlice, _: SampleSlice, own: Any = None) -> Any:
    """What an operator gives that stands for a number of the whole batch."""
    if isinstance(node.target, BatchShare):
        return float(((part.loss_samples or part.batch or part.samples) / part.samples) ** node.target.power)
    return own if part.whole is None else part.whole(str(node.meta["name"]), own)
