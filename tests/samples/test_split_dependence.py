"""Which models compute other numbers in other microbatches, and who says so."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.cluster.spec import parse
from polylane.commands.verify import _sentence
from polylane.compile.objectives import Objective, build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.cost.operators.training_options import TrainingOptions
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import parse_fixed
from polylane.planner.find_plans import find_plans
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify, sgd


class Residual(nn.Module):
    """Two normalized layers with a shortcut."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.first, self.norm1, self.second = nn.Linear(6, 6), norm(6), nn.Linear(6, 6)
        self.norm2, self.third, self.norm3, self.head = norm(6), nn.Linear(6, 6), norm(6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.relu(self.norm1(self.first(x)))
        x = x + torch.relu(self.norm2(self.second(x)))
        return self.head(self.norm3(self.third(x)))


class Functional(nn.Module):
    """A class of the user's own that calls torch's function."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * nn.functional.batch_norm(x, None, None, training=True)


class Cumulative(nn.BatchNorm1d):
    """Running statistics that are means over all steps: torch's own, whose code reads a counter."""

    def __init__(self, size: int) -> None:
        super().__init__(size, momentum=None)


class Frozen(nn.BatchNorm1d):
    """Normalizes by its running statistics in training as well."""

    def train(self, mode: bool = True) -> Frozen:
        super().train(False)
        return self

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.train()


class Instance(nn.Module):
    """Statistics of each sample alone."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x.unflatten(1, (2, -1))).flatten(1)


class Centered(nn.Module):
    """A statistic of the batch in the user's own operators."""

    def __init__(self, size: int) -> None:
        super().__init__()

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


DEPENDENT = (nn.BatchNorm1d, Functional, Cumulative)
INDEPENDENT = (Frozen, Instance, nn.LayerNorm)


def notes_of(norm: Any, plan: str, samples: int = 16) -> list[str]:
    torch.manual_seed(0)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compile_training(Residual(norm).double(), build_objectives(classify, sgd, None), batch_of(samples), plan)
    return [str(each.message) for each in caught if str(each.message).startswith("microbatches=")]


@pytest.mark.parametrize("norm", subsets.one_in(2, DEPENDENT))
def test_a_note_names_the_modules_and_the_size_of_a_microbatch(norm: Any) -> None:
    (note,) = notes_of(norm, "pipeline=2")
    assert note.startswith(
        "microbatches=8, of 2 samples each: the numbers depend on the statistics of a microbatch in "
    )
    assert "norm1, norm2 and 1 more; they are those of one worker that takes the same microbatches" in note
    assert not notes_of(norm, "pipeline=2,microbatches=1")


@pytest.mark.parametrize("norm", subsets.one_in(2, INDEPENDENT))
def test_no_note_where_samples_do_not_meet(norm: Any) -> None:
    assert not notes_of(norm, "pipeline=2")


def test_statistics_of_own_operators_keep_the_batch_whole() -> None:
    (note,) = notes_of(Centered, "pipeline=2")
    assert note.startswith("microbatches=1, and not 8, the plan's default")
    with pytest.raises(PolylaneError, match="microbatches=4 would not compute what one device computes"):
        notes_of(Centered, "pipeline=2,microbatches=4")


@pytest.mark.parametrize(
    "asked", subsets.one_in(2, ["", "microbatches=4", "data=2,replicas=round-robin", "pipeline=2"])
)
def test_a_search_keeps_batches_whole_unless_told_otherwise(asked: str) -> None:
    torch.manual_seed(0)
    problem = TrainingProblem(Residual(nn.BatchNorm1d).double(), build_objectives(classify, sgd, None), batch_of(16))
    captured = problem.captured(problem.capture(4))
    fixed = {"fixed": parse_fixed(asked)} if asked else {}
    found = find_plans(captured, parse("2:cpu"), 16, TrainingOptions(), **fixed)
    counts = {each.plan.microbatches for each in found.ranked_plans}
    expected = {"microbatches=4": counts == {4}, "data=2,replicas=round-robin": max(counts) > 1}
    assert expected.get(asked, counts == {1}), counts


def test_the_proof_says_with_what_it_agrees_and_by_how_much_whole_batches_differ() -> None:
    torch.manual_seed(0)
    batches = [batch_of(16)]
    model = Residual(nn.BatchNorm1d).double()
    with pytest.warns(UserWarning, match="those of one worker that takes the same microbatches"):
        verdict = verify(model, Objective("loss", classify, sgd), batches, "data=1,microbatches=4")
    whole = classify(model, batches[0]).item()
    assert verdict.passed and verdict.whole_loss == pytest.approx(whole, rel=1e-12)
    said, far = _sentence(verdict), abs(whole - verdict.losses[0][0])
    assert "and one worker that takes the same 4 microbatches agree in every loss" in said
    assert f"; whole batches differ by {far:.2g} in the first loss, for the statistics of a microbatch in norm1" in said
    assert said.endswith("microbatches=1 is exact.")
    plain = _sentence(verify(Residual(Frozen), Objective("loss", classify, sgd), batches, "data=1,microbatches=4"))
    assert "and one worker agree in every loss" in plain and "whole batches" not in plain
