"""The plan for a model that is here: of the workers that it may take, and with microbatches that the model takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from polylane.auto import choose as auto
from polylane.cluster.spec import parse
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.plan.fixed_keys import NOTHING_FIXED, parse_fixed
from polylane.planner.find_plans import find_plans
from polylane.planner.search import SearchResult
from tests.support import subsets
from tests.support.workers.training import batch_of, classify, mlp, sgd


class Branches(nn.Module):
    """Two of them, for which two workers are enough."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 8)) for _ in range(2))
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.left(x) * self.right(x))


def branches() -> nn.Module:
    return Branches().double()


def normalized() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()


def deep() -> nn.Module:
    return mlp(6, *[8] * 6, 4)


def problem(model: nn.Module, samples: int = 8) -> TrainingProblem:
    return TrainingProblem(model, build_objectives(classify, sgd, None), batch_of(samples))


def chosen(model: nn.Module, workers: range | tuple[int, ...], cluster: str, samples: int = 8) -> SearchResult:
    """On devices that the weights are not on, whose times are the model's of them: the same every time."""
    return auto.choose(problem(model, samples), workers, parse(cluster))


MODELS: dict[str, Callable[[], nn.Module]] = {"deep": deep, "branches": branches, "normalized": normalized}


@cache
def chosen_of_four(model: str, workers: range | tuple[int, ...]) -> SearchResult:
    return chosen(MODELS[model](), workers, "4:a100-80g")


@pytest.mark.parametrize(
    ("workers", "model"), subsets.one_in(4, subsets.pairs([1, 2, 3, 4], ["deep", "branches"]), first=1, several=True)
)
def test_only_plans_of_so_many_workers(workers: int, model: str) -> None:
    answer = chosen_of_four(model, (workers,))
    assert {candidate.workers for candidate in (*answer.fitting_candidates, *answer.too_large_candidates)} == {workers}
    assert {found.plan.workers for found in answer.ranked_plans} == {workers}
    times = [found.prediction.seconds for found in answer.ranked_plans]
    assert times == sorted(times)


def test_with_a_choice_the_best_of_all_is_no_worse_than_the_best_of_each() -> None:
    free = chosen_of_four("deep", range(1, 5)).ranked_plans[0]
    for workers in range(1, 5):
        bound = chosen_of_four("deep", (workers,)).ranked_plans[0]
        assert free.prediction.seconds <= 1.011 * bound.prediction.seconds, "but for what frugality may cost"


def test_microbatches_have_the_samples_that_the_model_needs() -> None:
    answer = chosen(normalized(), (2,), "2:a100-80g", samples=3)
    assert {candidate.microbatches for candidate in answer.fitting_candidates} == {1}
    with pytest.raises(PolylaneError, match=r"a batch has 1 sample, but .* needs 2 samples at once"):
        chosen(normalized(), (1,), "1:a100-80g", samples=1)


def test_what_is_measured_has_the_samples_that_the_model_needs() -> None:
    model = normalized()
    graph = capture(model, classify, batch_of(4))
    profile = auto.measure(graph, problem(model))
    assert profile is not None and profile.samples == (2, 4, 8)


def test_weights_on_another_device_are_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "measure", lambda *given: pytest.fail("times of the wrong device"))
    chosen(deep(), (1,), "1:a100-80g")


def test_a_model_without_weights() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model = model.double()
    assert chosen(model, (2,), "2:cpu").ranked_plans[0].plan.workers == 2


def test_of_keys_that_no_plan_has_it_is_said() -> None:
    with pytest.raises(PolylaneError, match=r"no plan for 1 worker and batches of 8 with data=2: fix less"):
        auto.choose(problem(deep()), (1,), parse("2:a100-80g"), fixed=parse_fixed("data=2"))


def test_nothing_fits_is_said_with_what_is_needed() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 60_000), nn.Linear(60_000, 60_000), nn.Linear(60_000, 4)).double()
    with pytest.raises(
        PolylaneError,
        match=r"plan auto: nothing fits on 2 workers with [\d.]+ GiB each: .*recompute=full\) needs [\d.]+ GiB",
    ):
        chosen(model, (2,), "2:cpu")


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_recomputation_that_is_fixed_is_kept(mode: str) -> None:
    answer = auto.choose(problem(deep()), (2,), parse("2:a100-80g"), fixed=parse_fixed(f"recompute={mode}"))
    assert {found.plan.recompute for found in answer.ranked_plans} == {mode}


@pytest.mark.parametrize(
    ("keys", "model"),
    subsets.one_in(3, subsets.pairs(["", "recompute=full", "shard=optimizer"], ["normalized", "deep"]), several=True),
)
def test_it_is_the_search_of_polylane_plan(keys: str, model: str) -> None:
    """The same training on the same machines has the same plans, whoever asks for them."""
    training, cluster = problem(MODELS[model]()), parse("4:a100-80g")
    fixed = parse_fixed(keys) if keys else NOTHING_FIXED
    here = auto.choose(training, range(1, 5), cluster, fixed=fixed)
    planned = find_plans(training.captured(training.capture(4)), cluster, 8, TrainingOptions(), fixed=fixed)
    assert [found.plan for found in here.ranked_plans] == [found.plan for found in planned.ranked_plans]
    assert here.compared_count == planned.compared_count
