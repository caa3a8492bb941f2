"""A training problem: how many samples a step has, and the graphs that are captured of it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from tests.support.workers.training import batch_of, classify, mlp, sgd


def problem(samples: int = 8, batch_size: int | None = None, optimizer: object = sgd) -> TrainingProblem:
    return TrainingProblem(mlp(6, 8, 4), build_objectives(classify, optimizer, None), batch_of(samples), batch_size)  # type: ignore[arg-type]


def test_a_step_has_the_examples_samples_unless_it_is_said_otherwise() -> None:
    assert problem(8).samples == 8
    assert problem(8, batch_size=32).samples == 32
    assert compile_training(problem(8, batch_size=32), "data=2,microbatches=16").plan.microbatches == 16


@pytest.mark.parametrize(("asked", "shown"), [(None, 8), (4, 4), (100, 8)])
def test_a_graph_is_captured_with_as_many_samples_as_asked_for(asked: int | None, shown: int) -> None:
    assert problem(8).capture(asked).samples == shown


def test_what_the_optimizer_does_not_take_is_not_trainable() -> None:
    def first(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        return torch.optim.SGD([parameters[0][1]], lr=0.1)

    graph = problem(optimizer=first).capture(2)
    assert [info.trainable for info in graph.parameters.values()] == [True, False, False, False]


def test_what_costs_depend_on() -> None:
    captured = problem().captured(problem().capture(2))
    assert (captured.optimizer.factory, captured.optimizer.outside) == (sgd, ())  # type: ignore[attr-defined]
    assert (captured.whole, captured.pins, captured.profile) == ({}, {}, None)


def test_an_optimizer_that_fails_is_one_sentence() -> None:
    with pytest.raises(PolylaneError, match=r"optimizer\(parameters\) fails: ZeroDivisionError"):
        problem(optimizer=lambda parameters: 1 / 0).capture()
