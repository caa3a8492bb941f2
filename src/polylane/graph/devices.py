"""Devices: moves a module's tensors to another device for a while, and the device arguments of captured code with them.

Code is captured where the user built the model, mostly on the CPU. It runs, is checked and is timed on the device that
trains it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn


def replace_devices(value: Any, device: torch.device) -> Any:
    """Replace every device that capture saw by another one, in nested arguments; the meta device stays."""
    if isinstance(value, torch.device):
        return value if value.type == "meta" else device
    if isinstance(value, (list, tuple)):
        return type(value)(replace_devices(each, device) for each in value)
    if isinstance(value, dict):
        return {key: replace_devices(each, device) for key, each in value.items()}
    return value


def copy_to_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Return a copy of captured code whose operators make their tensors on a device; node names stay."""
    made, values = fx.Graph(), dict[fx.Node, fx.Node]()
    made.output(made.graph_copy(graph, values))
    for node in made.nodes:
        node.args, node.kwargs = replace_devices(node.args, device), replace_devices(node.kwargs, device)
    return made


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
