"""Error feedback: the residual that compression left out of a gradient is added to the next one.

Seide et al., INTERSPEECH 2014, for one bit; Stich, Cordonnier, Jaggi, NeurIPS 2018 (arXiv 1809.07599), "memory".
"""

from __future__ import annotations

import torch
from torch import Tensor

from polylane.runtime.sync.compression.compressor import sum_dtype


class ErrorFeedback:
    """What every parameter's gradients left unsent on this rank; all ranks' residuals together are still to be sent.

    Attributes:
        residuals: by canonical name, what was not sent yet, in the parameter's shape; a missing one is zero.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}

    def add_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Add a gradient to the residual and return that as a vector; the caller subtracts in place what it sends."""
        if name not in self.residuals:
            dtype = sum_dtype(gradient.dtype)
            self.residuals[name] = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        # A view is returned, so that subtracting from it updates the stored residual.
        return self.residuals[name].add_(gradient.detach()).view(-1)
