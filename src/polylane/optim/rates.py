"""Learning-rate scaling: linear and square-root rules for large batches, applied only where the user asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, get_args

import torch

from polylane.errors import PolylaneError

Rule = Literal["linear", "sqrt"]


def scaled(lr: float, batch: int, base_batch: int, rule: Rule = "linear") -> float:
    """Return the learning rate for a batch size, given the one that was tuned for another batch size.

    * ``"linear"``: lr · batch / base_batch. k times fewer steps, each k times as long (Goyal et al., arXiv 1706.02677,
      section 2.1; it holds for SGD up to some thousands of images, and wants a warm-up, section 2.2).
    * ``"sqrt"``: lr · √(batch / base_batch), which keeps the variance of a step (Krizhevsky, arXiv 1404.5997, section
      5; Hoffer et al., arXiv 1705.08741). The rule that goes with LAMB (You et al., arXiv 1904.00962, section 4).

    Args:
        lr: learning rate that was tuned for ``base_batch`` samples.
        batch: samples of a step, over all workers.
        base_batch: samples of a step that ``lr`` was tuned for.
        rule: how the rate grows with the batch size.

    Raises:
        PolylaneError: an unknown rule, or a batch without samples.
    """
    return lr * _scaling_factor(batch, base_batch, rule)


def scale_rates(optimizer: torch.optim.Optimizer, batch: int, base_batch: int, rule: Rule = "linear") -> None:
    """Scale the rate of every group, as :func:`scaled` does, before the first step and before any scheduler is made.

    Schedulers that set rates of their own, such as OneCycleLR, set them over these.

    Raises:
        PolylaneError: as :func:`scaled`; or a scheduler has taken its rates from the optimizer already.
    """
    factor = _scaling_factor(batch, base_batch, rule)
    if any("initial_lr" in group for group in optimizer.param_groups):
        raise PolylaneError(
            "scale_rates(optimizer): a scheduler has taken the rates before they were scaled: make the scheduler later"
        )
    for group in optimizer.param_groups:
        group["lr"] = group["lr"] * factor  # not in place: groups may share a tensor


def scaled_optimizer(
    factory: Callable[[Any], torch.optim.Optimizer], batch: int, base_batch: int, rule: Rule = "linear"
) -> Callable[[Any], torch.optim.Optimizer]:
    """Wrap a recipe's ``optimizer(parameters)`` so that its rates are scaled for the batch.

    Raises:
        PolylaneError: as :func:`scaled`; raised here, and not when the factory is called.
    """
    # The rule is checked now, while the user's own call is on the stack. A partial of module-level functions pickles.
    _scaling_factor(batch, base_batch, rule)
    return partial(_build_scaled_optimizer, factory, batch, base_batch, rule)


def _build_scaled_optimizer(
    factory: Callable[[Any], torch.optim.Optimizer], batch: int, base_batch: int, rule: Rule, parameters: Any
) -> torch.optim.Optimizer:
    optimizer = factory(parameters)
    if isinstance(optimizer, torch.optim.Optimizer):  # anything else is refused by the caller, with a better message
        scale_rates(optimizer, batch, base_batch, rule)
    return optimizer


def _scaling_factor(batch: int, base_batch: int, rule: str) -> float:
    if rule not in get_args(Rule):
        raise PolylaneError(f"rule={rule!r} is not known: the learning rate is scaled by {' or '.join(get_args(Rule))}")
    for key, value in (("batch", batch), ("base_batch", base_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolylaneError(f"{key}={value!r} must be a number of samples, 1 or more")
    ratio = batch / base_batch
    return ratio if rule == "linear" else math.sqrt(ratio)
