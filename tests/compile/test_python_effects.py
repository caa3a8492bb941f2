"""Side effects of the user's own Python are found under any setting that it runs in."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.graph.capture.assign_keys import draws_by_sample
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.samples.leaf_effects import collect_effects
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import sgd


class Counts(nn.Module):
    """Does something else in every second call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.inner = 0, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        y: Tensor = self.inner(x)
        return y if self.calls % 2 else y * 2


class Noise(torch.autograd.Function):
    """Adds random numbers."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x + torch.randn_like(x)

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Draws(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        noisy: Tensor = Noise.apply(self.inner(x))  # type: ignore[no-untyped-call]
        return noisy


class Within(nn.Module):
    """Runs a module under the user's autocast, or as it is."""

    def __init__(self, inner: nn.Module, autocast: bool) -> None:
        super().__init__()
        self.inner, self.autocast = inner, autocast

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.autocast):
            y: Tensor = self.inner(x)
        return y.float()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    y: Tensor = model(batch)
    return y.square().mean()


def graph_of(model: nn.Module) -> Graph:
    return capture(model, loss, torch.randn(4, 4), trainable=[name for name, _ in model.named_parameters()])


@pytest.mark.parametrize("autocast", [False, True])
def test_python_that_counts_its_calls(autocast: bool) -> None:
    ((effect,),) = collect_effects(graph_of(Within(Counts(), autocast))).values()
    assert effect.kind == "state"
    with pytest.raises(PolylaneError, match=r"microbatches=2: .*calls"):
        compile_training(
            Within(Counts(), autocast), build_objectives(loss, sgd, None), torch.randn(4, 4), "data=1,microbatches=2"
        )


@pytest.mark.parametrize("autocast", [False, True])
def test_a_function_that_draws(autocast: bool) -> None:
    graph = graph_of(Within(Draws(), autocast))
    assert graph.code.random and not draws_by_sample(graph.code.fx)
    assert any("they are drawn by the user's own Python" in note and "function may" in note for note in graph.notes)
