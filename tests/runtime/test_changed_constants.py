"""What a capture took for constant and the user changes between steps: every step has what one device would have."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polylane.runtime.job import Job
from tests.support.workers.training import sgd, workers

TABLE: dict[str, Any] = {"array": np.array([1.0]), "mask": torch.ones(4, dtype=torch.bool)}


class Scale:
    def __init__(self, factor: float) -> None:
        self.factor = factor


ANNEALED = {"factor": 1.0}


def annealed() -> float:
    return ANNEALED["factor"]


# As configurations are nested: sections in files in runs.
OPTIONS = Scale([{"train": ({"schedule": Scale([[1.0]])},)}])  # type: ignore[arg-type]
CHOSEN = {"plain": None, "factors": (abs, [annealed])}
TEACHER = nn.Linear(3, 1, bias=False, dtype=torch.float64)


def nested_factor() -> list[float]:
    return OPTIONS.factor[0]["train"][0]["schedule"].factor[0]  # type: ignore[index, no-any-return]


def replace_data() -> None:
    TEACHER.weight.data = TEACHER.weight.data * 0.5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3).double()
        self.array, self.values, self.nested = np.array([1.0]), [1.0], [[1.0]]
        self.tensors, self.objects = [torch.ones((), dtype=torch.float64)], (Scale(1.0),)
        self.names, self.act, self.scale = {"a"}, torch.relu, Scale(1.0)
        self.mask = torch.ones(4, dtype=torch.bool)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.linear(x)) * float(self.array[0]) * self.values[0] * self.nested[0][0] * self.tensors[0]
        y = y * self.objects[0].factor * self.scale.factor * (2.0 if "b" in self.names else 1.0)
        y = y * (3.0 if bool(self.mask.all()) else 1.0) * (5.0 if bool(TABLE["mask"].all()) else 1.0)
        y = y * float(TABLE["array"][0]) * CHOSEN["factors"][1][0]()  # type: ignore[index, operator]
        y = y * OPTIONS.factor[0]["train"][0]["schedule"].factor[0][0]  # type: ignore[index]
        return torch.cat([y, TEACHER(y).detach()], dim=-1)


def replace_values(model: Any) -> None:
    model.values = [1.2]


def replace_function(model: Any) -> None:
    model.act = torch.tanh


def replace_object(model: Any) -> None:
    model.scale = Scale(0.9)


CHANGES: list[Callable[[Any], Any]] = [
    lambda model: model.array.fill(1.1),
    replace_values,
    lambda model: model.nested[0].__setitem__(0, 1.3),
    lambda model: model.tensors[0].fill_(0.8),
    lambda model: setattr(model.objects[0], "factor", 0.7),
    lambda model: model.names.add("b"),
    replace_function,
    replace_object,
    lambda model: setattr(model.scale, "factor", 1.4),
    lambda model: model.mask.__setitem__(0, False),
    lambda model: TABLE["mask"].__setitem__(1, False),
    lambda model: TABLE["array"].fill(1.5),
    lambda model: ANNEALED.__setitem__("factor", 1.1),
    lambda model: TEACHER.weight.detach().mul_(2.0),
    lambda model: replace_data(),
    lambda model: nested_factor().__setitem__(0, 1.2),
]


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


@pytest.mark.filterwarnings("ignore:.*is another one again")
def test_every_step_has_what_is_there_now() -> None:
    torch.manual_seed(0)
    model, batch = Model(), torch.randn(4, 6, dtype=torch.float64)

    def losses(own: nn.Module, step: Callable[[], float]) -> list[float]:
        TABLE["mask"].fill_(True)
        TABLE["array"].fill(1.0)
        nested_factor()[0] = 1.0
        TEACHER.weight.data, ANNEALED["factor"] = torch.ones(1, 3, dtype=torch.float64), 1.0
        found = [step()]
        for change in CHANGES:
            change(own)
            found.append(step())
        return found

    plain = copy.deepcopy(model)
    optimizer = sgd(list(plain.named_parameters()))

    def plain_step() -> float:
        optimizer.zero_grad()
        value = loss(plain, batch)
        value.backward()
        optimizer.step()
        return value.item()

    def work(job: Job) -> list[float]:
        return losses(job.model, lambda: job.step(batch).loss)

    (found,) = workers(work, model, "data=1", loss=loss, example=batch)
    assert found == pytest.approx(losses(plain, plain_step), rel=1e-12)


class Listed(nn.Module):
    """A parameter and a buffer in a list besides, as recurrent layers of torch have theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6, 3, dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(3, dtype=torch.float64))
        self.listed = [self.weight, self.shift]

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.listed[0] + self.listed[1]


@pytest.mark.parametrize("make", [Listed, lambda: nn.LSTM(6, 3).double()])
def test_weights_that_a_list_holds_besides_are_no_constants(make: Callable[[], nn.Module]) -> None:
    """They move with every step, and the graph reads them: nothing is captured again."""
    model, batch = make(), torch.randn(4, 6, dtype=torch.float64)

    def work(job: Job) -> tuple[list[float], int]:
        return [job.step(batch).loss for _ in range(3)], len(job._role._cache)

    first = (lambda model, x: loss(lambda y: model(y)[0], x)) if isinstance(model, nn.LSTM) else loss  # type: ignore[arg-type]
    ((found, graphs),) = workers(work, model, "data=1", loss=first, example=batch)
    assert found[0] > found[1] > found[2] and graphs == 1
