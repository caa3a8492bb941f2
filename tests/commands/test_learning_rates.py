"""What a command line asks for of optimizers and learning rates."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polylane.commands.learning_rates import PLAIN, LearningRateOptions
from polylane.errors import PolylaneError
from polylane.optim import LAMB, LARS
from polylane.recipe import Recipe, load

ROOT = Path(__file__).parents[2]


def recipe() -> Recipe:
    return load(str(ROOT / "examples/digits.py"), {})


def made(**asked: Any) -> tuple[torch.optim.Optimizer, Any]:
    """The optimizer and the scheduler of a recipe, changed as asked."""
    changed = LearningRateOptions(256, **asked).apply_to(recipe())
    optimizer = changed.optimizer(list(nn.Linear(3, 2).named_parameters()))
    return optimizer, changed.scheduler


def test_nothing_is_changed_unless_asked_for() -> None:
    plain = recipe()
    assert LearningRateOptions(64).apply_to(plain) is plain


def test_rates_follow_the_batch() -> None:
    assert made(rule="linear", base_batch=64)[0].param_groups[0]["lr"] == pytest.approx(0.04)
    assert made(rule="sqrt", base_batch=64)[0].param_groups[0]["lr"] == pytest.approx(0.02)


def test_a_warmup() -> None:
    optimizer, scheduler = made(warmup=3)
    steps = scheduler(optimizer)
    seen = [optimizer.param_groups[0]["lr"]]
    for _ in range(4):
        optimizer.step()
        steps.step()
        seen.append(optimizer.param_groups[0]["lr"])
    assert seen == pytest.approx([0.0025, 0.005, 0.0075, 0.01, 0.01])


def test_optimizers_for_large_batches() -> None:
    lamb, _ = made(optimizer="lamb", lr=0.05, rule="sqrt", base_batch=64)
    assert isinstance(lamb, LAMB) and [group["lr"] for group in lamb.param_groups] == pytest.approx([0.1, 0.1])
    lars, _ = made(optimizer="lars", lr=20.0)
    assert isinstance(lars, LARS) and [group["lr"] for group in lars.param_groups] == [20.0, 20 * PLAIN]
    assert [group.get("adapt", True) for group in lars.param_groups] == [True, False]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"rule": "linear"}, "--scale-lr goes with --base-batch"),
        ({"base_batch": 32}, "--base-batch goes with --scale-lr"),
        ({"lr": 0.1}, "--lr goes with --optimizer"),
        ({"optimizer": "lamb"}, "--optimizer goes with --lr"),
        ({"optimizer": "lamb", "lr": 0.0}, "--lr must be above 0, not 0"),
    ],
)
def test_what_is_refused(asked: dict[str, Any], says: str) -> None:
    with pytest.raises(PolylaneError, match=says):
        made(**asked)


def test_a_recipe_stays_as_it_is() -> None:
    before = recipe()
    found = LearningRateOptions(256, "lars", 20.0, warmup=5)
    assert found is not None and found.apply_to(before) is not before
    assert replace(before) == before and before.scheduler is None
