"""Buffers that two graphs have on different stages: each finds the value that the other one left."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from polylane.graph.partition import Partition
from polylane.runtime.job import Job
from polylane.runtime.parameters.shared_buffers import SharedBuffers, stages_of_buffers
from tests.support.synthetic_graphs import graph
from tests.support.workers.thread_transport import LocalTransport, run_local
from tests.support.workers.training import batch_of, mlp, sgd, workers

FIRST = Partition(graph([[], [0], [1]], buffers={"mean": [0], "mask": [0, 2]}), (1, 2))
LATER = Partition(graph([[], [0], [1]], buffers={"mean": [1], "mask": [1, 2]}), (1, 2))


def test_the_next_graph_gets_what_the_last_one_wrote() -> None:
    def worker(transport: LocalTransport) -> tuple[list[float], int, int]:
        tensors = {"mean": torch.zeros(2), "mask": torch.ones(2)}
        buffers = SharedBuffers(transport.rank, 3, range(3), True, lambda: tensors, torch.device("cpu"), transport)
        seen = []
        for step, (partition, stage) in enumerate([(FIRST, 0), (LATER, 1), (LATER, 1), (FIRST, 0)]):
            buffers.receive_updates(stages_of_buffers(partition))
            if transport.rank == stage:
                seen.append(tensors["mean"][0].item())
                tensors["mean"] += 10**step
            buffers.mark_updated(stages_of_buffers(partition))
        return seen, buffers.owning_stage("mean", {0, 1}), transport.counters.messages["all_reduce"]

    first, second, third = run_local(3, worker)
    assert first[0] == [0.0, 111.0] and second[0] == [1.0, 11.0] and third[0] == []
    assert {result[1] for result in (first, second, third)} == {0}
    assert len({result[2] for result in (first, second, third)}) == 1  # all took part in every sum


def test_nothing_travels_within_one_graph() -> None:
    def worker(transport: LocalTransport) -> int:
        tensors = {"mean": torch.zeros(2), "mask": torch.ones(2)}
        buffers = SharedBuffers(transport.rank, 3, range(3), True, lambda: tensors, torch.device("cpu"), transport)
        for _ in range(3):
            buffers.receive_updates(stages_of_buffers(FIRST))
            buffers.mark_updated(stages_of_buffers(FIRST))
        return transport.counters.messages["all_reduce"]

    assert run_local(3, worker) == [0, 0, 0]


class Halves(nn.Module):
    """Two networks, of which the losses run now the one first, now the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = mlp(6, 8, 6), mlp(6, 8, 6)
        self.norm = nn.BatchNorm1d(6, affine=False).double()  # without parameters that would hold it in place


def left_first(model: Halves, x: Tensor) -> Tensor:
    return model.right(model.left(model.norm(x))).square().mean()


def right_first(model: Halves, x: Tensor) -> Tensor:
    return model.norm(model.left(model.right(x)) + 0.1 * x).square().mean()


def test_two_losses_share_the_running_statistics() -> None:
    losses = {"left": left_first, "right": right_first}
    batches = [batch_of(samples, seed)[0] for seed, samples in enumerate((8, 6, 8))]

    def work(job: Job) -> dict[str, Tensor]:
        cuts = job._role._prepared.partitions
        assert [[s for s in (0, 1) if cuts[name].buffers(s)] for name in losses] == [[0], [1]]
        for batch in batches:
            for name in losses:
                job.step(batch, name)
        return job.state_dict()

    model = Halves()
    optimizers = [sgd(model.named_parameters()) for _ in losses]
    for batch in batches:
        for loss, optimizer in zip(losses.values(), optimizers, strict=True):
            optimizer.zero_grad()
            loss(model, batch).backward()
            optimizer.step()

    for plan in ("pipeline=2,microbatches=1", "data=2,pipeline=2,microbatches=1"):
        for state in workers(
            work, Halves(), plan, loss=losses, optimizer=dict.fromkeys(losses, sgd), example=batches[0]
        ):
            for name, value in model.state_dict().items():
                torch.testing.assert_close(state[name], value, rtol=1e-10, atol=1e-12, msg=name)
