"""Gradual warm-up: the rate of every step, alone and with torch's schedulers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from polylane.errors import PolylaneError
from polylane.optim import scaled_optimizer, warmed_scheduler, warmup

STEPS = 12
SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4, 9], gamma=0.1),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.5, total_iters=6),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, STEPS),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, STEPS, 2.0),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.8 + step / 50),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.3, 5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ExponentialLR(o, 0.5), lr_scheduler.StepLR(o, 2)], milestones=[3]
    ),
}


def made(lr: Any = 0.1) -> torch.optim.Optimizer:
    weight, bias = nn.Linear(3, 2).parameters()
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": lr / 4}], lr=lr)


def run(optimizer: torch.optim.Optimizer, scheduler: Any, steps: int = STEPS) -> list[list[float]]:
    """The rates of every step's groups."""
    seen = []
    for _ in range(steps):
        seen.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return seen


def rows(factors: list[float], lr: float = 0.1) -> list[Any]:
    return [pytest.approx([lr * factor, lr * factor / 4], rel=1e-12) for factor in factors]


def test_the_rate_rises_by_equal_steps_to_the_optimizers_own() -> None:
    optimizer = made()
    assert run(optimizer, warmup(optimizer, 4), 7) == rows([0.2, 0.4, 0.6, 0.8, 1, 1, 1])


@pytest.mark.parametrize(
    ("steps", "start", "factors"),
    [
        (4, 0.0, [0, 0.25, 0.5, 0.75, 1, 1]),
        (2, 0.125, [0.125, 0.5625, 1, 1]),  # of 64 to 512 samples
        (3, 1.0, [1, 1, 1, 1]),
        (1, None, [0.5, 1, 1]),
        (0, None, [1, 1]),
        (0, 0.0, [1, 1]),
    ],
)
def test_where_it_starts(steps: int, start: float | None, factors: list[float]) -> None:
    optimizer = made()
    assert run(optimizer, warmup(optimizer, steps, start), len(factors)) == rows(factors)


@pytest.mark.parametrize("steps", [0, 1, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_keeps_its_own_clock(name: str, steps: int) -> None:
    """During the warm-up its rates are scaled, and afterwards they are to the last bit what they are without one."""
    plain, warmed = made(), made()
    expected = run(plain, SCHEDULES[name](plain))
    found = run(warmed, warmup(warmed, steps, 0.1, after=SCHEDULES[name](warmed)))
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        factor = 0.1 + 0.9 * step / steps if step < steps else 1.0
        assert one == ([rate * factor for rate in other] if step < steps else other)


def test_in_torchs_sequence_the_schedule_begins_after_the_warm_up() -> None:
    for reverse in (False, True):
        optimizer = made()
        kinds: list[Callable[[], LRScheduler]] = [
            lambda o=optimizer: warmup(o, 3),  # type: ignore[misc]
            lambda o=optimizer: lr_scheduler.ExponentialLR(o, 0.5),  # type: ignore[misc]
        ]
        schedulers = [kind() for kind in (reversed(kinds) if reverse else kinds)]
        both = lr_scheduler.SequentialLR(optimizer, schedulers[::-1] if reverse else schedulers, milestones=[3])
        assert run(optimizer, both, 6) == rows([0.25, 0.5, 0.75, 1, 0.5, 0.25])


@pytest.mark.parametrize("name", [None, "CosineAnnealingLR", "SequentialLR"])
@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_loaded_state_goes_on_where_it_was(name: str | None, at: int) -> None:
    def both() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = made()
        return optimizer, warmup(optimizer, 4, after=None if name is None else SCHEDULES[name](optimizer))

    optimizer, scheduler = both()
    run(optimizer, scheduler, at)
    saved = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
    other, again = both()
    other.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    assert run(other, again) == run(optimizer, scheduler)
    assert again.get_last_lr() == scheduler.get_last_lr() == [group["lr"] for group in optimizer.param_groups]


def test_a_state_of_another_schedule_is_refused() -> None:
    optimizer = made()
    alone = warmup(optimizer, 4).state_dict()
    with pytest.raises(PolylaneError, match="saved with another schedule behind the warm-up"):
        warmup(optimizer, 4, after=SCHEDULES["StepLR"](optimizer)).load_state_dict(alone)


def test_a_rate_may_be_a_tensor() -> None:
    optimizer = made(torch.tensor(0.1, dtype=torch.float64))
    lr = optimizer.param_groups[0]["lr"]
    found = run(optimizer, warmup(optimizer, 2, 0.5, after=SCHEDULES["ExponentialLR"](optimizer)), 4)
    assert found == rows([0.5, 0.75 * 0.9, 0.81, 0.729])
    assert optimizer.param_groups[0]["lr"] is lr


def test_after_the_warm_up_rates_are_in_the_users_hands() -> None:
    optimizer = made()
    scheduler = warmup(optimizer, 2)
    run(optimizer, scheduler, 3)
    optimizer.param_groups[0]["lr"] = 0.5
    run(optimizer, scheduler, 2)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_a_recipes_scheduler_warmed_with_a_recipes_optimizer_scaled() -> None:
    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1)

    scaled = scaled_optimizer(optimizer, 512, 64, "linear")
    for factory, after in ((None, [1, 1, 1]), (SCHEDULES["StepLR"], [1, 0.5, 0.5])):
        built = scaled(list(nn.Linear(3, 2).named_parameters()))
        seen = [row[0] for row in run(built, warmed_scheduler(factory, 2, 1 / 8)(built), 5)]
        assert seen == pytest.approx([0.1, 0.45, *(0.8 * factor for factor in after)])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda o: warmup(o, -1), "warmup=-1 must be a number of steps, 0 for none"),
        (lambda o: warmed_scheduler(None, 2.5), "warmup=2.5 must be a number of steps"),  # type: ignore[arg-type]
        (lambda o: warmed_scheduler(None, 2, 1.5), r"start=1.5 must be a fraction of the rate, in \[0, 1\]"),
        (lambda o: warmup(o, 2, after=SCHEDULES["StepLR"](made())), "StepLR after it is not a scheduler of the same"),
        (lambda o: warmup(o, 2, after=lr_scheduler.ReduceLROnPlateau(o)), "ReduceLROnPlateau steps on a metric"),
        (lambda o: warmup(o, 2, after=lr_scheduler.OneCycleLR(o, 1.0, 9)), "OneCycleLR sets rates of its own"),
    ],
)
def test_what_is_refused(make: Any, says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        make(made())
