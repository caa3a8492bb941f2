"""Error feedback: what a rank did not send of its gradients is added to the next ones.

Seide et al., INTERSPEECH 2014, for one bit; Stich, Cordonnier, Jaggi, NeurIPS 2018 (arXiv 1809.07599), "memory".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.sync.compression.compressor import sum_dtype


class ErrorFeedback:
    """Of every parameter, what this rank owes to the sum; zeros at first.

    Only the total over the ranks that sum matters for what is still to come. So a training that goes on with another
    number of replicas gives one of them the sum of the memories, and the others none.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    def add_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """The memory with a gradient added, flat; what is sent of it is to be taken out of it in place."""
        dtype = sum_dtype(gradient.dtype)
        owed = self._residuals.get(name)
        if owed is None:
            owed = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        owed = restore_residual(name, owed, gradient.shape, gradient.device, dtype)
        self._residuals[name] = owed
        return owed.add_(gradient.detach()).view(-1)

    def drop_residual(self, name: str) -> None:
        """Nothing is owed of a parameter."""
        self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Tensor]:
        """By parameter, in its shape; the tensors are the memory's own."""
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Owe what is given, and nothing else."""
        self._residuals = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def restore_residual(
    name: str, tensor: Tensor, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """What is remembered of a parameter, where it is needed; the tensor itself where it is there.

    Raises:
        PolylaneError: it has another shape, as from a checkpoint of another plan.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise PolylaneError(
            f"what sync.compress remembers of {name} has the shape {tuple(tensor.shape)} in the checkpoint and "
            f"{tuple(shape)} by this plan: resume with the plan and the rank it was saved with, or without that state"
        )
    return tensor.to(device, dtype)
