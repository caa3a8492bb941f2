"""Ragged values: tensors whose number of rows depends on data, and the masks that select these rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from polylane.graph.interpreter import find_ancestors
from polylane.graph.nodes.facts import base_name, bind_arguments, operator_name
from polylane.graph.symbolic_sizes import data_dependent_symbols


def find_masks(code: fx.Graph) -> dict[Any, fx.Node]:
    """Return data-dependent size symbol -> the mask whose true elements it counts, where there is one."""
    masks: dict[Any, fx.Node] = {}
    seen_symbols: set[Any] = set()
    for node in code.nodes:
        new = set(data_dependent_symbols(node.meta.get("val"))) - seen_symbols
        seen_symbols |= new
        mask = _find_mask(node) if new else None
        if mask is not None:
            masks |= dict.fromkeys(new, mask)
    return masks


def share_one_mask(nodes: Sequence[fx.Node], masks: Mapping[Any, fx.Node]) -> bool:
    """Return whether all ragged values have the rows of one mask, which may be computed repeatedly."""
    symbols = {symbol for node in nodes for symbol in data_dependent_symbols(node.meta.get("val"))}
    if len(symbols) < 2:
        return True
    numbers: dict[Any, int] = {}
    return symbols <= masks.keys() and len({_number_formula(masks[symbol], numbers) for symbol in symbols}) == 1


def same_formula(node: fx.Node, other_node: fx.Node) -> bool:
    """Return whether two nodes compute the same from the graph's inputs, possibly twice."""
    numbers: dict[Any, int] = {}
    return _number_formula(node, numbers) == _number_formula(other_node, numbers)


def _number_formula(node: fx.Node, numbers: dict[Any, int]) -> int:
    """Return a number for the formula that a node computes from placeholders: equal for equal computations.

    Args:
        node: node whose formula is numbered.
        numbers: numbers of all nodes and formulas so far; is extended.
    """
    for ancestor in sorted(find_ancestors([node]) - numbers.keys()):
        inputs = fx.map_arg((ancestor.args, ancestor.kwargs), lambda n: _FormulaNumber(numbers[n]))
        formula = repr((str(ancestor.target), inputs)) if ancestor.op == "call_function" else ancestor
        numbers[ancestor] = numbers.setdefault(formula, len(numbers))
    return numbers[node]


class _FormulaNumber(int):
    """Number of a formula in place of a tensor; its repr differs from any number among a call's arguments."""

    def __repr__(self) -> str:
        return f"#{int(self)}"


def _find_mask(node: fx.Node) -> fx.Node | None:
    """Return the boolean mask by which an operator selects rows or finds indices; None for other operators."""
    base = base_name(node)
    arguments = bind_arguments(node)[1]
    if base == "masked_select":
        return arguments["mask"]  # type: ignore[no-any-return]
    if base in ("nonzero", "nonzero_numpy") or operator_name(node) == "aten.where.default":
        mask = arguments["self" if "self" in arguments else "condition"]
        return mask if mask.meta["val"].dtype is torch.bool else None
    indices = [i for i in arguments.get("indices", ()) if i is not None] if base == "index" else []
    index = indices[0] if len(indices) == 1 and isinstance(indices[0], fx.Node) else None
    return index if index is not None and index.meta["val"].dtype is torch.bool else None
