"""The user's own Python: whole on every replica, or divided as the plan asks by name, and then watched."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError, WorkerFailed
from tests.support import subsets
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, trained


class Experts(nn.Module):
    """Each sample goes to one of two experts; which of them are computed depends on the batch."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.experts, self.looks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2)), looks

    def forward(self, x: Tensor) -> Tensor:
        chosen, out = (x[:, 0] > 0).long(), torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]))
        if self.looks and bool(x.abs().max() > 40):
            out = out - out.mean(0)
        return out


class Around(nn.Module):
    """The experts between two layers."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.first, self.experts, self.last = nn.Linear(6, 8), Experts(looks), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.experts(self.first(x)))


def model(looks: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Around(looks).double()


BATCHES = [batch_of(7, seed) for seed in range(4)]


@pytest.mark.parametrize(
    "plan",
    subsets.one_in(
        2,
        [
            "data=2",
            "data=3,per_sample=experts",
            "pipeline=2,microbatches=3,per_sample=experts",
            "data=2,pipeline=2,microbatches=2,per_sample=model",
            "data=2,shard=parameters,per_sample=experts",
        ],
    ),
)
def test_experts_are_those_of_one_device(plan: str) -> None:
    assert_same(trained(model(), plan, BATCHES)[0], plainly(model(), BATCHES))


@pytest.mark.parametrize(
    ("plan", "told"),
    [
        ("pipeline=2,microbatches=3", "say so with per_sample=experts in the plan"),
        (
            "data=2,per_sample=first",
            "no module of that name is kept as your own Python; these do: experts",
        ),
    ],
)
def test_what_nothing_shows_is_asked_for_by_name(plan: str, told: str) -> None:
    with pytest.raises(PolylaneError, match=told):
        trained(model(), plan, BATCHES)


def large(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] * 100, batch[1]


LEAVE = r": leave it out of per_sample"


@pytest.mark.parametrize(
    ("plan", "advice"),
    [
        ("data=2,per_sample=experts", rf"{LEAVE}(?!, and)"),  # no word of microbatches, of which there are none
        ("pipeline=2,microbatches=2,per_sample=experts", rf"{LEAVE}, and use microbatches=1"),
    ],
)
def test_a_module_that_looks_at_its_batch_later_stops_the_run(plan: str, advice: str) -> None:
    """Innocent until the third batch: the witness of step 4 sees it."""
    batches = [*BATCHES[:2], large(BATCHES[2]), large(BATCHES[3])]
    with pytest.raises((PolylaneError, WorkerFailed), match=rf"step 4: experts .* the others of its batch.*{advice}"):
        trained(model(looks=True), plan, batches)
    innocent = batches[:2]
    assert_same(trained(model(looks=True), plan, innocent)[0], plainly(model(looks=True), innocent))


class Branch(nn.Module):
    """A model that decides by its whole batch, and by what it computed, for which a batch cannot be asked: no graph."""

    def __init__(self, at: float) -> None:
        super().__init__()
        self.net, self.at = mlp(6, 8, 4), at

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.net(x)
        return y if x.abs().mean() + 0 * y.mean() < self.at else 2 * y


def test_an_opaque_model_is_divided_only_where_the_plan_says_so() -> None:
    with pytest.warns(match=r"each replica computes model on the whole batch: .* per_sample=model in the plan"):
        whole = trained(Branch(9.0), "data=2", BATCHES)[0]
    assert_same(whole, plainly(Branch(9.0), BATCHES))
    assert_same(trained(Branch(9.0), "data=2,per_sample=model", BATCHES)[0], plainly(Branch(9.0), BATCHES))


def test_an_opaque_model_that_branches_on_the_batch_stops_the_run() -> None:
    def odd(batch: Any) -> Any:
        x = copy.deepcopy(batch[0])
        x[:1] *= 100  # one sample alone takes the batch over the bound, and not the other replica's part
        return x, batch[1]

    batches = [BATCHES[0], odd(BATCHES[1])]
    with pytest.raises((PolylaneError, WorkerFailed), match=r"step 2: the model .* depend on the others of its batch"):
        trained(Branch(9.0), "data=2,per_sample=model", batches)


def test_what_is_said_wrongly_is_refused_at_once() -> None:
    with pytest.raises(PolylaneError, match=r"per_sample=model does not hold: .*; leave it out of per_sample$"):
        trained(Branch(0.75), "data=2,per_sample=model", [batch_of(5, 1)] * 2, loss=classify)
