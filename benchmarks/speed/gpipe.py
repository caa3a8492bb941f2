"""python -m benchmarks.speed.gpipe [gpt] [--rounds R]: torchgpipe beside polylane, on the same cut: time and memory.

torchgpipe is no dependency: ``pip install --no-deps --target FOLDER torchgpipe``, then PYTHONPATH=FOLDER; without it
only this library is measured.
"""

from __future__ import annotations

import copy
import ctypes
import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from benchmarks import contenders
from benchmarks.harness import Contender, make_parser, race, running, table, turn
from benchmarks.published.gpipe import first_node
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec, parse
from polylane.runtime.job import Job
from polylane.runtime.workers.world import World

MICROBATCHES = 8
BASE = "plain loop, 1 thread"
# Further keys of the plan, tried where plans have them.
OURS = ({"schedule": "afab"}, {"schedule": "1f1b"}, {"schedule": "afab", "recompute": "full"})
CHECKPOINTS = ("never", "always")
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of glibc's mallopt(3)


def middle(units: Sequence[nn.Module]) -> int:
    """Return how many of a model's pieces the first stage has."""
    return (len(units) + 1) // 2


def polylane(task: contenders.Task, keys: dict[str, str], microbatches: int) -> Contender:
    """This library on two workers, cut where torchgpipe is cut.

    Args:
        task: what is trained.
        keys: further keys of the plan.
        microbatches: of a step.
    """
    model, line = copy.deepcopy(task.model), ",".join(f"{key}={value}" for key, value in keys.items())
    spec = parse(f"pipeline=2,microbatches={microbatches},{line}")
    assert isinstance(spec, Spec)
    problem = TrainingProblem(model, build_objectives(task.loss, contenders.optimizer, None), task.batch)
    graph, units = problem.capture(2), task.units(model)
    second = next(nn.Sequential(*units[middle(units) :]).parameters())
    name = next(name for name, parameter in model.named_parameters() if parameter is second)
    partition = Partition(graph, (first_node(graph, name.rpartition(".")[0]),))
    prepared = compile_training(problem, fit.plan_from_partition(partition, spec, microbatches))

    def setup(rank: int) -> Callable[[], float]:
        job = Job(prepared, World.join(), example=task.batch)
        return lambda: job.step(task.batch).loss

    return Contender(f"polylane {line}", 2, setup)


def torchgpipe(task: contenders.Task, checkpoint: str, microbatches: int) -> Contender:
    """torchgpipe, whose two stages are threads of one process.

    Args:
        task: what is trained.
        checkpoint: which microbatches are computed again in the backward pass.
        microbatches: of a step.
    """

    def setup(rank: int) -> Callable[[], float]:
        from torchgpipe import GPipe

        units = task.units(copy.deepcopy(task.model))
        balance = [middle(units), len(units) - middle(units)]
        model = GPipe(
            nn.Sequential(*units), balance, devices=["cpu", "cpu"], chunks=microbatches, checkpoint=checkpoint
        )
        steps = contenders.optimizer(model.named_parameters())
        inputs, targets = task.batch

        def step() -> float:
            steps.zero_grad()
            loss = task.output_loss(model(inputs), targets)
            loss.backward()
            steps.step()
            return float(loss.item())

        return step

    return Contender(f"torchgpipe checkpoint={checkpoint}", 1, setup)


def field(task: contenders.Task, microbatches: int) -> list[Contender]:
    """Everyone who trains ``task``, as far as it is installed and plans have the keys."""
    ours = [keys for keys in OURS if set(keys) <= set(Plan.model_fields)]
    found = [contenders.plain(task, 1), *(polylane(task, keys, microbatches) for keys in ours)]
    if importlib.util.find_spec("torchgpipe") is not None:
        found += [torchgpipe(task, checkpoint, microbatches) for checkpoint in CHECKPOINTS]
    return found


def step_memory(entry: Contender) -> list[int]:
    """Bytes by which one step raises the resident memory of each of a contender's processes at most.

    Measured apart from the times: what is free goes back to the system before the step, and in it as early as it can.
    """

    def setup(rank: int) -> Callable[[], int]:
        step = entry.setup(rank)
        glibc = ctypes.CDLL(None)
        glibc.mallopt(_MMAP_THRESHOLD, 1 << 16)
        glibc.mallopt(_TRIM_THRESHOLD, 0)

        def measure() -> int:
            glibc.malloc_trim(0)
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts from what is resident now
            before = _resident("VmRSS")
            step()
            return _resident("VmHWM") - before

        return measure

    probe = replace(entry, setup=setup, pipes=[], processes=[], seconds=[], extra=[])
    with running([probe]):
        turn(probe, 3)
        return [int(each) for each in probe.answers]


def _resident(which: str) -> int:
    """Bytes of this process's resident memory, now or at most."""
    found = re.search(rf"^{which}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the race, measure memory, and print both tables."""
    parser = make_parser("benchmarks.speed.gpipe", __doc__)
    contenders.add_tasks(parser, ("gpt",))
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contender has (default 7)")
    parser.add_argument("--memory-only", action="store_true", help="measure no times, which need an idle machine")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks:
        task = contenders.untie(contenders.TASKS[name]())  # torchgpipe refuses shared parameters
        entries = field(task, 2 if options.quick else MICROBATCHES)
        print(f"\n{task.name}\n")
        if not options.memory_only:
            race(entries, 1 if options.quick else options.rounds, steps=1 if options.quick else contenders.STEPS[name])
            print(f"{table(entries, BASE)}\n")
        print("| | a step's memory, MiB, by process |\n|---|---|")
        for entry in entries:
            print(f"| {entry.name} | {', '.join(f'{size / 2**20:.0f}' for size in step_memory(entry))} |", flush=True)
    if importlib.util.find_spec("torchgpipe") is None:
        print("\nNot measured: torchgpipe (pip install --no-deps --target FOLDER torchgpipe, then PYTHONPATH=FOLDER)")


if __name__ == "__main__":
    main()
