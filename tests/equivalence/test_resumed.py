"""A training that goes on from a checkpoint is the unbroken one: bit for bit on its plan, in float64 on any other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.checkpoint.store import open_checkpoint
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, classify

SAMPLES, BATCH = 20, 8  # three batches an epoch, the last one short: the checkpoint is in mid-epoch
AT = 4
NEXT, QUICK_NEXT = 5, 2  # steps that are compared after it, into the next epoch but one

PLANS = (
    "data=1,microbatches=2",
    "data=2,microbatches=2",
    "data=3,microbatches=2",
    "pipeline=2,microbatches=2",
    "pipeline=3,microbatches=2",
    "tensor=2,microbatches=2",
    "data=2,tensor=2,microbatches=2",
    "data=2,pipeline=2,microbatches=2",
    "pipeline=2,tensor=2,microbatches=2",
    "data=2,shard=optimizer,microbatches=2",
    "data=3,shard=parameters,microbatches=2",
    "data=2,servers=2,microbatches=2",
)
OWN = (  # those whose numbers are their own, and other combinations; PowerSGD compresses before the checkpoint
    "data=2,every=3",
    "data=2,every=3,warmup=2",
    "data=2,every=3,outer=0.7:0.9",
    "data=2,tensor=2,every=3",
    "data=2,tensor=2,every=3,outer=0.7:0.9",
    "data=2,pipeline=2,every=2,outer=0.7:0.9",
    "data=2,wire=bfloat16",
    "data=2,wire=float16",
    f"data=2,compress=powersgd:2:{AT - 2}",
    "data=2,tensor=2,compress=powersgd:2:0",
    "data=2,compress=top_k:0.25",
    "data=2,pipeline=2,compress=top_k:0.25",
    "data=2,shard=gradients",
    "data=4,shard=parameters,within=2,microbatches=1",
    "data=2,tensor=2,shard=parameters",
    "data=2,pipeline=2,shard=optimizer",
    "pipeline=2,schedule=pipedream,microbatches=2",
    "data=2,pipeline=2,schedule=pipedream",
    "pipeline=2,schedule=pipedream-2bw,microbatches=2",
    "data=2,servers=1,dedicated=yes",
    "data=2,tensor=2,servers=1",
)


class Net(nn.Module):
    """Dropout, running statistics, a tied weight and a parameter that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.Dropout(0.2)
        self.second, self.third, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.frozen = nn.Parameter(torch.ones(12), requires_grad=False)
        self.third.weight = self.second.weight

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(torch.relu(self.norm(self.first(x)))) * self.frozen
        return self.last(torch.tanh(self.third(torch.relu(self.second(hidden)))))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Net().double()


def adamw(parameters: Any) -> torch.optim.Optimizer:
    named = list(parameters)
    groups = [{"params": [p for n, p in named if (p.dim() > 1) == matrix]} for matrix in (True, False)]
    groups[0]["weight_decay"] = 0.1
    return torch.optim.AdamW(groups, lr=0.01)


def warm(optimizer: Any) -> Any:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=20)


DATA = list(zip(*batch_of(SAMPLES), strict=True))


def train(job: Job, steps: int, save: tuple[int, Path] | None = None) -> tuple[list[float], dict[str, Tensor]]:
    losses = []
    for batch in job.batches(DATA, BATCH, epochs=9, start=job.position):
        losses.append(job.step(batch).loss)
        if save is not None and job.position.step == save[0]:
            job.save_checkpoint(save[1])
        if len(losses) == steps:
            break
    return losses, job.state_dict()


@functools.cache
def compiled_once(plan: str) -> CompiledTraining:
    """A plan's training, cut into the same stages whenever it goes on: where these are cut, measured times decide."""
    return compile_training(model(), build_objectives(classify, adamw, warm), batch_of(BATCH), plan)


def run(plan: str, work: Callable[[Job], Any]) -> Any:
    prepared, clip_norm = compiled_once(plan), None if "pipedream" in plan else 0.5

    def worker(_: Any) -> Any:
        with Job(prepared, World.join(), example=batch_of(BATCH), seed=3, clip_norm=clip_norm) as job:
            return work(job)

    return fork_workers(worker, prepared.plan.processes)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], tuple[Path, list[float], Any]]:
    """By plan: the folder of its checkpoints, and what the run comes to that makes some more steps without a break."""

    @functools.cache
    def save(plan: str, steps: int) -> tuple[Path, list[float], dict[str, Tensor]]:
        folder = tmp_path_factory.mktemp("checkpoints")
        losses, state = run(plan, lambda job: train(job, AT + steps, (AT, folder)))
        return folder, losses[AT:], state

    return save


def resume(plan: str, folder: Path, steps: int) -> tuple[list[float], dict[str, Tensor]]:
    def work(job: Job) -> Any:
        assert job.load_checkpoint(folder).position.step == AT
        return train(job, steps)

    result: tuple[list[float], dict[str, Tensor]] = run(plan, work)
    return result


QUICK = (  # one of every kind of state; all are slow
    "data=2,microbatches=2",
    "pipeline=2,tensor=2,microbatches=2",
    "data=2,every=3,outer=0.7:0.9",
    f"data=2,compress=powersgd:2:{AT - 2}",
    "pipeline=2,schedule=pipedream,microbatches=2",
    "data=2,servers=1,dedicated=yes",
)


@pytest.mark.parametrize(
    ("plan", "steps"),
    [
        *(pytest.param(plan, NEXT, marks=pytest.mark.slow) for plan in (*PLANS, *OWN)),
        *(pytest.param(plan, QUICK_NEXT) for plan in QUICK),
    ],
)
def test_on_its_own_plan_it_goes_on_bit_for_bit(plan: str, steps: int, saved: Any) -> None:
    folder, losses, state = saved(plan, steps)
    again, resumed = resume(plan, folder, steps)
    assert len(losses) == steps and again == losses
    for name, value in state.items():
        assert torch.equal(value, resumed[name]), name


# Replicas that train separately, each in other stages and shards: their numbers are their own, and the same.
SEPARATE = tuple(
    f"data=2,{degrees}every=3,outer=0.7:0.9,microbatches=2" for degrees in ("", "tensor=2,", "pipeline=2,")
)

# All pairs, slow; and quickly every second plan with the next but one.
PAIRS = [
    *(pytest.param(first, then, NEXT, marks=pytest.mark.slow) for first in PLANS for then in PLANS),
    *(pytest.param(first, then, NEXT, marks=pytest.mark.slow) for first in SEPARATE for then in SEPARATE),
    *(pytest.param(first, PLANS[i + 2], QUICK_NEXT) for i, first in enumerate(PLANS[:-2]) if i % 3 == 1),
]


@pytest.mark.parametrize(("first", "then", "steps"), PAIRS)
def test_any_plan_goes_on_from_any_other(first: str, then: str, steps: int, saved: Any, tmp_path: Path) -> None:
    """What it loads it would save again, every bit; and then it trains as the first would have."""
    folder, losses, state = saved(first, steps)

    def work(job: Job) -> Any:
        job.load_checkpoint(folder)
        job.save_checkpoint(tmp_path)
        return train(job, steps)

    again, resumed = run(then, work)
    before, after = (CheckpointReader(*open_checkpoint(each)) for each in (folder, tmp_path))
    kept = [name for name in before.manifest.tensors if not name.startswith("random/")]
    assert kept == [name for name in after.manifest.tensors if not name.startswith("random/")]
    for name in kept:
        assert torch.equal(before.read_whole(name), after.read_whole(name)), name
    assert len(losses) == steps
    torch.testing.assert_close(again, losses, rtol=1e-12, atol=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(resumed[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
