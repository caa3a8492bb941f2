"""A training that comes to NaN, or to an infinite loss, on one worker is refused, and no plan is blamed for it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.verify.verify import verify
from tests.support.workers.training import adamw


@pytest.mark.parametrize(("factor", "word"), [(float("nan"), "NaN"), (float("inf"), "infinite")])
def test_a_loss_without_a_value_on_one_worker_is_refused(factor: float, word: str) -> None:
    """Nothing is equal to NaN: the sentence names the step, and does not blame the plan."""

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean() * torch.where(batch.max() > 1, factor, 1.0)

    batches = [torch.zeros(4, 3), torch.full((4, 3), 2.0)]
    with pytest.raises(PolylaneError, match=rf"the loss of step 2 is {word} on one worker"):
        verify(nn.Linear(3, 3), Objective("loss", loss, adamw), batches, "data=2")


class RootOfZero(nn.Module):
    """A finite loss, whose gradient in a direction that nothing comes from is 0 * inf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(x) + (self.inner(x) * 0).sqrt()


def square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@pytest.mark.parametrize("plan", ["data=2", "data=2,every=2", "data=2,servers=1,staleness=any"])
def test_a_gradient_of_nan_is_refused(plan: str) -> None:
    """Before the loss of the next step is NaN, and where there is none."""
    batches = [torch.ones(4, 3)] * 2
    for steps in (1, 2):
        with pytest.raises(PolylaneError, match=r"the gradient of inner.(weight|bias) holds NaN in step 1 on one wor"):
            verify(RootOfZero(), Objective("loss", square, adamw), batches[:steps], plan)


class Counting(nn.Linear):
    """A buffer that becomes NaN and that no result depends on."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.register_buffer("ratio", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.ratio.copy_(self.ratio / self.ratio)
        return super().forward(x)


class Forgetful(torch.optim.SGD):
    """An entry of its state is NaN, which no update depends on."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["ratio"] = math.nan


def test_buffers_and_states_of_nan_are_refused() -> None:
    with pytest.raises(PolylaneError, match=r"^ratio holds NaN in step 1 on one worker"):
        verify(Counting(), Objective("loss", square, adamw), [torch.ones(4, 3)], "data=2")
    forgetful = Objective("loss", square, lambda parameters: Forgetful(list(parameters), lr=0.1))
    with pytest.raises(PolylaneError, match="the optimizer's ratio of weight holds NaN in step 1 on one worker"):
        verify(nn.Linear(3, 3), forgetful, [torch.ones(4, 3)], "data=2")
