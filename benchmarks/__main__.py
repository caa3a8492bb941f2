"""python -m benchmarks [gpt mlp] [--rounds R]: two workers against one, two threads and torch's own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from benchmarks import contenders
from benchmarks.harness import make_parser, race, table


def field(task: contenders.Task, microbatches: list[int]) -> list[contenders.Contender]:
    """Everyone who trains ``task``."""
    entries = [
        contenders.plain(task, 1),
        contenders.polylane(task, "data=1", 1),
        contenders.plain(task, 2),
        contenders.ddp(task),
        contenders.polylane(task, "data=2", 2),
    ]
    for m in microbatches:
        entries += [
            contenders.pipelining(task, ScheduleGPipe, m),
            contenders.pipelining(task, Schedule1F1B, m),
            contenders.polylane(task, f"pipeline=2,schedule=afab,microbatches={m}", 2),
            contenders.polylane(task, f"pipeline=2,schedule=1f1b,microbatches={m}", 2),
        ]
    return entries


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the races and print their tables."""
    parser = make_parser("benchmarks", __doc__)
    contenders.add_tasks(parser, ("gpt", "mlp"))
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contender has (default 7)")
    parser.add_argument("--microbatches", type=int, nargs="*", default=[2, 4, 8])
    options = parser.parse_args(arguments)
    if options.quick:
        options.rounds, options.microbatches = 1, [2]
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks:
        task = contenders.TASKS[name]()
        entries = field(task, options.microbatches)
        race(entries, options.rounds, steps=1 if options.quick else contenders.STEPS[name])
        print(f"\n{task.name}\n\n{table(entries, 'plain loop, 1 thread')}", flush=True)


if __name__ == "__main__":
    main()
