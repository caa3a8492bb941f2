"""torch.compile is left out: the original modules run, under their plain names, and the user is told which they are."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.python_state.compiler import describe_left_out, without_compiler
from tests.support.workers.training import batch_of, classify, mlp, sgd


def refusing(*_: Any) -> Any:
    raise AssertionError("compiled")


def compiled(module: Any) -> Any:
    """With a backend that fails if it ever runs, as the usual one does not survive a fork."""
    return torch.compile(module, backend=refusing)


def inside() -> nn.Module:
    model = nn.Sequential(nn.Linear(6, 8), compiled(nn.Sequential(nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 4))
    model[2].compile(backend=refusing)
    return compiled(model.double())  # type: ignore[no-any-return]


def test_originals_run_under_their_own_names() -> None:
    plain = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.Tanh()), nn.Linear(8, 4))
    model = without_compiler(inside())
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert list(model.state_dict()) == list(plain.state_dict())
    model(batch_of(4)[0])
    assert without_compiler(plain) is plain and not describe_left_out(plain, classify)


def test_what_is_left_out_is_told() -> None:
    (note,) = describe_left_out(without_compiler(inside()), classify)
    assert note == "torch.compile is left out, and the original runs: the model, 1, 2"


def test_a_compiled_function_is_told_where_it_runs() -> None:
    gate = compiled(lambda x: x * torch.sigmoid(x))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, (gate(batch[0]), batch[1]))

    graph = TrainingProblem(mlp(6, 4), build_objectives(loss, sgd, None), batch_of(6)).capture()
    assert graph.notes[-1] == "torch.compile is left out, and the original runs: functions in forward or loss"
