"""LAMB (layer-wise adaptive moments): Adam with every layer's step scaled to its weights, for very large batches.

You et al., ICLR 2020, arXiv 1904.00962.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.adam import adam
from torch.optim.optimizer import ParamsT

from polylane.errors import PolylaneError
from polylane.optim.trust import GroupUpdate, TrustRatioOptimizer, compute_trust_ratio


class LAMB(TrustRatioOptimizer):
    """Layer-wise adaptive moments (You et al., ICLR 2020, arXiv 1904.00962, section 3, algorithm 2).

    For a parameter w with gradient g, whatever its shape, at its step t = 1, 2, ...:

        m = β1 · m + (1 - β1) · g               v = β2 · v + (1 - β2) · g²
        r = m / (1 - β1^t) / (√(v / (1 - β2^t)) + eps) + weight_decay · w
        w = w - lr · φ(‖w‖) / ‖r‖ · r           the ratio is 1 where φ(‖w‖) or ‖r‖ is zero

    where φ(z) = min(max(z, low), high) of ``bounds``, by default φ(z) = z.

    Args:
        params: whole parameters, (name, parameter) pairs, or groups of them, with options of their own.
        lr: η, the learning rate, a number or a scalar tensor.
        betas: (β1, β2), the decay rates of the moments, each in [0, 1).
        eps: added to the root of the second moment.
        weight_decay: λ, decoupled as in AdamW, inside of the norm.
        bounds: (low, high), the limits of φ.
        adapt: False for groups that take plain steps, as AdamW does; see ``polylane.optim.split_decay_groups``.

    A step needs temporary memory for as many elements as the worker holds, because no update is applied before all
    norms are known.

    Raises:
        PolylaneError: an option is out of its range.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> model = torch.nn.Linear(8, 3)
        >>> optimizer = optim.LAMB(optim.split_decay_groups(model.named_parameters()), lr=0.01, weight_decay=0.01)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        *,
        bounds: tuple[float, float] = (0.0, math.inf),
        adapt: bool = True,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, bounds=bounds, adapt=adapt)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        betas, bounds = group["betas"], group["bounds"]
        if not _is_pair(betas) or not all(0 <= beta < 1 for beta in betas):
            raise PolylaneError(f"LAMB: betas={betas!r} must be two numbers in [0, 1)")
        if not _is_pair(bounds) or not 0 <= bounds[0] <= bounds[1]:
            raise PolylaneError(f"LAMB: bounds={bounds!r} must be two numbers, 0 <= low <= high")

    def compute_directions(self, group: Mapping[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        states = [self._get_state(p) for p in parameters]
        gradients = _view_as_real([p.grad for p in parameters if p.grad is not None])
        first_moments = _view_as_real([state["exp_avg"] for state in states])
        second = _view_as_real([state["exp_avg_sq"] for state in states])
        # Adam's own kernel subtracts lr · m̂ / (√v̂ + ε) from its parameters. Given the decay term as parameters and
        # lr = -1 it computes r: decay plus direction. The moments are updated in place.
        directions = list(torch._foreach_mul(_view_as_real(parameters), group["weight_decay"]))
        fused = _can_fuse(directions, gradients, first_moments, second)
        beta1, beta2 = group["betas"]
        adam(
            directions,
            gradients,
            first_moments,
            second,
            [],
            [state["step"] for state in states],
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=-1.0,
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )
        return directions

    def ratios(self, group: Mapping[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        return compute_trust_ratio(weights.clamp(*group["bounds"]), directions)

    def apply_update(self, update: GroupUpdate, rates: list[Tensor]) -> None:
        torch._foreach_addcmul_(_view_as_real(update.parameters), update.directions, rates, value=-1)

    def _get_state(self, parameter: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)  # on the CPU: it is read in every step
            state["exp_avg"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        return state


def _view_as_real(tensors: list[Tensor]) -> list[Tensor]:
    """View complex tensors as pairs of real numbers; the moments and norms are those of the pairs."""
    return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]


def _can_fuse(*lists: list[Tensor]) -> bool:
    """Return whether Adam's fused kernel can be used for these lists of tensors, parameter by parameter.

    On a CPU it iterates over memory, and is silently wrong where tensors have other strides than their gradients; on
    other devices it needs the step counts on the device.
    """
    matches = (len({tensor.stride() for tensor in tensors}) == 1 for tensors in zip(*lists, strict=True))
    return all(t.device.type == "cpu" for t in lists[0]) and all(matches)


def _is_pair(value: Any) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(v, (int, float)) for v in value)
