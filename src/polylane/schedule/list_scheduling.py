"""List scheduling: orders of passes made by always running, on each worker, the most urgent pass that is ready.

Where halves of a backward pass take longer than the whole, it is halved only if a worker waits for its first half.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from polylane.schedule.problem import SLACK, Orders, ScheduleProblem

# (kind, microbatch, stage) -> urgency; the smallest runs first.
Urgency = Callable[[int, int, int], tuple[float, ...]]


@dataclass(frozen=True)
class ListRule:
    """How a list is worked off.

    Attributes:
        name: the rule in words.
        urgency: which ready pass is the most urgent.
        ahead: for each stage, forwards whose input gradients are still to come, at most.
        patience: seconds that a worker idles rather than start a weight gradient, where a more urgent pass is known to
            be ready by then, as a part of that weight gradient's seconds.
    """

    name: str
    urgency: Urgency
    ahead: tuple[int, ...]
    patience: float = 0


def list_rules(problem: ScheduleProblem) -> Iterator[ListRule]:
    """Yield the rules that are tried: gradients or forwards first, with few to all microbatches under way."""
    depths = problem.graph.depth_to_end
    # The chunk nearer to the end first: its microbatches are done, and their memory free, earlier.
    gradients: Urgency = lambda kind, m, stage: ((1, 0, 2)[kind], -stage, m)  # noqa: E731
    forwards: Urgency = lambda kind, m, stage: (kind, -stage, m)  # noqa: E731
    oldest: Urgency = lambda kind, m, stage: (kind == 2, m, -kind, -stage)  # noqa: E731
    limits = [tuple(max(1, math.ceil(depth * part)) for depth in depths) for part in (1, 1.25, 1.5, 2, 3)]
    limits.append((problem.microbatches,) * problem.graph.stages)
    for ahead in dict.fromkeys(tuple(min(bound, problem.microbatches) for bound in limit) for limit in limits):
        for name, urgency in (("gradients", gradients), ("forwards", forwards), ("the oldest", oldest)):
            for patience in (0.0, 0.5) if problem.split else (0.0,):
                yield ListRule(f"list scheduling, {name} first", urgency, ahead, patience)


def schedule_list(problem: ScheduleProblem, rule: ListRule) -> Orders | None:
    """Return the orders that a rule makes; None where workers run out of memory with no pass that would free some."""
    return _ListScheduler(problem, rule).run()


class _ListScheduler:
    """The state of the workers while a list is worked off.

    Args:
        problem: the tasks and the memory there is.
        rule: which task is taken.
    """

    def __init__(self, problem: ScheduleProblem, rule: ListRule) -> None:
        self._problem, self._rule = problem, rule
        kinds = range(len(problem.kinds))
        # The next microbatch of each kind of pass of each stage: they run in ascending order.
        self._next = [[0 for _ in kinds] for _ in range(problem.graph.stages)]
        self._stages = [[s for s, w in enumerate(problem.workers) if w == worker] for worker in range(problem.count)]
        self._missing = [len(read) for read in problem.predecessors]
        self._ready: list[float] = [0.0] * problem.tasks
        self._clock = [0.0] * problem.count
        self._alive = [0.0] * problem.count
        self._orders: Orders = [[] for _ in range(problem.count)]
        self._choices: list[tuple[float, int]] = []
        self._left = problem.tasks
        # Workers that wait for the first half of a backward pass on each stage.
        self._waiting = [
            {w for p in ps if (w := problem.workers[p]) != worker}
            for ps, worker in zip(problem.graph.predecessors, problem.workers, strict=True)
        ]

    def run(self) -> Orders | None:
        """Return the orders, or None where nothing can run any more."""
        # A worker's choice changes only when it runs something, or is sent something.
        self._choices = choices = [(math.inf, -1)] * self._problem.count
        choices[:] = [self._choose(worker) for worker in range(self._problem.count)]
        while self._left:
            worker = min(range(len(choices)), key=lambda index: choices[index][0])
            start, task = choices[worker]
            if task < 0:
                return None
            if self._problem.is_mixed and task % 3 == 1:
                # Decided as late as can be, when it is known what other workers have to do.
                task = self._whole_or_half(worker, task, start)
            for changed in self._take(worker, task, start):
                choices[changed] = self._choose(changed)
        return self._orders

    def _choose(self, worker: int) -> tuple[float, int]:
        """Return the start and the number of the task that a worker runs next; an endless start where it has none."""
        clock = self._clock[worker]
        ready = [(max(clock, self._ready[task]), urgency, task) for urgency, task in self._candidates(worker)]
        if not ready:
            return math.inf, -1
        earliest = min(start for start, _, _ in ready)
        chosen = min((choice for choice in ready if choice[0] == earliest), key=lambda choice: choice[1])
        # Rather than start a weight gradient, which can run at any time, wait a little for what others wait for.
        if self._problem.split and chosen[2] % 3 == 2 and self._rule.patience:
            until = earliest + self._rule.patience * self._problem.seconds[chosen[2]]
            better = [choice for choice in ready if choice[0] < until and choice[2] % 3 != 2]
            chosen = min(better, key=lambda choice: choice[:2], default=chosen)
        return chosen[0], chosen[2]

    def _candidates(self, worker: int) -> Iterator[tuple[tuple[float, ...], int]]:
        """Yield the tasks of a worker that may run next: all that they read is on its way, and there is memory."""
        problem = self._problem
        room = problem.bound_of(worker) * (1 + SLACK) - self._alive[worker]
        for stage in self._stages[worker]:
            counts = self._next[stage]
            for kind, microbatch in enumerate(counts):
                if microbatch == problem.microbatches:
                    continue
                task = problem.task(stage, microbatch, kind)
                if self._missing[task]:
                    continue
                if kind == 0 and (problem.bytes_of(stage) > room or counts[0] - counts[1] >= self._rule.ahead[stage]):
                    continue
                yield self._rule.urgency(kind, microbatch, stage), task

    def _whole_or_half(self, worker: int, task: int, start: float) -> int:
        """Return what a worker runs of a backward pass: its task if halved, else that of its second half.

        A whole pass comes behind the second halves of earlier microbatches: the first of them that is left is returned.
        """
        problem = self._problem
        stage, microbatch, _ = problem.split_task(task)
        until = start + problem.seconds[task]
        if any(self._clock[w] <= until and self._choices[w][0] > until for w in self._waiting[stage]):
            return task
        return problem.task(stage, min(microbatch, self._next[stage][2]), 2)

    def _take(self, worker: int, task: int, start: float) -> set[int]:
        """Run a task, and return the workers whose choice that may change."""
        problem = self._problem
        stage, microbatch, kind = problem.split_task(task)
        # The second half of a pass whose first half has not run: the whole pass.
        is_whole = problem.is_mixed and kind == 2 and self._next[stage][1] == microbatch
        if is_whole:
            task, self._next[stage][1] = task - 1, microbatch + 1
        end = start + (problem.whole_seconds if is_whole else problem.seconds)[task]
        self._next[stage][kind] = microbatch + 1
        self._left -= 1 + is_whole
        self._clock[worker] = end
        self._alive[worker] += problem.live_change[task + is_whole]
        self._orders[worker].append(task)
        changed = {worker}
        for reader, hop in problem.successors[task]:
            self._missing[reader] -= 1
            self._ready[reader] = max(self._ready[reader], end + hop)
            changed.add(problem.workers[problem.split_task(reader)[0]])
        return changed
