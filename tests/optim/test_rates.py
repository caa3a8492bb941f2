"""Learning rates that follow the batch, by the rules of the papers, and only where that is asked for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.optim import scale_rates, scaled, scaled_optimizer, warmup
from polylane.optim.rates import multiply_rates


def sgd(parameters: Any, lr: Any = 0.1) -> torch.optim.Optimizer:
    (weight, bias) = [p for _, p in parameters]
    return torch.optim.SGD([{"params": [weight]}, {"params": [bias], "lr": 0.02}], lr=lr, momentum=0.9)


def parameters() -> list[tuple[str, nn.Parameter]]:
    return list(nn.Linear(3, 2).named_parameters())


def rates(optimizer: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in optimizer.param_groups]


@pytest.mark.parametrize(
    ("batch", "base", "linear", "sqrt"),
    [(8192, 256, 32.0, 32**0.5), (256, 256, 1.0, 1.0), (64, 256, 0.25, 0.5), (3, 1, 3.0, 3**0.5)],
)
def test_rules(batch: int, base: int, linear: float, sqrt: float) -> None:
    assert scaled(0.1, batch, base) == scaled(0.1, batch, base, "linear") == pytest.approx(0.1 * linear, rel=1e-15)
    assert scaled(0.1, batch, base, "sqrt") == pytest.approx(0.1 * sqrt, rel=1e-15)


def test_every_group_is_scaled_and_nothing_else() -> None:
    optimizer = sgd(parameters())
    scale_rates(optimizer, 512, 64, "linear")
    assert rates(optimizer) == pytest.approx([0.8, 0.16])
    assert all(group["momentum"] == 0.9 for group in optimizer.param_groups)
    assert optimizer.param_groups[0]["params"][0].shape == (2, 3)


def test_a_tensor_that_groups_share_is_scaled_once_for_each() -> None:
    lr = torch.tensor(0.1)
    optimizer = torch.optim.SGD([{"params": [p]} for _, p in parameters()], lr=lr)
    scale_rates(optimizer, 4, 1, "sqrt")
    assert rates(optimizer) == pytest.approx([0.2, 0.2]) and lr.item() == pytest.approx(0.1)
    assert all(isinstance(group["lr"], Tensor) for group in optimizer.param_groups)


def test_a_recipes_optimizer_scaled() -> None:
    factory = scaled_optimizer(sgd, 256, 64, "sqrt")
    assert rates(factory(parameters())) == pytest.approx([0.2, 0.04])
    assert rates(factory(parameters())) == pytest.approx([0.2, 0.04])  # each from its own start
    assert rates(sgd(parameters())) == [0.1, 0.02]


def test_what_is_no_optimizer_is_left_to_who_asked_for_one() -> None:
    assert scaled_optimizer(lambda _: None, 2, 1)([]) is None  # type: ignore[arg-type, return-value]


def test_schedulers_come_after_the_scaling() -> None:
    optimizer = sgd(parameters())
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(PolylaneError, match="make the scheduler later"):
        scale_rates(optimizer, 4, 2)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 64), "batch=0 must be a number of samples, 1 or more"),
        ((64, -1), "base_batch=-1 must be a number of samples"),
        ((64, 6.4), "base_batch=6.4 must be a number of samples"),
        ((True, 64), "batch=True must be"),
        ((64, 64, "cubic"), "rule='cubic' is not known: the learning rate is scaled by linear or sqrt"),
    ],
)
def test_what_is_refused(arguments: Any, says: str) -> None:
    for call in (lambda *a: scaled(0.1, *a), lambda *a: scaled_optimizer(sgd, *a)):
        with pytest.raises(PolylaneError, match=says):
            call(*arguments)


@pytest.mark.parametrize("kind", ["none", "lambda", "cosine", "exponential", "warmup"])
def test_rates_are_multiplied_in_the_midst_of_a_schedule(kind: str) -> None:
    """From then on they are the factor times what they would have been."""
    from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR

    def schedule(optimizer: torch.optim.Optimizer) -> Any:
        kinds: dict[str, Any] = {
            "lambda": lambda: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
            "cosine": lambda: CosineAnnealingLR(optimizer, 20),
            "exponential": lambda: ExponentialLR(optimizer, 0.9),
            "warmup": lambda: warmup(optimizer, 6, after=LambdaLR(optimizer, lambda step: 1 / (1 + step))),
        }
        return kinds[kind]() if kind != "none" else None

    series = []
    for factor in (1.0, 3.0):
        optimizer, seen = sgd(parameters()), []
        scheduler = schedule(optimizer)
        for step in range(12):
            if step == 4:
                multiply_rates(optimizer, [] if scheduler is None else [scheduler], factor)
            seen.append(rates(optimizer)[0])
            optimizer.step()
            if scheduler is not None:
                scheduler.step()
        series.append(seen)
    assert series[1] == pytest.approx([rate * (1 if step < 4 else 3) for step, rate in enumerate(series[0])])


def test_schedules_of_absolute_rates_are_refused() -> None:
    optimizer = sgd(parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1.0, total_steps=10)
    with pytest.raises(PolylaneError, match="OneCycleLR sets rates that cannot be multiplied"):
        multiply_rates(optimizer, [schedule], 2.0)
