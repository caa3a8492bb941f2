"""Boxes of tensors, element by element, for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from polylane.program.boxes import IndexBox


def read(tensor: Tensor, box: IndexBox) -> Tensor:
    """A box of a tensor, element by element."""
    index = [
        torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.int64) for ranges in box
    ]
    return tensor[torch.meshgrid(*index, indexing="ij")] if index else tensor.clone()


def write(tensor: Tensor, box: IndexBox, values: Tensor) -> None:
    index = [
        torch.tensor([i for start, stop in ranges for i in range(start, stop)], dtype=torch.int64) for ranges in box
    ]
    if index:
        tensor[torch.meshgrid(*index, indexing="ij")] = values
    else:
        tensor.copy_(values)
