"""The GAN: two objectives over one model, stepped in turn, equal to a plain loop; and its own loop on replicas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gan
import polylane
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.graph.batch import split_bounds
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.runtime.job import Job
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.verify.rounding_floor import relative_error
from polylane.verify.whole_graph import run_graph
from tests.support import subsets
from tests.support.workers.compiling import compile_training

LOSSES = {"discriminator": gan.discriminator_loss, "generator": gan.generator_loss}
OPTIMIZERS = {"discriminator": gan.discriminator_optimizer, "generator": gan.generator_optimizer}
BATCHES = (10, 9, 6)


def images(samples: int, seed: int) -> Tensor:
    return torch.randn(samples, 64, generator=torch.Generator().manual_seed(seed)).double().tanh()


def network() -> nn.Module:
    torch.manual_seed(0)
    return gan.model(width=12).double()


def plain_loop(prepared: CompiledTraining) -> tuple[list[float], dict[str, Tensor]]:
    """Both losses' graphs run whole in turn, microbatch by microbatch, with torch's own optimizers."""
    model = prepared.model
    tensors = ModelTensors(model, [], torch.device("cpu"))
    optimizers = {name: factory(list(model.named_parameters())) for name, factory in OPTIMIZERS.items()}
    losses = []
    for step, samples in enumerate(BATCHES):
        batch = images(samples, step)
        for turn, name in enumerate(LOSSES):
            model.zero_grad()
            total = 0.0
            for microbatch, (start, stop) in enumerate(split_bounds(samples, prepared.plan.microbatches)):
                if start < stop:
                    part = SampleSlice(stop - start, start, samples, microbatch, 2 * step + turn)
                    (loss,) = run_graph(prepared.partitions[name].graph.code, tensors, [batch[start:stop]], part)
                    (loss * ((stop - start) / samples)).backward()
                    total += loss.item() * (stop - start) / samples
            optimizers[name].step()
            losses.append(total)
    return losses, copy.deepcopy(model.state_dict())


PLANS = (
    "data=2",
    "pipeline=2,microbatches=3",
    "data=2,pipeline=2,microbatches=2",
    "data=2,servers=2",
    "data=2,pipeline=2,microbatches=2,servers=2",
)
SPLIT = ("tensor=2", "tensor=3", "sequence=2", "data=2,tensor=2", "pipeline=2,tensor=2,microbatches=2")


# The discriminator is on other stages for its own loss than for the generator's.
UNEVEN = ("[data=2 | tensor=2],microbatches=2", "[1 | data=2 | tensor=2],microbatches=2")


# What others have, too.
FURTHER = (PLANS[0], PLANS[2], PLANS[3], SPLIT[0], SPLIT[1], SPLIT[-1], UNEVEN[0])


@pytest.mark.parametrize("plan", subsets.one_in(2, subsets.except_slow([*PLANS, *SPLIT, *UNEVEN], FURTHER)))
def test_two_objectives_train_as_a_plain_loop_does(plan: str) -> None:
    prepared = compile_training(
        network(), build_objectives(LOSSES, OPTIMIZERS, None), images(10, 0), plan, in_float64=True
    )

    def work(_: Any) -> tuple[list[float], dict[str, Tensor]]:
        job = Job(prepared, World.join(), example=images(10, 0))
        losses = [job.step(images(n, step), name).loss for step, n in enumerate(BATCHES) for name in LOSSES]
        return losses, job.state_dict()

    results = fork_workers(work, prepared.plan.workers)
    losses, state = plain_loop(prepared)
    for own, weights in results:
        assert own == pytest.approx(losses, rel=1e-9)
        worst = {name: relative_error(state[name], weights[name], 1e-3) for name in state}
        assert max(worst.values()) < 1e-9, worst


def test_its_own_loop_on_replicas() -> None:
    def work(_: Any) -> dict[str, Tensor]:
        model = network()
        replicas = polylane.data_parallel(model)
        optimizers = [factory(model.named_parameters()) for factory in OPTIMIZERS.values()]
        for batch in replicas.batches(list(images(23, 0)), 7, epochs=1):
            for loss, optimizer in zip(LOSSES.values(), optimizers, strict=True):
                optimizer.zero_grad()
                loss(model, batch).backward()
                optimizer.step()
        return model.state_dict()

    (alone,), several = fork_workers(work, 1), fork_workers(work, 3)
    for weights in several:
        worst = {name: relative_error(alone[name], weights[name], 1e-3) for name in alone}
        assert max(worst.values()) < 1e-9, worst
