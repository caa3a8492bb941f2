"""Servers that take gradients as they come do what they record: a replay in one process gives the same weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.speed.stragglers import Straggler, slow_down
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.plan.spec import parse
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.sync.parameter_server.update_log import ServerUpdate, count_staleness
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.record import ComparedTraining, ReferenceRun
from polylane.verify.server_replay import replay_updates
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw, assert_state, batch_of, classify, mlp, sgd

BATCHES = [batch_of(8, seed=i) for i in range(8)]
SLOW = {1: Straggler(3)}  # a rank whose passes take three times as long


@dataclass
class Seen:
    sums: list[tuple[float, float]]
    stale: list[int]
    state: dict[str, Tensor]
    orders: tuple[tuple[ServerUpdate, ...], ...]
    loss: float = 0.0


def seen(job: Job, batches: Any) -> Seen:
    sums, stale = [], []
    for batch in batches:
        sums.append(job.step(batch).sums)
        stale.append(job.worker.staleness)
    return Seen(sums, stale, job.state_dict(), job.worker.updates())


def run(
    model: nn.Module, plan: str, batches: Any = BATCHES, *, loss: Any = classify, optimizer: Any = sgd, **options: Any
) -> tuple[CompiledTraining, list[Seen]]:
    objectives = build_objectives(loss, optimizer, options.pop("scheduler", None))
    evaluates, stragglers = options.pop("evaluates", False), options.pop("stragglers", {})
    prepared = compile_training(model, objectives, batches[0], plan, evaluation=evaluates)

    def work(_: Any) -> Seen:
        with Job(prepared, World.join(), example=batches[0], **options) as job:
            found = seen(job, batches)
            return replace(found, loss=job.evaluate(batches[0])) if evaluates else found

    with slow_down(stragglers):
        return prepared, fork_workers(work, prepared.plan.processes)


def check(prepared: CompiledTraining, workers: list[Seen], batches: Any = BATCHES, **options: Any) -> ReferenceRun:
    again = replay_updates(ComparedTraining(prepared, batches, **options), workers[0].orders)
    for worker in workers:
        assert_state(worker.state, again.state, 1e-9)
        assert worker.orders == workers[0].orders
    plan = prepared.plan
    ranks = {plan.stage_and_replica(rank)[1]: rank for rank in range(plan.workers)}.values()
    for step, mean in enumerate(again.losses):
        total, count = map(sum, zip(*(workers[rank].sums[step] for rank in ranks), strict=True))
        assert total / count == pytest.approx(mean, rel=1e-9)
    return again


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}
PLANS = [
    "data=2,servers=1,staleness=any",
    "data=3,servers=2,staleness=any",
    "data=4,servers=3,staleness=any,dedicated=yes",
    "data=3,servers=2,staleness=1,dedicated=yes",
    "data=2,pipeline=2,microbatches=2,servers=2,staleness=any",
    "data=2,tensor=2,servers=2,staleness=2",
    "[data=2,tensor=2 | data=2],microbatches=2,servers=1,staleness=any",
]


@pytest.mark.parametrize(("plan", "optimizer"), subsets.one_in(2, subsets.pairs(PLANS, [*OPTIMIZERS]), several=True))
def test_the_weights_of_the_recorded_order(plan: str, optimizer: str) -> None:
    prepared, workers = run(mlp(6, 8, 4), plan, optimizer=OPTIMIZERS[optimizer], clip_norm=0.5, stragglers=SLOW)
    check(prepared, workers, clip_norm=0.5)
    for order in workers[0].orders:
        assert [update.version for update in order] == list(range(1, len(BATCHES) * prepared.plan.data + 1))
        assert max(count_staleness(order)) > 0  # some were stale, or nothing was shown


@pytest.mark.parametrize("bound", [1, 2])
def test_nobody_is_further_ahead_than_allowed_and_somebody_is_as_far(bound: int) -> None:
    plan = f"data=3,servers=2,staleness={bound}"
    prepared, workers = run(mlp(6, 8, 4), plan, stragglers={1: Straggler(30)})
    check(prepared, workers)
    for order in workers[0].orders:
        assert max(update.steps_ahead for update in order) == bound
        assert max(count_staleness(order)) <= 2 * (2 * bound + 1)  # of each other replica


def test_without_a_bound_the_others_do_not_wait_for_a_slow_one() -> None:
    _, workers = run(mlp(6, 8, 4), "data=2,servers=1,staleness=any", stragglers={1: Straggler(60)})
    assert max(update.steps_ahead for update in workers[0].orders[0]) > 2


def test_replicas_without_samples_make_no_update_and_hold_nobody_up() -> None:
    batches = [batch_of(n, seed=n) for n in (6, 2, 1, 2, 1, 6)]
    prepared, workers = run(mlp(6, 8, 4), "data=3,servers=2,staleness=1", batches, stragglers=SLOW)
    check(prepared, workers, batches)
    per_replica = [sum(update.replica == r for update in workers[0].orders[0]) for r in range(3)]
    assert per_replica == [6, 4, 2]


def test_means_schedulers_and_running_statistics() -> None:
    def some(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Mean:
        wanted = batch[1] != 0
        losses = F.cross_entropy(model(batch[0]), batch[1], reduction="none")
        return Mean((losses * wanted).sum(), wanted.sum())

    def halving(optimizer: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
    plan = "data=2,servers=2,staleness=any"
    prepared, workers = run(model, plan, loss=some, scheduler=halving, evaluates=True, stragglers=SLOW)
    again = check(prepared, workers)
    whole = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double().eval()
    whole.load_state_dict(dict(again.state))
    mean = some(whole, BATCHES[0])
    assert workers[0].loss == pytest.approx((mean.total / mean.count).item(), rel=1e-9)


def test_dropout() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)).double()
    prepared, workers = run(model, "data=2,servers=1,staleness=any", seed=7, stragglers=SLOW)
    check(prepared, workers, seed=7)


def test_evaluation_and_weights_in_between_change_nothing() -> None:
    def work(_: Any) -> Seen:
        with Job(prepared, World.join(), example=BATCHES[0]) as job:
            sums = []
            for batch in BATCHES:
                sums.append(job.step(batch).sums)
                job.evaluate(batch)
                job.state_dict()
            return Seen(sums, [], job.state_dict(), job.worker.updates())

    plan = "data=2,servers=2,staleness=any"
    prepared = compile_training(mlp(6, 8, 4), build_objectives(classify, sgd, None), BATCHES[0], plan, evaluation=True)
    check(prepared, fork_workers(work, prepared.plan.processes))


def test_what_the_workers_are_told_of_their_staleness() -> None:
    prepared, workers = run(mlp(6, 8, 4), "data=2,servers=1,staleness=any", stragglers=SLOW)
    for replica, worker in enumerate(workers):
        own = [update for update in worker.orders[0] if update.replica == replica]
        assert worker.stale == [update.staleness for update in own]
        assert [update.step for update in own] == list(range(len(BATCHES)))
    with pytest.raises(ValueError, match="no training has had this order"):
        order = [replace(update, read_version=update.version + 1) for update in workers[0].orders[0]]
        replay_updates(ComparedTraining(prepared, BATCHES), [order])


def test_synchronous_servers_have_no_order_to_replay() -> None:
    prepared = compile_training(
        mlp(6, 8, 4), build_objectives(classify, sgd, None), BATCHES[0], parse("data=2,servers=1")
    )
    with pytest.raises(ValueError, match="there is no order to replay"):
        replay_updates(ComparedTraining(prepared, BATCHES), [])
