"""Learning-rate options of the command line: an optimizer for large batches, rates scaled with the batch, warm-up.

Beside them, what a training learns of its gradient noise, by which batch and rates may follow.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from polylane.errors import PolylaneError

if TYPE_CHECKING:
    import torch

    from polylane.recipe import Recipe

LargeBatch = Literal["lars", "lamb"]
RateRule = Literal["linear", "sqrt"]
NoiseMode = Literal["auto", "on", "off"]

# LARS multiplies its rate by a trust ratio with a coefficient of 0.001. Parameters without that ratio (biases, norms)
# take this fraction of the rate instead.
PLAIN = 0.005


@dataclass(frozen=True)
class LearningRateOptions:
    """Changes to a recipe's optimizer and its learning rates.

    Attributes:
        batch: number of samples of a step, over all workers.
        optimizer: "lars" or "lamb" in place of the recipe's optimizer; None: the recipe's own.
        lr: learning rate of that optimizer; None with the recipe's own.
        rule: how learning rates grow with the batch, "linear" or "sqrt"; None: not at all.
        base_batch: number of samples of a step that the learning rates are meant for; None without a rule.
        warmup: number of steps in which learning rates rise to their full value.
        noise: whether the gradient noise is measured: "on" in every step, "auto" in as many as 2% of the time allow,
            and not where the plan does not allow it.

    Raises:
        PolylaneError: one of two options that go together is missing, or a rate is not positive and finite.
    """

    batch: int
    optimizer: LargeBatch | None = None
    lr: float | None = None
    rule: RateRule | None = None
    base_batch: int | None = None
    warmup: int = 0
    noise: NoiseMode = "auto"

    def __post_init__(self) -> None:
        why = "say which batch the rates are for, and how they grow"
        _refuse_one_alone("--scale-lr", self.rule, "--base-batch", self.base_batch, why)
        _refuse_one_alone("--optimizer", self.optimizer, "--lr", self.lr, "a recipe's own optimizer has its own rate")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise PolylaneError(f"--lr must be above 0, not {self.lr:g}")

    def apply_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this optimizer and these learning rates."""
        # Imported here, since polylane.optim imports torch, and options are checked before that.
        from polylane.optim import scaled_optimizer, warmed_scheduler

        if self.optimizer is not None and self.lr is not None:
            recipe = replace(recipe, optimizer=partial(_large_batch, self.optimizer, self.lr))
        if self.rule is not None and self.base_batch is not None:
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


def _refuse_one_alone(option: str, first: object, other_option: str, second: object, why: str) -> None:
    if (first is None) != (second is None):
        present, missing = (option, other_option) if second is None else (other_option, option)
        raise PolylaneError(f"{present} goes with {missing}: {why}")
