"""The reference's own interpreter: a captured graph run whole, in one process, by other code than a plan's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.batch import sampled_leaves
from polylane.graph.graph import Code
from polylane.graph.keying import follows_samples
from polylane.graph.part import Part
from polylane.graph.whole_batch import BatchShare, WholeBatch
from polylane.runtime.lane import Tensors


def tells_parts_apart(code: Code) -> bool:
    """Whether a model computes something else on a batch in parts: statistics of each, or random numbers for each."""
    return code.batch_statistics or (code.random and not follows_samples(code.fx))


def with_counts(
    code: Code,
    tensors: Tensors,
    parts: Sequence[Part],
    leaves: Sequence[Sequence[Any]],
    sampled: Sequence[bool] | None = None,
) -> list[Part]:
    """Parts that know what all of them count together.

    A part's own count is of no use here: samples are put together again, and counted as the one batch that they are.

    Args:
        code: the whole graph.
        tensors: on which it runs.
        parts: with their samples.
        leaves: of each part.
        sampled: which of the leaves are split with the samples.
    """
    counts = [node for node in code.fx.nodes if isinstance(node.target, WholeBatch)]
    if not counts or len(parts) < 2:
        return list(parts)
    split = sampled or sampled_leaves(leaves[0])
    joined = [torch.cat(each) if cut else each[0] for each, cut in zip(zip(*leaves, strict=True), split, strict=True)]
    samples = sum(part.samples for part in parts)
    found: dict[str, Tensor] = {}

    def look(name: str, value: Tensor) -> None:
        found[name] = value

    with torch.no_grad():
        run_whole(code, tensors, joined, Part(samples, batch=samples), look, only=_ancestors(counts))
    return [replace(part, whole=lambda key, own: found[key]) for part in parts]


def _ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Nodes, and all on which they depend."""
    found, left = set[fx.Node](), list(nodes)
    while left:
        node = left.pop()
        if node not in found:
            found.add(node)
            left += node.all_input_nodes
    return found


def run_whole(
    code: Code,
    tensors: Tensors,
    leaves: Sequence[Any],
    part: Part,
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
            values[node] = _of_batch(node, part, *args) if _asks(node) else node.target(*args, **kwargs)
            if look is not None and isinstance(values[node], Tensor):
                look(node.meta["name"], values[node])
        else:
            result = tuple(fx.map_arg(node.args[0], values.__getitem__))
    return result


def _asks(node: fx.Node) -> bool:
    return isinstance(node.target, (WholeBatch, BatchShare))


def _of_batch(node: fx.Node, part: Part, _: Part, own: Any = None) -> Any:
    """What an operator gives that stands for a number of the whole batch."""
    if isinstance(node.target, BatchShare):
        return float(((part.averaged or part.batch or part.samples) / part.samples) ** node.target.power)
    return own if part.whole is None else part.whole(str(node.meta["name"]), own)
