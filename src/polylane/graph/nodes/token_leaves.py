"""Tokens of a batch: whole numbers by which an embedding looks up rows, and not masks or class maps of the same dtype.

Only the graph says which tensors these are: a mask, a map of classes and a row of words are all int64.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.facts import base_name, unwrap_settings

# By operator, which argument has the numbers of rows; of those below the line only where a parameter is the table.
_EMBEDDINGS = {"embedding": 1, "embedding_bag": 1, "_embedding_bag": 1}
_LOOKUPS = {"index": 1, "index_select": 2}
# Operators that return elements of their input, beside views and what torch tags as pointwise.
_KEEPERS = frozenset(
    {"cat", "clone", "contiguous", "pad", "constant_pad_nd", "reshape", "roll", "stack", "to", "_to_copy"}
)
_MIXED = -1  # origin of a value that is not made element by element of one leaf


def find_token_leaves(graph: fx.Graph) -> frozenset[int]:
    """Return the numbers of the batch's leaves by whose elements rows of an embedding's table are looked up.

    They may be reshaped, cut, padded, masked or shifted on the way, but not counted or compared; what the user's own
    Python does in a leaf is not known.

    Args:
        graph: code of model and loss, see :class:`polylane.graph.graph.Code`.
    """
    origins, tokens = dict[fx.Node, int](), set[int]()
    for node in graph.nodes:
        if node.op == "placeholder":
            kind, name = node.meta["role"]
            if kind == "input" and not _is_bool(node):
                origins[node] = int(name)
            continue
        tokens |= {origins[source] for source in _looked_up(node) if source in origins}
        sources = {origins[source] for source in node.all_input_nodes if source in origins}
        if sources and not _is_bool(node):
            is_kept = len(sources) == 1 and _keeps_elements(node.target)
            origins[node] = sources.pop() if is_kept else _MIXED
    return frozenset(tokens - {_MIXED})


def count_tokens(leaves: Sequence[Any], token_leaves: Collection[int], samples: int) -> int:
    """Return the tokens of a batch: of the tensors that hold them, those with the most to a sample.

    Args:
        leaves: flat leaves of the batch, or of this worker's samples, whose first dimension is that of the samples.
        token_leaves: the numbers of those with tokens, see :func:`find_token_leaves`.
        samples: number of samples of the whole batch.

    Returns:
        0 where no tensor has several tokens to a sample.
    """
    tensors = (leaf for number, leaf in enumerate(leaves) if number in token_leaves and isinstance(leaf, Tensor))
    return max((leaf[0].numel() * samples for leaf in tensors if leaf.dim() > 1 and len(leaf)), default=0)


def _looked_up(node: fx.Node) -> list[fx.Node]:
    """Return the values by which a node looks up rows of a table; none of another node."""
    name = base_name(node)
    position = _EMBEDDINGS.get(name)
    if position is None and name in _LOOKUPS and _is_parameter(node.args[0]):
        position = _LOOKUPS[name]
    if position is None or len(node.args) <= position:
        return []
    numbers: Any = node.args[position]
    return [
        value for value in (numbers if isinstance(numbers, list | tuple) else [numbers]) if isinstance(value, fx.Node)
    ]


def _is_parameter(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.meta["role"][0] == "parameter"


def _is_bool(node: fx.Node) -> bool:
    """Return whether a value only says where something is done with others."""
    val = node.meta.get("val")
    return isinstance(val, Tensor) and val.dtype == torch.bool


def _keeps_elements(target: Any) -> bool:
    """Return whether an operator makes every element of its result of one element of its input, or of a constant."""
    target = unwrap_settings(target)
    if not isinstance(target, torch._ops.OpOverload):
        return getattr(target, "__name__", "") == "getitem"
    is_view = any(result.alias_info is not None for result in target._schema.returns)
    return is_view or torch.Tag.pointwise in target.tags or target._schema.name.removeprefix("aten::") in _KEEPERS
