"""What an optimizer was given it holds: layers that join late, parameters frozen and unfrozen, as in the plain loop."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from tests.support import subsets
from tests.support.workers.training import Pairs, Trained, adamw, assert_same, sgd, workers

Batch = tuple[Tensor, Tensor, Tensor]
Change = Callable[[int, Any], None]
STEPS = 5


def batch_of(step: int) -> Batch:
    """Inputs, classes, and the task of all samples, which changes from step to step."""
    random = torch.Generator().manual_seed(step)
    inputs = torch.randn(8, 6, generator=random, dtype=torch.float64)
    return inputs, torch.randint(0, 4, (8,), generator=random), torch.full((8,), step % 2)


class Net(nn.Module):
    """Two heads, of which the batch's task takes one, and a layer between that joins when ``deep`` says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.norm, self.late = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.heads, self.deep, self.tasks = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), True, False
        self.double()

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        y = torch.tanh(self.norm(self.stem(x)))
        y = y + torch.tanh(self.late(y)) if self.deep else y
        head: Tensor = self.heads[int(task[0]) if self.tasks else 0](y)
        return head


def loss(model: nn.Module, batch: Batch) -> Tensor:
    return F.cross_entropy(model(batch[0], batch[2]), batch[1])


CENTERS = nn.Parameter(torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4))


def by_centers(model: nn.Module, batch: Batch) -> Tensor:
    """A loss with parameters of its own, outside of the model."""
    return F.cross_entropy(-torch.cdist(model(batch[0], batch[2]), CENTERS), batch[1])


def with_centers(parameters: Pairs) -> Any:
    return torch.optim.AdamW([{"params": [p for _, p in parameters]}, {"params": [CENTERS], "lr": 0.1}], lr=0.01)


def two_optimizers(parameters: Pairs) -> list[Any]:
    named = list(parameters)
    return [
        torch.optim.Muon([p for _, p in named if p.dim() == 2], lr=0.02),
        adamw([(n, p) for n, p in named if p.dim() < 2]),
    ]


def two_schedules(optimizers: Any) -> list[Any]:
    return [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]


class Thawing(torch.optim.AdamW):
    """Unfreezes its first group after two steps, and freezes it after four."""

    steps = 0

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        self.steps += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.requires_grad_(2 <= self.steps < 4)
        return result


class Gradual(torch.optim.lr_scheduler.StepLR):
    """Unfreezes one group of its optimizer after another, from the last to the first."""

    def step(self, epoch: Any = None) -> None:
        super().step()
        for group in self.optimizer.param_groups[max(0, 2 - self.last_epoch) :]:
            for parameter in group["params"]:
                parameter.requires_grad_(True)


def grouped(parameters: Pairs, kind: Any = torch.optim.SGD, **options: Any) -> Any:
    """An optimizer with a group for each part of the net, at rates of its own."""
    named = list(parameters)
    prefixes = (("stem", "norm"), ("late",), ("heads",))
    groups = [[p for n, p in named if n.startswith(prefix)] for prefix in prefixes]
    return kind([{"params": ps, "lr": 0.1 / 2**i} for i, ps in enumerate(groups)], **options)


def frozen_but_heads(model: Any) -> None:
    model.requires_grad_(False)
    model.heads.requires_grad_(True)


class Case(NamedTuple):
    """A training; ``prepare`` changes the model at first, ``change`` before each step."""

    prepare: Callable[[Any], None] = lambda model: None
    change: Change = lambda step, model: None
    optimizer: Any = adamw
    scheduler: Any = None
    loss: Any = loss


def by_task(model: Any) -> None:
    model.tasks = True


def shallow(model: Any) -> None:
    model.deep = False


def deepen(step: int, model: Any) -> None:
    model.deep = step > 1


def toggle(step: int, model: Any) -> None:
    model.stem.requires_grad_(step % 2 == 0)


def take_turns(step: int, model: Any) -> None:
    """As the two networks of a GAN: one is trained while the other one is not."""
    for part, trained in ((model.stem, step % 2), (model.heads, step % 2 == 0)):
        part.requires_grad_(bool(trained))


def freeze_norm(step: int, model: Any) -> None:
    model.norm.requires_grad_(step < 2)


CASES = {
    "heads by task": Case(by_task),
    "a late layer": Case(shallow, deepen, lambda p: torch.optim.SGD(list(p), lr=0.1, momentum=0.9, weight_decay=0.1)),
    "unfrozen by step()": Case(lambda model: model.stem.requires_grad_(False), optimizer=lambda p: grouped(p, Thawing)),
    "unfrozen by a scheduler": Case(
        frozen_but_heads, optimizer=lambda p: grouped(p, momentum=0.9), scheduler=lambda own: Gradual(own, 2, 0.5)
    ),
    "toggled": Case(change=toggle),
    "in turns": Case(change=take_turns),
    "a frozen norm": Case(change=freeze_norm, optimizer=sgd),
    "a list of optimizers": Case(by_task, optimizer=two_optimizers, scheduler=two_schedules),
    "a criterion's own": Case(optimizer=with_centers, loss=by_centers),
}
PLANS = [
    "data=1",
    "data=2",
    "pipeline=2,microbatches=1",
    "tensor=2",
    "data=2,shard=parameters",
    "data=2,shard=optimizer",
]


def plainly(case: Case) -> Trained:
    """One device, as anybody would write it."""
    model = Net()
    case.prepare(model)
    built, losses = case.optimizer(list(model.named_parameters())), []
    scheduled = case.scheduler(built) if case.scheduler else []
    optimizers, schedulers = (each if isinstance(each, list) else [each] for each in (built, scheduled))
    for step in range(STEPS):
        case.change(step, model)
        for optimizer in optimizers:
            optimizer.zero_grad()
        value = case.loss(model, batch_of(step))
        value.backward()
        for each in (*optimizers, *schedulers):
            each.step()
        losses.append(value.item())
    return Trained(losses, dict(model.state_dict()))


def by_plan(case: Case, plan: str) -> list[Trained]:
    def work(job: Job) -> Trained:
        losses = []
        for step in range(STEPS):
            case.change(step, job.model)
            losses.append(job.step(batch_of(step)).loss)
        return Trained(losses, job.state_dict())

    model = Net()
    case.prepare(model)
    options = {"optimizer": case.optimizer, "scheduler": case.scheduler, "example": batch_of(0)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return workers(work, model, plan, loss=case.loss, **options)


def test_a_group_that_is_added_later_is_refused() -> None:
    def work(job: Job) -> None:
        job.step(batch_of(0))
        job.optimizer.add_param_group({"params": list(job.model.heads.parameters())})
        job.step(batch_of(1))

    def factory(parameters: Pairs) -> Any:
        return torch.optim.SGD([p for name, p in parameters if not name.startswith("heads")], lr=0.1)

    with pytest.raises(PolylaneError, match="further parameters after the training was prepared"):
        workers(work, Net(), "data=1", loss=loss, optimizer=factory, example=batch_of(0))


@pytest.mark.parametrize(("name", "plan"), subsets.one_in(5, subsets.pairs(CASES, PLANS), several=True))
def test_a_training_is_that_of_the_plain_loop(name: str, plan: str) -> None:
    (expected,) = fork_workers(lambda _: plainly(CASES[name]), 1)
    for worker in by_plan(CASES[name], plan):
        assert_same(worker, expected, 1e-9)
