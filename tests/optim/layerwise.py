"""LARS and LAMB for one tensor, written out as the papers have them, and parameters to try them on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def reference_lars(
    weight: Tensor,
    gradients: Sequence[Tensor],
    rates: Sequence[float],
    *,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    trust: float = 0.001,
    eps: float = 0.0,
    nesterov: bool = False,
    adapt: bool = True,
) -> Tensor:
    """Algorithm 1 of You, Gitman and Ginsburg (2017), with a rate for each step."""
    w, v = weight.clone(), torch.zeros_like(weight)
    for g, lr in zip(gradients, rates, strict=True):
        norm_w, norm_g = float((w * w).sum()) ** 0.5, float((g * g).sum()) ** 0.5
        local = 1.0
        if adapt and norm_w > 0 and norm_g > 0:
            local = trust * norm_w / (norm_g + weight_decay * norm_w + eps)
        step = lr * local * (g + weight_decay * w)
        v = momentum * v + step
        w = w - (momentum * v + step if nesterov else v)
    return w


def reference_lamb(
    weight: Tensor,
    gradients: Sequence[Tensor],
    rates: Sequence[float],
    *,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.0,
    bounds: tuple[float, float] = (0.0, float("inf")),
    adapt: bool = True,
) -> Tensor:
    """Algorithm 2 of You et al. (2020), with a rate for each step."""
    w, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for t, (g, lr) in enumerate(zip(gradients, rates, strict=True), start=1):
        m = betas[0] * m + (1 - betas[0]) * g
        v = betas[1] * v + (1 - betas[1]) * g * g
        r = m / (1 - betas[0] ** t) / ((v / (1 - betas[1] ** t)).sqrt() + eps) + weight_decay * w
        phi = min(max(float((w * w).sum()) ** 0.5, bounds[0]), bounds[1])
        norm_r = float((r * r).sum()) ** 0.5
        w = w - lr * (phi / norm_r if adapt and phi > 0 and norm_r > 0 else 1.0) * r
    return w


REFERENCES = {"LARS": reference_lars, "LAMB": reference_lamb}


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def gradients_of(shape: Sequence[int], steps: int, seed: int = 100) -> list[Tensor]:
    return [random(*shape, seed=seed + step) for step in range(steps)]


def stepped(
    optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], gradients: Sequence[Sequence[Any]]
) -> None:
    """Take a step for each list of the parameters' gradients."""
    for each in gradients:
        for parameter, gradient in zip(parameters, each, strict=True):
            parameter.grad = gradient
        optimizer.step()
