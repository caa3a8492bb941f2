"""Workers on several hosts: which transport they take, and that a training is the same over it."""

from __future__ import annotations

import copy
import multiprocessing

import pytest
import torch
from torch import nn

from polylane.runtime.transport import hierarchical
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.transport.shared_memory import rendezvous
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets
from tests.support.workers.training import Trained, assert_same, batch_of, classify, mlp, plainly, sgd, trained

BATCHES = [batch_of(9, seed=i) for i in range(3)]


ARRANGEMENTS = ["0 0 1 1", "0 1 1 1", "0 1 0 2"]
TRAINED = [
    "data=4",
    "data=2,pipeline=2,microbatches=2",
    "data=2,tensor=2",
    "data=4,shard=parameters",
    "data=4,servers=2",
]


@pytest.fixture(params=ARRANGEMENTS)
def hosts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Four ranks that take themselves to be on these hosts."""
    chosen = [int(number) for number in request.param.split()]
    rank = lambda: int(multiprocessing.current_process().name[-1])  # noqa: E731
    monkeypatch.setattr(rendezvous, "host_identity", lambda: (str(chosen[rank()]),))
    return chosen


def test_memory_is_shared_inside_a_host_only(hosts: list[int]) -> None:
    def worker(context: WorkerContext) -> tuple[type, list[int], float]:
        connect = choose_transport(context.world)
        transport = connect(context.world, [], [range(4)])
        reached = sorted(connect._hub.links) if isinstance(connect, hierarchical.HierarchicalConnections) else []
        total = transport.all_reduce(torch.full((1000,), float(context.rank)), range(4)).wait()
        transport.barrier()
        transport.close()
        return type(transport), reached, float(total.mean())

    for rank, (kind, reached, mean) in enumerate(fork_workers(worker, 4)):
        assert kind is hierarchical.HierarchicalTransport and mean == 6.0
        assert reached == [other for other in range(4) if hosts[other] == hosts[rank] and other != rank]


@pytest.mark.parametrize(
    ("plan", "hosts"), subsets.one_in(2, subsets.pairs(TRAINED, ARRANGEMENTS), several=True), indirect=["hosts"]
)
def test_a_training_over_several_hosts(hosts: list[int], plan: str) -> None:
    expected = plainly(mlp(6, 8, 4), BATCHES, microbatches=2 if "pipeline" in plan else 1)
    for worker in trained(mlp(6, 8, 4), plan, BATCHES):
        assert_same(worker, expected)


@pytest.mark.parametrize("hosts", subsets.one_in(3, ARRANGEMENTS, first=2), indirect=True)
def test_replicas_on_several_hosts_that_agree_every_second_step(hosts: list[int]) -> None:
    expected = agreeing(mlp(6, 8, 4), 4, 2)
    for worker in trained(mlp(6, 8, 4), "data=4,every=2", BATCHES):
        assert_same(worker, expected)


@pytest.mark.parametrize("hosts", subsets.one_in(3, ARRANGEMENTS, first=1), indirect=True)
def test_gradients_that_travel_rounded(hosts: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """As where all of them travel by torch.distributed: what is rounded is each replica's own share, before any sum."""
    found = trained(mlp(6, 8, 4), "data=4,wire=bfloat16", BATCHES)
    monkeypatch.setenv("POLYLANE_TRANSPORT", "gloo")
    for worker, expected in zip(found, trained(mlp(6, 8, 4), "data=4,wire=bfloat16", BATCHES), strict=True):
        assert_same(worker, expected)


def agreeing(model: nn.Module, replicas: int, every: int) -> Trained:
    """Replicas in one process, each with its samples of every batch; their weights are averaged every so many steps.

    A replica weighs as much as the samples it has seen since; after the last step the mean is taken once more.
    """
    models = [copy.deepcopy(model) for _ in range(replicas)]
    optimizers = [sgd(each.named_parameters()) for each in models]
    counts, losses = [0] * replicas, []
    for step, (inputs, targets) in enumerate(BATCHES, 1):
        values = []
        own = zip(inputs.tensor_split(replicas), targets.tensor_split(replicas), strict=True)
        for replica, batch in enumerate(own):
            optimizers[replica].zero_grad()
            value = classify(models[replica], batch)
            value.backward()
            optimizers[replica].step()
            values.append(value.item() * len(batch[1]))
            counts[replica] += len(batch[1])
        losses.append(sum(values) / len(targets))
        if step % every == 0 or step == len(BATCHES):
            weights = [count / sum(counts) for count in counts]
            states = [each.state_dict() for each in models]
            mean = {name: sum(w * s[name] for w, s in zip(weights, states, strict=True)) for name in states[0]}
            counts = [0] * replicas
            for each in models:
                each.load_state_dict(mean)
    return Trained(losses, models[0].state_dict())
