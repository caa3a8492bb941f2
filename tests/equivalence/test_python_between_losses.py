"""State in the user's own Python that settles on one batch, is bound in a partial, or is read by another loss."""

from __future__ import annotations

import array
import ctypes
import functools
import multiprocessing
import os
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import fork_workers

pytestmark = pytest.mark.filterwarnings("ignore:each replica computes")
SAMPLES, STEPS = 6, 4
OTHERS = ("pipeline=2,microbatches=1", "tensor=2", "data=2,shard=parameters", "data=2,tensor=2")
Batch = tuple[Tensor, Tensor]
last: deque[float] = deque([0.0])
options = SimpleNamespace(weight=1.0, seen=[])
steps = 0


class ByLastLoss(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * last[0]
        return super().step(closure)


def noting(model: nn.Module, batch: Batch) -> Tensor:
    """Of one batch the queue holds the same after every run."""
    loss = F.cross_entropy(model(batch[0]), batch[1])
    last.popleft()
    last.append(loss.item())
    return loss


def bound(model: nn.Module, batch: Batch, options: Any) -> Tensor:
    loss = options.weight * F.cross_entropy(model(batch[0]), batch[1])
    options.seen.append(loss.item())
    return loss


class ByLastTensor(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] = 0.1 * float(last_tensor)
        return super().step(closure)


last_tensor = torch.zeros(())


def noting_a_tensor(model: nn.Module, batch: Batch) -> Tensor:
    global last_tensor
    loss = F.cross_entropy(model(batch[0]), batch[1])
    last_tensor = loss.detach()
    return loss


def by_last_tensor(parameters: Any) -> torch.optim.Optimizer:
    return ByLastTensor([p for _, p in parameters], lr=0.3)


def by_environment(model: nn.Module, batch: Batch) -> Tensor:
    calls = int(os.environ.get("CALLS", "0"))
    os.environ["CALLS"] = str(calls + 1)
    return F.cross_entropy(model(batch[0]), batch[1]) / (1 + calls)


counted, doubled, shared = array.array("d", [0.0]), ctypes.c_double(1.0), multiprocessing.Value("d", 1.0)


def by_memory(model: nn.Module, batch: Batch) -> Tensor:
    """Counts in an array of Python's own and in one of C's; a script moves what processes share."""
    counted[0] += 1
    doubled.value *= 1.1
    return F.cross_entropy(model(batch[0]), batch[1]) / counted[0] * doubled.value * shared.value


by_number, by_pair = {0: 1.0}, {(0, 1): [1.0]}


def by_tables(model: nn.Module, batch: Batch) -> Tensor:
    """A script changes what tables have under numbers and pairs."""
    return F.cross_entropy(model(batch[0]), batch[1]) * by_number[0] * by_pair[0, 1][0]


def change(step: int) -> None:
    by_number[0], by_pair[0, 1][0] = 1.0 + step, 1.0 / (1 + step)
    options.weight = 1.0 / (1 + len(options.seen))
    shared.value = 1.0 / (1 + step)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def batches() -> list[Batch]:
    random = torch.Generator().manual_seed(1)
    return [
        (torch.randn(SAMPLES, 4, generator=random).double(), torch.randint(0, 3, (SAMPLES,), generator=random))
        for _ in range(STEPS)
    ]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for _, p in parameters], lr=0.3)


def by_last_loss(parameters: Any) -> torch.optim.Optimizer:
    return ByLastLoss([p for _, p in parameters], lr=0.3)


Loss = Callable[[Any, Any], Tensor]


def train_plainly(losses: dict[str, Loss], optimizers: dict[str, Any], build: Callable[[], nn.Module]) -> list[float]:
    model, found = build(), []
    built = {name: make(list(model.named_parameters())) for name, make in optimizers.items()}
    for step, batch in enumerate(batches()):
        change(step)
        for name, loss in losses.items():
            built[name].zero_grad()
            value = loss(model, batch)
            value.backward()
            built[name].step()
            found.append(value.item())
    return found


def train_by_plan(
    losses: dict[str, Loss], optimizers: dict[str, Any], build: Callable[[], nn.Module], plan: str
) -> list[list[float]]:
    """Return the losses of all steps, as each worker has them."""
    objectives = build_objectives(losses, optimizers, None)
    prepared = compile_training(TrainingProblem(build(), objectives, batches()[0]), plan)

    def run(context: WorkerContext) -> list[float]:
        job, found = Job(prepared, context.world, example=batches()[0], seed=5), []
        for step, batch in enumerate(batches()):
            change(step)
            found += [job.step(batch, name).loss for name in losses]
        job.close()
        return found

    return fork_workers(run, prepared.plan.processes)


@pytest.mark.parametrize(
    ("loss", "optimizer"),
    [
        (noting, by_last_loss),
        (noting_a_tensor, by_last_tensor),
        (functools.partial(bound, options=options), sgd),
        (by_environment, sgd),
        (by_memory, sgd),
        (by_tables, sgd),
    ],
    ids=["the last loss", "a tensor", "bound", "environment", "memory", "tables"],
)
def test_state_of_a_loss(loss: Loss, optimizer: Any) -> None:
    given = {"loss": loss}, {"loss": optimizer}, network
    alone = fork_workers(lambda _: train_plainly(*given), 1)[0]
    for losses in train_by_plan(*given, "data=2"):
        assert losses == pytest.approx(alone, rel=1e-9)


def test_workers_do_not_count_in_memory_that_they_share() -> None:
    def by_shared(model: nn.Module, batch: Batch) -> Tensor:
        shared.value += 1
        return F.cross_entropy(model(batch[0]), batch[1]) / shared.value

    with pytest.raises(PolylaneError, match="writes the global shared, memory that processes share, and each of 2"):
        train_by_plan({"loss": by_shared}, {"loss": sgd}, network, "data=2")


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = network(), nn.Linear(3, 1).double()


def of_the_body(model: Any, batch: Batch) -> Tensor:
    """Couples samples, so that replicas split operators along the batch."""
    values = model.body(batch[0])
    return F.cross_entropy(values, batch[1]) + (values @ values.T).softmax(1).square().mean()


def counting(model: Any, batch: Batch) -> Tensor:
    global steps
    loss = of_the_body(model, batch)
    steps += 1
    return loss


def of_the_head(model: Any, batch: Batch) -> Tensor:
    return (model.head(model.body(batch[0]).detach()) - 1).square().mean()


def of_the_count(model: Any, batch: Batch) -> Tensor:
    return of_the_head(model, batch) * min(1.0, steps / 4)


def train_of(part: str) -> Any:
    return lambda parameters: torch.optim.SGD([p for name, p in parameters if name.startswith(part)], lr=0.2)


@pytest.mark.parametrize(
    ("losses", "plan"),
    [
        ((of_the_body, of_the_head), "data=2"),
        ((counting, of_the_count), "data=2"),
        *(pytest.param((of_the_body, of_the_head), plan, marks=pytest.mark.slow) for plan in OTHERS),
        *(
            pytest.param((counting, of_the_count), plan, marks=pytest.mark.slow)
            for plan in OTHERS
            if "pipe" not in plan
        ),
    ],
)
def test_each_of_two_losses_trains_parameters_that_the_other_does_not(losses: tuple[Loss, Loss], plan: str) -> None:
    """Their gradients are partial sums in one graph, and are none in the other."""
    given = dict(zip("ab", losses, strict=True)), {"a": train_of("body"), "b": train_of("head")}, build_two
    alone = fork_workers(lambda _: train_plainly(*given), 1)[0]
    for found in train_by_plan(*given, plan):
        assert found == pytest.approx(alone, rel=1e-9)


def build_two() -> nn.Module:
    torch.manual_seed(0)
    return Two()
