"""Operators whose inputs get their gradients at the same time, so that all ranks move them in the same order."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from polylane.graph.precision import UnderSetting


class JointGradients(UnderSetting):
    """An operator all of whose inputs get their gradients at the same time.

    torch chooses among several ways to compute attention, by shapes: the gradients of some come one after another. All
    ranks must move gradients in the same order, also those whose part is empty.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
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
    """``target``, all of whose inputs get their gradients at the same time."""
    own = target
    while isinstance(own, UnderSetting):
        if isinstance(own, JointGradients):
            return target
        own = own.target
    return wrap_like(target, JointGradients(own))


def wrap_like(target: Any, function: Callable[..., Any]) -> Any:
    """``function`` under the settings that ``target`` runs under."""
    if not isinstance(target, UnderSetting):
        return function
    copied = copy.copy(target)
    copied.target = wrap_like(target.target, function)
    return copied
