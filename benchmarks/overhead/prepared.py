"""python -m benchmarks.overhead.prepared [--rounds N] [--quick]: prepared scripts beside plain loops.

The same loop (model, the loss of the example, backward, step, loss.item()) takes turns: plain;
prepared without a plan, and for one worker; the step of a Job for one worker. Then on two workers under data=2: the
prepared loop and the step of a Job; and a loop whose data set takes a millisecond of processor time for each sample,
where each worker reads its own samples, and where every worker reads whole batches. Nothing is audited.
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

import polylane
from benchmarks.harness import Contender, make_parser, race, table

EXAMPLES = Path(__file__).parents[2] / "examples"
BATCHES = {"digits": 64, "gpt": 16}


def load_example(name: str) -> ModuleType:
    """Import an example's file."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build(name: str) -> tuple[Any, Any, list[Any], Any]:
    """Return an example's model, its optimizer, some batches, and its module."""
    example = load_example(name)
    torch.manual_seed(0)
    model = example.model()
    optimizer = example.optimizer(list(model.named_parameters()))
    loader: Any = DataLoader(example.data("train"), batch_size=BATCHES[name], drop_last=True)
    batches = [batch for batch, _ in zip(loader, range(8), strict=False)]
    return model, optimizer, batches, example


def make_loop(name: str, plan: str | None, is_prepared: bool) -> Callable[[int], Callable[[], Any]]:
    """Return what sets up one step of a loop, plain or prepared."""

    def setup(rank: int) -> Callable[[], Any]:
        model, optimizer, batches, example = build(name)
        if is_prepared:
            model, optimizer = polylane.prepare(model, optimizer, plan=plan, audit="off")
        numbers = iter(range(10**9))

        def step() -> float:
            batch = batches[next(numbers) % len(batches)]
            optimizer.zero_grad()
            loss = example.loss(model, batch)
            loss.backward()
            optimizer.step()
            return float(loss.item())

        return step

    return setup


class SlowSamples(Dataset[Any]):
    """A data set whose samples each take some processor time.

    Args:
        samples: the samples.
        seconds: processor time of each.
    """

    def __init__(self, samples: Any, seconds: float) -> None:
        self._samples, self._seconds = samples, seconds

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> Any:
        end = time.process_time() + self._seconds
        while time.process_time() < end:
            pass
        return self._samples[index]


def make_reading_loop(name: str, whole_batches: bool) -> Callable[[int], Callable[[], Any]]:
    """Return what sets up one step of a prepared loop that reads its loader."""

    def setup(rank: int) -> Callable[[], Any]:
        model, optimizer, _, example = build(name)
        samples = SlowSamples(example.data("train"), 1e-3)
        loader: Any = DataLoader(samples, batch_size=BATCHES[name], drop_last=True, shuffle=True)
        model, optimizer, loader = polylane.prepare(
            model, optimizer, loader, plan="data=2", audit="off", whole_batches=whole_batches
        )
        batches = (batch for _ in itertools.count() for batch in loader)

        def step() -> float:
            optimizer.zero_grad()
            loss = example.loss(model, next(batches))
            loss.backward()
            optimizer.step()
            return float(loss.item())

        return step

    return setup


def make_job(name: str, plan: str) -> Callable[[int], Callable[[], Any]]:
    """Return what sets up one step of a Job."""

    def setup(rank: int) -> Callable[[], Any]:
        model, optimizer, batches, example = build(name)
        job = polylane.parallelize(model, example.loss, optimizer, example=batches[0], plan=plan, audit="off")
        numbers = iter(range(10**9))
        return lambda: job.step(batches[next(numbers) % len(batches)]).loss

    return setup


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("benchmarks.overhead.prepared", __doc__)
    parser.add_argument("--rounds", type=int, default=15, help="turns of each")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    options = parser.parse_args(arguments)
    rounds, steps = (1, 2) if options.quick else (options.rounds, options.steps)
    for name in BATCHES:
        alone = [
            Contender("plain loop", 1, make_loop(name, None, False)),
            Contender("prepared, without a plan", 1, make_loop(name, None, True)),
            Contender("prepared, data=1", 1, make_loop(name, "data=1", True)),
            Contender("Job.step, data=1", 1, make_job(name, "data=1")),
        ]
        race(alone, rounds, steps, lead=2)
        print(f"\n## {name}, one worker\n\n{table(alone, 'plain loop')}")
        pairs = [
            Contender("Job.step, data=2", 2, make_job(name, "data=2")),
            Contender("prepared, data=2", 2, make_loop(name, "data=2", True)),
        ]
        race(pairs, rounds, steps, lead=2)
        print(f"\n## {name}, two workers\n\n{table(pairs, 'Job.step, data=2')}")
    readers = [
        Contender("whole batches", 2, make_reading_loop("digits", True)),
        Contender("its own samples", 2, make_reading_loop("digits", False)),
    ]
    race(readers, rounds, steps, lead=2)
    print(f"\n## digits, two workers, 1 ms a sample to read\n\n{table(readers, 'whole batches')}")


if __name__ == "__main__":
    main()
