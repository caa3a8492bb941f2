"""Leaves of a batch that are no tensors: carried along unread, they are no part of its form; read, each value is."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.runtime.job import Job
from tests.support.workers.training import mlp, sgd, workers

SCALES = {"a": 1.0, "b": 3.0}
ROWS = 8


def batch_with(**more: Any) -> dict[str, Any]:
    """A batch of some samples with further entries."""
    torch.manual_seed(0)
    return {"x": torch.randn(ROWS, 4, dtype=torch.float64), "y": torch.randn(ROWS, 2, dtype=torch.float64), **more}


def error_of(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """The mean square of the difference, which reads tensors alone."""
    loss: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return loss


def moves(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Asks for types, as helpers do that move a batch to a device."""
    moved = {name: value.to(value.dtype) if isinstance(value, Tensor) else value for name, value in batch.items()}
    assert all(isinstance(name, str) and hasattr(name, "split") for name in batch["names"])
    return error_of(model, moved)


def branches(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return error_of(model, batch) * (2.0 if batch["names"][0] == "b0" else 1.0)


def looks_up(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return error_of(model, batch) * SCALES.get(batch["names"][0][0], 5.0)


def swallows(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    """Reads a name where nobody hears of an error."""
    scale = 1.0
    try:
        scale = SCALES["".join(batch["names"])[0]]
    except Exception:
        scale = 2.0
    return error_of(model, batch) * scale


def asks_for_exact_types(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return error_of(model, batch) * (2.0 if type(batch["names"][0]) is str and batch["names"][0] == "b0" else 1.0)


def formats(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return error_of(model, batch) * len(f"{batch['names'][0]}")


def multiplies(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return error_of(model, batch) * batch["scale"]


def names_of(letter: str) -> list[str]:
    return [f"{letter}{i}" for i in range(ROWS)]


@pytest.mark.parametrize("loss", [error_of, moves])
def test_what_is_not_read_is_carried(loss: Callable[..., Tensor]) -> None:
    batch = batch_with(names=names_of("a"), at=3.5, raw=b"some bytes", path=None)
    carried = capture(mlp(4, 2), loss, batch).code.carried
    assert carried == set(range(2, 2 + ROWS + 2))  # None is compared by identity, and stays part of the form


@pytest.mark.parametrize("loss", [branches, looks_up, swallows, asks_for_exact_types, formats])
def test_what_is_read_is_part_of_the_form(loss: Callable[..., Tensor]) -> None:
    assert not capture(mlp(4, 2), loss, batch_with(names=names_of("a"))).code.carried


def test_a_number_is_read_beside_names_that_are_not() -> None:
    carried = capture(mlp(4, 2), multiplies, batch_with(scale=2.0, names=names_of("a"))).code.carried
    assert carried == set(range(3, 3 + ROWS))


@pytest.mark.parametrize("value", [b"bytes", Path("a"), numpy.zeros(3), datetime.date(2026, 1, 1), {1}, object()])
def test_what_export_takes_for_no_input_is_no_hindrance(value: Any) -> None:
    found = capture(mlp(4, 2), error_of, batch_with(of=value))
    assert found.code.carried == {2} and not found.is_opaque


def losses_of(job: Job, letters: str, loss: Callable[..., Tensor]) -> tuple[list[float], list[float], int]:
    """The losses of steps whose batches have names with these letters, those of plain PyTorch, and captured graphs."""
    model = mlp(4, 2)
    optimizer = sgd(model.named_parameters())
    expected, found = [], []
    for letter in letters:
        batch = batch_with(names=names_of(letter))
        value = loss(model, batch)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        expected.append(float(value.detach()))
        found.append(job.step(batch).loss)
    return found, expected, len(job._role._cache)


@pytest.mark.parametrize(
    ("loss", "graphs", "plan"),
    [
        (error_of, 1, "data=2,microbatches=2"),
        (branches, 4, "pipeline=2,microbatches=2"),
        pytest.param(error_of, 1, "pipeline=2,microbatches=2", marks=pytest.mark.slow),
        pytest.param(branches, 4, "data=2,microbatches=2", marks=pytest.mark.slow),
    ],
)
def test_training_captures_for_values_that_are_read_alone(plan: str, loss: Callable[..., Tensor], graphs: int) -> None:
    example = batch_with(names=names_of("a"))
    for found, expected, count in workers(
        lambda job: losses_of(job, "abcdba", loss), mlp(4, 2), plan, loss=loss, example=example
    ):
        assert found == pytest.approx(expected, rel=1e-10)
        assert count == graphs
