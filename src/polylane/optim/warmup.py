"""Learning-rate warm-up: rates rise linearly over the first steps, in front of any scheduler.

Goyal et al., arXiv 1706.02677, section 2.2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau

from polylane.errors import PolylaneError


class Warmup(LRScheduler):
    """A scheduler whose rates rise from a fraction of another schedule's to that schedule's own; see :func:`warmup`."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, start: float | None = None, after: LRScheduler | None = None
    ) -> None:
        self.steps, self.start, self._after = steps, _check_start(steps, start), after
        _check_after(optimizer, after)
        self._schedule = _get_rates(optimizer)  # rates that the wrapped scheduler would have set, without the warm-up
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """Return the rate of a step (0, 1, ...) as a fraction of the schedule's."""
        return 1.0 if step >= self.steps else self.start + (1 - self.start) * step / self.steps

    def get_lr(self) -> list[float | Tensor]:
        # Called by LRScheduler once at construction (step 0) and once for each step after: the wrapped scheduler is
        # stepped along from step 1 on.
        step, schedule = self.last_epoch, self.base_lrs
        if self._after is not None:
            if 0 < step <= self.steps:  # many schedulers compute the next rates from the optimizer's current ones
                _set_rates(self.optimizer, self._schedule)
            if step > 0:
                self._after.step()
                self._schedule = _get_rates(self.optimizer)
            schedule = self._schedule
        elif step > self.steps:
            schedule = _get_rates(self.optimizer)  # after the warm-up rates stay what the user makes them
        return [rate * self.factor(step) for rate in schedule]

    def state_dict(self) -> dict[str, Any]:
        state = {key: value for key, value in super().state_dict().items() if key != "_after"}
        return {**state, "after": None if self._after is None else self._after.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        after = state_dict["after"]
        if (after is None) != (self._after is None):
            raise PolylaneError("warmup: what is loaded was saved with another schedule behind the warm-up: give it")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "after"})
        if self._after is not None:
            self._after.load_state_dict(after)


def warmup(
    optimizer: torch.optim.Optimizer, steps: int, start: float | None = None, after: LRScheduler | None = None
) -> Warmup:
    """Build a gradual warm-up (Goyal et al., arXiv 1706.02677, section 2.2): rates rise linearly over the first steps.

    Step t = 0, 1, ... has ``start`` + (1 - ``start``) · t / ``steps`` times the rate of the schedule; from step
    ``steps`` on it has the schedule's own. The schedule's clock runs from the first step, as in the paper: whatever is
    meant to happen at a step happens at that step, and a schedule that ends with the training still does. (One that is
    to begin only when the warm-up is over goes with this one into torch's SequentialLR, with the milestone ``steps``.)

    Args:
        optimizer: optimizer with the rates that the warm-up ends at.
        steps: number of optimizer steps with a rate below the schedule's; 0 for none.
        start: fraction of the rate at the first step, in [0, 1]; the paper's is base_batch / batch. Default:
            1 / (steps + 1), so that the first rate equals the increment of every later step.
        after: a scheduler of the same optimizer, not yet stepped, which the warm-up steps from now on; default:
            constant rates.

    Raises:
        PolylaneError: a number is out of its range; or ``after`` is another optimizer's, steps on a metric, or sets
            rates of its own from the start.
    """
    return Warmup(optimizer, steps, start, after)


def warmed_scheduler(
    factory: Callable[[torch.optim.Optimizer], Any] | None, steps: int, start: float | None = None
) -> Callable[[torch.optim.Optimizer], Warmup]:
    """Wrap a recipe's ``scheduler(optimizer)``, or None, in a warm-up.

    Raises:
        PolylaneError: a number is out of its range; raised here, and not when the factory is called.
    """
    _check_start(steps, start)
    return partial(_build_warmed_scheduler, factory, steps, start)


def _build_warmed_scheduler(
    factory: Callable[[torch.optim.Optimizer], Any] | None,
    steps: int,
    start: float | None,
    optimizer: torch.optim.Optimizer,
) -> Warmup:
    return Warmup(optimizer, steps, start, None if factory is None else factory(optimizer))


def _check_start(steps: int, start: float | None) -> float:
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
        raise PolylaneError(f"warmup={steps!r} must be a number of steps, 0 for none")
    if start is None:
        return 1 / (steps + 1)
    if not 0 <= start <= 1:
        raise PolylaneError(f"warmup: start={start!r} must be a fraction of the rate, in [0, 1]")
    return start


def _check_after(optimizer: torch.optim.Optimizer, after: Any) -> None:
    if after is None:
        return
    name = type(after).__name__
    if isinstance(after, ReduceLROnPlateau):
        raise PolylaneError(f"warmup: {name} steps on a metric, not on steps: step it apart, after each evaluation")
    if isinstance(after, (OneCycleLR, CyclicLR)):
        raise PolylaneError(f"warmup: {name} sets rates of its own from the first step: leave one of the two out")
    if getattr(after, "optimizer", None) is not optimizer:
        raise PolylaneError(f"warmup: the {name} after it is not a scheduler of the same optimizer")


def _get_rates(optimizer: torch.optim.Optimizer) -> list[float | Tensor]:
    return [lr.clone() if isinstance(lr, Tensor) else lr for lr in (group["lr"] for group in optimizer.param_groups)]


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[float | Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
