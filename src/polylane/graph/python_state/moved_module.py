"""Moved module: the tensors of the user's module are on another device for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def data_replaced(replaced: Sequence[tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Context manager: tensors have other data inside, and no gradients; afterwards their own data and gradients again.

    The tensor objects stay the same. What is written to them inside is lost.

    Args:
        replaced: pairs of a tensor of the user's and the data that it has inside.
    """
    originals = [(tensor, tensor.data, tensor.grad) for tensor, _ in replaced]
    for tensor, data in replaced:
        tensor.grad = None
        tensor.data = data
    try:
        yield
    finally:
        for tensor, data, grad in originals:
            tensor.grad = None
            tensor.data = data
            tensor.grad = grad


@contextmanager
def moved_module(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Context manager: all parameters and buffers of a module are on a device inside; see :func:`data_replaced`."""
    tensors = [t for t in (*module.parameters(), *module.buffers()) if t.device != device]
    with data_replaced([(tensor, tensor.data.to(device)) for tensor in tensors]):
        yield


@contextmanager
def joined_modules(modules: Sequence[nn.Module], device: torch.device) -> Iterator[torch.device]:
    """Context manager: all parameters and buffers of modules are on one device inside, which it yields.

    Args:
        modules: the model and its losses, of which a worker may have a part on its device.
        device: stays theirs if all of them are there, or have no data; else they are on the host, where the model fits.
    """
    tensors = [tensor for module in modules for tensor in (*module.parameters(), *module.buffers())]
    if all(tensor.device == device for tensor in tensors) or any(tensor.is_meta for tensor in tensors):
        yield device
        return
    device = torch.device("cpu")
    with data_replaced([(tensor, tensor.data.to(device)) for tensor in tensors if tensor.device != device]):
        yield device
