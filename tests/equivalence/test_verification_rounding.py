"""Gradients that are zero up to rounding: what an optimizer makes of them is no difference, any real error is one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective
from polylane.graph.rounding_noise import MARGIN
from polylane.runtime.training_role import TrainingRole
from polylane.verify.rounding_floor import (
    MeasuredPass,
    RoundingFloors,
    divide_by_scale,
    error_scale,
    is_determined,
    measure_floors,
)
from polylane.verify.verify import Verdict, batch_in_float64, verify_compiled
from tests.support import models, subsets
from tests.support.workers.compiling import compile_training

WIDTH, HEADS, VOCAB = 8, 2, 16
Named = Iterable[tuple[str, nn.Parameter]]


class Attention(nn.Module):
    """Softmax takes no notice of what is added to all keys: the gradient of their bias is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return attend(self.query(x), self.key(x), self.value(x))


class Fused(nn.Module):
    """Of its one bias a third is that of the keys."""

    def __init__(self) -> None:
        super().__init__()
        self.all = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return attend(*self.all(x).chunk(3, -1))


def attend(*parts: Tensor) -> Tensor:
    q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Model(nn.Module):
    """Both, a bias before BatchNorm, and a layer whose gradient is tiny but real."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.one, self.two = Attention(), Fused()
        self.faint = nn.Linear(WIDTH, WIDTH)
        self.before = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        x = x + self.one(x)
        x = torch.tanh(x + self.two(x))
        x = x + 1e-14 * torch.tanh(self.faint(x))
        x = self.norm(self.before(x).flatten(0, 1)).unflatten(0, tokens.shape)
        return self.head(x)


class Signs(torch.optim.Optimizer):
    """Moves every element by as much, however small its gradient: nothing makes more of rounding."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


class Wrapper(torch.optim.Optimizer):
    """An optimizer around another one, as Lookahead's is, which does not call its base class."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, {}

    def step(self, closure: Any = None) -> None:
        self.inner.step()


def adamw(named: Named) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(named), lr=1e-2, weight_decay=0.1)


def sharp_adamw(named: Named) -> torch.optim.Optimizer:
    """Nothing dampens what is small."""
    return torch.optim.AdamW(list(named), lr=1e-2, weight_decay=0.1, eps=1e-30)


def signs(named: Named) -> torch.optim.Optimizer:
    return Signs([parameter for _, parameter in named])


def wrapped(named: Named) -> torch.optim.Optimizer:
    return Wrapper(sharp_adamw(named))


BATCHES = [models.tokens(samples, seed, length=6, vocab=VOCAB) for seed, samples in enumerate((7, 6, 5))]


@functools.cache
def training(plan: str) -> CompiledTraining:
    objective, example = Objective("loss", models.next_token, adamw), batch_in_float64(BATCHES[0])
    return compile_training(seeded(), {"loss": objective}, example, plan, in_float64=True, shared=True)


@functools.cache
def seeded() -> nn.Module:
    torch.manual_seed(0)
    return Model().double()


def verdict(plan: str, optimizer: Callable[[Named], torch.optim.Optimizer], clip_norm: float | None = None) -> Verdict:
    objective = Objective("loss", models.next_token, optimizer)
    return verify_compiled(replace(training(plan), objectives={"loss": objective}), BATCHES, clip_norm=clip_norm)


@pytest.mark.parametrize(
    ("plan", "optimizer"),
    subsets.one_in(
        2,
        subsets.pairs(
            ["data=2", "tensor=2", "pipeline=2,microbatches=2", "data=2,microbatches=2"], ["sharp_adamw", "signs"]
        ),
        several=True,
    ),
)
def test_what_an_optimizer_makes_of_rounding(plan: str, optimizer: str) -> None:
    result = verdict(plan, {"sharp_adamw": sharp_adamw, "signs": signs}[optimizer])
    assert result.passed, (result.worst, result.culprit)
    assert set(result.undetermined) == {"gradient of one.key.bias", "gradient of before.bias"}
    assert result.free is not None and (result.free.worst > result.tolerance or "pipeline" in plan)


@pytest.mark.parametrize("optimizer", [adamw, wrapped])
def test_with_clipping(optimizer: Callable[[Named], torch.optim.Optimizer]) -> None:
    assert verdict("data=2", optimizer, clip_norm=0.01).passed


def test_the_gradients_that_are_told_are_the_plans_own() -> None:
    """Not those that its optimizer was given."""
    result = verdict("data=2", sharp_adamw)
    told = {d.name: d.gradient for d in result.deviations}
    assert all(told[name] for name in ("one.key.bias", "before.bias"))  # rounding, which differs
    assert all(d.value <= 1e-15 for d in result.deviations if d.name in ("one.key.bias", "before.bias"))


def spoil(monkeypatch: pytest.MonkeyPatch, name: str, change: Callable[[nn.Parameter], None], steps: set[int]) -> None:
    """Change what a plan's workers hand to the optimizer, in some of the steps."""
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, objective: str, *rest: Any) -> None:
        held = self._updates[objective].local_parameters
        if self._step in steps and name in held:
            change(held[name])
        finish(self, objective, *rest)

    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)


@pytest.mark.parametrize(
    ("name", "size", "step"),
    subsets.one_in(
        2,
        [
            ("one.key.bias", 1e-3, 0),
            ("one.key.bias", 1e-8, 1),
            ("one.key.bias", 1e-13, 2),
            ("before.bias", 1e-3, 2),
            ("before.bias", 1e-8, 0),
            ("before.bias", 1e-13, 1),
        ],
        several=True,
    ),
)
def test_an_error_in_a_gradient_that_should_be_zero(
    monkeypatch: pytest.MonkeyPatch, name: str, size: float, step: int
) -> None:
    """Of all sizes that are not rounding, in any step; the largest gradients are about 0.1."""
    spoil(monkeypatch, name, lambda parameter: parameter.grad.add_(size), {step})  # type: ignore[union-attr]
    result = verdict("data=2", sharp_adamw)
    assert not result.passed
    wrong = {d.name for d in result.deviations if d.worst > result.tolerance}
    assert wrong == {name}
    assert result.culprit is not None and f"that of {name}" in result.culprit
    assert step == 0 or f"step {step + 1}" in result.culprit


@pytest.mark.parametrize(
    ("name", "part"),
    subsets.one_in(
        3,
        [("one.key.bias", slice(None)), ("before.bias", slice(None)), ("two.all.bias", slice(WIDTH, 2 * WIDTH))],
        several=True,
    ),
)
def test_an_error_in_a_value_whose_gradient_is_zero(monkeypatch: pytest.MonkeyPatch, name: str, part: slice) -> None:
    """Such a value changes no loss, no gradient, at most the mean that BatchNorm sees; still it has to be right."""

    def drift(parameter: nn.Parameter) -> None:
        parameter.data[part] *= 1 + 1e-7

    spoil(monkeypatch, name, drift, {1})
    result = verdict("data=2", sharp_adamw)
    assert not result.passed
    wrong = {d.name for d in result.deviations if d.value > result.tolerance}
    assert wrong == {name}
    assert result.culprit is not None and "of step 2 agrees: what differs is an update" in result.culprit
    assert f"that of {name}" in result.culprit


def test_an_error_in_the_rest_of_a_gradient_that_is_zero_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad[2 * WIDTH :] *= 1 + 1e-6

    spoil(monkeypatch, "two.all.bias", wrong, {0})
    result = verdict("data=2", sharp_adamw)
    assert not result.passed and result.culprit is not None and "two.all.bias" in result.culprit


@pytest.mark.parametrize("factor", subsets.one_in(2, [-1.0, 0.0]))
def test_a_tiny_gradient_is_not_taken_for_rounding(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """Its error is invisible next to the other gradients, not next to what rounding makes of it."""
    spoil(monkeypatch, "faint.weight", lambda parameter: parameter.grad.mul_(factor), {0, 1})  # type: ignore[union-attr]
    result = verdict("data=2", sharp_adamw)
    assert not result.passed
    wrong = {d.name for d in result.deviations if d.worst > result.tolerance}
    assert wrong == {"faint.weight"}


@pytest.mark.parametrize("factor", subsets.one_in(2, [1 + 1e-6, -1.0]))
def test_an_error_in_the_memory_of_an_optimizer(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    """It is there before any weight shows it."""
    finish = TrainingRole._apply_update

    def spoiled(self: TrainingRole, objective: str, *rest: Any) -> None:
        finish(self, objective, *rest)
        if self._step == 1:
            self.optimizer_of(objective).state[self._updates[objective].local_parameters["head.bias"]]["exp_avg"].mul_(
                factor
            )

    monkeypatch.setattr(TrainingRole, "_apply_update", spoiled)
    result = verdict("data=2", adamw)
    assert not result.passed and {d.name for d in result.deviations if d.worst > result.tolerance} == {"head.bias"}
    assert result.culprit is not None and "that of head.bias" in result.culprit and "exp_avg differs" in result.culprit


def passed(**gradients: Any) -> MeasuredPass:
    """A pass in which only gradients are of interest."""
    return MeasuredPass(1.0, {n: torch.as_tensor(g, dtype=torch.float64) for n, g in gradients.items()}, {})


def test_what_does_not_hold_still_is_undetermined() -> None:
    """Two tensors of tiny elements: one is the same again to 12 digits, the other is another number each time."""
    real = 1e-14 * torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def again(attempt: int, permuted: bool) -> MeasuredPass:
        return passed(large=[1.0], real=real * (1 + 1e-12), noise=[-1e-17])

    floors = measure_floors(passed(large=[1.0], real=real, noise=[1e-17]), again, 1e-9, permutes=False)
    assert is_determined(1.0, floors.gradients["large"]) and is_determined(1e-14, floors.gradients["real"])
    assert not is_determined(1e-17, floors.gradients["noise"])
    assert floors.gradients["noise"] == 2e-17 and floors.loss == 0.0


def test_one_that_stands_still_by_chance_is_tried_again() -> None:
    tried: list[int] = []

    def again(attempt: int, permuted: bool) -> MeasuredPass:
        tried.append(attempt)
        return passed(noise=1e-17 * attempt)

    assert measure_floors(passed(noise=0.0), again, 1e-9, permutes=False).gradients == {"noise": 1e-17}
    assert tried == [0, 1]


def test_samples_change_places_only_where_that_is_the_same_function() -> None:
    """One whose order counts would make everything undetermined."""

    def again(moved: float) -> Callable[[int, bool], MeasuredPass]:
        return lambda attempt, permuted: passed(large=[1.0 + moved * permuted], noise=[1e-17 * (1 + permuted)])

    once = passed(large=[1.0], noise=[0.0])
    assert measure_floors(once, again(1e-15), 1e-9, permutes=True).gradients["noise"] == 2e-17
    floors = measure_floors(once, again(1e-3), 1e-9, permutes=True)
    assert floors.gradients == {"large": 0.0, "noise": 1e-17}


def test_a_difference_is_held_against_size_and_floor() -> None:
    """Within the tolerance of the size, or within the margin of the floor; not in between."""
    assert (
        divide_by_scale(0.9e-9, error_scale(1.0, 0.0, 1e-9))
        < 1e-9
        < divide_by_scale(1.1e-9, error_scale(1.0, 0.0, 1e-9))
    )
    assert divide_by_scale(0.9 * MARGIN * 1e-17, error_scale(1e-17, 1e-17, 1e-9)) < 1e-9
    assert divide_by_scale(1.1 * MARGIN * 1e-17, error_scale(1e-17, 1e-17, 1e-9)) > 1e-9
    assert divide_by_scale(1e-30, error_scale(0.0, 0.0, 1e-9)) == float("inf") and divide_by_scale(0.0, 0.0) == 0.0


def test_floors_are_the_largest() -> None:
    most = RoundingFloors(1.0, {"a": 1.0}, {"b": 3.0}).elementwise_max(RoundingFloors(2.0, {"a": 0.5, "c": 1.0}))
    assert most == RoundingFloors(2.0, {"a": 1.0, "c": 1.0}, {"b": 3.0})
