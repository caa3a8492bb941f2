"""Whatever the timing, the same bits: slow workers, large messages, evaluation in between; and no deadlock."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.runtime.job import Job
from polylane.runtime.pipeline.stage_runner import StageRunner
from tests.support import subsets
from tests.support.workers.training import batch_of, mlp, plainly, trained, workers

pytestmark = pytest.mark.timeout(60)
BATCHES = [batch_of(samples, seed) for seed, samples in enumerate((8, 7))]


def steps(job: Job) -> tuple[list[float], dict[str, Tensor]]:
    seen = []
    for step in range(3):
        result = job.step(batch_of(16, step))
        if step % 2:  # not always read, so that steps overlap
            seen += [result.loss, job.evaluate(batch_of(5, step))]
    return seen, job.state_dict()


SLOWED = [
    "data=3,microbatches=3",
    "pipeline=3,microbatches=3,schedule=naive",
    "pipeline=3,microbatches=4,schedule=1f1b",
    "data=2,pipeline=2,microbatches=3,schedule=1f1b",
    "data=2,pipeline=2,microbatches=4,schedule=afab",
]


@pytest.mark.parametrize("plan", subsets.one_in(3, subsets.one_in(2, SLOWED), first=2))
def test_slow_workers(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def model() -> nn.Module:
        return nn.Sequential(mlp(6, 8, 8), nn.BatchNorm1d(8).double(), mlp(8, 8, 4))

    example = batch_of(16)
    usual = workers(steps, model(), plan, example=example, evaluates=True)
    for name in ("forward", "backward"):
        run = getattr(StageRunner, name)

        def late(self: StageRunner, *args: Any, run: Any = run) -> Any:
            time.sleep(random.choice([0.0, 0.0, 0.001, 0.01]))
            return run(self, *args)

        monkeypatch.setattr(StageRunner, name, late)

    def unsteady(job: Job) -> Any:
        random.seed(job.world.rank)
        return steps(job)

    for (seen, state), (expected, reference) in zip(
        workers(unsteady, model(), plan, example=example, evaluates=True), usual, strict=True
    ):
        assert seen == expected
        assert all(torch.equal(state[name], value) for name, value in reference.items())


class Wide(nn.Module):
    """Megabytes cross between its stages, in both directions, and as a skip over them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.first(x)[:, None, :].expand(-1, 20_000, -1) * 1.0
        return self.last((torch.tanh(self.second(wide)) + wide).mean(1))


@pytest.mark.parametrize("schedule", subsets.one_in(2, ["afab", "1f1b"], first=1))
def test_large_messages(schedule: str) -> None:
    torch.manual_seed(0)
    model = Wide().double()
    reference = plainly(model, BATCHES)
    for worker in trained(model, f"pipeline=3,microbatches=4,schedule={schedule}", BATCHES):
        assert worker.losses == pytest.approx(reference.losses, rel=1e-9)


def test_a_fast_worker_may_be_steps_ahead() -> None:
    """Nobody reads a loss: the first stage runs on as far as its messages let it."""

    def work(job: Job) -> float:
        for _ in range(30):
            result = job.step(BATCHES[0])
        return result.loss

    first, second = workers(work, mlp(6, 8, 8, 4), "pipeline=2,microbatches=4")
    assert first == second and first < 1.0
