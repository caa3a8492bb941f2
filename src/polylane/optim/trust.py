"""Trust ratios: steps scaled by the norm of a layer's weights, also where a worker holds only a shard of the layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from polylane.errors import PolylaneError


class SumOverHolders(Protocol):
    """All-reduce of per-parameter sums over the workers that hold shards of the same parameter.

    The runtime sets it as ``sum_over_holders`` on an optimizer that has this attribute, where workers hold shards. Each
    tensor in the optimizer's groups is then a shard of one parameter (a slice, a flat range, or all of it). The part of
    the runtime that shards parameters provides the function, because it knows which worker holds what; the optimizer
    knows nothing of other workers.

    It is collective: every worker calls it exactly once in every step, even with no parameters. Workers may call it
    with different parameters, in any order.
    """

    def __call__(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Sum over all shards.

        Args:
            parameters: tensors out of the optimizer's groups, each at most once. All workers with a shard of a
                parameter pass theirs, or none does; a worker without any element of a parameter may leave it out.
            values: float64, shape (parameters, 2), on any device: sums over the elements of this worker's shards.

        Returns:
            float64, shape (parameters, 2), on the workers' device: the same sums over the elements of the whole
            parameters, in the given order. Replicated shards count once, and all holders get bitwise equal sums.
        """
        ...


def set_sum_over_holders(optimizer: torch.optim.Optimizer, sums: SumOverHolders) -> None:
    """Set the sums over all shards on an optimizer that takes them; leave others unchanged."""
    if hasattr(optimizer, "sum_over_holders"):
        optimizer.sum_over_holders = sums


@dataclass(frozen=True, eq=False)
class GroupUpdate:
    """What a step does to one group of parameters.

    Attributes:
        group: the optimizer's parameter group, for its options.
        parameters: the group's parameters that have a gradient.
        directions: for each of these, the tensor that the trust ratio scales.
    """

    group: Mapping[str, Any]
    parameters: list[Tensor]
    directions: list[Tensor]


class TrustRatioOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the step of every parameter by norms of the whole parameter.

    A step has three passes: compute directions (elementwise), then the norms of directions and parameters (summed over
    all shards), then update the parameters (elementwise). Only the second one is collective.

    Attributes:
        sum_over_holders: None where this worker holds parameters whole; else see :class:`SumOverHolders`.
    """

    sum_over_holders: SumOverHolders | None = None

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse a group, complete with defaults, that has an option out of its range."""
        for key in ("lr", "weight_decay", "eps"):
            check_option(self, group, key, math.inf)
        if not isinstance(group["adapt"], bool):
            raise PolylaneError(f"{type(self).__name__}: adapt={group['adapt']!r} must be True or False")

    def compute_directions(self, group: Mapping[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """Return the tensors to be scaled, for parameters that have a gradient; updates the optimizer states."""
        raise NotImplementedError

    def ratios(self, group: Mapping[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        """Return every parameter's trust ratio, given norms of the whole parameters and directions, all float64."""
        raise NotImplementedError

    def apply_update(self, update: GroupUpdate, rates: list[Tensor]) -> None:
        """Update parameters in place; ``rates`` are learning rates times trust ratios, a scalar tensor for each."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Also called by the constructor for each of its groups: this is where every option is checked.
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        # All groups' directions first, so that one collective gives the norms of all of them.
        updates = [self._prepare_update(group) for group in self.param_groups]
        for update, norms in zip(updates, self._compute_norms(updates), strict=True):
            if update.parameters:
                self.apply_update(update, self._compute_rates(update, norms))
        return loss

    def _prepare_update(self, group: dict[str, Any]) -> GroupUpdate:
        parameters: list[Tensor] = [p for p in group["params"] if p.grad is not None]
        if any(p.grad is not None and p.grad.is_sparse for p in parameters):
            raise PolylaneError(
                f"{type(self).__name__} takes no sparse gradients: make the embedding with sparse=False"
            )
        return GroupUpdate(group, parameters, self.compute_directions(group, parameters) if parameters else [])

    def _compute_norms(self, updates: Sequence[GroupUpdate]) -> list[tuple[Tensor, Tensor] | None]:
        """Return the norms of each group's whole parameters and directions; None for a group that does not adapt.

        One collective for all groups, where parameters are sharded; it runs even if this worker has nothing to sum.
        """
        adapting = [update for update in updates if update.group["adapt"]]
        parameters = [p for update in adapting for p in update.parameters]
        directions = [d for update in adapting for d in update.directions]
        # Norms are squared so that shards can be added. In float64 square and root return a float32 norm unchanged.
        squares = torch.stack([compute_norms(parameters), compute_norms(directions)], 1).square()
        if self.sum_over_holders is not None:
            squares = self.sum_over_holders(parameters, squares)
        weights, steps = squares.sqrt().unbind(1)
        sizes = [len(update.parameters) if update.group["adapt"] else 0 for update in updates]
        pairs = zip(weights.split(sizes), steps.split(sizes), updates, strict=True)
        return [(weight, step) if update.group["adapt"] else None for weight, step, update in pairs]

    def _compute_rates(self, update: GroupUpdate, norms: tuple[Tensor, Tensor] | None) -> list[Tensor]:
        parameters, lr = update.parameters, update.group["lr"]
        if norms is None:
            ratios = torch.ones(len(parameters), dtype=torch.float64, device=parameters[0].device)
        else:
            ratios = self.ratios(update.group, *norms)
        rates = ratios * (lr.to(ratios.device) if isinstance(lr, Tensor) else lr)
        return [rate.to(p.device) for rate, p in zip(rates.unbind(), parameters, strict=True)]


def compute_norms(tensors: list[Tensor]) -> Tensor:
    """Return 2-norms, computed in at least float32, as a float64 vector on the device of the first tensor."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    dtypes = {t.dtype for t in tensors}
    # The multi-tensor kernel takes one accumulation dtype for all.
    if len(dtypes) == 1:
        wide = reduce(torch.promote_types, dtypes, torch.float32)
        norms = list(torch._foreach_norm(tensors, 2.0, dtype=wide))
    else:
        norms = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.stack([norm.to(norms[0].device, torch.float64) for norm in norms])


def compute_trust_ratio(numerator: Tensor, denominator: Tensor, coefficient: float = 1.0) -> Tensor:
    """Return ``coefficient`` · numerator / denominator; 1 where either is zero (a layer that is still all zeros)."""
    is_positive = (numerator > 0) & (denominator > 0)
    return torch.where(is_positive, coefficient * numerator / denominator, 1.0)


def check_option(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], key: str, limit: float) -> None:
    """Refuse an option that is not a number from 0 up to, but not including, ``limit``."""
    value = group[key]
    number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not number or isinstance(value, bool) or not 0 <= float(value) < limit:
        span = "not below 0" if math.isinf(limit) else f"in [0, {limit})"
        raise PolylaneError(f"{type(optimizer).__name__}: {key}={value!r} must be a number {span}")


def split_decay_groups(parameters: ParamsT, **options: Any) -> list[dict[str, Any]]:
    """Split parameters into two groups: weights, which adapt, and vectors and scalars, which do not and have no decay.

    Biases and the scales of norms are few, small and often zero at first. Large-batch recipes leave them out of weight
    decay (Goyal et al., arXiv 1706.02677, section 5.1) and out of trust ratios. The number of dimensions of the whole
    parameter decides, so call this on whole parameters: in ``optimizer(parameters)``.

    Args:
        parameters: tensors, or (name, tensor) pairs, as an optimizer of torch takes them without groups.
        options: further options of the second group, such as ``lr``, the rate of plain steps.

    Returns:
        Groups for ``LARS``, ``LAMB`` and other optimizers with the option ``adapt``; no empty group.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> model = torch.nn.Linear(8, 3)
        >>> groups = optim.split_decay_groups(model.parameters(), lr=0.1)
        >>> [(len(group["params"]), group.get("adapt", True)) for group in groups]
        [(1, True), (1, False)]
    """
    entries: list[Any] = list(parameters)
    if any(isinstance(entry, Mapping) for entry in entries):
        raise PolylaneError(
            'split_decay_groups(parameters) makes the groups itself: give it parameters, and "adapt" to groups'
        )
    dims = [(entry[1] if isinstance(entry, tuple) else entry).dim() for entry in entries]
    weights = [entry for entry, dim in zip(entries, dims, strict=True) if dim > 1]
    vectors = [entry for entry, dim in zip(entries, dims, strict=True) if dim <= 1]
    groups = [{"params": weights}, {"params": vectors, "adapt": False, "weight_decay": 0.0, **options}]
    return [group for group in groups if group["params"]]
