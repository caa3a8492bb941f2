"""Numbers of Python's that change from step to step: a weight that is annealed, a count that a loss is divided by.

A number is a constant of its tape, and each further value would be a further tape, captured for seconds. From the
second value on it is an input instead, a tensor without dimensions, if the function computes the same with one: the
same shape and dtype by torch's own rules of promotion, and the same bits on numbers that are drawn to try it.
A view is recorded without the size of the batch, which is another one in a worker's part and in a short last batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from polylane.graph.python_state.random_generators import generators_kept
from polylane.script.deferred import DeferredTensor, Spec, plain_tensors, unflatten_arguments
from polylane.script.model_results import UnknownValues

FindResults = Callable[[Sequence[Any]], Sequence[Any]]

MOST_ELEMENTS = 2**24  # of the tensors on which a function is tried
MANY_VALUES = 4  # values of a constant, each with a capture of its own, after which the user is told


@dataclass
class _Site:
    """A call on a line of the script, whatever its numbers are.

    Attributes:
        numbers: the flat arguments of the first call that are numbers; None for others.
        dtypes: by position of a number that has changed, its dtype as an input; None: it stays a constant.
        values: values of numbers that stay constants, of all calls so far.
    """

    numbers: Sequence[Any]
    dtypes: dict[int, torch.dtype | None] = field(default_factory=dict)
    values: set[Any] = field(default_factory=set)


class NumbersBySite:
    """The numbers among the arguments of a loop's calls, by line."""

    def __init__(self) -> None:
        self._sites = dict[Any, _Site]()

    def as_inputs(
        self, func: Callable[..., Any], leaves: Sequence[Any], spec: Spec, form: Any, line: str, find: FindResults
    ) -> Sequence[Any]:
        """Return the arguments of a call with tensors in place of the numbers that change.

        Args:
            func: the function that is called.
            leaves: the flat arguments of the call.
            spec: how they are nested.
            form: what the metadata of its results depends on, whatever its numbers are.
            line: file and line of the script.
            find: returns the metadata of the results, from flat arguments.
        """
        if (site := self._sites.get((line, form))) is None:
            # Not the tensors: a run keeps what the script holds, and nobody holds these.
            site = self._sites[line, form] = _Site([leaf if is_number(leaf) else None for leaf in leaves])
        changed = [i for i, leaf in enumerate(leaves) if is_number(leaf) and not _equal(leaf, site.numbers[i])]
        for i in changed:
            if i not in site.dtypes:
                site.dtypes[i] = _find_dtype(func, leaves, site.numbers[i], i, spec, find)
            if site.dtypes[i] is None:
                self._count_constant(site, leaves[i], func, line)
        return [
            leaf if (dtype := site.dtypes.get(i)) is None else torch.tensor(leaf, dtype=dtype)
            for i, leaf in enumerate(leaves)
        ]

    def _count_constant(self, site: _Site, number: float, func: Callable[..., Any], line: str) -> None:
        if len(site.values) == MANY_VALUES or number in site.values:
            return
        site.values.add(number)
        if len(site.values) == MANY_VALUES:
            warnings.warn(
                f"{func.__name__} is called with another number from step to step ({line}), and for each the step is "
                "captured anew, which takes seconds: give it a tensor in the number's place, where it takes one, or "
                "change the number more rarely",
                stacklevel=6,
            )


def is_number(leaf: Any) -> bool:
    """Return whether an argument is a number of Python's."""
    return type(leaf) in (int, float)


def _equal(number: float, other_number: float) -> bool:
    return number == other_number or (number != number and other_number != other_number)


def _find_dtype(
    func: Callable[..., Any], leaves: Sequence[Any], old_number: float, at: int, spec: Spec, find: FindResults
) -> torch.dtype | None:
    """Return the dtype of a tensor with which a function computes what it does with a number; None: there is none."""
    number = leaves[at]
    metadata = _describe(find(leaves))
    dtypes: list[torch.dtype] = [
        torch.float64 if isinstance(number, float) else torch.int64,
        *(form[1] for form in metadata if form),
    ]
    for dtype in dict.fromkeys(dtypes):
        try:
            with_tensor = [*leaves[:at], torch.tensor(number, dtype=dtype), *leaves[at + 1 :]]
            if _describe(find(with_tensor)) == metadata and all(
                _same_bits(func, [*leaves[:at], value, *leaves[at + 1 :]], at, dtype, spec)
                for value in (old_number, number)
            ):
                return dtype
        except Exception:  # the function takes no tensor there: whatever it raises
            continue
    return None


def _describe(results: Sequence[Any]) -> list[Any]:
    return [(tuple(r.shape), r.dtype, r.device) if isinstance(r, Tensor) else None for r in results]


def _same_bits(func: Callable[..., Any], leaves: Sequence[Any], at: int, dtype: torch.dtype, spec: Spec) -> bool:
    """Return whether a function and its gradients have the same bits with a tensor as with a number, on drawn data."""
    if sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor)) > MOST_ELEMENTS:
        return False
    generator = torch.Generator().manual_seed(0)
    with plain_tensors():
        drawn = [_draw(leaf, generator) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    tensor = torch.tensor(leaves[at], dtype=dtype)
    with generators_kept(), torch.enable_grad():
        with_number = _run(func, [*drawn[:at], leaves[at], *drawn[at + 1 :]], spec)
        with UnknownValues([tensor]):  # torch takes a tensor for a size, say, and reads it: no tape has what it reads
            with_tensor = _run(func, [*drawn[:at], tensor, *drawn[at + 1 :]], spec)
    pairs = zip(with_number, with_tensor, strict=True)
    return all(a.dtype == b.dtype and torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in pairs)


def _draw(leaf: Tensor, generator: torch.Generator) -> Tensor:
    if not isinstance(leaf, DeferredTensor):
        return leaf.detach().cpu().clone()
    shape, dtype = leaf.metadata.shape, leaf.metadata.dtype
    if not dtype.is_floating_point:
        return torch.randint(0, 2, shape, generator=generator).to(dtype)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def _run(func: Callable[..., Any], leaves: Sequence[Any], spec: Spec) -> list[Tensor]:
    """Return the results of a function that are tensors, and the gradients of their sum."""
    args, kwargs = unflatten_arguments(leaves, spec)
    results = [result for result in tree_flatten(func(*args, **kwargs))[0] if isinstance(result, Tensor)]
    sources = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    sums = [result.double().pow(2).sum() for result in results if result.requires_grad]
    gradients = torch.autograd.grad(sum(sums[1:], sums[0]), sources, allow_unused=True) if sums and sources else ()
    return [*(result.detach() for result in results), *(g for g in gradients if g is not None)]


def view_by_sample(tensor: Tensor, *sizes: int) -> Tensor:
    """View a tensor as (its first dimension, *sizes)."""
    if not sizes or tensor.dim() == 1:
        return tensor.reshape(-1, *(1 if size == -1 else size for size in sizes))
    view: Tensor = tensor.flatten(1).unflatten(1, sizes)
    return view


def without_batch_size(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return a function and its arguments; of a view that keeps the first dimension, the same without its size.

    ``x.view(x.size(0), -1)`` names the size of the batch, and of a part of one this is another.
    """
    if func.__name__ not in ("view", "reshape") or kwargs or not isinstance(args[0], DeferredTensor):
        return func, args
    sizes = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args[1:]
    shape = args[0].metadata.shape
    if not sizes or not all(type(size) is int for size in sizes) or shape[:1] != tuple(sizes[:1]) or 0 in shape:
        return func, args
    return view_by_sample, (args[0], *sizes[1:])
