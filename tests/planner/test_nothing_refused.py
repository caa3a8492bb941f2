"""No plan that a search finds is refused by the training that it was found for."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.cluster.spec import parse
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import NOTHING_FIXED, parse_fixed
from polylane.planner.find_plans import find_plans
from polylane.planner.search import SearchResult
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import OverAll

SAMPLES = 16


class Words(nn.Module):
    """A table that is looked up, with sparse gradients or none."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(50, 16, sparse=sparse), deep(16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.out(self.table(x.abs().long().clamp(max=49)[:, 0]))
        return y


class Counts(nn.Module):
    """Counts its calls in Python, in a buffer, or by a clock."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.register_buffer("passes", torch.zeros((), dtype=torch.long))
        self.calls, self.by = 0, by

    def forward(self, x: Tensor) -> Tensor:
        if self.by == "buffer":
            self.passes.add_(1)
            return torch.where(self.passes > 2, 2 * x, x)
        if self.by == "clock":
            return x * (1.0 + 0.0 * time.time())
        self.calls += 1
        return x * 2 if self.calls > 2 else x


def deep(width: int = 6, inner: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(2)]
    return nn.Sequential(nn.Linear(width, 32), *([inner] if inner else []), *layers, nn.Linear(32, 4))


def hooked() -> nn.Module:
    model = deep()
    next(model.parameters()).register_hook(lambda gradient: gradient.clamp(-1, 1))
    return model


def classify(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def negatives(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


def over_all(parameters: Any) -> torch.optim.Optimizer:
    return OverAll([p for _, p in parameters], lr=0.1)


TRAININGS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "ordinary": (deep, classify, sgd),
    "updates that depend on each other": (deep, classify, over_all),
    "sparse gradients": (lambda: Words(True), classify, lambda p: torch.optim.SGD([q for _, q in p], lr=0.1)),
    "samples meet": (deep, negatives, sgd),
    "state": (lambda: deep(inner=Counts("attribute")), classify, sgd),
    "a counter": (lambda: deep(inner=Counts("buffer")), classify, sgd),
    "a clock": (lambda: deep(inner=Counts("clock")), classify, sgd),
    "hooks": (hooked, classify, sgd),
}
KEYS = ("", "pipeline=2", "data=2", "shard=optimizer", "servers=2", "tensor=2")


def searched(name: str, keys: str) -> tuple[TrainingProblem, SearchResult | None]:
    """The training, and the plans that are found for it on two devices; None: none."""
    make, loss, optimizer = TRAININGS[name]
    example = (torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 4)
    problem = TrainingProblem(make(), build_objectives(loss, optimizer, None), example)
    fixed = parse_fixed(keys) if keys else NOTHING_FIXED
    captured = problem.captured(problem.capture(4))
    try:
        return problem, find_plans(
            captured, parse("2:a100-80g"), SAMPLES, TrainingOptions(), fewer=not keys, fixed=fixed
        )
    except PolylaneError as error:
        assert keys and "no plan" in str(error), error
        return problem, None


EVERY = [(name, keys) for name in TRAININGS for keys in KEYS]
QUICK = [(name, "") for name in ("sparse gradients", "samples meet", "a clock")]
QUICK += [(name, "pipeline=2") for name in ("updates that depend on each other", "state")]
SLOW = [pair for pair in EVERY if pair not in QUICK]


@pytest.mark.parametrize("pair", subsets.except_slow(EVERY, SLOW))
def test_what_a_search_finds_the_training_takes(pair: tuple[str, str]) -> None:
    name, keys = pair
    problem, found = searched(name, keys)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for ranked in () if found is None else found.ranked_plans:
            model, objectives = problem.model, problem.objectives
            assert compile_training(model, objectives, problem.example, ranked.plan).plan == ranked.plan


def test_what_no_plan_can_have_is_said_in_the_words_of_the_training() -> None:
    make, loss, _ = TRAININGS["hooks"]
    example = (torch.randn(SAMPLES, 6), torch.arange(SAMPLES) % 4)
    problem = TrainingProblem(make(), build_objectives(loss, sgd, None), example)
    with pytest.raises(PolylaneError, match=r"no plan is found that the training allows: .*servers sum the gradient"):
        find_plans(
            problem.captured(problem.capture(4)), parse("2:a100-80g"), SAMPLES, TrainingOptions(),
            fewer=False, fixed=parse_fixed("servers=1,data=2"),
        )  # fmt: skip
