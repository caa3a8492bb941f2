"""Learning-rate options of the command line: an optimizer for large batches, rates scaled with the batch, warm-up."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from polylane.errors import PolylaneError

if TYPE_CHECKING:
    import torch

    from polylane.recipe import Recipe

# LARS multiplies its rate by a trust ratio with a coefficient of 0.001. Parameters without that ratio (biases, norms)
# take this fraction of the rate instead.
PLAIN = 0.005


@dataclass(frozen=True)
class LearningRateOptions:
    """Changes to a recipe's optimizer and its learning rates.

    Attributes:
        optimizer: "lars" or "lamb" in place of the recipe's optimizer; None: the recipe's own.
        lr: learning rate of that optimizer; None with the recipe's own.
        batch: number of samples of a step, over all workers.
        rule: how learning rates grow with the batch, "linear" or "sqrt"; None: not at all.
        base_batch: number of samples of a step that the learning rates are meant for.
        warmup: number of steps in which learning rates rise to their full value.
    """

    optimizer: Literal["lars", "lamb"] | None
    lr: float | None
    batch: int
    rule: Literal["linear", "sqrt"] | None
    base_batch: int
    warmup: int

    def apply_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this optimizer and these learning rates."""
        # Imported here, since polylane.optim imports torch, and options are checked before that.
        from polylane.optim import scaled_optimizer, warmed_scheduler

        if self.optimizer is not None and self.lr is not None:
            recipe = replace(recipe, optimizer=partial(_large_batch, self.optimizer, self.lr))
        if self.rule is not None:
            scaled = scaled_optimizer(recipe.optimizer, self.batch, self.base_batch, self.rule)
            recipe = replace(recipe, optimizer=scaled)
        if self.warmup:
            recipe = replace(recipe, scheduler=warmed_scheduler(recipe.scheduler, self.warmup))
        return recipe


def _large_batch(name: str, lr: float, parameters: Any) -> torch.optim.Optimizer:
    """Build LARS or LAMB with the settings of their papers; vectors are not decayed and take plain steps."""
    from polylane.optim import LAMB, LARS, split_decay_groups

    if name == "lamb":
        return LAMB(split_decay_groups(parameters), lr=lr, weight_decay=0.01)
    return LARS(split_decay_groups(parameters, lr=lr * PLAIN), lr=lr, weight_decay=1e-4)


def learning_rate_options(
    batch: int,
    optimizer: Literal["lars", "lamb"] | None,
    lr: float | None,
    rule: Literal["linear", "sqrt"] | None,
    base_batch: int | None,
    warmup: int,
) -> LearningRateOptions | None:
    """Return the changes that a command line asks for; None where it asks for none.

    Args:
        batch: number of samples of a step, over all workers.
        optimizer: "lars" or "lamb" in place of the recipe's optimizer; None: the recipe's own.
        lr: learning rate of that optimizer; None with the recipe's own.
        rule: how learning rates grow with the batch, "linear" or "sqrt"; None: not at all.
        base_batch: number of samples of a step that the learning rates are meant for; None: ``batch``.
        warmup: number of steps in which learning rates rise to their full value.

    Raises:
        PolylaneError: one of two options that go together is missing, or a rate is not positive and finite.
    """
    _refuse_together(
        "--scale-lr", rule, "--base-batch", base_batch, "say which batch the rates are for, and how they grow"
    )
    _refuse_together("--optimizer", optimizer, "--lr", lr, "a recipe's own optimizer has its own rate")
    if lr is not None and not 0 < lr < math.inf:
        raise PolylaneError(f"--lr must be above 0, not {lr:g}")
    if rule is None and optimizer is None and not warmup:
        return None
    return LearningRateOptions(optimizer, lr, batch, rule, base_batch or batch, warmup)


def _refuse_together(one: str, first: object, other: str, second: object, why: str) -> None:
    if (first is None) != (second is None):
        given, missing = (one, other) if second is None else (other, one)
        raise PolylaneError(f"{given} goes with {missing}: {why}")
