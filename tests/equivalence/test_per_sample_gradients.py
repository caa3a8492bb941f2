"""The user's own Python whose backward pass alone joins samples is found, on the example and in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.errors import PolylaneError, WorkerFailed
from tests.support.workers.training import assert_same, batch_of, mlp, plainly, trained

BATCHES = [(batch_of(7, seed)[0], torch.ones(7, 4, dtype=torch.float64)) for seed in range(4)]


def squares(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


class Backward(torch.autograd.Function):
    """The identity, whose gradient is what a function makes of it."""

    of: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return Backward.of(gradient)


class Hooked(nn.Module):
    """A hook on a value's gradient: export cannot hold it, so that the model has no graph."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.first, self.last, self.hook = mlp(6, 8, 8), nn.Linear(8, 4), hook

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.first(x)
        if y.requires_grad:
            y.register_hook(self.hook)
        out: Tensor = self.last(y)
        return out


class Within(nn.Module):
    """A custom function between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = mlp(6, 8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(Backward.apply(self.first(x)))  # type: ignore[no-untyped-call]
        return out


def scaled(gradient: Tensor) -> Tensor:
    """Each sample's gradient by itself; numpy, so that no trace shows it."""
    return torch.from_numpy(gradient.numpy() * 2).clamp(-0.01, 0.01)


def normed(gradient: Tensor) -> Tensor:
    """Divided by the norm over all samples; numpy, so that no trace shows it."""
    return gradient / (float((gradient.numpy() ** 2).sum()) ** 0.5 + 1e-3)


def hooked(hook: Any) -> nn.Module:
    torch.manual_seed(0)
    return Hooked(hook).double()


def within(function: Any) -> nn.Module:
    torch.manual_seed(0)
    Backward.of = staticmethod(function)
    return Within().double()


@pytest.mark.parametrize("model", [hooked, within])
def test_gradients_of_each_sample_by_itself_are_those_of_one_device(model: Any) -> None:
    plan = "data=3,per_sample=model"
    assert_same(trained(model(scaled), plan, BATCHES, loss=squares)[0], plainly(model(scaled), BATCHES, loss=squares))


@pytest.mark.parametrize(
    ("model", "plan", "advice"),
    [
        (hooked, "data=3,per_sample=model", "leave it out of per_sample$"),
        (within, "data=2,microbatches=2,per_sample=model", "leave it out of per_sample, and use microbatches=1$"),
    ],
)
def test_a_backward_pass_that_joins_samples_is_refused_on_the_example(model: Any, plan: str, advice: str) -> None:
    with pytest.raises(
        PolylaneError, match=rf"per_sample=model does not hold: .*the gradient of each sample.*{advice}"
    ):
        trained(model(normed), plan, BATCHES, loss=squares)


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        (within, "data=3,per_sample=model"),
        (hooked, "data=1,microbatches=3,per_sample=model"),
        (within, "pipeline=2,schedule=pipedream,data=2,per_sample=model"),
    ],
)
def test_a_backward_pass_that_joins_samples_later_stops_the_run(model: Any, plan: str) -> None:
    """Innocent until the loss is large, as in the fourth batch."""

    def later(gradient: Tensor) -> Tensor:
        return normed(gradient) if float(abs(gradient.numpy()).max()) > 1 else gradient

    large = [*BATCHES[:3], (BATCHES[3][0], BATCHES[3][1] * 100)]
    with pytest.raises((PolylaneError, WorkerFailed), match=r"step 4: .* the gradient of each sample depend"):
        trained(model(later), plan, large, loss=squares)
    if "pipedream" not in plan:
        expected = plainly(model(later), BATCHES[:2], loss=squares)
        assert_same(trained(model(later), plan, BATCHES[:2], loss=squares)[0], expected)


class Attending(nn.Module):
    """The gradient of a key's bias is zero, and what is left of it rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(6, 2, batch_first=True)
        self.last = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.stack([x, x.flip(1), x.roll(1, 1)], 1)
        y = self.inner(y, y, y)[0]
        if y.requires_grad:
            y.register_hook(scaled)
        out: Tensor = self.last(y.mean(1))
        return out


def test_rounding_of_gradients_that_are_zero_is_no_dependence() -> None:
    torch.manual_seed(0)
    model = Attending().double()
    got = trained(model, "data=2,microbatches=2,per_sample=model", BATCHES, loss=squares)[0]
    expected = plainly(model, BATCHES, loss=squares, microbatches=2)
    assert all(torch.allclose(got.state[name], value, rtol=1e-9, atol=1e-12) for name, value in expected.state.items())
