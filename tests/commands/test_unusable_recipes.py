"""Recipes with which nothing can be trained, whatever the plan, are one sentence before any worker starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polylane.commands import user_inputs as inputs
from polylane.commands.requests import RecipeRequest
from polylane.compile.unusable_modules import refuse_unusable_modules, refuse_unusable_settings
from polylane.errors import PolylaneError
from polylane.runtime.data.loader import batch_sizes
from polylane.runtime.data.sample_order import sample_order
from polylane.runtime.workers.stop_request import Stopped

RECIPE = """
import torch

class Halt(BaseException):
    pass

class Points(list):
    pass

AT_IMPORT
def model():
    IN_MODEL
    return torch.nn.Linear(2, 1)

def data(split):
    IN_DATA
    return [(torch.ones(2), torch.ones(1))] * 8

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    IN_OPTIMIZER
    return torch.optim.SGD([p for _, p in parameters], lr=0.1)
"""
PLACES = ("AT_IMPORT", "IN_MODEL", "IN_DATA", "IN_OPTIMIZER")


@pytest.fixture(autouse=True)
def settings_of_torch() -> Iterator[None]:
    yield
    torch.set_grad_enabled(True)
    torch.set_default_device(None)


def open_with(folder: Path, place: str, line: str) -> None:
    text = RECIPE
    for each in PLACES:
        text = text.replace(each, line if each == place else "")
    path = folder / f"recipe_{place.lower()}.py"
    path.write_text(text)
    request = RecipeRequest(recipe=str(path), batch=4, settings=(), seed=0, json=False)
    inputs.open_problem(inputs.open_recipe(request), request)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("torch.set_grad_enabled(False)", "gradients are switched off"),
        ("torch.set_default_device('meta')", "torch's default device is meta"),
    ],
)
def test_settings_that_user_code_leaves(place: str, line: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        open_with(tmp_path, place, line)


def test_settings_that_end_with_their_block_are_fine(tmp_path: Path) -> None:
    open_with(tmp_path, "IN_DATA", "torch.no_grad().__enter__().__exit__ if False else None")
    with torch.inference_mode(), pytest.raises(PolylaneError, match="a mode of inference"):
        refuse_unusable_settings()
    refuse_unusable_settings()


@pytest.mark.parametrize("place", PLACES)
def test_an_exception_of_ones_own_is_one_sentence(place: str, tmp_path: Path) -> None:
    with pytest.raises(PolylaneError, match=r"recipe_.*Halt: enough"):
        open_with(tmp_path, place, "raise Halt('enough')")


@pytest.mark.parametrize("interruption", [KeyboardInterrupt(), Stopped(15)])
def test_an_interruption_is_nobodys_error(interruption: BaseException, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("builtins.interruption", interruption, raising=False)
    for place in PLACES[:2]:
        with pytest.raises(type(interruption)):
            open_with(tmp_path, place, "raise interruption")


def of_parameter(value: torch.Tensor, name: str = "w") -> nn.Module:
    inner = nn.Linear(2, 2)
    inner.register_parameter(name, nn.Parameter(value))
    return nn.Sequential(inner)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (of_parameter(torch.zeros(1).expand(4)), "several elements of the parameter 0.w are the same memory"),
        (of_parameter(torch.zeros(3, 1).expand(3, 2)), "several elements of the parameter 0.w are the same memory"),
        (of_parameter(torch.eye(3).to_sparse()), "the parameter 0.w is torch.sparse_coo, and only dense ones"),
        (of_parameter(torch.zeros(2), "w\ud83d"), r"the parameter 0.w\\ud83d has a name that is no text"),
    ],
)
def test_parameters_that_cannot_be_updated_or_written(model: nn.Module, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        refuse_unusable_modules(model)


@pytest.mark.parametrize(
    "value", [torch.ones(2, 3).t(), torch.ones(8)[::2], torch.zeros(0, 3), torch.ones(1, 4)[:, :1]]
)
def test_parameters_in_other_orders_are_fine(value: torch.Tensor) -> None:
    refuse_unusable_modules(of_parameter(value, "w\0x"))


def test_a_dataset_without_an_end_that_has_a_length() -> None:
    for count in (lambda: batch_sizes(2**62, 16), lambda: sample_order(2**62, 0, 0)):
        with pytest.raises(PolylaneError, match=r"len\(\) of the dataset is 4,611,686,018,427,387,904"):
            count()
