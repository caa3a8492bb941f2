"""Batch writes: what a script writes in place into what loaders have returned, where views share the memory.

What was recorded of the values before is computed before they change; what follows is computed from them at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.argument_trees import flatten_tree
from polylane.script.deferred import DeferredTensor
from polylane.script.recorded_calls import Result


def release_values(
    target: DeferredTensor, held_results: Sequence[Result], value_of: Callable[[Result], Tensor]
) -> bool:
    """Compute what was recorded of the values of a loader's batch, or of what follows from it: they may change now.

    Args:
        target: the tensor that the script may write into.
        held_results: the results that the script holds.
        value_of: returns the value of a result.

    Returns:
        whether that is all that was recorded of them, and they are a loader's; not where a model was called.
    """
    if not target.call.readers:
        return False
    memory = Result(target.call, target.position).memory
    other_results = [result for result in _list_unknown(held_results) if result.memory.isdisjoint(memory)]
    followers = [
        r for r in other_results if not all(argument.memory.isdisjoint(memory) for argument in r.call.arguments)
    ]
    for result in followers:
        if result.call.readers:
            value_of(result)
    return None not in memory and all(result.call.readers for result in followers)


def _list_unknown(held_results: Sequence[Result]) -> list[Result]:
    """Return the results that have no value, of what the script holds and of what this follows from."""
    unknown_results, stack = dict[tuple[int, int], Result](), [*held_results]
    while stack:
        result = stack.pop()
        key = result.call.number, result.position
        if key not in unknown_results and result.position not in result.call.values.keys() | result.call.runs.keys():
            unknown_results[key] = result
            stack += result.call.arguments
    return [unknown_results[key] for key in sorted(unknown_results)]


def share_memory(tensor: Any, result: Any) -> bool:
    """Return whether the script could write into a tensor by writing into what a function of it has returned."""
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
        return False
    tensors = [leaf for leaf in flatten_tree(result)[0] if isinstance(leaf, Tensor)]
    if not tensors:  # an array, or what hands it to another library
        return not isinstance(result, (bool, int, float, str, list, type(None)))
    memory = tensor.untyped_storage().data_ptr()
    return any(leaf.layout is torch.strided and leaf.untyped_storage().data_ptr() == memory for leaf in tensors)
