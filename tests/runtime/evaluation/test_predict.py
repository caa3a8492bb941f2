"""Predictions come for every sample once, in the data's order, and are those of one device, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.workers.team import WorkerContext, fork_workers
from tests.runtime.evaluation.test_metrics import BATCH, CASES, PLANS, SAMPLES, classifier, classify, collate, sgd


def describe_classes(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits = model(batch[0])
    return {"choice": logits.argmax(-1), "pair": (logits, logits.T), "sure": logits.softmax(-1).amax(-1) > 0.3}


def job_of(context: WorkerContext, compiled: Any, example: Any) -> Job:
    return Job(compiled, context.world, example=example)


@pytest.mark.parametrize("plan", PLANS)
def test_predictions_are_those_of_one_device(plan: str) -> None:
    samples = CASES["classes"].data()
    example = collate(samples[:BATCH])
    compiled = compile_training(TrainingProblem(classifier(), build_objectives(classify, sgd, None), example), plan)

    def run(context: WorkerContext) -> list[Any]:
        with job_of(context, compiled, example) as job:
            rows = list(job.predict(samples, BATCH, describe_classes))
            inputs = [sample[0] for sample in samples]  # without labels, and by the model alone
            return [rows, list(job.predict(inputs, BATCH))]

    model = classifier().eval()
    with torch.no_grad():
        expected = model(torch.stack([sample[0] for sample in samples]))
    for rows, logits in fork_workers(run, compiled.plan.processes):
        assert len(rows) == len(logits) == SAMPLES
        for i, (row, logit) in enumerate(zip(rows, logits, strict=True)):
            assert torch.allclose(logit, expected[i], rtol=1e-12, atol=1e-12)
            assert torch.allclose(row["pair"][0], expected[i], rtol=1e-12, atol=1e-12)
            assert torch.allclose(row["pair"][1], expected[i], rtol=1e-12, atol=1e-12)
            assert row["choice"] == expected[i].argmax() and row["choice"].dtype == torch.int64
            assert row["sure"] == (expected[i].softmax(-1).amax() > 0.3) and row["sure"].dtype == torch.bool


def test_training_goes_on_after_predictions_as_without_them() -> None:
    samples = CASES["classes"].data()
    example = collate(samples[:BATCH])
    problem = TrainingProblem(classifier(), build_objectives(classify, sgd, None), example)
    compiled = compile_training(problem, "data=2")

    def run(context: WorkerContext, predicts: bool) -> dict[str, Tensor]:
        with job_of(context, compiled, example) as job:
            for batch in job.batches(samples, BATCH):
                job.step(batch)
                if predicts:
                    assert len(list(job.predict(samples, 5))) == SAMPLES
            return job.state_dict()

    with_predictions = fork_workers(lambda context: run(context, True), 2)[0]
    for name, value in fork_workers(lambda context: run(context, False), 2)[0].items():
        assert torch.equal(with_predictions[name], value)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda model, batch: model(batch[0]).sum(0), "not known which of its elements belong to which sample"),
        (lambda model, batch: 3, "must return tensors with a row for each sample"),
        (lambda model, batch: model(batch[5]), r"predict\(model, batch\) fails"),
    ],
)
def test_what_has_no_row_for_each_sample_is_refused(function: Any, words: str) -> None:
    samples = CASES["classes"].data()
    example = collate(samples[:BATCH])
    problem = TrainingProblem(classifier(), build_objectives(classify, sgd, None), example)
    compiled = compile_training(problem, "data=2")

    def run(context: WorkerContext) -> str:
        with job_of(context, compiled, example) as job:
            with pytest.raises(PolylaneError, match=words) as raised:
                list(job.predict(samples, BATCH, function))
            return str(raised.value)

    first, second = fork_workers(run, 2)
    assert first == second
