"""Weight averaging: means of tensors over replicas, and a worker's own values set aside meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from polylane.runtime.sync.flat_packing import FlatPacking, PackedTensor
from polylane.runtime.transport.protocol import Transport


def average_over_replicas(
    tensors: Mapping[str, Tensor], share: float, members: Sequence[int], transport: Transport
) -> dict[str, Tensor]:
    """The weighted mean of every tensor over the replicas of a stage; one sum for each dtype.

    Args:
        tensors: of floating-point numbers on one device, by name; the same names at all members.
        share: this worker's weight in the mean; those of all members add up to 1.
        members: ranks of the replicas that hold the same parts of the model.
        transport: between the workers, with a group of ``members``.
    """
    packing = FlatPacking(PackedTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    sums = [transport.all_reduce(row.mul_(share), members) for row in packing.pack(tensors)]
    return packing.unpack([each.wait() for each in sums])


@contextmanager
def restore_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: at its end the tensors have the values again that they had at its beginning.

    The values are copied, the tensors are not exchanged: the code of a stage is bound to the tensors themselves.

    Args:
        tensors: parameters and buffers of this worker, each of them once.
    """
    own = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in own:
                tensor.copy_(value)
