"""python -m benchmarks.speed.zero_bubble [gpt] [--rounds R]: schedules with halved backward passes, and torch's own.

Two workers and eight microbatches, against one worker. Torch's contenders are cut by hand, between attentions and
feed-forward layers, into as many pieces as they have chunks; ours are cut as they balance themselves.
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble

from benchmarks import contenders
from benchmarks.harness import Contender, make_parser, race, table

MICROBATCHES = 8
SCHEDULES = ("1f1b", "interleaved", "zb-h1", "zb-h2", "zb-v", "auto", "auto,chunks=2")
BASE = "plain loop, 1 thread"
# The GPT's fourteen pieces dealt to four chunks. In equal numbers, the worker with the last chunk of an interleaved
# pipeline has more to do than the other; with whole blocks both have the same, in chunks of unequal length.
EQUAL, WHOLE_BLOCKS = (4, 3, 3, 4), (5, 2, 2, 5)

Kind = type[ScheduleInterleavedZeroBubble] | type[ScheduleZBVZeroBubble]


def pipelining(task: contenders.Task, kind: Kind, microbatches: int, cut: Sequence[int]) -> Contender:
    """torch.distributed.pipelining on two workers with two chunks each, cut by hand.

    Args:
        task: what is trained.
        kind: torch's schedule.
        microbatches: of a step.
        cut: pieces of the model in each of the four chunks.
    """

    def setup(rank: int) -> Callable[[], None]:
        units = task.units(copy.deepcopy(task.model))
        own = (rank, 3 - rank) if kind is ScheduleZBVZeroBubble else (rank, rank + 2)
        bounds = list(pairwise([0, *accumulate(cut)]))
        modules = [nn.Sequential(*units[bounds[chunk][0] : bounds[chunk][1]]) for chunk in own]
        stages = [PipelineStage(m, chunk, 4, torch.device("cpu")) for m, chunk in zip(modules, own, strict=True)]
        schedule = kind(stages, microbatches, loss_fn=task.output_loss)
        steps = contenders.optimizer(nn.ModuleList(modules).named_parameters())
        inputs, targets = task.batch
        given: dict[str, Any] = {"target": targets, "losses": []} if 3 in own else {}

        def step() -> None:
            steps.zero_grad()
            schedule.step(*([inputs] if 0 in own else []), **given)
            steps.step()

        return step

    return Contender(f"torch {kind.__name__}, {'+'.join(map(str, cut))}", 2, setup)


def field(task: contenders.Task, microbatches: int) -> list[Contender]:
    """Everyone who trains ``task``."""
    count = len(task.units(task.model))
    cuts = (EQUAL, WHOLE_BLOCKS) if count == sum(EQUAL) else (even_cut(count),)
    plans = [f"pipeline=2,schedule={schedule},microbatches={microbatches}" for schedule in SCHEDULES]
    return [
        contenders.plain(task, 1),
        *(contenders.polylane(task, plan, 2) for plan in plans),
        *(pipelining(task, ScheduleInterleavedZeroBubble, microbatches, cut) for cut in cuts),
        pipelining(task, ScheduleZBVZeroBubble, microbatches, cuts[0]),
    ]


def even_cut(count: int) -> tuple[int, ...]:
    """Deal pieces to four chunks."""
    return tuple(count * (i + 1) // 4 - count * i // 4 for i in range(4))


def ratio(over: Contender, under: Contender) -> float:
    """Return how many times as fast the first is as the second: the median over rounds."""
    return statistics.median(b / a for a, b in zip(over.seconds, under.seconds, strict=True))


def compare(entries: Sequence[Contender], samples: int) -> str:
    """Samples a second of everyone, the zero-bubble schedules over 1F1B, and ours over the best of torch's."""
    ours = [each for each in entries if each.name.startswith("polylane")]
    theirs = min((each for each in entries if each.name.startswith("torch")), key=lambda each: each.median)
    plain = next(each for each in ours if "schedule=1f1b" in each.name)
    lines = [f"| | samples/s | over 1f1b | over {theirs.name} |", "|---|---:|---:|---:|"]
    for each in entries:
        lines.append(
            f"| {each.name} | {samples / each.median:.1f} | {ratio(each, plain):.3f} | {ratio(each, theirs):.3f} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the race and print its tables."""
    parser = make_parser("benchmarks.speed.zero_bubble", __doc__)
    contenders.add_tasks(parser, ("gpt",))
    parser.add_argument("--rounds", type=int, default=9, help="turns that each contender has (default 9)")
    parser.add_argument("--microbatches", type=int, default=MICROBATCHES)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # before anything runs: the contenders are forked
    for name in options.tasks:
        task = contenders.TASKS[name]()
        entries = field(task, 4 if options.quick else options.microbatches)
        race(entries, 1 if options.quick else options.rounds, steps=1 if options.quick else contenders.STEPS[name])
        print(f"\n{task.name}\n\n{table(entries, BASE)}\n\n{compare(entries, len(task.batch[0]))}", flush=True)


if __name__ == "__main__":
    main()
