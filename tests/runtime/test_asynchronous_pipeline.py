"""Asynchronous pipelines against a plain loop in one process that computes each gradient on delayed weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.graph.batch import split_bounds
from polylane.runtime.job import Job
from polylane.schedule.asynchronous import weight_delays
from tests.support.workers.training import batch_of, mlp, sgd, workers

BATCHES = [batch_of(8, seed=number) for number in range(9)]
WIDTHS = (6, 8, 8, 8, 4)
SLOW = pytest.mark.slow


def step_all(job: Job) -> dict[str, Any]:
    results = [job.step(batch) for batch in BATCHES]
    state = job.state_dict()
    begins = [(span.rank, span.start) for span in job.timeline(steps=4).spans]
    assert len(set(begins)) == len(begins), "what a worker does is measured once"
    pipeline = job._role._binder.pipeline
    stages = {name: stages[0] for name, stages in job._role._local_model.owning_stages.items()}
    return {
        "losses": [result.loss for result in results],
        "state": state,
        "versions": pipeline.versions.most,
        "stages": stages,
    }


def replay(
    delays: tuple[int, ...], stages: dict[str, int], batches: Sequence[tuple[Tensor, Tensor]] = BATCHES
) -> tuple[list[float], dict[str, Tensor]]:
    """Each batch's gradient at the weights of ``max(0, t - delay)`` updates of every stage, applied to the newest."""
    model = mlp(*WIDTHS)
    parameters, optimizer = dict(model.named_parameters()), sgd(model.named_parameters())
    versions, losses = [{name: p.detach().clone() for name, p in parameters.items()}], list[float]()
    for number, (inputs, labels) in enumerate(batches):
        write(parameters, {n: versions[max(0, number - delays[stages[n]])][n] for n in parameters})
        loss = nn.functional.cross_entropy(model(inputs), labels)
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        losses.append(loss.item())
        write(parameters, versions[-1])
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            parameter.grad = gradient
        optimizer.step()
        versions.append({name: p.detach().clone() for name, p in parameters.items()})
    return losses, versions[-1]


def write(parameters: dict[str, nn.Parameter], values: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(values[name])


@pytest.mark.parametrize(
    "plan, stages, microbatches, versions",
    [
        ("pipeline=4,schedule=pipedream", 4, 1, [4, 3, 2, 1]),
        ("pipeline=3,schedule=pipedream-2bw,microbatches=4", 3, 4, [2, 2, 2]),
        ("data=2,pipeline=2,schedule=pipedream,replicas=round-robin", 2, 1, [2, 1] * 2),
        pytest.param("pipeline=2,schedule=pipedream", 2, 1, [2, 1], marks=pytest.mark.slow),
        pytest.param("pipeline=4,schedule=pipedream,vertical_sync=yes", 4, 1, [4] * 4, marks=pytest.mark.slow),
        pytest.param("data=2,pipeline=2,schedule=pipedream,microbatches=2", 2, 2, [2, 1] * 2, marks=pytest.mark.slow),
        pytest.param(
            "pipeline=2,tensor=2,schedule=pipedream-2bw,microbatches=2", 2, 2, [2] * 4, marks=pytest.mark.slow
        ),
    ],
)
def test_a_run_is_the_replay_of_its_rule(plan: str, stages: int, microbatches: int, versions: list[int]) -> None:
    found = workers(step_all, mlp(*WIDTHS), plan)
    delays = weight_delays(
        "pipedream-2bw" if "2bw" in plan else "pipedream", stages, microbatches, "vertical_sync" in plan
    )
    losses, state = replay(delays, found[0]["stages"])
    assert found[0]["losses"] == pytest.approx(losses, rel=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(found[0]["state"][name], value, rtol=1e-12, atol=1e-14)
    assert [each["versions"] for each in found] == versions


@pytest.mark.parametrize(
    "plan, options, says",
    [
        ("pipeline=4,schedule=pipedream-2bw,microbatches=2", {}, "of 4 stages needs at least 3"),
        ("data=2,pipeline=2,schedule=pipedream,every=2", {}, "leave sync out"),
        ("pipeline=2,schedule=afab,vertical_sync=yes", {}, "vertical_sync is for schedule=pipedream, not afab"),
        ("pipeline=2,schedule=pipedream", {"clip_norm": 1.0}, "clip_norm"),
        ("data=2,pipeline=2,schedule=pipedream,microbatches=3,replicas=round-robin", {}, "is no multiple of data=2"),
        ("[data=2 | 1],schedule=pipedream,replicas=round-robin", {}, "needs as many replicas of every stage"),
    ],
)
def test_what_is_refused(plan: str, options: dict[str, Any], says: str) -> None:
    with pytest.raises((PolylaneError, RuntimeError), match=says):
        workers(step_all, mlp(*WIDTHS), plan, **options)


def test_stages_that_share_a_weight_are_refused() -> None:
    model = mlp(6, 6, 6, 6, 4)
    model[4].weight = model[0].weight
    with pytest.raises(PolylaneError, match=r"share .*weight, and would update it at different times"):
        workers(step_all, model, "pipeline=4,schedule=pipedream")


def test_stages_may_share_a_frozen_weight() -> None:
    model = mlp(6, 6, 6, 6, 4)
    model[4].weight = model[0].weight
    model[0].weight.requires_grad_(False)
    shared = model[0].weight.clone()
    for found in workers(lambda job: [[job.step(b).loss for b in BATCHES[:3]], job.state_dict()], model, ASYNC):
        assert all(loss == loss for loss in found[0])
        torch.testing.assert_close(found[1]["4.weight"], shared)


ASYNC = "pipeline=2,schedule=pipedream"
SIZES = (8, 8, 5, 8)


def step_sizes(job: Job) -> dict[str, Tensor]:
    for number, size in enumerate(SIZES):
        job.step(batch_of(size, seed=number))
    return job.state_dict()


@pytest.mark.parametrize(
    "line",
    [
        "data=2,pipeline=2,schedule=pipedream,microbatches=2,replicas=round-robin",
        pytest.param("data=2,pipeline=2,schedule=pipedream-2bw,microbatches=2,replicas=round-robin", marks=SLOW),
        pytest.param("pipeline=2,schedule=pipedream,microbatches=2", marks=SLOW),
    ],
)
def test_running_statistics_of_replicas_in_turn_move_once_for_every_microbatch(line: str) -> None:
    """Also of the last batches, under way when the pipeline is emptied, and of one that is shorter than the others."""
    model, count = nn.Sequential(nn.BatchNorm1d(6).double(), *mlp(*WIDTHS)), int(line.partition("microbatches=")[2][:1])
    found = workers(step_sizes, model, line)[0]
    # What the first layer normalizes does not depend on weights.
    norm = nn.BatchNorm1d(6).double()
    for number, size in enumerate(SIZES):
        for first, last in split_bounds(size, count):
            norm(batch_of(size, seed=number)[0][first:last])
    for name, value in norm.named_buffers():
        torch.testing.assert_close(found[f"0.{name}"], value, rtol=1e-12, atol=1e-14)


def test_batches_too_short_for_all_microbatches_are_learned_from() -> None:
    """Their last backward pass is some steps before the update, whose place does not depend on their size."""
    batches = [batch_of(size, seed=number) for number, size in enumerate((8, 1, 2, 8, 3))]
    delays = weight_delays("pipedream-2bw", 3, 4)

    def run(job: Job) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
        losses = [result.loss for result in [job.step(batch) for batch in batches]]
        return losses, job.state_dict(), {name: own[0] for name, own in job._role._local_model.owning_stages.items()}

    losses, state, stages = workers(run, mlp(*WIDTHS), "pipeline=3,schedule=pipedream-2bw,microbatches=4")[0]
    expected_losses, expected = replay(delays, stages, batches)
    assert losses == pytest.approx(expected_losses, rel=1e-12)
    for name, value in state.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-12, atol=1e-14)
