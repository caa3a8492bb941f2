"""What workers send so that replicas agree, counted where it leaves, is what theory says."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from polylane.plan.spec import parse
from tests.support import subsets
from tests.support.workers.training import adamw, batch_of, mlp, workers

MODEL = (6, 128, 128, 4)  # beyond 64 KB: less goes straight to everybody
PARAMETERS = sum((a + 1) * b for a, b in pairwise(MODEL))
BYTES = 8 * PARAMETERS
STEPS = 6


def traffic(plan: str, model: tuple[int, ...] = MODEL) -> list[dict[str, float]]:
    """Of every worker, the mean over the steps."""

    def work(job: Any) -> list[dict[str, float]]:
        for step in range(STEPS):
            job.step(batch_of(24, seed=step))
        return job.traffic()

    found = workers(work, mlp(*model), plan, optimizer=adamw, example=batch_of(24))
    assert all(each == found[0] for each in found)
    return list(found[0])


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_ring_of_all_workers(workers: int) -> None:
    sent = [each["agreement"] for each in traffic(f"data={workers}")]
    assert sum(sent) == pytest.approx(2 * BYTES * (workers - 1), rel=0.01)


@pytest.mark.parametrize("workers", subsets.one_in(2, [2, 3]))
@pytest.mark.parametrize("servers", [1, 2])
def test_parameter_servers(workers: int, servers: int) -> None:
    """Gradients go to the servers and weights come back, once for each worker; at the start weights come once more."""
    sent = [each["agreement"] for each in traffic(f"data={workers},servers={servers},dedicated=yes")]
    assert sum(sent[:workers]) == pytest.approx(BYTES * workers, rel=0.01)
    assert sum(sent[workers:]) == pytest.approx(BYTES * workers, rel=2 / STEPS)
    assert sum(sent[workers:]) >= BYTES * workers


@pytest.mark.parametrize("servers", [1, 2])
def test_parameter_servers_in_the_workers_own_processes(servers: int) -> None:
    """What a worker and its own server give each other goes nowhere: as much is sent as in a ring."""
    sent = [each["agreement"] for each in traffic(f"data=4,servers={servers}")]
    assert sum(sent) == pytest.approx(2 * BYTES * 3, rel=0.01)


@pytest.mark.parametrize("workers", [3, 4])
def test_small_sums_go_straight_to_everybody(workers: int) -> None:
    for each in traffic(f"data={workers}", (6, 8, 4)):
        small = 8 * (7 * 8 + 9 * 4)
        assert each["theory"] == pytest.approx(2 * small * (workers - 1) / workers)
        assert each["agreement"] == small * (workers - 1) == pytest.approx(each["theory"] * workers / 2)


PLANS = [
    "data=2",
    "data=3",
    "data=2,wire=bfloat16",
    "data=3,wire=float16",
    "data=2,compress=powersgd:2:0",
    "data=2,compress=powersgd:2:3",
    "data=3,compress=top_k:0.1",
    "data=2,every=3",
    "data=2,every=2,warmup=2,outer=0.7:0.9",
    "data=2,shard=optimizer",
    "data=3,shard=gradients",
    "data=2,shard=parameters",
    "data=4,shard=gradients,within=2",
    "data=2,microbatches=4,shard=optimizer",
    "data=2,microbatches=4,shard=gradients",
    "data=2,microbatches=4,shard=parameters",
    "data=2,pipeline=2,microbatches=2,shard=parameters",
    "data=2,pipeline=2,microbatches=2",
    "data=2,tensor=2",
    "data=2,servers=1,dedicated=yes",
    "data=2,servers=2,dedicated=yes,staleness=1",
    "data=4,servers=2",
    "data=2,servers=2,staleness=any",
    "data=2,pipeline=2,microbatches=2,servers=2",
    "data=2,tensor=2,servers=2",
]
# Their closed forms are those of others.
FURTHER = [
    "data=2",
    "data=2,wire=bfloat16",
    "data=2,compress=powersgd:2:0",
    "data=2,every=3",
    "data=2,shard=parameters",
    "data=2,microbatches=4,shard=optimizer",
    "data=2,microbatches=4,shard=gradients",
    "data=2,tensor=2",
    "data=2,pipeline=2,microbatches=2",
    "data=2,servers=2,staleness=any",
    "data=2,servers=1,dedicated=yes",
]


@pytest.mark.parametrize("plan", subsets.one_in(2, subsets.except_slow(PLANS, FURTHER)))
def test_theory(plan: str) -> None:
    for each in traffic(plan)[: parse(plan).workers]:
        assert each["theory"] > 0
        # What a worker and a server say to each other beside tensors is counted too: a head there and a head back.
        heads = 2 * 80 * max(parse(plan).sync.server_count, 1)
        assert each["agreement"] == pytest.approx(each["theory"], rel=0.01, abs=heads), plan


def test_norms_are_nothing_that_replicas_agree_on() -> None:
    def work(job: Any) -> list[dict[str, float]]:
        job.step(batch_of(24))
        return job.traffic()

    found = workers(work, mlp(6, 8, 4), "pipeline=2", optimizer=adamw, example=batch_of(24), clip_norm=1.0)[0]
    for each in found:
        assert (each["agreement"], each["theory"]) == (0, 0) and each["statistics"] > 0


@pytest.mark.parametrize("shard", ["gradients", "parameters"])
def test_short_batches_have_fewer_passes(shard: str) -> None:
    def work(job: Any) -> list[dict[str, float]]:
        for samples in (24, 3, 1):
            job.step(batch_of(samples))
        return job.traffic()

    plan = f"data=2,microbatches=4,shard={shard}"
    for each in workers(work, mlp(*MODEL), plan, optimizer=adamw, example=batch_of(24))[0]:
        passes = 4 + 3 + 1
        times = (passes + 3) / 3 if shard == "gradients" else passes
        assert each["theory"] == pytest.approx(times * BYTES / 2)
        assert each["agreement"] == pytest.approx(each["theory"], rel=0.01)
