"""Writes in place: new values where nobody else sees the memory, gradients included; left as they are elsewhere."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.samples.mean_loss import splits_exactly
from tests.support import models, subsets
from tests.support.reference.eager_and_captured import SIZES, assert_unchanged, close, compare, run, state


class Writing(nn.Module):
    """A layer, and what somebody does with its output."""

    def __init__(self, write: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.write = nn.Linear(16, 4), write

    def forward(self, x: Tensor) -> Tensor:
        return self.write(self.fc(x))


def power(y: Tensor) -> Tensor:
    z = y * 1
    z **= 2
    return z


def copied_then_changed(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    z.copy_(y * 2)
    y = y * 1
    y.mul_(3)  # what was copied is no view
    return z.sigmoid_() + y


def in_another_order(y: Tensor) -> Tensor:
    return torch.empty(4, len(y)).copy_(y.t()).view(-1, 4)


def channels_last(y: Tensor) -> Tensor:
    x = y[:, :, None, None].expand(-1, -1, 3, 3).contiguous(memory_format=torch.channels_last)
    return torch.empty(x.shape).copy_(x * 2).view(len(y), -1)


def without_gradient(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    with torch.no_grad():
        z.copy_(y).mul_(2)
    return z * y


def autocast(y: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        a = y @ torch.ones(4, 4)
        z = torch.empty_like(a)
        z.copy_(a)
        z.mul_(2)
        return (z @ torch.ones(4, 4)).float()


# Nobody else sees what is written: nothing must stay together.
ALONE: dict[str, Callable[[Tensor], Tensor]] = {
    "copy": lambda y: torch.empty_like(y).copy_(y),
    "a chain": lambda y: torch.empty_like(y).copy_(y).mul_(2).add_(1).pow_(2).clamp_(0, 5),
    "copy over values": lambda y: (y * 2).copy_(y * 3),
    "copy of one row": lambda y: y + torch.empty_like(y).copy_(y[0]),
    "copy of a scalar": lambda y: y * torch.empty(()).copy_(y.mean()),
    "copy to double": lambda y: torch.empty_like(y, dtype=torch.float64).copy_(y).float(),
    "copy to lower": lambda y: torch.empty_like(y, dtype=torch.bfloat16).copy_(y).float(),
    "copy of integers": lambda y: y * torch.empty_like(y).copy_(torch.arange(4)),
    "copy to complex": lambda y: torch.empty(y.shape, dtype=torch.complex64).copy_(y).mul_(1j).imag,
    "copy to a part": lambda y: y.new_empty(len(y), 8)[:, ::2].copy_(y),
    "copied, then changed": copied_then_changed,
    "in another order": in_another_order,
    "channels last": channels_last,
    "autocast": autocast,
    "without gradient": without_gradient,
    "power": power,
    "power of a tensor": lambda y: y.clone().abs_().add_(1).pow_(y),
    "power in double": lambda y: y.double().float_power_(2).float(),
    "zero": lambda y: y + (y * 1).zero_(),
    "fill": lambda y: y * y.new_empty(y.shape).fill_(y.mean()),
    "compared": lambda y: y + y.clone().gt_(0.0),
    "another type": lambda y: y.clone().mul_(torch.full((4,), 0.1, dtype=torch.float64)),
    "whole division": lambda y: y + y.detach().clone().floor_divide_(torch.tensor(2.0)),
    "transposed": lambda y: y.clone().transpose_(0, 1).t(),
    "detached": lambda y: y + (y * 1).detach_(),
    "normal": lambda y: y + (y * 1).normal_(),
    "uniform": lambda y: y + (y * 1).uniform_(),
    "exponential": lambda y: y + torch.empty_like(y).exponential_(),
    "coins": lambda y: y * torch.empty_like(y).bernoulli_(),
    "coins over values": lambda y: y * (y * 1).bernoulli_(0.3),
    "coins by probability": lambda y: y * torch.empty_like(y).bernoulli_(torch.sigmoid(y)),
}


def by_columns(y: Tensor) -> Tensor:
    z = torch.empty(len(y), 8)
    z[:, :4], z[:, 4:] = y, y * 2
    return z


def seen_by_a_view(y: Tensor) -> Tensor:
    z = torch.empty_like(y)
    view = z.view(-1)
    z.copy_(y)
    return view.view_as(y) * 2


def without_gradient_by_columns(y: Tensor) -> Tensor:
    z = torch.zeros(len(y), 8)
    with torch.no_grad():
        z[:, :4] = y
    return z[:, :4] * y


def at_once(y: Tensor) -> Tensor:
    z = y * 1
    torch._foreach_mul_([z], 2.0)
    return z


# Somebody does, or no operator gives the same as a new value.
TOGETHER: dict[str, Callable[[Tensor], Tensor]] = {
    "by columns": by_columns,
    "seen by a view": seen_by_a_view,
    "without gradient, by columns": without_gradient_by_columns,
    "several at once": at_once,
    "arguments in another order": lambda y: y.clone().abs_().add_(1).polygamma_(1),
    "no truth value": lambda y: y * y.clone().logical_not_(),
}


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    out = model(batch[0])
    return out.square().mean() + out.mean() * batch[1].float().mean()


@pytest.mark.parametrize("name", subsets.one_in(2, [*ALONE, *TOGETHER]))
def test_writes_have_a_graph(name: str) -> None:
    model = Writing((ALONE | TOGETHER)[name])
    before = state(model)
    graph = capture(model, loss, models.vectors(5, 0))
    assert_unchanged(before, state(model))
    assert not graph.is_opaque
    assert not graph.notes
    assert bool(graph.unsplittable_ranges) == (name in TOGETHER)
    # A sum over memory with gaps may be taken in another order.
    same = close if name == "copy to a part" else torch.equal
    assert all(compare(graph, model, loss, models.vectors, samples, same) for samples in SIZES)


class Remembering(nn.Module):
    """Writes what has a gradient to memory just made, and to a buffer."""

    def __init__(self, detach: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.detach = nn.Linear(16, 4), detach
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        z = torch.empty_like(y)
        z.copy_(y)
        z.sigmoid_()
        z = z.clone()
        if self.detach:
            self.average.mul_(0.9).add_(z.detach().mean(0) * 0.1)
        else:
            with torch.no_grad():
                self.average.mul_(0.9).add_(z.mean(0) * 0.1)
        return z + self.average


@pytest.mark.parametrize("detach", [True, False])
def test_buffers_keep_no_gradients(detach: bool) -> None:
    model = Remembering(detach)
    before = state(model)
    graph = capture(model, models.classify, models.vectors(5, 0))
    assert_unchanged(before, state(model))
    assert not graph.is_opaque
    assert all(compare(graph, model, models.classify, models.vectors, samples) for samples in SIZES)
    leaves, rebuild = flatten(models.vectors(5, 1))
    for own in (model, copy.deepcopy(model)):
        run(graph, ModelWithLoss(own, models.classify, rebuild), leaves, SampleSlice(5, batch=5))
        assert not own.average.requires_grad


def test_a_capture_that_fails_leaves_no_gradients() -> None:
    class Forgetful(Remembering):
        def forward(self, x: Tensor) -> Tensor:
            self.average.add_(self.fc(x).mean(0))
            return self.fc(x) if x.sum().item() > 1e9 else self.fc(x) * 2

    model = Forgetful(False)
    assert capture(model, models.classify, models.vectors(5, 0)).is_opaque
    assert not model.average.requires_grad
    copy.deepcopy(model)


def test_coins_thrown_in_views_are_fair() -> None:
    def coins(y: Tensor) -> Tensor:
        z = torch.empty(len(y), 8)
        z[:, :4].bernoulli_()
        z[:, 4:].bernoulli_()
        return z + 0 * y.sum()

    def heads(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return model(batch[0]).mean()

    model = Writing(coins)
    graph = capture(model, heads, models.vectors(5, 0))
    leaves, rebuild = flatten(models.vectors(500, 0))
    (mean,) = run(graph, ModelWithLoss(model, heads, rebuild), leaves, SampleSlice(500, batch=500))
    assert 0.45 < mean.item() < 0.55


def test_unfilled_memory_is_not_to_blame() -> None:
    """Samples meet in the loss; that two parts of a batch find different garbage in new memory is no news."""

    def halves(y: Tensor) -> Tensor:
        z = torch.empty_like(y)
        z[:, :2], z[:, 2:] = y[:, 2:], y[:, :2]
        return z

    def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        z = model(batch[0])
        return F.cross_entropy(z @ z.t(), torch.arange(len(z)))

    model = Writing(halves)
    graph = capture(model, contrast, models.vectors(6, 0))
    garbage = [torch.randn(n, 4, dtype=torch.float64) for n in range(1, 9) for _ in range(9)]
    del garbage
    told = splits_exactly(graph, model, contrast, flatten(models.vectors(6, 0))[0])
    assert told is not None
    assert "loss/matmul in the loss" in told
