"""Counts that cross between stages of other numbers of replicas: integers they stay, also where a replica has none."""

from __future__ import annotations

import pytest
import torch

from polylane.compile.objectives import build_objectives
from polylane.compile.reshard import SentShare
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw, batch_of, classify, mlp

SAMPLES = 4  # two microbatches of two: the third of three replicas has none


@pytest.mark.parametrize("plan", ["[data=3 | tensor=2],microbatches=2", "[data=2 | data=3],microbatches=2"])
def test_a_count_crosses_between_other_numbers_of_replicas(plan: str) -> None:
    objectives = build_objectives(classify, adamw, None)
    ends = compile_training(mlp(6, 8, 8, 4), objectives, batch_of(SAMPLES), plan)
    names = [node.name for node in ends.main_partition.graph.nodes]
    cut = names.index("loss/sum") + 1
    divided = zip(ends.plan.stages, ((names[0], names[cut - 1]), (names[cut], names[-1])), strict=True)
    stages = tuple(stage.model_copy(update={"nodes": nodes}) for stage, nodes in divided)
    prepared = compile_training(
        mlp(6, 8, 8, 4), objectives, batch_of(SAMPLES), ends.plan.model_copy(update={"stages": stages})
    )

    def work(_: object) -> list[float]:
        with Job(prepared, World.join(), example=batch_of(SAMPLES), seed=3) as job:
            return [job.step(batch_of(SAMPLES, seed=step)).loss for step in range(3)]

    model = mlp(6, 8, 8, 4)
    optimizer, losses = adamw(model.named_parameters()), []
    for step in range(3):
        optimizer.zero_grad()
        loss = classify(model, batch_of(SAMPLES, seed=step))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    for found in fork_workers(work, prepared.plan.processes):
        torch.testing.assert_close(found, losses, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("value", [torch.tensor(7), torch.tensor([-5, 0, 100], dtype=torch.int8), torch.tensor(0.3)])
def test_shares_add_up_to_the_whole_in_its_dtype(value: torch.Tensor) -> None:
    shares = [SentShare(start, stop, 12).take_from(value) for start, stop in ((0, 5), (5, 5), (5, 11), (11, 12))]
    assert all(share.dtype == value.dtype for share in shares)
    torch.testing.assert_close(sum(shares), value)
