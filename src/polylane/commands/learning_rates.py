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
# Samples of a batch: the default, and the most.
FIRST_BATCH, MOST = 64, 2**30

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
        ema: part of the weights' moving average that remains in a step; None: none is kept.
        largest_batch: number of samples up to which the batch may grow with the noise; 0: as far as the data allow;
            None: it stays as it is.

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
    ema: float | None = None
    largest_batch: int | None = None

    def __post_init__(self) -> None:
        why = "say which batch the rates are for, and how they grow"
        _refuse_one_alone("--scale-lr", self.rule, "--base-batch", self.base_batch, why)
        _refuse_one_alone("--optimizer", self.optimizer, "--lr", self.lr, "a recipe's own optimizer has its own rate")
        if self.lr is not None and not 0 < self.lr < math.inf:
            raise PolylaneError(f"--lr must be above 0, not {self.lr:g}")

    @property
    def noise_mode(self) -> NoiseMode:
        """Whether the gradient noise is measured; in every step where the batch follows it."""
        return self.noise if self.largest_batch is None else "on"

    def apply_to(self, recipe: Recipe) -> Recipe:
        """Return the recipe with this optimizer and these learning rates."""
        # Imported here, since polylane.optim imports torch, and options are checked before that.
        from polylane.optim import averaged_optimizer, scaled_optimizer, warmed_scheduler

        if self.optimizer is not None and self.lr is not None:
            recipe = replace(recipe, optimizer=partial(_large_batch, self.optimizer, self.lr))
        if self.rule is not None and self.base_batch is not None:
            scaled = scaled_optimizer(recipe.optimizer, self.batch, self.base_batch, self.rule)
            recipe = replace(recipe, optimizer=scaled)
        if self.ema is not None:
            recipe = replace(recipe, optimizer=averaged_optimizer(recipe.optimizer, self.ema))
        if self.warmup:
            recipe = replace(recipe, scheduler=warmed_scheduler(recipe.scheduler, self.warmup))
        return recipe


def parse_batch(text: str) -> tuple[int, int | None]:
    """Read ``--batch``: a number; or ``auto``, ``auto:FIRST`` or ``auto:FIRST:LARGEST`` of a batch that grows.

    Returns:
        Samples of the first steps, and those up to which the batch may grow: 0 as far as it may, None not at all.

    Raises:
        PolylaneError: it is none of these.
    """
    word, *numbers = text.split(":")
    if word != "auto":
        word, numbers = "", [text]
    if len(numbers) > (2 if word else 1) or not all(
        n.isascii() and n.isdigit() and 0 < int(n) <= MOST for n in numbers
    ):
        raise PolylaneError(
            f"Invalid value for '--batch': must be a number, auto, auto:FIRST or auto:FIRST:LARGEST, not {text!r}"
        )
    sizes = [int(number) for number in numbers]
    if sizes[1:] and sizes[1] < sizes[0]:
        raise PolylaneError(f"--batch {text}: the largest batch is smaller than the first one")
    return (sizes or [FIRST_BATCH])[0], (sizes[1] if sizes[1:] else 0) if word else None


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
