"""Batches as flat lists of leaves (as torch.utils._pytree), and their division by samples."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.graph.sample_lists import SampleList, group_samples, ungroup_samples

Rebuild = Callable[[Sequence[Any]], Any]


def flatten(batch: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a batch in order, and a function that puts leaves back into its structure.

    Mappings (Hugging Face's BatchEncoding too), sequences, named tuples, dataclasses and records (torch_geometric's
    Data, see :func:`_is_record`) are nested, and lists with an entry for each sample are one leaf
    (:mod:`polylane.graph.sample_lists`); all else is a leaf.
    """
    leaves, rebuild = flatten_nested(group_samples(batch))
    if not any(isinstance(leaf, SampleList) for leaf in leaves):
        return leaves, rebuild
    return leaves, lambda new_leaves: rebuild([ungroup_samples(leaf) for leaf in new_leaves])


def flatten_nested(value: Any) -> tuple[list[Any], Rebuild]:
    """Return the leaves of a value that is no batch, such as a function's arguments; see :func:`flatten`."""
    children = find_children(value)
    if children is None:
        return [value], lambda leaves: leaves[0]
    values, build = children
    flats = [flatten_nested(inner) for inner in values]
    sizes = [len(leaves) for leaves, _ in flats]

    def rebuild(leaves: Sequence[Any]) -> Any:
        parts, start = [], 0
        for size, (_, inner) in zip(sizes, flats, strict=True):
            parts.append(inner(leaves[start : start + size]))
            start += size
        return build(parts)

    return [leaf for leaves, _ in flats for leaf in leaves], rebuild


def batch_structure(batch: Any) -> Any:
    """Return how a batch is nested, and under which names; equal if a loss cannot tell two structures apart."""
    return _nesting(group_samples(batch))


def _nesting(batch: Any) -> Any:
    children = find_children(batch)
    if children is None:
        return None
    names: Any = tuple(batch) if isinstance(batch, Mapping) else len(children[0])
    if _is_record(batch):
        hidden = [(name, repr(value)) for _, name, value in _hidden_fields(batch) if _is_plain(value)]
        names = tuple(batch.to_dict()), tuple(sorted(hidden))
    return type(batch).__qualname__, names, tuple(_nesting(value) for value in children[0])


def leaf_names(structure: Any) -> list[str]:
    """Return how a user writes each leaf of a batch nested like this: batch["labels"], batch[0]."""

    def name(inner: Any, path: str) -> list[str]:
        if inner is None:
            return [path]
        _, names, children = inner
        keys = names if isinstance(names, tuple) else range(names)
        return [leaf for key, child in zip(keys, children, strict=True) for leaf in name(child, f"{path}[{key!r}]")]

    return name(structure, "batch")


def find_children(value: Any) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    if isinstance(value, Mapping):
        keys, kind = list(value), cast(Any, type(value))
        return list(value.values()), lambda parts: kind(dict(zip(keys, parts, strict=True)))
    if isinstance(value, tuple):
        named = type(value) if hasattr(value, "_fields") else None
        return list(value), lambda parts: named(*parts) if named else tuple(parts)
    if isinstance(value, list):
        return list(value), list
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return [getattr(value, name) for name in names], lambda parts: _with_fields(value, names, parts)
    if _is_record(value):
        names = list(value.to_dict())
        return [value[name] for name in names], lambda parts: _with_items(value, names, parts)
    return None


def _with_fields(original: Any, names: list[str], parts: list[Any]) -> Any:
    clone = copy.copy(original)
    for name, part in zip(names, parts, strict=True):
        # A frozen dataclass refuses setattr.
        object.__setattr__(clone, name, part)
    return clone


def _is_record(value: Any) -> bool:
    """Return whether an object has named items and is no mapping: ``record[name]`` and ``to_dict()``."""
    methods = ("to_dict", "__getitem__", "__setitem__")
    return (
        not isinstance(value, (Mapping, type))
        and hasattr(value, "__dict__")
        and all(callable(getattr(value, name, None)) for name in methods)
    )


def _hidden_fields(record: Any) -> list[tuple[Any, str, Any]]:
    """Return what a record has besides its items, such as the number of graphs in a batch, each with its owner."""
    owners = [record, *(inner for inner in vars(record).values() if hasattr(inner, "__dict__"))]
    return [
        (owner, name, value) for owner in owners if not isinstance(owner, type) for name, value in vars(owner).items()
    ]


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _with_items(original: Any, names: list[str], parts: list[Any]) -> Any:
    clone, items = copy.copy(original), set(names)
    # Hidden tensors would stay those of the example: a loss must not find them.
    for owner, name, value in _hidden_fields(clone):
        if not (isinstance(value, Mapping) and set(value) == items) and _holds_tensors(value):
            del vars(owner)[name]
    for name, part in zip(names, parts, strict=True):
        clone[name] = part
    return clone


def _holds_tensors(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return isinstance(value, Tensor) or any(map(_holds_tensors, inner))


def sample_count(leaves: Sequence[Any]) -> int:
    """Return the number of samples: the length of the first dimension of the first tensor that has one.

    Raises:
        PolylaneError: no leaf is a tensor with a dimension.
    """
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise PolylaneError(
        "the batch holds no tensor with a batch dimension: give samples along dimension 0 of its tensors"
    )


def is_sampled(leaf: Any, samples: int) -> bool:
    """Return whether a leaf has one row per sample (and is divided with them), or belongs to the batch as a whole."""
    return isinstance(leaf, Tensor) and leaf.dim() > 0 and leaf.shape[0] == samples


def sampled_leaves(leaves: Sequence[Any]) -> tuple[bool, ...]:
    """Return for every leaf whether it is divided with the samples."""
    samples = sample_count(leaves)
    return tuple(is_sampled(leaf, samples) for leaf in leaves)


def batch_signature(
    leaves: Sequence[Any], sampled: Sequence[bool] | None = None, carried: Collection[int] = ()
) -> tuple[Any, ...]:
    """Return what a captured graph depends on: all of the leaves but the number of samples and the tensors' data.

    Args:
        leaves: flat leaves of a batch, see :func:`flatten`.
        sampled: for each leaf whether it is divided, where that is known better than by its length.
        carried: positions of leaves whose values the loss does not read, so that only their types count.
    """
    return tuple(
        (str(leaf.dtype), ("samples", *leaf.shape[1:]) if split else tuple(leaf.shape))
        if isinstance(leaf, Tensor)
        else ("carried", type(leaf).__qualname__)
        if i in carried
        else ("constant", *_describe_constant(leaf))
        for i, (leaf, split) in enumerate(zip(leaves, sampled or sampled_leaves(leaves), strict=True))
    )


def _describe_constant(leaf: Any) -> tuple[Any, ...]:
    """Return what tells two constants apart: arrays by all their elements, of which ``repr`` shows some."""
    if hasattr(leaf, "tobytes") and hasattr(leaf, "shape"):
        return type(leaf).__qualname__, str(leaf.dtype), tuple(leaf.shape), leaf.tobytes()
    return (repr(leaf),)


class CarriedLeaves:
    """Leaves of batches that a loss carries along without reading them (names of files, ids): no part of a form.

    Which these are was found for each graph when it was captured
    (:mod:`polylane.graph.capture.carried_leaves`). Of several graphs for batches that are nested alike, with
    leaves of the same types, a leaf is carried that none of them reads.
    """

    def __init__(self) -> None:
        self._carried: dict[Hashable, frozenset[int]] = {}

    def sign(
        self, objective: Hashable, structure: Any, leaves: Sequence[Any], sampled: Sequence[bool] | None = None
    ) -> tuple[Any, ...]:
        """Return the signature of a batch, without the values of leaves that are known to be carried.

        Args:
            objective: what is captured (the objective and the mode).
            structure: how the batch is nested.
            leaves: flat leaves of the batch.
            sampled: for each leaf whether it is divided with the samples.
        """
        carried = self._carried.get((objective, structure, _kinds(leaves)), ()) if self._carried else ()
        return batch_signature(leaves, sampled, carried)

    def record(self, objective: Hashable, structure: Any, leaves: Sequence[Any], carried: Collection[int]) -> None:
        """Record which leaves of such a batch a graph that was captured from it carries along."""
        form = objective, structure, _kinds(leaves)
        if not all(isinstance(leaf, Tensor) for leaf in leaves):
            self._carried[form] = self._carried.get(form, frozenset(carried)) & frozenset(carried)


def _kinds(leaves: Sequence[Any]) -> tuple[Any, ...]:
    return tuple((leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else type(leaf) for leaf in leaves)


def split_bounds(total: int, parts: int | Sequence[int]) -> list[tuple[int, int]]:
    """Divide ``total`` samples into contiguous ranges, some of them empty when there are fewer samples than ranges.

    Args:
        total: number of samples to divide.
        parts: number of ranges, whose lengths differ by at most one, longer ones first; or what each of them has in
            proportion to the others, rounded.
    """
    if not isinstance(parts, int):
        sums = [0, *itertools.accumulate(parts)]
        return list(itertools.pairwise((2 * total * n + sums[-1]) // (2 * sums[-1]) for n in sums))
    size, extra = divmod(total, parts)
    ends = [part * size + min(part, extra) for part in range(parts + 1)]
    return list(itertools.pairwise(ends))


def count_parts(total: int, limit: int, fewest: int = 1) -> int:
    """Return the number of parts for ``total`` samples: ``limit``, or fewer where a part would have too few samples.

    Parts without any sample are skipped and need none: with ``fewest`` at 1 there are always ``limit`` parts.

    Args:
        total: number of samples to divide.
        limit: number of parts of a full batch.
        fewest: samples that a part needs; if ``total`` is less than that, there is one part.
    """
    return limit if fewest == 1 or total // limit >= fewest else max(1, total // fewest)


def take_samples(leaves: Sequence[Any], start: int, stop: int, sampled: Sequence[bool] | None = None) -> list[Any]:
    """Return the samples ``start:stop`` of every divided leaf; the other leaves whole."""
    split = sampled or sampled_leaves(leaves)
    return [leaf[start:stop] if is_split else leaf for leaf, is_split in zip(leaves, split, strict=True)]


def take_first_samples(leaves: Sequence[Any], count: int, sampled: Sequence[bool] | None = None) -> list[Any]:
    """Return about ``count`` first samples: more if a leaf that is not divided has just that length."""
    split = sampled or sampled_leaves(leaves)
    lengths = {
        len(leaf)
        for leaf, is_split in zip(leaves, split, strict=True)
        if isinstance(leaf, Tensor) and leaf.dim() and not is_split
    }
    # The smaller batch must not make an undivided leaf look like one row per sample.
    while count in lengths:
        count += 1
    return take_samples(leaves, 0, count, split)


def to_device(leaves: Sequence[Any], device: torch.device) -> list[Any]:
    """Return the leaves with tensors moved to ``device``; an accelerator gets them in the order of its stream."""
    return [_move(leaf, device) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cpu":  # the host would read what has not arrived
        return tensor.to(device)
    # From pageable memory the host waits for the copy, and so for all that the stream was given before it.
    if tensor.device.type == "cpu" and tensor.layout is torch.strided and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def cast_leaves(leaves: Sequence[Any], dtype: torch.dtype) -> list[Any]:
    """Return the leaves with floating-point tensors cast to ``dtype``, complex ones to its complex counterpart."""
    return [cast_tensor(leaf, dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def cast_tensor(leaf: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a floating-point tensor cast to ``dtype``, a complex one to its complex counterpart, others unchanged."""
    if isinstance(leaf, SampleList):
        return leaf.cast(lambda tensor: cast_tensor(tensor, dtype))
    if leaf.is_complex():
        return leaf.to(dtype.to_complex())
    return leaf.to(dtype) if leaf.is_floating_point() else leaf


def clone_leaves(leaves: Sequence[Any]) -> list[Any]:
    """Return a copy of every tensor leaf: a model may write into its batch, and a dry run must leave no trace."""
    return [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
