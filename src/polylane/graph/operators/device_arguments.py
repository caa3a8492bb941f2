"""Device arguments: code that was captured on one device makes its tensors on another one.

Code is captured where the user built the model, mostly on the CPU. It runs, is checked and is timed on the device that
trains it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx


def replace_devices(value: Any, device: torch.device) -> Any:
    """Replace every device that capture saw by another one, in nested arguments; the meta device stays."""
    if isinstance(value, torch.device):
        return value if value.type == "meta" else device
    if isinstance(value, (list, tuple)):
        return type(value)(replace_devices(item, device) for item in value)
    if isinstance(value, dict):
        return {key: replace_devices(item, device) for key, item in value.items()}
    return value


def copy_to_device(graph: fx.Graph, device: torch.device) -> fx.Graph:
    """Return a copy of captured code whose operators make their tensors on a device; node names stay."""
    copy, values = fx.Graph(), dict[fx.Node, fx.Node]()
    copy.output(copy.graph_copy(graph, values))
    for node in copy.nodes:
        node.args, node.kwargs = replace_devices(node.args, device), replace_devices(node.kwargs, device)
    return copy
