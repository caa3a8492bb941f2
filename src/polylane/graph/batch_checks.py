"""Batches that cannot be divided by samples: each is refused in a sentence that says what to give in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from polylane.errors import PolylaneError
from polylane.graph.batch import flatten, leaf_names
from polylane.graph.sample_lists import group_samples, is_sample_list

_LAYOUTS = {
    "sparse": "give it dense, or its indices and values as tensors of their own",
    "nested": "pad it, and pass the lengths with it",
}


def refuse_undividable(batch: Any) -> None:
    """Refuse a batch that holds what is no plain tensor with samples along dimension 0, and no constant.

    Raises:
        PolylaneError: it names the first such thing by its place in the batch, and what to do.
    """
    leaves, _ = flatten(batch)
    rows = {leaf.shape[0] for leaf in leaves if _is_plain(leaf) and leaf.dim()}
    first_leaf = next((leaf for leaf in leaves if _is_plain(leaf) and leaf.dim()), None)
    if first_leaf is not None and not first_leaf.shape[0]:
        raise PolylaneError(f"the batch has no samples: its first tensor has the shape {list(first_leaf.shape)}")
    if type(batch) in (list, tuple) and isinstance(batch[0], Mapping) and is_sample_list(batch) and len(rows) > 1:
        raise PolylaneError(
            "the batch is a list of dicts whose tensors have other numbers of rows, as if each were a sample: give a "
            "list of what is the input (the images) and a list of dicts with the rest (the targets)"
        )
    for path, value in _walk("batch", group_samples(batch)):
        if isinstance(value, PackedSequence):
            raise PolylaneError(
                f"{path} is a PackedSequence, in which samples are not along a dimension: give the padded tensor and "
                "the lengths, and pack inside of the model"
            )
        if isinstance(value, Tensor) and not _is_plain(value):
            kind = "nested" if value.is_nested else "sparse"
            raise PolylaneError(f"{path} is a {kind} tensor, which cannot be divided by samples: {_LAYOUTS[kind]}")
        if type(value).__name__ == "ndarray" and value.ndim:
            raise PolylaneError(f"{path} is a numpy array: give a tensor, torch.from_numpy(...)")
        if isinstance(value, list) and len(value) > 3 and len(value) in rows:
            _refuse_list(path, value)
        if _hides_tensors(value):
            raise PolylaneError(
                f"{path} is of your own class {type(value).__name__}, which is not inspected: use a dict, a tuple "
                "or a dataclass"
            )


def refuse_unequal_rows(leaves: Sequence[Any], sampled: Sequence[bool], structure: Any) -> None:
    """Refuse a batch whose tensors with samples differ in their number of rows, which only its example shows to be one.

    Args:
        leaves: flat leaves of a batch.
        sampled: for each leaf whether it has one row for each sample, as it had in the example batch.
        structure: how the batch is nested, see :func:`polylane.graph.batch.batch_structure`; None: not known.

    Raises:
        PolylaneError: it names the first two tensors that differ, with their shapes, and what to do.
    """
    rows = [leaf.shape[0] for leaf, is_split in zip(leaves, sampled, strict=True) if is_split]
    if rows.count(rows[0]) == len(rows):
        return
    names = [] if structure is None else leaf_names(structure)
    if len(names) != len(leaves):
        names = [f"leaf {i} of the batch" for i in range(len(leaves))]
    named = zip(names, leaves, sampled, strict=True)
    shapes = [(name, list(leaf.shape)) for name, leaf, is_split in named if is_split]
    (first, shape), (other, another) = shapes[0], next(pair for pair in shapes if pair[1][0] != rows[0])
    width = shape[1] if len(shape) > 1 else None
    if width is not None and all(len(sizes) > 1 and sizes[1] == width for _, sizes in shapes):
        remedy = f"here it looks like time, and dimension 1 ({width}) like the samples: transpose both"
    else:
        remedy = (
            f"give each as many rows as there are samples; if {other} belongs to the batch as a whole, take an example "
            f"batch with another number of samples than it has rows"
        )
    raise PolylaneError(
        f"{first} has the shape {shape} and {other} {another}, where they had one number of rows in the example batch: "
        f"dimension 0 must be the samples; {remedy}"
    )


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.layout is torch.strided and not leaf.is_nested


def _walk(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every value in a batch with its place, the outer ones first."""
    yield path, value
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk(f"{path}[{key!r}]", item)
    elif isinstance(value, (list, tuple)) and not isinstance(value, PackedSequence):
        for i, item in enumerate(value):
            yield from _walk(f"{path}[{i}]", item)
    elif hasattr(type(value), "__dataclass_fields__"):
        for name in type(value).__dataclass_fields__:
            yield from _walk(f"{path}.{name}", getattr(value, name))


def _refuse_list(path: str, value: list[Any]) -> None:
    """Refuse a list of as many things as there are samples: it would be taken for constants of the whole batch."""
    if all(type(item) in (int, float, bool) for item in value):
        raise PolylaneError(f"{path} is a list of numbers, one for each sample: give a tensor, torch.tensor(...)")
    tensors = [item for item in value if isinstance(item, Tensor)]
    if len(tensors) == len(value) and any(tensor.shape[:1] != (len(value),) for tensor in tensors):
        raise PolylaneError(
            f"{path} is a list of tensors, one for each sample: stack them, padded to one length where they differ, "
            "and pass the lengths with them"
        )


def _hides_tensors(value: Any) -> bool:
    is_known_type = isinstance(value, (Tensor, Mapping, list, tuple)) or hasattr(type(value), "__dataclass_fields__")
    if is_known_type or isinstance(value, type) or not hasattr(value, "__dict__"):
        return False
    return any(isinstance(attribute, Tensor) for attribute in vars(value).values())
