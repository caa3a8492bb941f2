"""Moved module: the tensors of the user's module are on another device for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def moved_module(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: all parameters and buffers of a module are on a device inside, without their gradients.

    The tensor objects stay the same, and have their own memory again afterwards. What is written to them inside is
    lost.
    """
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device != device]
    originals = [(tensor, tensor.data, tensor.grad) for tensor in tensors]
    try:
        for tensor in tensors:
            tensor.grad = None
            tensor.data = tensor.data.to(device)
        yield
    finally:
        for tensor, data, grad in originals:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad
