"""Joint gradients: all inputs get their gradients at once, so that all ranks start collectives in one order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polylane.graph.nodes.facts import UnderSetting


class JointGradients(UnderSetting):
    """An operator all of whose inputs get their gradients at the same time.

    torch chooses an attention kernel by shapes, and some kernels produce gradients one after another. All ranks must
    start the gradients' collectives in the same order, including ranks whose part is empty.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # One autograd node in front of all inputs: its backward runs when the last of their gradients is there.
        flowing = [i for i, arg in enumerate(args) if isinstance(arg, Tensor) and arg.requires_grad]
        joined = list(args)
        if len(flowing) > 1:
            for i, out in zip(flowing, _JointGradientsFunction.apply(*(args[i] for i in flowing)), strict=True):  # type: ignore[no-untyped-call]
                joined[i] = out
        return self.target(*joined, **kwargs)


class _JointGradientsFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads


def joint_gradients(target: Any) -> Any:
    """Return ``target`` with all its inputs getting their gradients at the same time."""
    # Idempotent: look through all settings for a wrapper of this kind.
    function = target
    while isinstance(function, UnderSetting):
        if isinstance(function, JointGradients):
            return target
        function = function.target
    return wrap_like(target, JointGradients(function))


def wrap_like(target: Any, function: Callable[..., Any]) -> Any:
    """Return ``function`` under the same settings (autocast, grad mode) as ``target``."""
    if not isinstance(target, UnderSetting):
        return function
    copied = copy.copy(target)
    copied.target = wrap_like(target.target, function)
    return copied
