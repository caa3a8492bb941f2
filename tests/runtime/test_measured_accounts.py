"""Time accounts of measured steps: every moment of every worker is told, under each kind of plan."""

from __future__ import annotations

import pytest

from polylane.observe.time_account import account_time
from polylane.observe.timeline import Timeline
from polylane.runtime.job import Job
from polylane.schedule.action import ActionKind
from tests.support.workers.training import batch_of, mlp, workers

PLANS = [
    "data=2",
    "tensor=2",
    "data=2,shard=parameters",
    "pipeline=2,microbatches=4,schedule=afab",
    "pipeline=2,microbatches=4,schedule=1f1b",
    "pipeline=2,microbatches=2,schedule=interleaved",
    "data=2,tensor=2",
]


def train_step(job: Job) -> tuple[Timeline, Timeline]:
    job.step(batch_of(8))
    return job.step(batch_of(8)).timeline, job.timeline()


@pytest.mark.parametrize("plan", PLANS)
def test_the_time_of_every_worker_is_told(plan: str) -> None:
    ((timeline, gathered), *others) = workers(train_step, mlp(6, 8, 8, 8, 4), plan)
    assert gathered.groups == timeline.groups and all(other.groups == timeline.groups for _, other in others)
    account = account_time(timeline)
    assert account_time(gathered).shares() == pytest.approx(account.shares(), abs=1e-6)
    for rank, spent in enumerate(account.ranks):
        assert spent.computing > 0 and rank not in spent.waiting
        assert spent.computing + spent.communication + spent.bubble == pytest.approx(account.makespan, abs=1e-9)
    if plan == "data=2,tensor=2":  # other shards are summed under the same name, by other ranks
        reduces = {span.action.value for span in timeline.spans if span.action.kind is ActionKind.REDUCE}
        assert reduces & timeline.groups.keys() and {(0, 2), (1, 3)} <= {*sum(timeline.groups.values(), ())}
