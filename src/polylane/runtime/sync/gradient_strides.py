"""Memory layout of gradients: that of their parameters, which optimizers that walk over both at once count on."""

from __future__ import annotations

import torch
from torch import Tensor


def match_strides(gradient: Tensor, parameter: Tensor) -> Tensor:
    """The gradient with the strides of its parameter; itself where it has them already.

    Autograd gives gradients so, and torch's fused optimizers go through the memory of both side by side: a contiguous
    gradient of a channels-last weight would be added to the wrong elements, without a word (torch 2.13, CPU).
    """
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter, requires_grad=False).copy_(gradient)
