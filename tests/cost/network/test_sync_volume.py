"""What replicas send each other, by theory: the closed forms of the literature."""

from __future__ import annotations

import pytest

from polylane.cost.network.sync_volume import TrainedTensor, compute_sync_bytes, count_top_k_entries
from polylane.plan.spec import parse

N = 4 * 1000 * 500


def one(plan: str, ranks: int, step: int = 0, **held: bool) -> float:
    return compute_sync_bytes(parse(plan).sync, [TrainedTensor((1000, 500), 4, ranks, **held)], step)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_sum(ranks: int) -> None:
    assert one("data=2", ranks) * ranks == pytest.approx(2 * N * (ranks - 1))
    assert one("data=2,wire=bfloat16", ranks) * ranks == pytest.approx(N * (ranks - 1))
    assert one("data=2,shard=optimizer", ranks) == one("data=2,shard=gradients", ranks) == one("data=2", ranks)
    assert one("data=2,shard=parameters", ranks) == pytest.approx(1.5 * one("data=2", ranks))


def test_servers_get_and_give_once_for_each_replica() -> None:
    resnet_50 = compute_sync_bytes(
        parse("data=8,servers=1,dedicated=yes").sync, [TrainedTensor((23_000_000,), 4, 8)], 0
    )
    assert 8 * resnet_50 * 2 == pytest.approx(1.47e9, rel=2e-3)


def test_in_one_of_several_steps() -> None:
    assert [one("data=2,every=3", 2, step) for step in range(6)] == [0, 0, N, 0, 0, N]
    assert [one("data=2,every=2,warmup=2", 2, step) for step in range(6)] == [N, N, 0, N, 0, N]
    assert one("data=2,every=3", 2, only_replicas=False) == N  # what ranks of one replica sum does not wait


def test_compressed() -> None:
    assert [one("data=2,compress=powersgd:4:1", 2, step) for step in (0, 1)] == [N, 4 * 4 * 1500]
    assert one("data=2,compress=powersgd:400:0", 2) == N  # two matrices of that rank would be larger
    assert one("data=2,compress=top_k:0.01", 4) == 3 * 5000 * 8
    assert one("data=2,compress=top_k:0.01", 4, only_replicas=False) == pytest.approx(1.5 * N)


def test_sharded_over_microbatches() -> None:
    each = N * (4 - 1) / 4
    for shard, times in (("optimizer", 2), ("gradients", 3 + 1), ("parameters", 3 * 3)):
        sync = parse(f"data=4,microbatches=3,shard={shard}").sync
        assert compute_sync_bytes(sync, [TrainedTensor((1000, 500), 4, 4)], 0, microbatches=3) == pytest.approx(
            times * each
        )


def test_a_server_in_a_workers_process() -> None:
    """Of two workers one hosts the server: gradients of the other go, weights to the other come."""
    sync = parse("data=2,servers=1").sync
    assert compute_sync_bytes(sync, [TrainedTensor((1000, 500), 4, 2, goes_to_server=False)], 0, answers=N) == N
    assert compute_sync_bytes(sync, [TrainedTensor((1000, 500), 4, 2)], 0) == N


@pytest.mark.parametrize(
    ("fraction", "elements", "expected"),
    [(0.1, 30, 3), (0.1, 31, 4), (0.01, 1, 1), (1.0, 7, 7), (1e-9, 10**9, 1), (0.5, 0, 0)],
)
def test_entries(fraction: float, elements: int, expected: int) -> None:
    assert count_top_k_entries(fraction, elements) == expected


def test_hybrid_sharding() -> None:
    within, across = N * (4 - 1) / 4, 2 * (N / 4) * (2 - 1) / 2
    assert one("data=8,shard=gradients,within=4", 8) == pytest.approx(2 * within + across)
    assert one("data=8,shard=parameters,within=4", 8) == pytest.approx(3 * within + across)
