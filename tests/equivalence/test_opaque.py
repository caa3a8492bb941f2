"""Models of which capture sees little or nothing, and losses in which samples meet: replicas train as one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polylane
from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import assert_same, batch_of, plainly, sgd, trained, workers


class Whichever(nn.Module):
    """Which way it goes depends on the data, so that no graph shows it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        if x.sum().item() > 1e9:
            x = x * 2
        y: Tensor = self.inner(x)
        return y


class Averages(nn.Module):
    """Remembers the mean of what comes."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(features))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean(0) * 0.1)
        return x - self.mean


def opaque(*middle: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Whichever(nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 4))).double()


def with_a_leaf() -> nn.Module:
    torch.manual_seed(0)
    leaf = Whichever(nn.Linear(8, 8))
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), leaf, nn.Tanh(), nn.Linear(8, 4)).double()


def one(z: Tensor) -> Tensor:
    """Every sample is its own class."""
    return F.cross_entropy(z @ z.t() * 3.0, torch.arange(len(z)), reduction="none")


def contrast(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """In-batch negatives."""
    return one(F.normalize(model(batch[0]), dim=-1)).mean()


def some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> polylane.Mean:
    """The same, of those samples whose label is not 0."""
    counts = (batch[1] > 0).double()
    return polylane.Mean((one(F.normalize(model(batch[0]), dim=-1)) * counts).sum(), counts.sum())


MODELS: dict[str, Callable[[], nn.Module]] = {
    "opaque": opaque,
    "a buffer": lambda: opaque(Averages(8)),
    "batch statistics": lambda: opaque(nn.BatchNorm1d(8)),
    "a leaf": with_a_leaf,
}
CASES = [
    ("opaque", "data=2", contrast, (4, 5, 1, 8)),
    ("opaque", "data=3", some, (7, 2, 5)),
    ("opaque", "data=2,tensor=2", contrast, (5, 3)),
    ("opaque", "tensor=2", contrast, (5, 1)),
    ("a buffer", "data=2", contrast, (5, 8)),
    ("batch statistics", "data=2", some, (5, 3)),
    ("a leaf", "data=2", contrast, (5, 1, 8)),
    ("a leaf", "data=2,pipeline=2,microbatches=1", contrast, (5, 4)),
    ("a leaf", "tensor=2", some, (5, 4)),
]


@pytest.mark.parametrize("case", subsets.one_in(2, subsets.except_slow(CASES, [CASES[0], CASES[2], CASES[6]])))
def test_samples_that_meet_where_nothing_is_seen(case: tuple[str, str, Any, tuple[int, ...]]) -> None:
    name, plan, loss, sizes = case
    batches = [batch_of(samples, seed) for seed, samples in enumerate(sizes)]

    def evaluated(job: Job) -> list[float]:
        return [job.evaluate(batch_of(samples, 9)) for samples in (5, 1, 6)]

    expected = plainly(MODELS[name](), batches, loss=loss)
    ((_, evaluations),) = workers(lambda job: _all(job, batches, evaluated), MODELS[name](), "data=1", loss=loss)
    for worker in trained(MODELS[name](), plan, batches, evaluated, loss=loss):
        assert_same(worker, expected, 1e-9)
        assert worker.extra == pytest.approx(evaluations, rel=1e-9)


# Replicas that hold parts, or that send what they have elsewhere: their summands of a gradient add up to that of the
# whole batch, whoever adds them. All of the entries by top_k, and products of full rank, are the whole gradient.
SYNCED = [
    ("opaque", "data=2,shard=parameters", contrast, (4, 5, 1, 8)),
    ("a leaf", "data=3,shard=gradients", some, (7, 2, 5)),
    ("batch statistics", "data=2,shard=parameters", some, (5, 3)),
    ("no leaf", "data=2,tensor=2,shard=optimizer", contrast, (5, 8)),
    ("a leaf", "data=4,shard=parameters,within=2", contrast, (5, 8)),
    ("a leaf", "data=2,pipeline=2,shard=gradients", contrast, (5, 4)),
    ("no leaf", "data=2,pipeline=2,shard=parameters", some, (5, 4)),
    ("a leaf", "data=2,servers=2", contrast, (5, 1, 8)),
    ("opaque", "data=2,servers=1", some, (5, 8)),
    ("a leaf", "data=2,compress=top_k:1", contrast, (5, 8)),
    ("no leaf", "data=3,compress=powersgd:8:0", some, (5, 8)),
]


@pytest.mark.parametrize("case", subsets.one_in(3, SYNCED))
def test_samples_that_meet_under_every_rule_that_is_exact(case: tuple[str, str, Any, tuple[int, ...]]) -> None:
    name, plan, loss, sizes = case
    make, batches = MODELS.get(name, lambda: opaque().inner), [batch_of(n, seed) for seed, n in enumerate(sizes)]
    expected = plainly(make(), batches, loss=loss)
    for worker in trained(make(), plan, batches, loss=loss):
        assert_same(worker, expected, 1e-9)


@pytest.mark.parametrize("plan", ["data=2,every=2", "data=2,servers=1,staleness=1"])
@pytest.mark.parametrize("make", [opaque, lambda: opaque().inner])
def test_replicas_that_step_alone_would_train_another_loss(make: Callable[[], nn.Module], plan: str) -> None:
    told = f"{plan.removeprefix('data=2,')} lets each replica take steps on samples of its own, and where samples meet"
    with pytest.raises(
        PolylaneError, match=f"{told} that is another loss: .*; leave (every|staleness) out|per_sample="
    ):
        compile_training(make(), build_objectives(contrast, sgd, None), batch_of(6), plan)


def _all(job: Job, batches: list[Any], then: Callable[[Job], list[float]]) -> tuple[list[float], list[float]]:
    return [job.step(batch).loss for batch in batches], then(job)


def test_random_numbers_are_those_of_one_device() -> None:
    def work(job: Job) -> list[float]:
        return [job.step(batch_of(samples, samples)).loss for samples in (5, 4, 5)]

    (expected,) = workers(work, opaque(nn.Dropout(0.4)), "data=1", loss=contrast)
    for losses in workers(work, opaque(nn.Dropout(0.4)), "data=2", loss=contrast):
        assert losses == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("make", [opaque, lambda: opaque().inner])
def test_a_batch_of_another_form_is_evaluated(make: Callable[[], nn.Module]) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        each = one(F.normalize(model(batch[0]), dim=-1))
        return each.mean() if len(batch) == 2 else (each * batch[2]).mean() * batch[3].mean()

    def work(job: Job) -> list[float]:
        other = (*batch_of(5, 1), torch.arange(5).double(), torch.ones(3).double())
        return [job.step(batch_of(5)).loss, job.evaluate(other), job.step(batch_of(4)).loss]

    (expected,) = workers(work, make(), "data=1", loss=loss)
    for values in workers(work, make(), "data=2", loss=loss):
        assert values == pytest.approx(expected, rel=1e-9)


class Six(nn.Module):
    """Somebody wrote the number of samples into it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x.reshape(6, 6))
        return y


REFUSED: dict[str, tuple[Callable[[], nn.Module], str, str]] = {
    "microbatches": (opaque, "data=2,microbatches=2", r"microbatches=2 would not compute what one device computes"),
    "stages": (opaque, "pipeline=2,microbatches=1", r"the model is opaque and cannot be cut"),
    "a number": (
        lambda: Six().double(), "data=2", r"does not compute with 12 samples at a time: reshape makes \(6, 6\) of",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name: str) -> None:
    make, plan, told = REFUSED[name]
    with pytest.raises(PolylaneError, match=told):
        compile_training(make(), build_objectives(contrast, sgd, None), batch_of(6), plan, batch_size=12)
