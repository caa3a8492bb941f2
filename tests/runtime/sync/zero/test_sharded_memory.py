"""The most that a worker holds in a step is within a tenth of what the formulas say."""

from __future__ import annotations

import gc
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.profiler import profile

from polylane.compile.objectives import build_objectives
from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.memory.peak import TrainedBytes, peak_memory
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.state_sharding import StateSharding
from polylane.plan.sync import SUM, Shard
from polylane.program import lower
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from polylane.schedule.synchronous import one_forward_one_backward
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import batch_of, workers

WIDTH, DEPTH = 128, 40
MARK = 123_451  # bytes of a tensor that is made between two steps, and of no other


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def batch() -> tuple[Tensor, Tensor]:
    inputs, _ = batch_of(4, features=WIDTH)
    return inputs.float(), torch.zeros(4, WIDTH)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(list(parameters), lr=1e-3, fused=True)


def alive() -> int:
    """Bytes of all tensors, each piece of memory once; what the parent made before the fork, too."""
    gc.unfreeze()
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (Tensor, nn.Parameter) and each.device.type == "cpu"]
    # A sparse tensor has no memory of its own to look at: those that other tests keep are left out, always.
    strided = [each for each in tensors if each.layout == torch.strided]
    storages = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in strided}
    return sum(storages.values())


def most(job: Job) -> int:
    """Of a step, beyond what other jobs and their graphs left here.

    The profiler sees whatever is allocated and freed, but not how much there was before it came: that is what is alive
    at the end, less all that came and went. By the second step all has gone that was there before.
    """
    job.step(batch())
    with profile(profile_memory=True) as seen:
        job.step(batch())
        mark = torch.empty(MARK, dtype=torch.uint8)
        del mark
        job.step(batch())
    changes = [event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"]
    held, start = alive() - sum(changes), changes.index(-MARK)
    levels = [held := held + change for change in changes]
    return max(levels[start:])


ALSO = [
    pytest.param(shard, microbatches, "float32", marks=pytest.mark.slow)
    for shard, microbatches in (("none", 2), ("optimizer", 1), ("optimizer", 2), ("gradients", 2), ("parameters", 1))
]
FEW = [("none", 1, "float32"), ("gradients", 1, "float32"), ("parameters", 2, "float32"), *ALSO]


@pytest.mark.parametrize(
    ("shard", "microbatches", "precision"),
    [*subsets.one_in(3, FEW, first=1, several=True), ("parameters", 1, "bfloat16")],
)
def test_the_most_that_a_worker_holds(
    shard: Shard, microbatches: int, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under autocast, too, which would keep a cast of every weight between the passes, half of the weights' bytes."""
    unit = WIDTH * WIDTH * 4
    monkeypatch.setattr(lower, "BUCKET_BYTES", unit)
    before = alive()
    whole = model()
    parameters = sum(p.nbytes for p in whole.parameters())
    load = TrainedBytes(parameters, parameters, states=2 * parameters, largest_block=unit)
    nothing = PeakMemory(*[0.0] * 9)
    lane = one_forward_one_backward(1, 1)[0]
    sharding = StateSharding.of(SUM.changed(shard=shard), 2, microbatches)
    method = TrainingOptions(dtype=precision)
    expected = peak_memory(lane, {0: nothing}, {0: load.trained}, load, method, sharding).total
    plan = f"data=2,microbatches={microbatches},shard={shard},precision={precision}"
    for held in workers(most, whole, plan, loss=loss, optimizer=adam, example=batch()):
        assert abs(held - before - expected) < 0.1 * expected, ((held - before) / parameters, expected / parameters)


def test_a_model_without_values_is_never_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """While it gets them, a worker has its half, and one module."""
    unit = WIDTH * WIDTH * 4
    monkeypatch.setattr(lower, "BUCKET_BYTES", unit)
    with torch.device("meta"):
        whole = model()
    prepared = compile_training(whole, build_objectives(loss, adam, None), batch(), "data=2,shard=parameters")

    def start(_: Any) -> int:
        world = World.join()
        with profile(profile_memory=True) as seen:
            job = Job(prepared, world, example=batch())
        job.close()
        return max(accumulate(event.nbytes() for event in seen.kineto_results.events() if event.name() == "[memory]"))

    for held in fork_workers(start, 2):
        assert held < (DEPTH / 2 + 2) * unit
