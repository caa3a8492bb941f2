"""python -m benchmarks.speed.sharded [gpt mlp] [--rounds R]: replicas that hold parts, beside DDP and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from benchmarks import contenders
from benchmarks.harness import Contender, make_parser, race, table
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.runtime.job import Job
from polylane.runtime.transport import c10d
from polylane.runtime.transport.choose import choose_transport
from polylane.runtime.workers.world import World

SHARDS = ("none", "optimizer", "gradients", "parameters")


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """What a user of FSDP2 would wrap: a transformer's blocks, or the layers that have parameters."""
    blocks = getattr(model, "blocks", None)
    layers = model.children() if blocks is None else blocks
    return [layer for layer in layers if next(layer.parameters(), None) is not None]


def fsdp(task: contenders.Task, reshard: bool) -> Contender:
    """torch's fully_shard on every block and on the model, on two workers.

    Args:
        task: what is trained.
        reshard: let go of parameters between the passes (ZeRO-3), or not (ZeRO-2).
    """

    def setup(rank: int) -> Callable[[], None]:
        model, mesh = copy.deepcopy(task.model), init_device_mesh("cpu", (2,))
        for module in (*blocks_of(model), model):
            fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
        steps = contenders.optimizer(model.named_parameters())
        half = len(task.batch[0]) // 2
        own: tuple[Tensor, ...] = tuple(leaf[rank * half : (rank + 1) * half] for leaf in task.batch)

        def step() -> None:
            steps.zero_grad()
            task.loss(model, own).backward()
            steps.step()

        return step

    return Contender(f"torch fully_shard, {'ZeRO-3' if reshard else 'ZeRO-2'}", 2, setup)


def polylane(task: contenders.Task, shard: str, gloo: bool) -> Contender:
    """This library on two replicas.

    Args:
        task: what is trained.
        shard: what replicas hold parts of.
        gloo: over gloo, as torch's own are; else as it comes.
    """
    plan = f"data=2,shard={shard}"
    objectives = build_objectives(task.loss, contenders.optimizer, None)
    prepared = compile_training(TrainingProblem(copy.deepcopy(task.model), objectives, task.batch), plan)

    def setup(rank: int) -> Callable[[], Any]:
        world = World.join()
        job = Job(prepared, world, example=task.batch, connect=c10d.C10dTransport if gloo else choose_transport(world))
        return lambda: job.step(task.batch).loss

    return Contender(f"polylane shard={shard}{', gloo' if gloo else ''}", 2, setup)


def field(task: contenders.Task, gloo: bool) -> list[Contender]:
    """Everyone who trains ``task``."""
    theirs = [contenders.plain(task, 1), contenders.ddp(task), fsdp(task, False), fsdp(task, True)]
    both = (False, True) if gloo else (False,)
    return [*theirs, *(polylane(task, shard, each) for shard in SHARDS for each in both)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the races and print their tables."""
    parser = make_parser("benchmarks.speed.sharded", __doc__)
    contenders.add_tasks(parser, ("gpt",))
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contender has (default 7)")
    parser.add_argument("--gloo", action="store_true", help="this library over gloo too")
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds = 1
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks:
        task = contenders.TASKS[name]()
        entries = field(task, options.gloo)
        race(entries, options.rounds, steps=1 if options.quick else contenders.STEPS[name])
        print(f"\n{task.name}\n\n{table(entries, 'torch fully_shard, ZeRO-3')}", flush=True)


if __name__ == "__main__":
    main()
