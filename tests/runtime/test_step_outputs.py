"""Steps in two halves: outputs and gradients of the first are those of one device, under every kind of plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.capture.output_request import LossWithOutputs
from polylane.recipe import Mean
from polylane.runtime.stale_weights import allow_own_calls
from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.role import ScriptJob, ScriptRole

SAMPLES = 7
Batch = tuple[Tensor, Tensor]


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 3)).double()


def batch_of(step: int) -> Batch:
    random = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, generator=random).double(), torch.randint(0, 3, (SAMPLES,), generator=random)


def loss_of(logits: Tensor, labels: Tensor, counted: bool) -> tuple[Any, list[Tensor]]:
    entropy = F.cross_entropy(logits, labels, ignore_index=1)
    squares = logits.square().mean()
    right = (logits.argmax(1) == labels).sum()
    # How the mean over counted labels is put together is known where it is a part of the loss.
    outputs = [logits, squares, right, logits.sum(0), labels, *([] if counted else [entropy])]
    total = F.cross_entropy(logits, labels, reduction="sum")
    return (Mean(total, torch.ones_like(labels).sum()) if counted else entropy + 0.1 * squares), outputs


def with_outputs(model: nn.Module, batch: Batch) -> LossWithOutputs:
    return LossWithOutputs(*loss_of(model(batch[0]), batch[1], counted=False))


def counted_with_outputs(model: nn.Module, batch: Batch) -> LossWithOutputs:
    return LossWithOutputs(*loss_of(model(batch[0]), batch[1], counted=True))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.5, momentum=0.9)


def train_plainly(counted: bool) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
    model, records = network(), []
    optimizer = sgd(list(model.named_parameters()))
    for step in range(4):
        images, labels = batch_of(step)
        loss, outputs = loss_of(model(images), labels, counted)
        if isinstance(loss, Mean):
            loss = loss.total / loss.count
        loss.backward()
        records.append([loss.detach(), *(output.detach().clone() for output in outputs)])
        if step % 2:  # two steps' gradients make an update
            optimizer.step()
            optimizer.zero_grad()
    return records, model.state_dict()


PLANS = [
    "data=1",
    "data=1,microbatches=3",
    "data=2",
    "data=2,shard=parameters",
    "pipeline=2",
    "pipeline=2,microbatches=3,schedule=zb-h1",
    "tensor=2",
    "data=2,pipeline=2,microbatches=2",
]


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("plan", PLANS)
def test_halves_of_steps_are_those_of_one_device(plan: str, counted: bool) -> None:
    loss = counted_with_outputs if counted else with_outputs
    problem = TrainingProblem(network(), build_objectives(loss, sgd, None), batch_of(0))
    prepared = compile_training(problem, plan)
    expected, weights = train_plainly(counted)

    def run(context: WorkerContext) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
        records = []
        with ScriptJob(prepared, context.world, example=batch_of(0)) as job:
            role = job.worker
            assert isinstance(role, ScriptRole)
            for step in range(4):
                computed = role.compute(batch_of(step), "loss")
                values = [
                    computed.outputs.gather(i, value.shape, value.dtype) for i, value in enumerate(expected[step][1:])
                ]
                records.append([torch.tensor(computed.result.loss, dtype=torch.float64), *values])
                with allow_own_calls():
                    for parameter, gradient in computed.gradients.items():
                        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
                if step % 2:
                    optimizer = role.optimizer_of("loss")
                    role.update_weights("loss", optimizer)
                    with allow_own_calls():
                        optimizer.zero_grad()
            return records, job.state_dict()

    for records, state in fork_workers(run, prepared.plan.processes):
        for got, values in zip(records, expected, strict=True):
            for a, b in zip(got, values, strict=True):
                assert torch.allclose(a.double(), b.double(), rtol=1e-9, atol=1e-12)
        for name, tensor in weights.items():
            assert torch.allclose(state[name], tensor, rtol=1e-9, atol=1e-12), name
