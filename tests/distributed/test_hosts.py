"""Workers on several hosts: which transport they take, and that a training is the same over it."""

from __future__ import annotations

import os

import pytest

from polylane.runtime.launch import Context, fork
from polylane.runtime.transport import hierarchical, rendezvous
from polylane.runtime.transport.choose import transport_for
from training import assert_same, batch_of, mlp, plainly, trained

BATCHES = [batch_of(9, seed=i) for i in range(3)]


@pytest.fixture(params=["0 0 1 1", "0 1 1 1", "0 1 0 2"])
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four ranks that take themselves to be on these hosts."""
    chosen = [int(number) for number in request.param.split()]
    monkeypatch.setattr(rendezvous, "host", lambda: (str(chosen[int(os.environ["RANK"])]),))
    return chosen


def test_memory_is_shared_inside_a_host_only(hosts: list[int]) -> None:
    def worker(context: Context) -> tuple[type, list[int], float]:
        connect = transport_for(context.world)
        transport = connect(context.world, [], [range(4)])
        reached = sorted(connect._hub.links) if isinstance(connect, hierarchical.Hierarchical) else []
        import torch

        total = transport.all_reduce(torch.full((1000,), float(context.rank)), range(4)).wait()
        transport.barrier()
        transport.close()
        return type(transport), reached, float(total.mean())

    for rank, (kind, reached, mean) in enumerate(fork(worker, 4)):
        assert kind is hierarchical.Transport and mean == 6.0
        assert reached == [other for other in range(4) if hosts[other] == hosts[rank] and other != rank]


@pytest.mark.parametrize("plan", ["data=4", "data=2,pipeline=2,microbatches=2", "data=2,tensor=2", "data=4,every=2"])
def test_a_training_over_several_hosts(hosts: list[int], plan: str) -> None:
    workers = trained(mlp(6, 8, 4), plan, BATCHES)
    if "every" in plan:
        for worker in workers[1:]:
            assert_same(worker, workers[0])
        return
    expected = plainly(mlp(6, 8, 4), BATCHES, microbatches=2 if "pipeline" in plan else 1)
    for worker in workers:
        assert_same(worker, expected)
