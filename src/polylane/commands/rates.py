"""What a command line asks for of a recipe's learning rates: that they follow the batch, and a warm-up."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from polylane.errors import PolylaneError

if TYPE_CHECKING:
    from polylane.recipe import Recipe


@dataclass(frozen=True)
class Rates:
    """What is done with a recipe's learning rates.

    Attributes:
        batch: samples of a step.
        rule: how rates grow with the batch, "linear" or "sqrt"; None: not at all.
        base_batch: that they are meant for.
        warmup: steps in which they rise to what they are.
    """

    batch: int
    rule: Literal["linear", "sqrt"] | None
    base_batch: int
    warmup: int

    def of(self, recipe: Recipe) -> Recipe:
        """The recipe with these rates."""
        from polylane.optim import scaled_optimizer, warmed_scheduler

        if self.rule is not None:
            scaled = scaled_optimizer(recipe.optimizer, self.batch, self.base_batch, self.rule)
            recipe = replace(recipe, optimizer=scaled)
        if self.warmup:
            recipe = replace(recipe, scheduler=warmed_scheduler(recipe.scheduler, self.warmup))
        return recipe


def rates(batch: int, rule: Literal["linear", "sqrt"] | None, base_batch: int | None, warmup: int) -> Rates | None:
    """What a command line asks for of learning rates; None for nothing.

    Raises:
        PolylaneError: one of two options that go together is missing.
    """
    if (rule is None) != (base_batch is None):
        given, missing = ("--scale-lr", "--base-batch") if base_batch is None else ("--base-batch", "--scale-lr")
        raise PolylaneError(
            f"{given} goes with {missing}: say which batch the recipe's rates are for, and how they grow"
        )
    return Rates(batch, rule, base_batch or batch, warmup) if rule is not None or warmup else None
