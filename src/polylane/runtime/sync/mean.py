"""Means of tensors over replicas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polylane.runtime.transport.protocol import Transport


def means(
    tensors: Mapping[str, Tensor], share: float, members: Sequence[int], transport: Transport
) -> dict[str, Tensor]:
    """The weighted mean of every tensor over the replicas of a stage; one sum for each dtype.

    Args:
        tensors: of floating-point numbers, by name; the same names at all members.
        share: this worker's weight; those of all members add up to 1.
        members: ranks that hold the same parts.
        transport: between them.
    """
    found, pending = dict[str, Tensor](), []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors.values()):
        names = [name for name, tensor in tensors.items() if tensor.dtype == dtype]
        flat = torch.cat([tensors[name].detach().reshape(-1) for name in names]).mul_(share)
        pending.append((names, transport.all_reduce(flat, members)))
    for names, transfer in pending:
        pieces = transfer.wait().split([tensors[name].numel() for name in names])
        found |= {name: piece.view(tensors[name].shape) for name, piece in zip(names, pieces, strict=True)}
    return found
