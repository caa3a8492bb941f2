"""Large batches on handwritten digits: 512 of 1,437 images in every step, three steps an epoch, learnt all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.optim import LAMB, LARS, scaled_optimizer, split_decay_groups, warmed_scheduler
from polylane.recipe import load
from polylane.runtime.job import Job
from tests.support.workers.training import workers

DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
BATCH, EPOCHS, WARMUP = 512, 20, 6
STEPS = EPOCHS * 3


def lamb(parameters: Any) -> torch.optim.Optimizer:
    return LAMB(split_decay_groups(parameters), lr=0.05, weight_decay=0.01)


def lars(parameters: Any) -> torch.optim.Optimizer:
    """As in the paper, with trust 0.001 and a rate of tens; biases and norms take plain steps of 0.1."""
    return LARS(split_decay_groups(parameters, lr=0.1), lr=20.0, weight_decay=1e-4)


def decaying(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.PolynomialLR(optimizer, STEPS, power=2.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "plan"), [("lamb", "tensor=2"), ("lars", "tensor=2"), ("sgd, scaled linearly", "data=2")]
)
def test_digits_are_learnt_in_60_steps(kind: str, plan: str) -> None:
    recipe = load(DIGITS, {"width": "16", "blocks": "1"})
    factories: dict[str, Callable[[Any], Any]] = {"lamb": lamb, "lars": lars}
    factory = factories.get(kind) or scaled_optimizer(partial(recipe.optimizer, lr=0.01), BATCH, 32, "linear")
    train, test = recipe.data("train"), recipe.data("test")
    torch.manual_seed(0)
    model = recipe.model()

    def work(job: Job) -> dict[str, torch.Tensor]:
        for batch in job.batches(train, BATCH, EPOCHS):
            job.step(batch)
        return job.state_dict()

    options: dict[str, Any] = {"optimizer": factory, "scheduler": warmed_scheduler(decaying, WARMUP)}
    states = workers(work, model, plan, loss=recipe.loss, example=train[:8], **options)
    model.load_state_dict(states[0])
    model.eval()
    images, labels = test[:]
    with torch.no_grad():
        accuracy = (model(images).argmax(1) == labels).float().mean().item()
    assert accuracy >= 0.97
