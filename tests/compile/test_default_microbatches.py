"""Where nobody says how many microbatches, a pipeline has as many as the training allows, and says why it has one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from tests.equivalence.trainings.python_state import Calls
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, mlp, sgd

Loss = Callable[[nn.Module, Any], Tensor]
EXAMPLE = batch_of(16)


class Whichever(nn.Module):
    """Reads its values."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum().item() > 1e9 else x


def within(inner: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), inner, nn.Tanh(), nn.Linear(8, 4)).double()


def negatives(model: nn.Module, batch: Any) -> Tensor:
    z = F.normalize(model(batch[0]), dim=-1)
    return F.cross_entropy(z @ z.t(), torch.arange(len(z)))


def hard(model: nn.Module, batch: Any) -> Tensor:
    losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
    return losses[losses > 1.0].mean()


WHOLE: dict[str, tuple[Callable[[], nn.Module], Loss, str]] = {
    "samples meet": (
        lambda: mlp(6, 8, 4),
        negatives,
        "loss/matmul in the loss .* makes each sample depend on the others",
    ),
    "a count of the model's own values": (lambda: mlp(6, 8, 4), hard, "what it counts does not follow from the inputs"),
    "a leaf": (lambda: within(Whichever()), classify, "1 .* runs your own Python, .* say so with per_sample=1 in the"),
    "state": (lambda: within(Calls()), classify, "1 .*writes self.calls"),
}


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("plan", ["data=2,pipeline=2", "pipeline=2,schedule=afab"])
def test_a_batch_that_must_stay_whole_does_and_a_note_says_why(name: str, plan: str) -> None:
    make, loss, why = WHOLE[name]
    with pytest.warns(UserWarning, match=f"^microbatches=1, and not 8, the plan's default: .*{why}"):
        assert compile_training(make(), build_objectives(loss, sgd, None), EXAMPLE, plan).plan.microbatches == 1


def test_who_says_a_number_gets_it_or_an_error() -> None:
    objectives = build_objectives(negatives, sgd, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compile_training(mlp(6, 8, 4), objectives, EXAMPLE, "pipeline=2,microbatches=1").plan.microbatches == 1
        ordinary = build_objectives(classify, sgd, None)
        assert compile_training(mlp(6, 8, 4), ordinary, EXAMPLE, "data=2,pipeline=2").plan.microbatches == 8
    with pytest.raises(PolylaneError, match="microbatches=8 would not compute what one device computes"):
        compile_training(mlp(6, 8, 4), objectives, EXAMPLE, "pipeline=2,microbatches=8")


def test_replicas_in_turn_need_microbatches() -> None:
    with pytest.raises(
        PolylaneError, match=r"replicas=round-robin: .* a batch must stay whole here: .*; leave replicas out"
    ):
        compile_training(
            mlp(6, 8, 4), build_objectives(negatives, sgd, None), EXAMPLE, "data=2,pipeline=2,replicas=round-robin"
        )


def test_alone_trains_the_microbatches_of_the_plan() -> None:
    with pytest.warns(UserWarning, match="microbatches=1, and not 8"):
        job = polylane.parallelize(mlp(6, 8, 4), negatives, sgd, example=EXAMPLE, plan="data=2,pipeline=2", alone=True)
    assert job.plan.microbatches == 1 and job.step(EXAMPLE).loss > 0
