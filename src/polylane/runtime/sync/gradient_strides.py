"""Gradient strides: gives a reduced gradient the strides of its parameter, as fused optimizers assume."""

from __future__ import annotations

import torch
from torch import Tensor


def match_strides(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Return the gradient with the strides of its parameter; the gradient itself if it has them already.

    Autograd does the same, and torch's fused optimizers walk over the memory of both in parallel: a contiguous gradient
    of a channels-last weight would be added to the wrong elements, without an error (torch 2.13, CPU).
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
