"""python -m benchmarks.speed.tensor [gpt4 gpt16 wide1 wide32]: operators split over two workers, beside DTensor."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import contenders
from benchmarks.contenders import Task
from benchmarks.harness import Contender, make_parser, race, table
from benchmarks.speed.dtensor import dtensor, dtensor_forward, split_gpt, split_mlp
from polylane.compile.compiled_training import compile_training
from polylane.compile.objectives import build_objectives
from polylane.compile.training_problem import TrainingProblem
from polylane.runtime.job import Job
from polylane.runtime.workers.world import World

WIDTH, LAYERS = 8192, 4


def wide(samples: int, width: int = WIDTH) -> Task:
    """A few very wide layers. With one sample a step reads every weight once: the memory's bandwidth bounds it."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(width, width), nn.ReLU())]
    model = nn.Sequential(*layers[:-1])
    batch = (torch.randn(samples, width), torch.zeros(samples, width))  # against zero, so that a loss tells of rounding

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    name = f"MLP, {LAYERS} layers of {width}, batch {samples}, forward only"
    return Task(name, model, loss, F.mse_loss, batch, list)


def plain_forward(task: Task, threads: int) -> Contender:
    """One process, the loss alone."""

    def setup(rank: int) -> Callable[[], float]:
        model = task.model.eval()

        def step() -> float:
            with torch.no_grad():
                return float(task.loss(model, task.batch))

        return step

    return Contender(f"plain loop, {threads} thread{'s' * (threads > 1)}", 1, setup, threads)


def polylane_forward(task: Task, plan: str, workers: int) -> Contender:
    """This library, the loss alone."""
    # An optimizer without states: nothing is trained.
    objectives = build_objectives(
        task.loss, lambda parameters: torch.optim.SGD([p for _, p in parameters], lr=0.1), None
    )
    prepared = compile_training(TrainingProblem(task.model, objectives, task.batch), plan, evaluation=True)

    def setup(rank: int) -> Callable[[], float]:
        job = Job(prepared, World.join(), example=task.batch)
        return lambda: job.evaluate(task.batch)

    return Contender(f"polylane {plan}", workers, setup)


def training(task: Task) -> list[Contender]:
    """Everyone who trains ``task``."""
    return [
        contenders.plain(task, 1),
        contenders.plain(task, 2),
        dtensor(task, split_gpt),
        contenders.polylane(task, "tensor=2", 2),
    ]


def forward(task: Task) -> list[Contender]:
    """Everyone who computes the loss of ``task``."""
    return [
        plain_forward(task, 1),
        plain_forward(task, 2),
        dtensor_forward(task, split_mlp),
        polylane_forward(task, "tensor=2", 2),
    ]


def agree(entries: Sequence[Contender], tolerance: float = 1e-3) -> float:
    """The largest relative difference of the losses that the contenders saw from the first one's, turn by turn.

    Raises:
        RuntimeError: they do not compute the same.
    """
    worst = 0.0
    for entry in entries:
        for expected, got in zip(entries[0].extra, entry.extra, strict=True):
            worst = max(worst, abs(got - expected) / abs(expected))
            if not worst <= tolerance:
                raise RuntimeError(f"{entry.name} computes another loss: {got} instead of {expected}")
    return worst


RACES: dict[str, tuple[Callable[[], Task], Callable[[Task], list[Contender]]]] = {
    "gpt4": (lambda: contenders.gpt(4), training),
    "gpt16": (lambda: contenders.gpt(16), training),
    "wide1": (lambda: wide(1), forward),
    "wide32": (lambda: wide(32), forward),
    "tiny": (lambda: wide(4, 16), forward),
}
USUAL = ("gpt4", "gpt16", "wide1", "wide32")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the races and print their tables."""
    parser = make_parser("benchmarks.speed.tensor", __doc__)
    parser.add_argument(
        "tasks", nargs="*", metavar="{" + ",".join(RACES) + "}", help=f"which races (default: {' '.join(USUAL)})"
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contender has (default 7)")
    parser.add_argument("--steps", type=int, default=4, help="steps of a turn (default 4)")
    options = parser.parse_args(arguments)
    for name in set(options.tasks) - set(RACES):
        parser.error(f"there is no race {name}: take {', '.join(RACES)}")
    if options.quick:
        options.rounds = options.steps = 1
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks or USUAL:
        make, field = RACES[name]
        task = make()
        entries = field(task)
        race(entries, options.rounds, options.steps)
        print(f"\n{task.name}\n\n{table(entries, 'plain loop, 1 thread')}")
        print(f"\nTheir losses differ by {agree(entries):.1g}, relatively.", flush=True)


if __name__ == "__main__":
    main()
