"""Functions that draw by numpy or Python are nodes, whose numbers are the same however a batch is divided."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx, nn

from polylane.compile.objectives import Objective
from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import run_code, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.samples.derivation import derive_composition
from polylane.verify.verify import verify
from tests.support import subsets


def draw_spans(shape: tuple[int, int], length: int) -> np.ndarray[Any, Any]:
    """A span of each row, drawn row after row, as SpecAugment masks are."""
    rows, columns = shape
    mask = np.zeros((rows, columns), dtype=bool)
    for row in range(rows):
        first = np.random.randint(columns - length + 1)
        mask[row, first : first + length] = True
    return mask


def draw_scale() -> float:
    return random.uniform(0.5, 1.5)


def draw_beside(x: Tensor) -> Tensor:
    return torch.from_numpy(np.random.rand(*x.shape).astype(np.float32))


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 1)
        self.hidden = nn.Parameter(torch.randn(4))

    def mask(self, h: Tensor) -> Tensor:
        drawn = torch.tensor(draw_spans((h.shape[0], h.shape[1]), 2), dtype=torch.bool, device=h.device)
        h[drawn] = self.hidden.to(h.dtype)
        return h

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(self.mask(self.first(x)) * draw_scale())
        return y


class Beside(Masked):
    """Draws beside a value of the samples, which no worker has of the whole batch."""

    def mask(self, h: Tensor) -> Tensor:
        return h * draw_beside(h.detach())


def draw_by_count(weight: Tensor, samples: int) -> Tensor:
    return weight * float(np.random.rand() * samples)


class Counting(Masked):
    """Draws of a weight, and of the number of samples, of which a part has its own."""

    def mask(self, h: Tensor) -> Tensor:
        return h * draw_by_count(self.hidden.detach(), h.shape[0])


class Branching(Masked):
    """Goes one of two ways by what it draws."""

    def mask(self, h: Tensor) -> Tensor:
        return h if draw_scale() > 1 else 2 * h


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def losses(graph: Graph, model: nn.Module, batch: Tensor, part: SampleSlice) -> Tensor:
    leaves, rebuild = flatten(batch[part.first : part.first + part.samples])
    table = tensors_by_role(ModelWithLoss(model, mean, rebuild), graph.code.constants, leaves)
    result: Tensor = run_code(fx.GraphModule(nn.Module(), graph.code.fx), graph.code.fx, table, part)[0]
    return result


def test_parts_have_the_numbers_of_the_whole() -> None:
    model = Masked().double()
    batch = torch.randn(7, 5, 3, dtype=torch.float64)
    graph = capture(model, mean, batch)
    assert not graph.is_opaque and not graph.notes
    assert [node.op for node in graph.nodes].count("draw") == 2 and derive_composition(graph).is_proven
    state = np.random.get_state()[2], random.getstate()
    whole = SampleSlice(7, batch=7, step=3, seed=1)
    loss = losses(graph, model, batch, whole)
    parts = [
        dataclasses.replace(whole, samples=n, first=at, microbatch=i) for i, (at, n) in enumerate([(0, 3), (3, 4)])
    ]
    together = sum(part.samples / 7 * losses(graph, model, batch, part) for part in parts)
    assert abs((loss - together).item()) < 1e-12
    assert loss.item() != float(losses(graph, model, batch, dataclasses.replace(whole, step=4)).detach())
    assert (np.random.get_state()[2], random.getstate()) == state  # the user's own generators are left alone


@pytest.mark.parametrize("make", [Beside, Counting, Branching])
def test_what_needs_more_than_sizes_is_not_divided(make: type[nn.Module]) -> None:
    graph = capture(make(), mean, torch.randn(5, 4, 3))
    assert not derive_composition(graph).is_proven
    assert graph.is_opaque == (make is Branching)


@pytest.mark.parametrize("plan", subsets.one_in(3, ["data=2", "pipeline=2,microbatches=3", "tensor=2"], first=1))
def test_plans_are_exact(plan: str) -> None:
    objective = Objective("loss", mean, lambda parameters: torch.optim.SGD(list(parameters), lr=0.1))
    torch.manual_seed(0)
    assert verify(Masked(), objective, [torch.randn(7, 5, 3) for _ in range(2)], plan).passed


class CheckedAndDrawn(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 1e6:
            raise ValueError("large")
        drawn = torch.from_numpy(draw_spans((x.shape[0], x.shape[1]), 2)).to(x.device)
        return super().forward(torch.where(drawn, 0, x))


def test_predictions_have_checks_and_draws() -> None:
    graph = capture(CheckedAndDrawn(5, 3).to("meta"), mean, torch.randn(4, 5))
    assert [node.op for node in graph.nodes if node.op in ("check", "draw")] == ["check", "draw"]
