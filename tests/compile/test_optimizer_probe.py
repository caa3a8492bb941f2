"""What an optimizer needs whole: known by trying it, and said where it cannot be tried."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.compile.optimizer_parts import find_unshardable
from polylane.compile.optimizer_probe import LOOKS, UntriedOptimizer, find_whole_parameters
from polylane.compile.optimizer_trials import draw_true_trials
from tests.support.workers.compiling import compile_training

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


class KnowsShapes(torch.optim.SGD):
    """Steps nothing but its own model's parameters, and no part of them."""

    def step(self, closure: Any = None) -> Any:
        first = self.param_groups[0]["params"][0]
        if tuple(first.shape) != (8, 6):
            raise ValueError(f"a first layer of {tuple(first.shape)}?\nno")
        return super().step(closure)


def of_shapes(parameters: Pairs) -> torch.optim.Optimizer:
    return KnowsShapes([p for _, p in parameters], lr=0.1)


class FactorsLarge(torch.optim.SGD):
    """Divides by the means of rows from a length on, as Adafactor of transformers (128) and timm (16) do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if p.dim() > 1 and min(p.shape) >= group["momentum"] * 100:
                    p.grad = p.grad / p.grad.square().mean(1, keepdim=True).sqrt()
                p.sub_(p.grad, alpha=0.1)


def factors_from(length: int) -> Callable[[Pairs], torch.optim.Optimizer]:
    return lambda parameters: FactorsLarge([p for _, p in parameters], lr=0.1, momentum=length / 100)


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


def test_what_goes_by_the_size_is_tried_at_the_models_own() -> None:
    named = [(n, nn.Parameter(torch.zeros(s))) for n, s in {"w": (40, 34), "b": (40,), "small": (40, 8)}.items()]
    assert find_whole_parameters(named, [factors_from(32)]) == {"w": LOOKS}
    assert find_unshardable(named, [factors_from(32)]) == {"w"}
    assert find_whole_parameters(named, [factors_from(41)]) == {} == {n: n for n in find_unshardable(named, [sgd])}


def test_of_large_models_one_parameter_of_a_shape_is_tried() -> None:
    shapes = {"tokens": (50_000, 768), "a": (768, 768), "b": (768, 768), "image": (512, 256, 3, 3), "bias": (768,)}
    named = [(n, nn.Parameter(torch.zeros(s, device="meta"))) for n, s in shapes.items()]
    trials = list(draw_true_trials(named, sgd, {"bias"}))
    tried = {n: [tuple(t.values[n].shape) for t in trials] for n in shapes}
    assert tried["b"] == [(4, 4)] * len(trials) and tried["bias"][0] == (4,)
    assert {(181, 181), (50_000, 2)} <= set(tried["tokens"]) and (181, 181, 1, 1) in tried["image"]
    assert not any(trial.is_true for trial in trials)
    assert set(find_whole_parameters(named, [factors_from(128)])) >= {"tokens", "a"}


def test_halves_of_half_precision_are_tried_as_they_are() -> None:
    class Rounds(torch.optim.SGD):
        """Rounds at random what has few bits."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                if p.dtype is torch.bfloat16:
                    p.add_(torch.randn_like(p) * p.abs() * 0.01)

    def rounds(parameters: Pairs) -> torch.optim.Optimizer:
        return Rounds([p for _, p in parameters], lr=0.1)

    named = list(nn.Linear(16, 16, bias=False).named_parameters())
    low = [(n, nn.Parameter(p.detach().bfloat16())) for n, p in named]
    assert find_whole_parameters(named, [rounds]) == {} == find_whole_parameters(low, [sgd])
    assert find_whole_parameters(low, [rounds]) == {"weight": LOOKS}


def test_masks_of_signs_and_projections_are_seen() -> None:
    class Cautious(torch.optim.SGD):
        """Scales by the share of signs that agree with those of the step before, of which the first has none."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                state, before = self.state[p], self.state[p].get("before")
                mask = torch.ones_like(p) if before is None else (before * p.grad > 0).to(p.dtype)
                state["before"] = p.grad.clone() if "begun" in state else None
                state["begun"] = True
                p.sub_(p.grad * mask / mask.mean().clamp(min=1e-3), alpha=0.1)

    class Projects(torch.optim.SGD):
        """Decays what is not orthogonal to its gradient, as AdamP does."""

        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for p in self.param_groups[0]["params"]:
                if abs(torch.nn.functional.cosine_similarity(p.flatten(), p.grad.flatten(), 0)) > 0.01:
                    p.mul_(0.9)
            return super().step(closure)

    named = list(model().named_parameters())
    for kind in (Cautious, Projects):
        found = find_whole_parameters(named, [lambda p, kind=kind: kind([q for _, q in p], lr=0.1)])
        assert {"0.weight", "2.weight"} <= set(found)


def test_what_cannot_be_tried_says_why() -> None:
    named = list(model().named_parameters())
    assert find_whole_parameters(named, [sgd, of_large_ones]) == {}  # it runs on parts of parameters as they are
    found = find_whole_parameters(named, [sgd, of_shapes])
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
        made = prepared(of_shapes, "tensor=2")
    assert set(made.layouts["loss"].distinct[0].whole) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert prepared(sgd, "tensor=2").layouts["loss"].distinct[0].whole == {}
        prepared(of_shapes, "sequence=2")  # which holds parameters whole anyway
        prepared(of_shapes, "data=2")
