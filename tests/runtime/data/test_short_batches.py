"""Batches that are too short for batch normalization: refused before the first step, or divided into fewer parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

import polylane
from polylane.compile.objectives import Objective, build_objectives
from polylane.errors import PolylaneError
from polylane.runtime.data.sample_order import sample_order
from polylane.runtime.job import Job
from polylane.verify.verify import verify
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import assert_same, batch_of, classify, mlp, plainly, sgd, trained, workers

PLANS = ["data=1", "data=2", "pipeline=2,microbatches=4", "data=2,pipeline=2,microbatches=4", "tensor=2"]


def normed() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)]
    return nn.Sequential(*layers).double()


def dataset(samples: int) -> TensorDataset:
    return TensorDataset(*batch_of(samples))


# Refused


@pytest.mark.parametrize("plan", subsets.one_in(2, PLANS))
def test_a_single_sample_that_is_left_is_refused_before_the_first_step(plan: str) -> None:
    def work(job: Job) -> tuple[str, bool, int]:
        before = job.state_dict()
        with pytest.raises(PolylaneError) as caught:
            for batch in job.batches(dataset(65), 8):
                job.step(batch)
        unchanged = all(torch.equal(value, before[name]) for name, value in job.state_dict().items())
        steps = [job.step(batch).step for batch in job.batches(dataset(65), 8, drop_last=True)]
        return str(caught.value), unchanged, len(steps)

    for said, unchanged, steps in workers(work, normed(), plan):
        assert said.startswith("the last batch of an epoch has 1 sample, but 1/batch_norm")
        assert said.endswith("leave it out, with drop_last=True of batches(), or take another batch size")
        assert unchanged and steps == 8


@pytest.mark.parametrize("plan", subsets.one_in(2, PLANS))
def test_what_is_only_evaluated_may_be_short(plan: str) -> None:
    def work(job: Job) -> list[float]:
        return [job.evaluate(batch) for batch in job.batches(dataset(9), 8, shuffle=False)]

    model, (x, y) = normed().eval(), batch_of(9)
    with torch.no_grad():
        expected = [float(classify(model, (x[a:b], y[a:b]))) for a, b in ((0, 8), (8, 9))]
    for losses in workers(work, normed(), plan):
        assert losses == pytest.approx(expected, rel=1e-12)


def test_a_model_without_batch_statistics_takes_it() -> None:
    inputs, labels = batch_of(9)
    whole = [(inputs[a:b], labels[a:b]) for a, b in ((0, 8), (8, 9))]
    reference = plainly(mlp(6, 8, 8, 4), whole)
    for plan in PLANS:
        for worker in trained(mlp(6, 8, 8, 4), plan, whole):
            assert_same(worker, reference)


def test_of_a_stream_nobody_knows_before() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(list(zip(*batch_of(9), strict=True)))

    job = polylane.parallelize(normed(), classify, sgd, example=batch_of(8))
    batches = job.batches(Stream(), 8)
    job.step(next(batches))
    with pytest.raises(PolylaneError, match="this batch has 1 sample, but 1/batch_norm"):
        job.step(next(batches))
    assert len(list(job.batches(Stream(), 8, drop_last=True))) == 1


def test_a_plan_that_leaves_too_few_in_every_batch() -> None:
    def prepared(plan: str, samples: int) -> Any:
        return compile_training(
            normed(), build_objectives(classify, sgd, None), batch_of(samples), plan
        ).plan.microbatches

    with pytest.raises(PolylaneError, match=r"microbatches=4: of a batch of 6 .* would have 1, .* use microbatches=3,"):
        prepared("pipeline=2,microbatches=4", 6)
    with pytest.raises(PolylaneError, match=r"a batch has 1 sample, but 1/batch_norm"):
        prepared("data=1", 1)
    assert prepared("pipeline=2,microbatches=3", 6) == prepared("pipeline=2", 6) == prepared("pipeline=2", 7) == 3
    alone = polylane.parallelize(normed(), classify, sgd, example=batch_of(6), plan="pipeline=2", alone=True)
    assert alone.plan.microbatches == 3


# Divided into fewer microbatches


def batches() -> list[tuple[Tensor, Tensor]]:
    return [batch_of(samples, seed) for seed, samples in enumerate((8, 5, 8, 3, 2, 5))]


@pytest.mark.parametrize("plan", ["microbatches=4", *(plan for plan in PLANS if "microbatches" in plan)])
def test_a_short_batch_has_fewer_microbatches(plan: str) -> None:
    reference = plainly(normed(), batches(), microbatches=[4, 2, 4, 1, 1, 2], clip_norm=0.2)
    for worker in trained(normed(), plan, batches(), clip_norm=0.2):
        assert_same(worker, reference)


def test_of_a_job_s_own_batches_each_worker_loads_what_it_computes_on() -> None:
    inputs, labels = batch_of(21)
    at = sample_order(21, 0, 0)
    whole = [(inputs[at[a:b]], labels[at[a:b]]) for a, b in ((0, 8), (8, 16), (16, 21))]
    reference = plainly(normed(), whole, microbatches=[4, 4, 2])

    def work(job: Job) -> Any:
        return [job.step(batch).loss for batch in job.batches(dataset(21), 8)], job.state_dict()

    for losses, state in workers(work, normed(), "data=2,pipeline=2,microbatches=4"):
        assert_same(type(reference)(losses, state), reference)


def test_the_timeline_has_the_microbatches_that_there_were() -> None:
    def work(job: Job) -> list[set[int | None]]:
        return [{span.action.microbatch for span in job.step(batch).timeline.spans} for batch in batches()[:4]]

    every, some, one = {0, 1, 2, 3, None}, {0, 1, None}, {0, None}
    assert workers(work, normed(), "pipeline=2,microbatches=4") == [[every, some, every, one]] * 2


def test_the_proof_takes_the_same_ones() -> None:
    objective = Objective("loss", classify, sgd)
    assert verify(normed(), objective, batches()[:2], "data=2,pipeline=2,microbatches=4").passed
    with pytest.raises(PolylaneError, match="the shortest batch has 1 sample, but 1/batch_norm"):
        verify(normed(), objective, [batch_of(8), batch_of(1)], "data=2")
