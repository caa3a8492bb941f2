"""Comparison of two checkpoints: bit for bit, or by relative errors where two plans have saved them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polylane.checkpoint.manifest import Manifest, read_manifest
from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.graph.rounding_noise import max_difference, max_magnitude
from polylane.runtime.plain_data.serialization import from_json
from polylane.verify.rounding_floor import divide_by_scale

_MODEL, _OPTIMIZER = "model/", "optimizer/"


@dataclass(frozen=True)
class CheckpointDifference:
    """How two checkpoints differ.

    Attributes:
        first: name of the first tensor or plain value that differs; "" for none.
        worst: largest relative error of any tensor.
        tensors: number of tensors that were compared.
    """

    first: str
    worst: float
    tensors: int


def compare_bits(expected: Path, actual: Path) -> CheckpointDifference:
    """Compare every tensor and every plain value of two checkpoints of one plan, bit for bit."""
    expected_store, actual_store = _open(expected), _open(actual)
    first_name, worst = "", 0.0
    # A tensor that only one of them has counts as an infinite error, and is named like any other.
    names = sorted({*expected_store.manifest.tensors, *actual_store.manifest.tensors}, key=_order)
    for name in names:
        if name not in expected_store.manifest.tensors or name not in actual_store.manifest.tensors:
            first_name, worst = first_name or name, float("inf")
            continue
        a, b = expected_store.read_whole(name), actual_store.read_whole(name)
        if a.shape != b.shape or not _same_bits(a, b):
            first_name, worst = first_name or name, max(worst, _relative_error(a, b))
    return CheckpointDifference(
        first_name or _first_plain(expected_store.manifest, actual_store.manifest), worst, len(names)
    )


def compare_values(expected: Path, actual: Path) -> dict[str, float]:
    """Return relative errors of the weights, buffers and optimizer states that two plans have saved, by name.

    State that only one of the plans has, such as that of a random generator of one worker, is no part of this.
    """
    expected_store, actual_store = _open(expected), _open(actual)
    names = [name for name in expected_store.manifest.tensors if name.startswith((_MODEL, _OPTIMIZER))]
    names = sorted(
        (name for name in names if name.startswith(_MODEL) or name in actual_store.manifest.tensors), key=_order
    )
    return {name: _relative_error(expected_store.read_whole(name), actual_store.read_whole(name)) for name in names}


def _open(folder: Path) -> CheckpointReader:
    return CheckpointReader(folder, read_manifest(folder))


def _order(name: str) -> tuple[bool, bool, str]:
    """Weights come first, then the states of optimizers: what differs in these follows from the weights."""
    return not name.startswith(_MODEL), not name.startswith(_OPTIMIZER), name


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.dtype != b.dtype:
        return False
    # As bytes: equal NaN are equal then, and -0.0 is not 0.0.
    bits = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (a, b) if tensor.numel()]
    return not bits or torch.equal(*bits)


def _relative_error(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    # An empty tensor has no largest element to divide by.
    if not a.numel():
        return 0.0
    a, b = a.to(torch.float64), b.to(torch.float64)
    return divide_by_scale(max_difference(a, b), max_magnitude(a))


def _first_plain(expected: Manifest, actual: Manifest) -> str:
    a, b = from_json(expected.plain), from_json(actual.plain)
    return next((name for name in sorted({*a, *b}) if _text(a.get(name)) != _text(b.get(name))), "")


def _text(value: Any) -> str:
    return repr(value)  # NaN equals NaN here, and -0.0 is not 0.0
