"""``plan="auto"``: rank 0 measures, every rank gets the same plan of all workers, and refuses what rank 0 does."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import yaml
from torch import Tensor, nn

import polylane
from polylane.auto import choose as auto
from polylane.auto import on_workers
from polylane.auto.plan_broadcast import compute_on_rank0
from polylane.errors import PeerLost, PolylaneError, WorkerFailed
from polylane.plan.plan import Plan
from polylane.plan.plan_file import dump
from polylane.probe import machine
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support import subsets
from tests.support.workers.training import Trained, adamw, assert_same, batch_of, classify, mlp, plainly, sgd

BATCHES = [batch_of(8, seed) for seed in (0, 1)]


class Forked(nn.Module):
    """Two branches: plans with a branch on each of two workers leave others without work."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.last = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.left(x)) * torch.sigmoid(self.right(x)))


def forked() -> nn.Module:
    torch.manual_seed(0)
    return Forked().double()


def normalized() -> nn.Module:
    """Which takes two samples at once or more."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.0), nn.Tanh(), nn.Linear(8, 4)).double()


def automatically(model: nn.Module, **options: Any) -> polylane.Job:
    given = {"loss": classify, "optimizer": sgd, "example": BATCHES[0], "plan": "auto", **options}
    return polylane.parallelize(model, given.pop("loss"), given.pop("optimizer"), **given)


def trained(model: nn.Module) -> tuple[str, Trained]:
    """The plan, and two steps of it."""
    with automatically(model, optimizer=adamw) as job:
        return dump(job.plan), Trained([job.step(batch).loss for batch in BATCHES], job.state_dict())


@pytest.mark.parametrize(
    ("build", "workers"),
    subsets.one_in(2, [(lambda: mlp(6, 8, 8, 4), 2), (forked, 3), (normalized, 2)], several=True),
    ids=["mlp", "forked", "norm"],
)
def test_one_plan_of_all_workers_and_the_numbers_of_one_device(build: Callable[[], nn.Module], workers: int) -> None:
    found = fork_workers(lambda context: trained(build()), workers)
    (plan,) = {plan for plan, _ in found}
    chosen = Plan.model_validate(yaml.safe_load(plan))
    assert sorted(rank for stage in chosen.stages for rank in stage.devices) == list(range(workers))
    reference = plainly(build(), BATCHES, optimizer=adamw, microbatches=chosen.microbatches)
    for _, each in found:
        assert_same(each, reference)


def test_alone() -> None:
    """Without any group, in this very process."""
    model = mlp(6, 8, 4)
    job = automatically(model)
    assert job.plan.workers == 1
    losses = [job.step(batch).loss for batch in BATCHES]
    reference = plainly(mlp(6, 8, 4), BATCHES, microbatches=job.plan.microbatches)
    assert_same(Trained(losses, job.state_dict()), reference)


def test_only_rank_0_measures_and_leaves_no_trace(capfd: pytest.CaptureFixture[str]) -> None:
    def work(context: WorkerContext) -> tuple[int, bool]:
        measured: list[int] = []
        measure = auto.measure
        auto.measure = lambda *given: (measured.append(context.rank), measure(*given))[1]  # type: ignore[assignment]
        model, untouched, drawn = mlp(6, 8, 4), mlp(6, 8, 4), torch.get_rng_state()
        with automatically(model) as job:
            plan = job.plan
        # Whatever plan is the fastest here: under some of them a model holds parts of its parameters.
        automatically(untouched, plan=plan).close()
        with allow_own_calls():  # which look at the parts that a worker has
            same = all(map(torch.equal, model.parameters(), untouched.parameters()))
            same &= all(p.grad is None for p in model.parameters())
        return len(measured), same and torch.equal(drawn, torch.get_rng_state())

    assert fork_workers(work, 2) == [(1, True), (0, True)]
    assert capfd.readouterr().err.count("plan auto: ") == 1


def refusals(work: Callable[[WorkerContext], Any], workers: int = 2) -> list[str]:
    """What every rank is told, and soon."""

    def refused(context: WorkerContext) -> str:
        with pytest.raises(PolylaneError) as told:
            work(context)
        return f"{type(told.value).__name__}: {told.value}"

    start = time.monotonic()
    found = fork_workers(refused, workers)
    assert time.monotonic() - start < 8
    return found


def test_nothing_fits_and_every_rank_says_so() -> None:
    def work(context: WorkerContext) -> None:
        machine.available_memory = lambda: 2000 * context.world.size  # type: ignore[assignment]
        automatically(mlp(6, 8, 4))

    first, second = refusals(work)
    assert first == second
    assert "plan auto: nothing fits on 2 workers" in first


def test_the_others_wait_as_long_as_it_takes_and_sleep() -> None:
    """However little patience the group has that the script made: here a second."""

    def work(context: WorkerContext) -> tuple[str, float]:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = [listener.getsockname()[1] if context.rank == 0 else 0]
        port = context.world.all_gather_object(port)[0]
        context.world.leave()
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port[0]), TORCHELASTIC_USE_AGENT_STORE="False")
        os.environ.update(RANK=str(context.rank), WORLD_SIZE="2")
        world = World.join(timedelta(seconds=1))
        before = time.process_time()
        found = compute_on_rank0(world, lambda: (time.sleep(2.5), f"of rank {context.rank}")[1])
        spent = time.process_time() - before
        dist.barrier()
        world.leave()
        return found, spent

    (first, _), (second, spent) = fork_workers(work, 2)
    assert first == second == "of rank 0"
    assert spent < 0.5


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.float()


def test_a_model_that_fails_and_every_rank_says_so() -> None:
    first, second = refusals(lambda context: automatically(Broken()))
    assert first == second


def test_several_hosts_are_refused_with_what_to_do() -> None:
    def work(context: WorkerContext) -> None:
        on_workers.host_identity = lambda: (f"host{context.rank}",)  # type: ignore[assignment]
        automatically(mlp(6, 8, 4))

    first, second = refusals(work)
    assert first == second
    for words in ("these 2 workers are on 2", "polylane probe", "polylane plan RECIPE --cluster"):
        assert words in first


def test_several_losses_are_refused() -> None:
    losses = {"loss": classify, "other": lambda model, batch: F.mse_loss(model(batch[0]), model(batch[0]).detach())}
    with pytest.raises(PolylaneError, match=r"one loss, not of 2 \(loss, other\)"):
        automatically(mlp(6, 8, 4), loss=losses, optimizer=dict.fromkeys(losses, sgd))


def test_what_is_no_fault_of_the_user_keeps_its_own_error() -> None:
    def work(context: WorkerContext) -> None:
        def fails(*given: Any) -> Any:
            raise ArithmeticError("on the way to a plan")

        auto.measure = fails  # type: ignore[assignment]
        if context.rank == 0:
            automatically(mlp(6, 8, 4))
        with pytest.raises(PeerLost, match="on the way to a plan"):
            automatically(mlp(6, 8, 4))

    with pytest.raises(WorkerFailed) as told:
        fork_workers(work, 2)
    assert told.value.rank == 0 and told.value.error_type == "ArithmeticError"
