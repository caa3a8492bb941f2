"""LARS: momentum SGD with a learning rate for every layer, for batches of thousands of images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from polylane.errors import PolylaneError
from polylane.optim.trust import GroupUpdate, TrustRatioOptimizer, check_option, compute_trust_ratio


class LARS(TrustRatioOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, arXiv 1708.03888, section 4, algorithm 1).

    For a parameter w with gradient g, whatever its shape::

        λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps)        1 where ‖w‖ or ‖g‖ is zero
        v = momentum · v + lr · λ · (g + weight_decay · w)
        w = w - v                                                 with nesterov: w - (momentum · v + the last summand)

    As in the paper the learning rate is inside of the momentum: a change of rate reaches the steps as the momentum
    decays. (torch's SGD has it outside; at a constant rate both are the same.)

    Args:
        params: whole parameters, (name, parameter) pairs, or groups of them, with options of their own.
        lr: γ, the global learning rate.
        momentum: m, in [0, 1).
        weight_decay: β.
        trust: η, the trust coefficient: how long a layer's step may be, compared with its weights, at ``lr`` = 1.
        eps: added to the denominator of λ.
        nesterov: look ahead by the momentum.
        adapt: False for groups that take plain steps, λ = 1, at their own ``lr``; see
            :func:`polylane.optim.split_decay_groups`.

    With weight decay a step needs temporary memory for as many elements as this worker has of a group.

    Raises:
        PolylaneError: an option has a value that it cannot have.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 0.0,
        *,
        nesterov: bool = False,
        adapt: bool = True,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust": trust,
            "eps": eps,
            "nesterov": nesterov,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse what cannot be in a group with all its options."""
        super().check_group(group)
        check_option(self, group, "momentum", 0, 1)
        check_option(self, group, "trust", 0, float("inf"))
        if group["nesterov"] and not group["momentum"]:
            raise PolylaneError("LARS: nesterov=True looks ahead by the momentum: give a momentum above 0")

    def compute_directions(self, group: Mapping[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """The gradients themselves: it is their norm that counts, and weight decay comes later."""
        return [p.grad for p in parameters if p.grad is not None]

    def ratios(self, group: Mapping[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        """λ of every parameter."""
        known = compute_trust_ratio(
            weights, directions + group["weight_decay"] * weights + group["eps"], group["trust"]
        )
        return torch.where(directions > 0, known, 1.0)

    def apply_update(self, update: GroupUpdate, rates: list[Tensor]) -> None:
        """Add to the momentum, and move by it."""
        group, parameters, directions = update.group, update.parameters, update.directions
        momentum, nesterov = group["momentum"], group["nesterov"]
        if group["weight_decay"]:
            directions = list(torch._foreach_add(directions, parameters, alpha=group["weight_decay"]))
        if momentum:
            velocities = [self._get_velocity(p) for p in parameters]
            torch._foreach_mul_(velocities, momentum)
            torch._foreach_addcmul_(velocities, directions, rates)
            torch._foreach_sub_(parameters, velocities, alpha=momentum if nesterov else 1)
        if nesterov or not momentum:
            torch._foreach_addcmul_(parameters, directions, rates, value=-1)

    def _get_velocity(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if "velocity" not in state:
            state["velocity"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        velocity: Tensor = state["velocity"]
        return velocity
