"""LARS (layer-wise adaptive rate scaling): momentum SGD with a learning rate for every layer, for batches of thousands.

You, Gitman and Ginsburg, arXiv 1708.03888.
"""

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

    For a parameter w with gradient g, whatever its shape:

        λ = trust · ‖w‖ / (‖g‖ + weight_decay · ‖w‖ + eps)        1 where ‖w‖ or ‖g‖ is zero
        v = momentum · v + lr · λ · (g + weight_decay · w)
        w = w - v                                                 with nesterov: w - (momentum · v + the last term of v)

    As in the paper the learning rate is inside the momentum: a change of rate reaches the steps as the momentum
    decays. (torch's SGD has it outside; at a constant rate both are the same.)

    Args:
        params: whole parameters, (name, parameter) pairs, or groups of them, with options of their own.
        lr: γ, the global learning rate.
        momentum: m, the factor of the last velocity, in [0, 1).
        weight_decay: β, the coefficient of the L2 penalty, added to the gradient.
        trust: η, the trust coefficient: how long a layer's step may be, compared with its weights, at ``lr`` = 1.
        eps: added to the denominator of λ.
        nesterov: look ahead by the momentum.
        adapt: False for groups that take plain steps, λ = 1, at their own ``lr``; see
            ``polylane.optim.split_decay_groups``.

    With weight decay a step needs temporary memory for as many elements as this worker holds of a group.

    Raises:
        PolylaneError: an option is out of its range.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> model = torch.nn.Linear(8, 3)
        >>> optimizer = optim.LARS(optim.split_decay_groups(model.named_parameters()), lr=1.0, weight_decay=1e-4)
        >>> model(torch.ones(4, 8)).sum().backward()
        >>> optimizer.step()
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
        rates = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(params, **rates, trust=trust, eps=eps, nesterov=nesterov, adapt=adapt)

    def check_group(self, group: Mapping[str, Any]) -> None:
        super().check_group(group)
        check_option(self, group, "momentum", 1)
        check_option(self, group, "trust", float("inf"))
        if group["nesterov"] and not group["momentum"]:
            raise PolylaneError("LARS: nesterov=True looks ahead by the momentum: give a momentum above 0")

    def compute_directions(self, group: Mapping[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        # The gradients themselves: the trust ratio is of their norm, and weight decay is added in apply_update.
        return [p.grad for p in parameters if p.grad is not None]

    def ratios(self, group: Mapping[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        # λ is 1 where either norm is zero. The denominator alone does not show that: decay and eps make it positive.
        ratios = compute_trust_ratio(
            weights, directions + group["weight_decay"] * weights + group["eps"], group["trust"]
        )
        return torch.where(directions > 0, ratios, 1.0)

    def apply_update(self, update: GroupUpdate, rates: list[Tensor]) -> None:
        group, parameters, directions = update.group, update.parameters, update.directions
        momentum, nesterov = group["momentum"], group["nesterov"]
        if group["weight_decay"]:
            directions = list(torch._foreach_add(directions, parameters, alpha=group["weight_decay"]))
        # ``rates`` are lr · λ, so that the learning rate is inside the velocity. With nesterov the new velocity counts
        # times momentum, and the new term is added once more below; without momentum only that term is there.
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
