"""Error feedback: the residual that compression left out of a gradient is added to the next one.

Seide et al., INTERSPEECH 2014, for one bit; Stich, Cordonnier, Jaggi, NeurIPS 2018 (arXiv 1809.07599), "memory".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from polylane.errors import PolylaneError
from polylane.runtime.sync.compression.compressor import sum_dtype


class ErrorFeedback:
    """Residual of every parameter on this rank: what was not sent yet; zeros at first.

    What is still to be sent is the sum of residuals over ranks. So a training that is resumed with another number of
    replicas gives the summed residuals to one of them, and none to the others.
    """

    def __init__(self) -> None:
        self._residuals: dict[str, Tensor] = {}

    def add_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Add a gradient to the residual and return that as a vector; the caller subtracts in place what it sends."""
        dtype = sum_dtype(gradient.dtype)
        owed = self._residuals.get(name)
        if owed is None:
            owed = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        owed = restore_residual(name, owed, gradient.shape, gradient.device, dtype)
        # A view is returned, so that subtracting from it updates the stored residual.
        self._residuals[name] = owed
        return owed.add_(gradient.detach()).view(-1)

    def drop_residual(self, name: str) -> None:
        """Forget the residual of a parameter, so that it starts from zeros again."""
        self._residuals.pop(name, None)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the residuals by parameter, in their shapes; the tensors are the stored ones, not copies."""
        return dict(self._residuals)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Replace all residuals by copies of the given ones."""
        self._residuals = {name: tensor.clone(memory_format=torch.contiguous_format) for name, tensor in state.items()}


def restore_residual(
    name: str, tensor: Tensor, shape: Sequence[int], device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Return a parameter's stored state on a device and in a dtype; the tensor itself if it fits already.

    Args:
        name: canonical name of the parameter, for the error.
        tensor: stored residual, or PowerSGD's directions.
        shape: shape that this plan needs.
        device: device of the parameter's gradient.
        dtype: dtype of accumulation, see :func:`.compressor.sum_dtype`.

    Raises:
        PolylaneError: the tensor has another shape, as from a checkpoint of another plan.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise PolylaneError(
            f"what sync.compress remembers of {name} has the shape {tuple(tensor.shape)} in the checkpoint and "
            f"{tuple(shape)} by this plan: resume with the plan and the rank it was saved with, or without that state"
        )
    return tensor.to(device, dtype)
