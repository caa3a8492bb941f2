"""What an optimizer needs whole: known by trying it, and said where it cannot be tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from compiling import compile_training
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.compile.optimizer_probe import LOOKS, UntriedOptimizer, find_whole_parameters

Pairs = Sequence[tuple[str, nn.Parameter]]


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))


def sgd(parameters: Pairs) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)


def of_large_ones(parameters: Pairs) -> torch.optim.Optimizer:
    """A recipe that knows the shapes of its own model."""
    first = parameters[0][1]
    if first.shape[1] != 6:
        raise ValueError(f"a first layer of {tuple(first.shape)}?\nno")
    return sgd(parameters)


def prepared(optimizer: Callable[[Pairs], torch.optim.Optimizer], plan: str) -> CompiledTraining:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).square().mean()

    return compile_training(model(), {"loss": Objective("loss", loss, optimizer)}, torch.randn(4, 6), plan)


def test_elementwise_optimizers_need_nothing_whole() -> None:
    assert find_whole_parameters(list(model().named_parameters()), [sgd]) == {}


def test_norms_are_of_whole_parameters() -> None:
    found = find_whole_parameters(
        list(model().named_parameters()), [lambda p: torch.optim.Adafactor([q for _, q in p])]
    )
    assert (
        found
        and set(found.values()) == {LOOKS}
        and not any(isinstance(why, UntriedOptimizer) for why in found.values())
    )


def test_what_cannot_be_tried_says_why() -> None:
    found = find_whole_parameters(list(model().named_parameters()), [sgd, of_large_ones])
    assert list(found) == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert set(found.values()) == {
        "its optimizer does not run on small parameters (ValueError: a first layer of (4, 4)? no)"
    }


def test_an_optimizer_of_other_parameters_is_not_tried() -> None:
    own = model()
    named = list(own.named_parameters())
    found = find_whole_parameters(named, [lambda _: torch.optim.SGD(own.parameters(), lr=0.1)])
    assert "takes other parameters than those that it is given" in found["0.weight"]


def test_what_is_not_known_is_warned_of_where_parameters_are_cut() -> None:
    with pytest.warns(
        UserWarning, match=r"4 parameters stay whole on every rank of tensor=2, .*a first layer of \(4, 4"
    ):
        made = prepared(of_large_ones, "tensor=2")
    assert set(made.layouts["loss"].distinct[0].whole) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared(sgd, "tensor=2").layouts["loss"].distinct[0].whole == {}
        prepared(of_large_ones, "sequence=2")  # which holds parameters whole anyway
        prepared(of_large_ones, "data=2")
