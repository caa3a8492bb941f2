"""Facts of observed steps: the norm of all gradients is that of one device under every plan, and so is the loss."""

from __future__ import annotations

import copy
import itertools
import time
from typing import Any

import pytest
import torch
from torch import nn

from polylane.diagnosis.page_layout import Phase
from polylane.runtime.job import Job
from polylane.runtime.progress_page import Progress
from polylane.runtime.telemetry.worker_facts import WorkerFacts
from tests.support.workers.training import Tied, batch_of, classify, mlp, sgd, workers

STEPS = 6
SAMPLES = 10

PLANS = [
    "data=2",
    "data=3",
    "pipeline=2",
    "tensor=2",
    "data=2,pipeline=2",
    "data=2,tensor=2",
    "data=2,shard=optimizer",
    "data=2,shard=gradients",
    "data=2,shard=parameters",
    "pipeline=2,schedule=zb-h1,microbatches=4",
    "pipeline=2,microbatches=3,replicas=round-robin,data=2",
]


def plain_norms(model: nn.Module, clip: float | None) -> list[float]:
    optimizer, norms = sgd(list(model.named_parameters())), list[float]()
    for step in range(STEPS):
        optimizer.zero_grad()
        classify(model, batch_of(SAMPLES, step)).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        norms.append(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])).item())
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return norms


def train(job: Job) -> list[tuple[float, tuple[WorkerFacts, ...]]]:
    results = [job.step(batch_of(SAMPLES, step)) for step in range(STEPS)]
    return [(result.loss, result.facts) for result in results]


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("plan", PLANS)
def test_the_norm_is_that_of_one_device(plan: str, clip: float | None) -> None:
    model = mlp(6, 12, 12, 4)
    if "pipeline" not in plan and clip is None:
        model = nn.Sequential(Tied(), mlp(6, 12, 4))
    expected = plain_norms(_copy(model), clip)
    by_rank = workers(train, model, plan, clip_norm=clip)
    observed = [step for step, (_, facts) in enumerate(by_rank[0]) if facts]
    assert 0 in observed and len(observed) >= 2
    for records, step in itertools.product(by_rank, observed):
        loss, facts = records[step]
        norm = sum(fact.squared_norm for fact in facts) ** 0.5
        assert norm == pytest.approx(expected[step], rel=1e-12)
        total, count = (sum(getattr(fact, name) for fact in facts) for name in ("loss_total", "loss_count"))
        assert total / count == pytest.approx(loss, rel=1e-14) and count == SAMPLES
    assert all([bool(facts) for _, facts in records] == [bool(facts) for _, facts in by_rank[0]] for records in by_rank)


def test_a_mean_of_counted_parts_and_sparse_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 6, sparse=True), nn.Flatten(), nn.Linear(18, 4)).double()
    words = torch.randint(0, 9, (8, 3)), torch.randint(0, 4, (8,))

    def step(job: Job) -> Any:
        result = job.step(words)
        return result.facts

    plain = _copy(model)
    classify(plain, words).backward()
    squares = sum(p.grad.to_dense().square().sum().item() for p in plain.parameters() if p.grad is not None)
    facts = workers(step, model, "data=2", example=words, optimizer=_plain_sgd)[0]
    assert sum(fact.squared_norm for fact in facts) == pytest.approx(squares, rel=1e-12)


def test_an_asynchronous_pipeline_has_no_norm_of_one_batch() -> None:
    facts = workers(train, mlp(6, 12, 12, 4), "pipeline=2,schedule=pipedream")[0][0][1]
    assert all(fact.squared_norm != fact.squared_norm for fact in facts)


def test_memory_and_times_are_those_of_each_worker() -> None:
    facts = [facts for _, facts in workers(train, mlp(6, 12, 12, 4), "data=2,pipeline=2")[0] if facts][-1]
    assert len(facts) == 4
    assert all(fact.memory > 0 and 0 < fact.computing <= fact.extent <= fact.seconds * 10 for fact in facts)
    assert all(fact.computing + fact.communicating <= fact.extent * (1 + 1e-9) and fact.cost > 0 for fact in facts)


def test_tests_between_two_steps_are_no_part_of_them() -> None:
    class Clock(Progress):
        tested = 0.0

        def phase_seconds(self, phase: Phase) -> float:
            return self.tested if phase is Phase.EVALUATING else 0.0

    def train_and_test(job: Job) -> list[float]:
        clock = Clock()
        job.worker.telemetry._progress = clock  # type: ignore[union-attr]
        seconds = list[float]()
        for step in range(STEPS):
            seconds += [fact.seconds for fact in job.step(batch_of(SAMPLES, step)).facts]
            time.sleep(0.3)
            clock.tested += 0.3
        return seconds

    assert max(workers(train_and_test, mlp(6, 12, 4), "data=1")[0][1:]) < 0.15


def _copy(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def _plain_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1)
