"""Batches and results of the user's own classes: their tensors are recorded, wherever they are held."""

from __future__ import annotations

from collections import UserDict
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.errors import PolylaneError
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.script.loops import Prepare, samples


@dataclass
class Prediction:
    scores: Tensor
    hidden: dict[str, Tensor]
    name: str = "prediction"


class Classifier(nn.Module):
    """Takes a batch of any class, and returns a result of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 8), nn.Linear(8, 3)

    def forward(self, batch: Any) -> Prediction:
        x = batch["x"] if isinstance(batch, UserDict) else batch.x
        hidden = self.body(x).tanh()
        return Prediction(self.head(hidden), {"hidden": hidden})


class AddingClassifier(Classifier):
    def forward(self, batch: Any) -> Prediction:
        prediction = super().forward(batch)
        batch.hidden = prediction.hidden
        return prediction


def train(prepare: Prepare, make_batch: Any, model_class: type[nn.Module] = Classifier) -> list[float]:
    torch.manual_seed(0)
    model: Any = model_class().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    numbers = list[float]()
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(samples(), batch_size=12):
            optimizer.zero_grad()
            prediction = model(make_batch(x=x))
            loss = F.cross_entropy(prediction.scores, y) + 0.01 * prediction.hidden["hidden"].pow(2).mean()
            loss.backward()
            optimizer.step()
            numbers += [loss.item(), prediction.scores.argmax(1).eq(y).sum().item(), len(prediction.name)]
    return numbers


@pytest.mark.parametrize(("make_batch", "plan"), [(SimpleNamespace, "data=2"), (UserDict, "pipeline=2")])
def test_batches_and_results_of_other_classes(make_batch: Any, plan: str) -> None:
    expected = train(lambda *objects: objects, make_batch)

    def run(context: WorkerContext) -> list[float]:
        return train(partial(polylane.prepare, plan=plan), make_batch)

    for numbers in fork_workers(run, 2):
        assert numbers == pytest.approx(expected, rel=1e-9)


def test_a_model_that_adds_to_its_batch_is_refused() -> None:
    def run(context: WorkerContext) -> None:
        train(partial(polylane.prepare, plan="data=1"), SimpleNamespace, AddingClassifier)

    with pytest.raises(PolylaneError, match=r"changes a dict, list or object.*test_argument_trees\.py:\d+"):
        fork_workers(run, 1)
