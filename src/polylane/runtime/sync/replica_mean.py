"""Weight averaging: weighted means of tensors over replicas, and restoring a worker's own values afterwards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.sync.flat_packing import FlatPacking, PackedTensor
from polylane.runtime.transport.protocol import Transport


def averaged_buffers(local_model: LocalModel) -> dict[str, Tensor]:
    """Return this worker's buffers that have a mean, by name; integer ones (a count of batches, say) have none."""
    return {
        name: tensor
        for name, tensor in local_model.local_tensors().items()
        if not isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
    }


def average_over_replicas(
    tensors: Mapping[str, Tensor], sample_counts: Sequence[int], members: Sequence[int], transport: Transport
) -> dict[str, Tensor]:
    """Return the weighted mean of every tensor over the replicas of a stage, with one all-reduce for each dtype.

    Args:
        tensors: floating-point tensors on one device, by name; the same names at all members.
        sample_counts: the number of samples that each member weighs by in the mean.
        members: ranks of the replicas that hold the same shards of the model.
        transport: connects the workers; ``members`` is one of its groups.
    """
    packing = FlatPacking(PackedTensor(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items())
    share = sample_counts[members.index(transport.rank)] / sum(sample_counts)
    # Rows are copies, so scaling them in place leaves the tensors as they are; all sums are pending at once.
    sums = [transport.all_reduce(row.mul_(share), members) for row in packing.pack(tensors)]
    return packing.unpack([transfer.wait() for transfer in sums])


def copy_values(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Overwrite the tensors that have a value of the same name by it, in place."""
    with torch.no_grad():
        for name, value in values.items():
            tensors[name].copy_(value)


@contextmanager
def restore_values(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Context manager: restore the values of tensors at its end.

    Values are copied, tensors are not exchanged: the compiled code of a stage is bound to the tensor objects.

    Args:
        tensors: parameters and buffers of this worker, each of them once.
    """
    copies = [(tensor, tensor.detach().clone()) for tensor in tensors]
    try:
        yield
    finally:
        with torch.no_grad():
            for tensor, value in copies:
                tensor.copy_(value)
