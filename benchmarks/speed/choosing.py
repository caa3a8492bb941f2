"""python -m benchmarks.speed.choosing [mlp gpt] [--rounds R]: which way of splitting suits a model, on two workers.

The MLP has many bytes of gradients for each of its FLOPs, the GPT few: what is fastest for one is not for the other.
Contenders take turns; torch's DistributedDataParallel is among them. A turn waits until the machine is quiet, and is
repeated if other processes took more than a twentieth of the cores' time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from benchmarks import contenders
from benchmarks.harness import Contender, make_parser, running, table, turn

PLANS = ("data=2", "tensor=2", "pipeline=2,microbatches=8", "pipeline=2,schedule=auto,chunks=2,microbatches=8")
BASE = "plain loop, 1 thread"
DISTURBED = 0.05  # share of the cores' time that other processes may take
PAUSE = 1.0  # seconds that the machine must have been quiet before a turn
TICKS = os.sysconf("SC_CLK_TCK")  # of a second, in which /proc counts


def read_busy_seconds() -> float:
    """Return the seconds that all processes of the machine have computed since it started, over all cores."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / TICKS  # all but idle, and waiting for a disk


def read_process_seconds(contender: Contender) -> float:
    """Return the seconds that the processes of a contender have computed."""
    texts = [Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2] for process in contender.processes]
    return sum(int(field) for text in texts for field in text.split()[11:13]) / TICKS


def take_quiet_turn(contender: Contender, steps: int) -> float:
    """Return the seconds of a step in a turn that no other process disturbed; waits until there is one."""
    cores = os.cpu_count() or 1
    while True:
        busy, start = read_busy_seconds(), time.monotonic()
        time.sleep(PAUSE)  # nobody computes here meanwhile
        if read_busy_seconds() - busy > DISTURBED * (time.monotonic() - start) * cores:
            continue
        busy, computed, start = read_busy_seconds(), read_process_seconds(contender), time.monotonic()
        seconds = turn(contender, steps, lead=1)
        others = read_busy_seconds() - busy - (read_process_seconds(contender) - computed)
        if others <= DISTURBED * (time.monotonic() - start) * cores:
            return seconds


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the races and print their tables."""
    parser = make_parser("benchmarks.speed.choosing", __doc__)
    contenders.add_tasks(parser, ("mlp", "gpt"))
    parser.add_argument("--rounds", type=int, default=7, help="turns that each contender has (default 7)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks:
        task = contenders.TASKS[name]()
        plans = [contenders.polylane(task, plan, 2) for plan in PLANS]
        entries = [contenders.plain(task, 1), contenders.plain(task, 2), contenders.ddp(task), *plans]
        with running(entries):
            for _ in range(1 if options.quick else options.rounds):
                for contender in entries:
                    steps = 1 if options.quick else contenders.STEPS[name]
                    seconds = turn(contender, steps) if options.quick else take_quiet_turn(contender, steps)
                    contender.seconds.append(seconds)
        print(f"\n{task.name}\n\n{table(entries, BASE)}", flush=True)


if __name__ == "__main__":
    main()
