"""Gradients of the whole model from one call, whatever the plan: those of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import polylane
from polylane.runtime.job import Job
from polylane.runtime.parameters import broadcast
from tests.support import subsets
from tests.support.workers.training import adamw, batch_of, classify, mlp, plainly, sgd, workers

PLANS = [
    "data=1",
    "data=2",
    "pipeline=2,microbatches=2",
    "tensor=2",
    "data=2,pipeline=2,tensor=2,microbatches=2",
    "[data=2 | tensor=2 | 1],microbatches=2",
]


def given(job: Job) -> dict[str, Tensor | None]:
    job.step(batch_of(8))
    return job.whole_gradients()


@pytest.mark.parametrize("plan", subsets.one_in(2, PLANS, first=1))
def test_every_worker_gets_all_of_them(plan: str) -> None:
    model = mlp(6, 9, 8, 8, 4)
    reference = plainly(model, [batch_of(8)], clip_norm=0.1).gradients
    for gradients in workers(given, model, plan, clip_norm=0.1):
        assert list(gradients) == list(reference)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, reference[name], rtol=1e-10, atol=1e-12, msg=name)


@pytest.mark.parametrize("nbytes", [0, 8 * 70, 1 << 20])
def test_however_many_sums_are_under_way(nbytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One at a time, a few, all: the weights of the whole model are the same bits, and so are its gradients."""
    monkeypatch.setattr(broadcast, "BYTES_IN_FLIGHT", nbytes)

    def work(job: Job) -> tuple[dict[str, Tensor], dict[str, Tensor | None]]:
        return job.state_dict(), given(job)

    model = mlp(6, 9, 8, 4)
    reference = plainly(model, [batch_of(8)]).gradients
    for state, gradients in workers(work, model, "pipeline=2,microbatches=2"):
        assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
        torch.testing.assert_close(gradients, reference, rtol=1e-10, atol=1e-12)


class Ends(nn.Module):
    """A weight tied between both ends; one parameter is frozen, one reaches the loss through detach only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8, bias=False), nn.Linear(8, 6), nn.Linear(6, 8, bias=False)
        self.aside, self.frozen = nn.Linear(6, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.frozen(torch.tanh(self.first(x)))
        return self.last(self.middle(y)) + self.aside(x).detach()


@pytest.mark.parametrize("plan", subsets.one_in(2, PLANS))
def test_tied_ones_once_and_none_where_there_is_none(plan: str) -> None:
    torch.manual_seed(0)
    model = Ends().double()
    reference = plainly(model, [batch_of(8)]).gradients
    for gradients in workers(given, model, plan):
        assert set(gradients) <= set(reference) and gradients["frozen.weight"] is None  # the optimizer has it
        assert gradients["aside.weight"] is None and reference["aside.weight"] is None
        for name, gradient in reference.items():
            if gradient is not None:
                torch.testing.assert_close(gradients[name], gradient, rtol=1e-10, atol=1e-12, msg=name)


def test_they_are_of_the_objective_that_is_named() -> None:
    def some(parameters: object) -> torch.optim.Optimizer:
        return adamw((name, p) for name, p in parameters if name.startswith("2"))  # type: ignore[attr-defined]

    def work(job: Job) -> tuple[list[str], list[str]]:
        job.step(batch_of(8), "one")
        job.step(batch_of(8), "two")
        return list(job.whole_gradients("one")), list(job.whole_gradients("two"))

    losses, optimizers = {"one": classify, "two": classify}, {"one": sgd, "two": some}
    every = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    for plan in ("data=1", "pipeline=2,microbatches=2"):
        for own in workers(work, mlp(6, 8, 8, 4), plan, loss=losses, optimizer=optimizers):
            assert own == (every, ["2.weight", "2.bias"])


def test_what_is_given_is_a_copy() -> None:
    job = polylane.parallelize(mlp(6, 8, 4), classify, sgd, example=batch_of(8))
    gradient = given(job)["0.weight"]
    assert gradient is not None and gradient.device.type == "cpu"
    gradient.zero_()
    assert job.gradients()["0.weight"].abs().sum() > 0  # type: ignore[union-attr]
