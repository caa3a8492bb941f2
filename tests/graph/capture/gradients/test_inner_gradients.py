"""Gradients that a loss takes inside (torch.autograd.grad) are operators of the graph; the self-check proves them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.samples.derivation import derive_composition
from tests.support import autograd_functions
from tests.support.workers.training import batch_of, classify, mlp

BATCH = batch_of(6)
grad = torch.autograd.grad


def slope(model: nn.Module, batch: Any, after: Callable[[Tensor], Tensor] = torch.square) -> Tensor:
    """The gradient of ``after`` the model, summed over the batch, to its inputs."""
    inputs = batch[0].clone().requires_grad_(True)
    (found,) = grad(after(model(inputs)).sum(), inputs, create_graph=True)
    return found


def penalty(model: nn.Module, batch: Any) -> Tensor:
    return slope(model, batch).square().sum(1).mean()


def captured(model: nn.Module, loss: Any = penalty, batch: Any = BATCH) -> Graph:
    """A capture without a leaf: its loss and gradients are those of the model, says the self-check."""
    graph = capture(model, loss, batch)
    assert not graph.is_opaque and graph.notes == ()
    assert not any("gradient" in node.op for node in graph.nodes)
    return graph


def test_every_sample_has_its_own_gradient() -> None:
    graph = captured(mlp(6, 8, 4))
    assert derive_composition(graph).is_proven
    inner = next(node for node in graph.nodes if node.op == "aten.tanh_backward.default")
    assert inner.module == "1" and inner.batch_dim == 0 and inner.requires_grad  # tanh's, and differentiated again
    assert inner.source.endswith(f"{__file__}:{slope.__code__.co_firstlineno + 3}")


ACTIVATIONS = (
    *(F.gelu, F.elu, F.softplus, F.hardtanh, F.silu, torch.sigmoid, F.logsigmoid, F.relu, F.normalize),
    *(lambda x: F.softmax(x, -1), lambda x: F.log_softmax(x, 1), lambda x: F.glu(torch.cat([x, x], -1))),
)


def shaped(y: Tensor) -> Tensor:
    """Selections, positions, paddings, reductions of [samples, 4]."""
    a, b = y.chunk(2, 1)
    moved = torch.stack([a, b], 1).permute(0, 2, 1).reshape(-1, 4) + y[:, [1, 0, 3, 2]] + F.pad(y[:, 1:], (1, 0))
    wide = y[:, :1] * y[:, 1:2].expand(-1, 4) + torch.where(y > 0, y, 2 * y) + y.gather(1, torch.argsort(y, 1))
    reduced = y.max(1, keepdim=True).values + y.std(1, keepdim=True) + y.logsumexp(1, keepdim=True) + y[:, 2, None]
    return moved * wide * reduced + y.cumsum(1).masked_fill(y > 1, 0.0)


@pytest.mark.parametrize("after", [lambda y: sum(each(y) for each in ACTIVATIONS), shaped], ids=["pointwise", "shapes"])
def test_operators_and_their_second_derivatives(after: Callable[[Tensor], Tensor]) -> None:
    graph = captured(mlp(6, 8, 4), lambda model, batch: slope(model, batch, after).square().mean())
    assert derive_composition(graph).is_proven


def test_norms_and_convolutions() -> None:
    layers = (nn.Conv1d(2, 4, 3, 2, 1), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.Conv1d(4, 4, 3, 1, 1, groups=2))
    model = nn.Sequential(*layers, nn.ConvTranspose1d(4, 2, 4, 2, 1), nn.LayerNorm(6), nn.Flatten()).double()
    graph = captured(model, penalty, (torch.randn(6, 2, 6, dtype=torch.float64),))
    assert derive_composition(graph).is_proven


def test_batch_statistics_are_differentiated_and_couple_samples() -> None:
    graph = captured(nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double())
    assert not derive_composition(graph).is_proven


def test_gradients_to_weights_for_a_step_of_their_own() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        weights = dict(model.named_parameters())
        inner = F.cross_entropy(torch.func.functional_call(model, weights, (batch[0],)), batch[1])
        slopes = grad(inner, list(weights.values()), create_graph=True)
        moved = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(torch.func.functional_call(model, moved, (batch[0],)), batch[1])

    assert not derive_composition(captured(mlp(6, 8, 4), loss)).is_proven  # a step for all samples


def test_the_ways_to_call_it() -> None:
    """Several outputs and inputs, unused ones, vectors that are given, gradients that are not differentiated."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, other = (batch[0].clone().requires_grad_() for _ in range(2))
        y = model(x)
        first, none = grad(y.sum(), (x, other), create_graph=True, allow_unused=True)
        (zeros,) = grad(y.sum(), other, create_graph=True, materialize_grads=True)
        assert none is None
        (both,) = grad([y, y.square().sum()], [x], [torch.ones_like(y) * 2, None], create_graph=True)
        (constant,) = grad(y.square().sum(), x, retain_graph=True)
        assert not constant.requires_grad and first.requires_grad
        (second,) = grad(first[:, 0].sum(), x, create_graph=True)
        return (first + zeros + second).square().mean() + both.abs().mean() + (constant * y.sum(1, keepdim=True)).mean()

    assert derive_composition(captured(mlp(6, 8, 4), loss)).is_proven


class Field(nn.Module):
    """A model that is a gradient itself, in training and in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.potential = mlp(6, 8, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            return grad(self.potential(x).square().sum(), x, create_graph=self.training)[0]


@pytest.mark.parametrize("training", [True, False])
def test_a_model_that_takes_gradients_in_its_forward(training: bool) -> None:
    graph = capture(Field(), lambda model, batch: model(batch[0]).square().mean(), BATCH, training=training)
    assert not graph.is_opaque and derive_composition(graph).is_proven


def test_noise_is_drawn_once() -> None:
    """What dropout drops is dropped in the gradient, too: one draw, by one key."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 4)).double()
    graph = captured(model)
    assert derive_composition(graph).is_proven
    assert [node.op for node in graph.nodes if "dropout" in node.op] == ["aten.dropout.default"]


def test_lower_precision_and_own_functions() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(6, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return autograd_functions.Swish.apply(y) + sum(autograd_functions.Both.apply(y))

    captured(Own().double())

    def loss(model: nn.Module, batch: Any) -> Tensor:
        inputs = batch[0].float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            outputs = model(inputs)
        return grad(outputs.float().square().sum(), inputs, create_graph=True)[0].square().mean()

    captured(mlp(6, 8, 4).float(), loss)


class Branching(nn.Module):
    """Which way it goes depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        return x if float(x.sum()) > -1e9 else 2 * x


def test_through_own_python_it_stays_one_leaf() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Branching(), nn.Linear(4, 4)).double()
    graph = capture(model, penalty, BATCH)
    assert graph.is_opaque
    assert (
        "takes gradients inside itself (torch.autograd.grad), and an operator on their way, leaf, runs your own"
        in (graph.notes[0])
    )


def test_beside_own_python_it_is_captured() -> None:
    model = nn.Sequential(nn.Linear(6, 4), Branching()).double()
    graph = capture(model, lambda model, batch: penalty(model[0], batch) + classify(model, batch), BATCH)
    assert not graph.is_opaque and [note.partition(" ")[0] for note in graph.notes] == ["1"]


@pytest.mark.parametrize("transform", [lambda f: torch.func.vmap(torch.func.grad(f)), torch.func.grad])
def test_function_transforms_stay_one_leaf(transform: Any) -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        slopes: Tensor = transform(lambda x: model(x).sum())(batch[0])
        return slopes.square().mean()

    graph = capture(mlp(6, 8, 4), loss, BATCH)
    assert graph.is_opaque and "takes gradients inside itself by torch.func" in graph.notes[0]
