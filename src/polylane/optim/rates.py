"""Learning rates for large batches: scaling rules, applied only where the user asks for them, and warm-up.

Scaling is linear or by the square root. A warm-up is a linear rise over the first steps, in front of any scheduler
(Goyal et al., arXiv 1706.02677, section 2.2).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CyclicLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

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

    Examples:
        >>> from polylane import optim
        >>> optim.scaled(0.1, batch=512, base_batch=64)
        0.8
        >>> optim.scaled(0.1, batch=256, base_batch=64, rule="sqrt")
        0.2
    """
    return lr * _scaling_factor(batch, base_batch, rule)


def scale_rates(optimizer: torch.optim.Optimizer, batch: int, base_batch: int, rule: Rule = "linear") -> None:
    """Scale the rate of every group, as ``scaled`` does, before the first step and before any scheduler is made.

    Schedulers that set rates of their own, such as OneCycleLR, set them over these.

    Args:
        optimizer: optimizer with the rates that were chosen for ``base_batch``.
        batch: samples of a step, over all workers.
        base_batch: samples of a step that the rates were chosen for.
        rule: how the rate grows with the batch size, "linear" or "sqrt".

    Raises:
        PolylaneError: as ``scaled``; or a scheduler has taken its rates from the optimizer already.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> optimizer = torch.optim.SGD(torch.nn.Linear(8, 3).parameters(), lr=0.1)
        >>> optim.scale_rates(optimizer, batch=512, base_batch=64)
        >>> optimizer.param_groups[0]["lr"]
        0.8
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

    Args:
        factory: a recipe's ``optimizer(parameters)``, which makes an optimizer.
        batch: samples of a step, over all workers.
        base_batch: samples of a step that the factory's rates were chosen for.
        rule: how the rate grows with the batch size, "linear" or "sqrt".

    Returns:
        A function of parameters, as the factory is.

    Raises:
        PolylaneError: as ``scaled``; raised here, and not when the factory is called.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> def optimizer(parameters):
        ...     return torch.optim.SGD(parameters, lr=0.1)
        >>> large = optim.scaled_optimizer(optimizer, batch=512, base_batch=64)
        >>> large(torch.nn.Linear(8, 3).parameters()).param_groups[0]["lr"]
        0.8
    """
    # The rule is checked now, while the user's own call is on the stack. A partial of module-level functions pickles.
    _scaling_factor(batch, base_batch, rule)
    return partial(_build_scaled_optimizer, factory, batch, base_batch, rule)


def _build_scaled_optimizer(
    factory: Callable[[Any], torch.optim.Optimizer], batch: int, base_batch: int, rule: Rule, parameters: Any
) -> torch.optim.Optimizer:
    optimizer = factory(parameters)
    for member in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        if isinstance(member, torch.optim.Optimizer):  # anything else is refused by the caller, with a better message
            scale_rates(member, batch, base_batch, rule)
    return optimizer


def multiply_rates(optimizer: torch.optim.Optimizer, schedulers: Iterable[Any], factor: float) -> None:
    """Multiply the rates of an optimizer in the midst of a training, and those that its schedulers will set.

    Schedulers go on counting steps as before.

    Args:
        optimizer: optimizer whose groups have rates.
        schedulers: of this optimizer, those that step it.
        factor: by which all rates are multiplied.

    Raises:
        PolylaneError: a scheduler is made of others, each with rates of its own; or sets absolute ones.
    """
    schedulers = list(schedulers)
    for scheduler in schedulers:
        if isinstance(scheduler, SequentialLR | ChainedScheduler | OneCycleLR | CyclicLR):
            raise PolylaneError(
                f"a {type(scheduler).__name__} sets rates that cannot be multiplied in the midst of a training: take "
                "one schedule, such as LambdaLR or CosineAnnealingLR"
            )
    for group in optimizer.param_groups:
        for key in ("lr", "initial_lr"):
            if key in group:
                group[key] = group[key] * factor  # not in place: groups may share a tensor
    for scheduler in schedulers:
        if isinstance(scheduler, Warmup):
            scheduler.multiply(factor)
        elif hasattr(scheduler, "base_lrs"):
            scheduler.base_lrs = [rate * factor for rate in scheduler.base_lrs]


def _scaling_factor(batch: int, base_batch: int, rule: str) -> float:
    if rule not in get_args(Rule):
        raise PolylaneError(f"rule={rule!r} is not known: the learning rate is scaled by {' or '.join(get_args(Rule))}")
    for key, value in (("batch", batch), ("base_batch", base_batch)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise PolylaneError(f"{key}={value!r} must be a number of samples, 1 or more")
    ratio = batch / base_batch
    return ratio if rule == "linear" else math.sqrt(ratio)


# ---- warm-up ----


class Warmup(LRScheduler):
    """A scheduler whose rates rise from a fraction of another schedule's to that schedule's own; see ``warmup``.

    Args:
        optimizer: optimizer with the rates that the warm-up ends at.
        steps: number of optimizer steps with a rate below the schedule's.
        start: fraction of the rate at the first step; default: 1 / (steps + 1).
        after: scheduler of the same optimizer, which the warm-up steps; default: constant rates.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> sgd = torch.optim.SGD(torch.nn.Linear(8, 3).parameters(), lr=0.1)
        >>> schedule = optim.Warmup(sgd, steps=4)
        >>> sgd.step()
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, start: float | None = None, after: LRScheduler | None = None
    ) -> None:
        self.steps, self.start, self._after = steps, _check_start(steps, start), after
        _check_after(optimizer, after)
        self._schedule = _get_rates(optimizer)  # rates that the wrapped scheduler would have set, without the warm-up
        super().__init__(optimizer)

    def factor(self, step: int) -> float:
        """Return the rate of a step (0, 1, ...) as a fraction of the schedule's.

        Args:
            step: number of the step, from 0.

        Examples:
            >>> [schedule.factor(step) for step in range(6)]
            [0.2, 0.4, 0.6000000000000001, 0.8, 1.0, 1.0]
        """
        return 1.0 if step >= self.steps else self.start + (1 - self.start) * step / self.steps

    def multiply(self, factor: float) -> None:
        """Multiply the rates that it sets, and those of the schedule behind it, whose optimizer's are multiplied.

        Args:
            factor: by which all rates are multiplied.

        Examples:
            >>> schedule.multiply(2.0)
            >>> schedule.step()
            >>> f"{sgd.param_groups[0]['lr']:.2f}"
            '0.08'
        """
        self.base_lrs = [rate * factor for rate in self.base_lrs]
        self._schedule = [rate * factor for rate in self._schedule]
        if self._after is not None and hasattr(self._after, "base_lrs"):
            self._after.base_lrs = [rate * factor for rate in self._after.base_lrs]

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
        schedule_state = state_dict["after"]
        if (schedule_state is None) != (self._after is None):
            raise PolylaneError("warmup: what is loaded was saved with another schedule behind the warm-up: give it")
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "after"})
        if self._after is not None:
            self._after.load_state_dict(schedule_state)


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

    Returns:
        A scheduler: call its ``step()`` after every step of the optimizer.

    Raises:
        PolylaneError: a number is out of its range; or ``after`` is another optimizer's, steps on a metric, or sets
            rates of its own from the start.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> sgd = torch.optim.SGD(torch.nn.Linear(8, 3).parameters(), lr=0.1)
        >>> schedule = optim.warmup(sgd, 4, after=torch.optim.lr_scheduler.StepLR(sgd, 6, gamma=0.1))
        >>> rates = []
        >>> for step in range(8):
        ...     rates.append(round(sgd.param_groups[0]["lr"], 3))
        ...     sgd.step()
        ...     schedule.step()
        >>> rates
        [0.02, 0.04, 0.06, 0.08, 0.1, 0.1, 0.01, 0.01]
    """
    return Warmup(optimizer, steps, start, after)


def warmed_scheduler(
    factory: Callable[[torch.optim.Optimizer], Any] | None, steps: int, start: float | None = None
) -> Callable[[torch.optim.Optimizer], Warmup]:
    """Wrap a recipe's ``scheduler(optimizer)``, or None, in a warm-up.

    Args:
        factory: a recipe's ``scheduler(optimizer)``; None: constant rates.
        steps: number of optimizer steps with a rate below the schedule's.
        start: fraction of the rate at the first step; default: 1 / (steps + 1).

    Returns:
        A function of an optimizer, as the factory is.

    Raises:
        PolylaneError: a number is out of its range; raised here, and not when the factory is called.

    Examples:
        >>> import torch
        >>> from polylane import optim
        >>> scheduler = optim.warmed_scheduler(None, steps=4)
        >>> sgd = torch.optim.SGD(torch.nn.Linear(8, 3).parameters(), lr=0.1)
        >>> schedule = scheduler(sgd)
        >>> f"{sgd.param_groups[0]['lr']:.2f}"
        '0.02'
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


def _check_after(optimizer: torch.optim.Optimizer, scheduler: Any) -> None:
    if scheduler is None:
        return
    name = type(scheduler).__name__
    if isinstance(scheduler, ReduceLROnPlateau):
        raise PolylaneError(f"warmup: {name} steps on a metric, not on steps: step it yourself, after each evaluation")
    if isinstance(scheduler, (OneCycleLR, CyclicLR)):
        raise PolylaneError(f"warmup: {name} sets rates of its own from the first step: leave one of the two out")
    if getattr(scheduler, "optimizer", None) is not optimizer:
        raise PolylaneError(f"warmup: the {name} after it is not a scheduler of the same optimizer")


def _get_rates(optimizer: torch.optim.Optimizer) -> list[float | Tensor]:
    return [lr.clone() if isinstance(lr, Tensor) else lr for lr in (group["lr"] for group in optimizer.param_groups)]


def _set_rates(optimizer: torch.optim.Optimizer, rates: list[float | Tensor]) -> None:
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
