"""Train small models by a plan on forked workers, and by a plain loop: what the tests of the runtime compare."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import Objective, build_objectives
from polylane.graph.batch import flatten, sample_count, split_bounds, take_samples
from polylane.plan.plan import Plan
from polylane.plan.spec import parse
from polylane.recipe import Mean
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.support.workers.compiling import compile_training, describe

Pairs = Iterable[tuple[str, nn.Parameter]]


def sgd(parameters: Pairs) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(parameters), lr=0.1, momentum=0.9)


def adamw(parameters: Pairs) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01, weight_decay=0.1)


def mlp(*sizes: int) -> nn.Sequential:
    """Linear layers with tanh in between, the same weights every time, in float64."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


class Tied(nn.Module):
    """Its last layer has the first one's weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))


class OverAll(torch.optim.SGD):
    """Scales all updates by the norm of all gradients, as D-Adaptation and others do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        own = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in own]).norm()
        for p in own:
            p.grad = p.grad / norm
        return super().step(closure)


def classify(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batch_of(samples: int, seed: int = 0, features: int = 6, classes: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=random, dtype=torch.float64)
    return inputs, torch.randint(0, classes, (samples,), generator=random)


@dataclass
class Trained:
    """What one worker, or a plain loop, saw."""

    losses: list[float]
    state: dict[str, Tensor]
    extra: Any = None
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


_compiled = OrderedDict[Any, CompiledTraining]()  # the latest ones
KEPT = 16


def compiled(
    model: nn.Module, objectives: dict[str, Objective], example: Any, plan: str | Plan, evaluation: bool = False
) -> CompiledTraining:
    """Compile a training, or take an equal one: many tests train the same model by the same plan.

    Workers are forked, so that what they do to a model stays theirs. Only models of torch's own modules are taken for
    equal: their printed form and tensors say all of them.
    """
    described = describe(model, objectives, example)
    if described is None:
        return compile_training(model, objectives, example, plan, evaluation=evaluation)
    key = described, tuple(objectives.items()), plan if isinstance(plan, str) else plan.model_dump_json(), evaluation
    known = _compiled.pop(key, None)
    # A test may have changed the model of an earlier one in place.
    if known is None or describe(known.model, objectives, example) != described:
        known = compile_training(model, objectives, example, plan, evaluation=evaluation)
    _compiled[key] = known
    if len(_compiled) > KEPT:
        _compiled.popitem(last=False)
    return known


def workers(
    work: Callable[[Job], Any],
    model: nn.Module,
    plan: str | Plan,
    *,
    loss: Any = classify,
    optimizer: Any = sgd,
    scheduler: Any = None,
    example: Any = None,
    evaluates: bool = False,
    **options: Any,
) -> list[Any]:
    """What ``work(job)`` returns on every worker of ``plan``; evaluation is captured once for all if it evaluates."""
    example = batch_of(8) if example is None else example
    prepared = compiled(model, build_objectives(loss, optimizer, scheduler), example, plan, evaluates)

    def run(_: Any) -> Any:
        with Job(prepared, World.join(), example=example, **options) as job:
            return work(job)

    return fork_workers(run, prepared.plan.processes)


def trained(
    model: nn.Module,
    plan: str | Plan,
    batches: Sequence[Any],
    after: Callable[[Job], Any] = lambda job: None,
    **options: Any,
) -> list[Trained]:
    """Train by ``plan`` on whole batches; what every worker saw."""

    def work(job: Job) -> Trained:
        losses = [job.step(batch).loss for batch in batches]
        gradients = {name: None if g is None else g.clone() for name, g in job.gradients().items()}
        return Trained(losses, job.state_dict(), after(job), gradients)

    return workers(work, model, plan, example=options.pop("example", batches[0]), **options)


def trained_by_servers(model: nn.Module, plan: str, batches: Sequence[Any], **options: Any) -> list[Trained]:
    """What the workers that train saw; those that only serve hold the same weights in the end."""
    results = trained(model, plan, batches, **options)
    count = parse(plan).workers
    for server in results[count:]:
        assert_state(server.state, results[0].state, 0)
    return results[:count]


def plainly(
    model: nn.Module,
    batches: Sequence[Any],
    *,
    loss: Any = classify,
    optimizer: Any = sgd,
    scheduler: Any = None,
    microbatches: int | Sequence[int] = 1,
    clip_norm: float | None = None,
) -> Trained:
    """The same on one device, as anybody would write it, on a copy of the model.

    Args:
        microbatches: of every batch, or of each.
    """
    model = copy.deepcopy(model)
    parameters = list(model.named_parameters())
    steps = optimizer(parameters)
    schedule = scheduler(steps) if scheduler is not None else None
    counts = [microbatches] * len(batches) if isinstance(microbatches, int) else microbatches
    losses = []
    for batch, parts in zip(batches, counts, strict=True):
        steps.zero_grad()
        leaves, rebuild = flatten(batch)
        samples, total, count = sample_count(leaves), 0.0, 0.0
        for start, stop in split_bounds(samples, parts):
            if start == stop:
                continue
            value = loss(model, rebuild(take_samples(leaves, start, stop)))
            if isinstance(value, Mean):
                value.total.backward()
                total, count = total + value.total.item(), count + float(value.count)
            else:
                (value * ((stop - start) / samples)).backward()
                total, count = total + value.item() * (stop - start), count + (stop - start)
            is_mean = isinstance(value, Mean)
        if is_mean:
            for _, parameter in parameters:
                if parameter.grad is not None:
                    parameter.grad /= count
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_([p for group in steps.param_groups for p in group["params"]], clip_norm)
        steps.step()
        if schedule is not None:
            schedule.step()
        losses.append(total / count)
    gradients = {name: p.grad for name, p in parameters}
    return Trained(losses, dict(model.state_dict()), None, gradients)


def assert_same(plan: Trained, reference: Trained, tolerance: float = 1e-10) -> None:
    """Losses and weights agree."""
    torch.testing.assert_close(plan.losses, reference.losses, rtol=tolerance, atol=tolerance)
    assert_state(plan.state, reference.state, tolerance)


def assert_state(state: Mapping[str, Tensor], reference: Mapping[str, Tensor], tolerance: float = 1e-10) -> None:
    assert list(state) == list(reference)
    for name, value in reference.items():
        torch.testing.assert_close(
            state[name], value, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
