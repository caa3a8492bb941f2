"""The ways of training that are compared: a plain loop, torch's own parallelism, and polylane's."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from benchmarks.harness import Contender
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.runtime.job import Job
from polylane.runtime.workers.world import World


@dataclass(frozen=True)
class Task:
    """A model with one batch, the same for every contender.

    ``units`` takes a copy of the model to pieces by hand, which run one after the other: torch.distributed.pipelining
    and others need modules that are the stages.
    """

    name: str
    model: nn.Module
    loss: Callable[[nn.Module, Any], Tensor]
    output_loss: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, Tensor]
    units: Callable[[nn.Module], list[nn.Module]]


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    """The same fused AdamW for everyone: the default one takes nine times as long on CPU."""
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-3, weight_decay=0.1, fused=True)


def plain(task: Task, threads: int) -> Contender:
    """One process, an ordinary loop."""

    def setup(rank: int) -> Callable[[], None]:
        model = copy.deepcopy(task.model)
        steps = optimizer(model.named_parameters())

        def step() -> float:
            steps.zero_grad()
            loss = task.loss(model, task.batch)
            loss.backward()
            steps.step()
            return loss.item()

        return step

    return Contender(f"plain loop, {threads} thread{'s' * (threads > 1)}", 1, setup, threads)


def ddp(task: Task) -> Contender:
    """torch's DistributedDataParallel on two workers."""

    def setup(rank: int) -> Callable[[], None]:
        model = copy.deepcopy(task.model)
        wrapped = nn.parallel.DistributedDataParallel(model)
        steps = optimizer(model.named_parameters())
        half = len(task.batch[0]) // 2
        own = tuple(leaf[rank * half : (rank + 1) * half] for leaf in task.batch)

        def step() -> None:
            steps.zero_grad()
            task.loss(wrapped, own).backward()
            steps.step()

        return step

    return Contender("torch DistributedDataParallel", 2, setup)


def pipelining(task: Task, kind: type[ScheduleGPipe] | type[Schedule1F1B], microbatches: int) -> Contender:
    """torch.distributed.pipelining on two workers, cut by hand in the middle."""

    def setup(rank: int) -> Callable[[], None]:
        units = task.units(copy.deepcopy(task.model))
        half = (len(units) + 1) // 2
        module = nn.Sequential(*(units[half:] if rank else units[:half]))
        stage = PipelineStage(module, rank, 2, torch.device("cpu"))
        schedule = kind(stage, microbatches, loss_fn=task.output_loss)
        steps = optimizer(module.named_parameters())
        inputs, targets = task.batch

        def step() -> None:
            steps.zero_grad()
            if rank == 0:
                schedule.step(inputs)
            else:
                schedule.step(target=targets, losses=[])
            steps.step()

        return step

    return Contender(f"torch {kind.__name__}, m={microbatches}", 2, setup)


def polylane(task: Task, plan: str, workers: int) -> Contender:
    """This library, by a plan."""
    model = copy.deepcopy(task.model)
    prepared = compile_training(TrainingProblem(model, build_objectives(task.loss, optimizer, None), task.batch), plan)

    def setup(rank: int) -> Callable[[], float]:
        job = Job(prepared, World.join(), example=task.batch)

        def step() -> float:
            return job.step(task.batch).loss

        return step

    return Contender(f"polylane {plan}", workers, setup)


class _Embedding(nn.Module):
    """What the GPT does before its blocks, without dropout."""

    def __init__(self, whole: Any) -> None:
        super().__init__()
        self.token, self.position = whole.token, whole.position

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        return found


class _AttentionHalf(nn.Module):
    """The first half of a block, without dropout."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.attention = block.norm1, block.attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


class _MlpHalf(nn.Module):
    """The second half of a block, without dropout."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.norm, self.mlp = block.norm2, block.mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def gpt(samples: int = 16) -> Task:
    """The 6-layer GPT of examples/gpt.py: hidden 256, 8 heads, sequence 128."""
    from polylane.recipe import load

    recipe = load("examples/gpt.py", {"layers": "6", "hidden": "256", "heads": "8", "vocab": "512", "dropout": "0.0"})
    torch.manual_seed(0)
    model = recipe.model()
    batch = torch.utils.data.default_collate([recipe.data("train")[i] for i in range(samples)])

    def units(whole: Any) -> list[nn.Module]:
        halves = [half for block in whole.blocks for half in (_AttentionHalf(block), _MlpHalf(block))]
        return [_Embedding(whole), *halves, nn.Sequential(whole.norm, whole.head)]

    def output_loss(logits: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    name = f"GPT, 6 layers, hidden 256, sequence 128, batch {samples}"
    return Task(name, model, recipe.loss, output_loss, batch, units)


def untie(task: Task) -> Task:
    """Return the task with a copy of its model in which no two modules share a parameter."""
    return replace(task, model=untie_parameters(copy.deepcopy(task.model)))


def untie_parameters(model: nn.Module) -> nn.Module:
    """Give every module of a model parameters of its own: asynchronous pipelines and others refuse shared ones."""
    seen = set[int]()
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if id(parameter) in seen:
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
            seen.add(id(parameter))
    return model


def mlp(width: int = 1024, samples: int = 128) -> Task:
    """Ten layers of 1024, batch 128: bound by communication."""
    torch.manual_seed(0)
    layers = [layer for _ in range(10) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    batch = (torch.randn(samples, width), torch.randn(samples, width))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    name = f"MLP, 10 layers of {width}, batch {samples}"
    return Task(name, model, loss, F.mse_loss, batch, list)


TASKS: dict[str, Callable[[], Task]] = {"gpt": gpt, "mlp": mlp, "tiny": lambda: mlp(16, 8)}
STEPS = {"gpt": 2, "mlp": 8, "tiny": 8}  # of a turn


def add_tasks(parser: argparse.ArgumentParser, default: Sequence[str]) -> None:
    """Let a command line name tasks; ``choices`` would refuse the default of a list before Python 3.12."""

    def task(name: str) -> str:
        if name not in TASKS:
            raise argparse.ArgumentTypeError(f"there is no task {name!r}: choose from {', '.join(TASKS)}")
        return name

    said = f"of {', '.join(TASKS)} (default: {' '.join(default)})"
    parser.add_argument("tasks", nargs="*", type=task, metavar="TASK", default=list(default), help=said)
