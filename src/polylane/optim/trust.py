"""Trust ratios: a layer's step as long as its weights say, also where a worker holds only a part of the layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from polylane.errors import PolylaneError


class SumOverHolders(Protocol):
    """Makes sums over the parts of parameters sums over the whole ones.

    What a runtime gives to an optimizer that has an attribute ``sum_over_holders``, where workers hold parts. Each
    tensor in the optimizer's groups is then a part of one parameter (a slice, a flat piece, or all of it). Whoever cuts
    parameters binds the function, for only they know who holds what; the optimizer knows nothing of other workers.

    It is collective: every worker calls it exactly once in every step, be it with no parameters at all. Workers may
    call it with different parameters, in any order.
    """

    def __call__(self, parameters: Sequence[Tensor], values: Tensor) -> Tensor:
        """Sums over all parts.

        Args:
            parameters: tensors out of the optimizer's groups, each at most once. All who hold a part of a parameter
                name their part, or none of them does; a worker without any element of a parameter may leave it out.
            values: float64, (parameters, 2): sums over the elements of this worker's part. On any device.

        Returns:
            float64, (parameters, 2): the same sums over the elements of the whole parameter, in the given order, on the
            device of the workers. Parts that several workers hold alike count once, and every holder gets equal bits.
        """
        ...


def set_sum_over_holders(optimizer: torch.optim.Optimizer, sums: SumOverHolders) -> None:
    """Give an optimizer that takes it the sums over all who hold parts; others are left as they are."""
    if hasattr(optimizer, "sum_over_holders"):
        optimizer.sum_over_holders = sums


@dataclass(frozen=True, eq=False)
class GroupUpdate:
    """What a step does to one group of parameters.

    Attributes:
        group: the optimizer's, for its options.
        parameters: those that have a gradient.
        directions: a tensor for each of them, which the trust ratio scales.
    """

    group: Mapping[str, Any]
    parameters: list[Tensor]
    directions: list[Tensor]


class TrustRatioOptimizer(torch.optim.Optimizer):
    """An optimizer that scales the step of every parameter by norms of the whole of it.

    A step goes three ways: directions element by element, then the norms of them and of the parameters, from all who
    hold a part, then the parameters element by element.

    Attributes:
        sum_over_holders: None where this worker holds parameters whole; else see :class:`SumOverHolders`.
    """

    sum_over_holders: SumOverHolders | None = None

    def check_group(self, group: Mapping[str, Any]) -> None:
        """Refuse what cannot be in a group with all its options."""
        for key in ("lr", "weight_decay", "eps"):
            check_option(self, group, key, 0, math.inf)
        if not isinstance(group["adapt"], bool):
            raise PolylaneError(f"{type(self).__name__}: adapt={group['adapt']!r} must be True or False")

    def compute_directions(self, group: Mapping[str, Any], parameters: list[Tensor]) -> list[Tensor]:
        """What is scaled, for parameters that have a gradient; states are brought up to date here."""
        raise NotImplementedError

    def ratios(self, group: Mapping[str, Any], weights: Tensor, directions: Tensor) -> Tensor:
        """The trust ratio of every parameter, of the norms of the whole parameters and directions, all float64."""
        raise NotImplementedError

    def apply_update(self, update: GroupUpdate, rates: list[Tensor]) -> None:
        """Move parameters; ``rates`` are learning rates times ratios, a scalar for each."""
        raise NotImplementedError

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as to every optimizer of torch.

        Raises:
            PolylaneError: an option of the group has a value that it cannot have.
        """
        self.check_group({**self.defaults, **param_group})
        super().add_param_group(param_group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step; returns what ``closure``, which may compute the gradients, returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
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
        """For every group the norms of its whole parameters and of their whole directions; None if it does not adapt.

        One collective for all groups, where there are other holders.
        """
        adapting = [update for update in updates if update.group["adapt"]]
        parameters = [p for update in adapting for p in update.parameters]
        directions = [d for update in adapting for d in update.directions]
        # Squared in float64, and the root taken there, a norm of single precision comes back as it was.
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
    """2-norms, each taken in at least single precision, as a vector in float64 on the device of the first."""
    if not tensors:
        return torch.zeros(0, dtype=torch.float64)
    dtypes = {t.dtype for t in tensors}
    if len(dtypes) == 1:
        wide = reduce(torch.promote_types, dtypes, torch.float32)
        found = list(torch._foreach_norm(tensors, 2.0, dtype=wide))
    else:
        found = [torch.linalg.vector_norm(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in tensors]
    return torch.stack([norm.to(found[0].device, torch.float64) for norm in found])


def compute_trust_ratio(numerator: Tensor, denominator: Tensor, coefficient: float = 1.0) -> Tensor:
    """``coefficient`` · numerator / denominator; 1 where either is zero, for there is nothing to compare then."""
    known = (numerator > 0) & (denominator > 0)
    return torch.where(known, coefficient * numerator / denominator, 1.0)


def check_option(optimizer: torch.optim.Optimizer, group: Mapping[str, Any], key: str, low: float, high: float) -> None:
    """Refuse an option that is not a number from ``low`` up to, but not including, ``high``."""
    value = group[key]
    number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
    if not number or isinstance(value, bool) or not low <= float(value) < high:
        span = f"not below {low}" if math.isinf(high) else f"in [{low}, {high})"
        raise PolylaneError(f"{type(optimizer).__name__}: {key}={value!r} must be a number {span}")


def split_decay_groups(parameters: ParamsT, **others: Any) -> list[dict[str, Any]]:
    """Two groups: weights, which adapt, and vectors and scalars, which do not and are not decayed.

    Biases and the scales of norms are few, small and often zero at first. Large-batch recipes leave them out of weight
    decay (Goyal et al., arXiv 1706.02677, section 5.1) and out of trust ratios. A whole parameter's number of
    dimensions decides, so call this on whole parameters: in ``optimizer(parameters)``.

    Args:
        parameters: as an optimizer of torch takes them, without groups: tensors, or (name, tensor) pairs.
        others: further options of the second group, such as ``lr``, the rate of plain steps.

    Returns:
        Groups for :class:`LARS`, :class:`LAMB` and others that know ``adapt``, without one that would be empty.
    """
    given: list[Any] = list(_flatten_parameters(parameters))
    weights = [each for each in given if _get_tensor(each).dim() > 1]
    vectors = [each for each in given if _get_tensor(each).dim() <= 1]
    groups = [{"params": weights}, {"params": vectors, "adapt": False, "weight_decay": 0.0, **others}]
    return [group for group in groups if group["params"]]


def _flatten_parameters(parameters: Iterable[Any]) -> Iterable[Any]:
    for each in parameters:
        if isinstance(each, Mapping):
            raise PolylaneError('apart(parameters) makes the groups itself: give it parameters, and "adapt" to groups')
        yield each


def _get_tensor(each: Any) -> Tensor:
    tensor: Tensor = each[1] if isinstance(each, tuple) else each
    return tensor
