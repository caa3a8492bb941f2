"""Rules that round what travels: no proof takes them for those of one device, and a model learns by them as well."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.errors import PolylaneError
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.training import batch_of, classify, mlp, plainly, sgd, trained

BATCHES = [batch_of(8, seed=i) for i in range(6)]


@pytest.mark.parametrize("words", ["wire=bfloat16", "wire=float16", "compress=powersgd:2", "compress=top_k:0.1"])
def test_no_proof(words: str) -> None:
    with pytest.raises(PolylaneError, match="lose digits on their way"):
        verify(mlp(6, 8, 4), Objective("loss", classify, sgd), BATCHES[:1], f"data=2,{words}")


# How far from one device a step may be, by how gradients travel.
FAR = {"wire=bfloat16": 1e-2, "wire=float16": 1e-3, "compress=powersgd:8:0": 1e-9, "compress=top_k:1": 1e-9}


@pytest.mark.parametrize(
    ("plan", "words"),
    subsets.pairs(["data=2", "data=3", "data=2,pipeline=2,microbatches=2", "data=2,tensor=2"], list(FAR)),
)
def test_near_one_device(plan: str, words: str) -> None:
    far = FAR[words]
    reference = plainly(mlp(6, 8, 4), BATCHES)
    workers = trained(mlp(6, 8, 4), f"{plan},{words}", BATCHES)
    for worker in workers:
        for name, value in reference.state.items():
            error = float((worker.state[name] - value).abs().max() / value.abs().max())
            assert error < far, f"{name}: {error:.1e}"
    exact = far <= 1e-9
    other = max(float((workers[0].state[name] - value).abs().max()) for name, value in reference.state.items())
    assert exact or other > 1e-12  # something was rounded


@pytest.mark.parametrize("scale", [1e8, 1e-12])
@pytest.mark.parametrize("plan", ["data=2", "data=3"])
def test_the_size_of_gradients_does_not_matter_to_float16(plan: str, scale: float) -> None:
    """Of a loss that is so many times as large, with a rate that is as many times smaller: the same weights."""

    def scaled(model: nn.Module, batch: Any) -> Tensor:
        return classify(model, batch) * scale

    def as_slow(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for _, p in parameters], lr=0.1 / scale)

    reference = plainly(mlp(6, 8, 4), BATCHES, loss=scaled, optimizer=as_slow)
    for worker in trained(mlp(6, 8, 4), f"{plan},wire=float16", BATCHES, loss=scaled, optimizer=as_slow):
        for name, value in reference.state.items():
            assert float((worker.state[name] - value).abs().max() / value.abs().max()) < 1e-3


def test_error_feedback_comes_back_through_a_job() -> None:
    """A tenth of the entries in each step, and the weights still move as far as those of one device."""
    torch.manual_seed(0)
    model = nn.Linear(6, 4).double()
    before = model.weight.detach().clone()
    batches = [BATCHES[0]] * 60
    reference = plainly(model, batches, optimizer=slow_sgd)
    (worker, *_) = trained(model, "data=2,compress=top_k:0.1", batches, optimizer=slow_sgd)
    moved = reference.state["weight"] - before
    assert float((worker.state["weight"] - reference.state["weight"]).norm() / moved.norm()) < 0.2


def slow_sgd(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.01)
