"""Scheduling problem: stages with their times and memory, for which an order of passes is to be found.

The passes of a problem are numbered tasks. An order is a list of tasks for each worker; it is played by longest paths,
each task as early as those before it on its worker and those that it reads from allow, which is what
`polylane.cost.simulator.schedule_tasks.simulate_schedule` computes for the same lanes.

Where a backward pass takes less time at once than in two halves, an order also says which of them are whole: those
whose second half is in no order. The first half's task then stands for all of the pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from polylane.schedule.action import Action, ActionKind
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

Orders = list[list[int]]
Hops = float | Mapping[tuple[int, int], float]

SLACK = 1e-9  # relative difference of times that rounding makes


class NoScheduleFits(ValueError):
    """A memory bound is below what one microbatch takes.

    Attributes:
        worker: the worker whose bound is too low.
        minimum: bytes that it needs at least.
    """

    def __init__(self, worker: int, bound: float, minimum: float) -> None:
        self.worker, self.least = worker, minimum
        super().__init__(
            f"no order of passes fits on worker {worker}: one microbatch takes {minimum:g} bytes of activations there, "
            f"{bound:g} are allowed"
        )


@dataclass(frozen=True, kw_only=True)
class ScheduleProblem:
    """What an order of passes is sought for.

    Attributes:
        graph: which stages feed which.
        workers: the worker that has each stage, from 0.
        microbatches: number of microbatches of a step.
        forward: seconds of the forward pass of each stage.
        input_gradient: seconds of the first half of its backward pass, which other stages wait for.
        weight_gradient: seconds of the second half of its backward pass.
        hop: seconds from the end of a pass until its value, or its gradient, is on the worker that reads it: one number
            for all, or one for each pair (producer, consumer) of stages. Between stages of one worker it takes none.
        activation_bytes: what each stage keeps of a live microbatch; empty: 1 of each, so that bounds count them.
        memory: bytes of live activations that each worker may hold; empty: no bound.
        split: whether the halves of a backward pass may be apart; else they are one pass, whose end other stages wait
            for.
        backward: seconds of the whole backward pass of each stage, no more than those of its halves; empty: as long as
            both halves.

    Raises:
        ValueError: figures that are negative or not one for each stage or worker, or a whole backward pass that takes
            longer than its halves or less than the first of them.
        NoScheduleFits: a bound below what one microbatch takes on its worker.
    """

    graph: StageGraph
    workers: tuple[int, ...]
    microbatches: int
    forward: tuple[float, ...]
    input_gradient: tuple[float, ...]
    weight_gradient: tuple[float, ...]
    hop: Hops = 0
    activation_bytes: tuple[float, ...] = ()
    memory: tuple[float, ...] = ()
    split: bool = True
    backward: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.microbatches, int) or self.microbatches < 1:
            raise ValueError(f"microbatches must be a whole number of at least 1, not {self.microbatches!r}")
        per_stage = {
            "workers": self.workers,
            "forward": self.forward,
            "input_gradient": self.input_gradient,
            "weight_gradient": self.weight_gradient,
            "activation_bytes": self.activation_bytes or self.workers,
            "backward": self.backward or self.workers,
        }
        for name, values in per_stage.items():
            if len(values) != self.graph.stages:
                raise ValueError(f"{name} has {len(values)} figures for {self.graph.stages} stages")
            if not all(0 <= value < math.inf for value in values):
                raise ValueError(f"{name} must be at least 0 for every stage, not {values}")
        for stage, (seconds, *halves) in enumerate(
            zip(self.whole, self.input_gradient, self.weight_gradient, strict=True)
        ):
            if not halves[0] * (1 - SLACK) <= seconds <= sum(halves) * (1 + SLACK):
                raise ValueError(
                    f"the whole backward pass of stage {stage} takes {seconds:g} seconds, its halves {halves[0]:g} and "
                    f"{halves[1]:g}: it must take no longer than both, and no less than the first"
                )
        if set(self.workers) != set(range(self.count)):
            raise ValueError(f"every worker from 0 to {self.count - 1} must have a stage, not only {self.workers}")
        if self.memory and len(self.memory) != self.count:
            raise ValueError(f"memory has {len(self.memory)} bounds for {self.count} workers")
        for worker, bound in enumerate(self.memory):
            # Every forward of a microbatch comes before its first backward: all chunks of a worker are live at once.
            minimum = sum(self.bytes_of(s) for s, owner in enumerate(self.workers) if owner == worker)
            if minimum > bound * (1 + SLACK):
                raise NoScheduleFits(worker, bound, minimum)

    @cached_property
    def whole(self) -> tuple[float, ...]:
        """Seconds of the whole backward pass of each stage."""
        return self.backward or tuple(map(sum, zip(self.input_gradient, self.weight_gradient, strict=True)))

    @cached_property
    def is_mixed(self) -> bool:
        """Whether an order says of every backward pass if it is whole: halves may be apart, and take longer somewhere.

        Where they do not, halves one behind the other are as good as the whole pass.
        """
        halves = map(sum, zip(self.input_gradient, self.weight_gradient, strict=True))
        return self.split and any(time < total * (1 - SLACK) for time, total in zip(self.whole, halves, strict=True))

    @property
    def count(self) -> int:
        """Number of workers."""
        return 1 + max(self.workers)

    def bytes_of(self, stage: int) -> float:
        """Return the bytes of one live microbatch on a stage."""
        return self.activation_bytes[stage] if self.activation_bytes else 1.0

    def bound_of(self, worker: int) -> float:
        """Return the bytes of live activations that a worker may hold."""
        return self.memory[worker] if self.memory else math.inf

    def hop_of(self, producer: int, consumer: int) -> float:
        """Return the seconds of a value from one stage to another."""
        if self.workers[producer] == self.workers[consumer]:
            return 0
        return self.hop[producer, consumer] if isinstance(self.hop, Mapping) else self.hop

    # Tasks: (stage * microbatches + microbatch) * kinds + kind, where a kind is a place in `kinds`.

    @cached_property
    def kinds(self) -> tuple[ActionKind, ...]:
        """The kinds of pass of a stage, in the order in which a microbatch goes through them."""
        if self.split:
            return (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)
        return (ActionKind.FORWARD, ActionKind.BACKWARD)

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return self.graph.stages * self.microbatches * len(self.kinds)

    def task(self, stage: int, microbatch: int, kind: int) -> int:
        """Return the number of a task."""
        return (stage * self.microbatches + microbatch) * len(self.kinds) + kind

    def split_task(self, task: int) -> tuple[int, int, int]:
        """Return stage, microbatch and kind of a task."""
        return self._places[task]

    @cached_property
    def _places(self) -> list[tuple[int, int, int]]:
        of_stage = range(self.microbatches), range(len(self.kinds))
        return [(stage, m, kind) for stage in range(self.graph.stages) for m in of_stage[0] for kind in of_stage[1]]

    @cached_property
    def seconds(self) -> list[float]:
        """Duration of every task, with all backward passes in halves if they may be."""
        return self._each_microbatch(self.input_gradient, self.weight_gradient)

    @cached_property
    def whole_seconds(self) -> list[float]:
        """Duration of every task with all backward passes whole."""
        return self._each_microbatch(self.whole, (0.0,) * self.graph.stages)

    @cached_property
    def least_seconds(self) -> list[float]:
        """Durations that no order can fall below: other stages wait for a first half, the worker for a whole pass."""
        remainders = tuple(max(0.0, total - half) for total, half in zip(self.whole, self.input_gradient, strict=True))
        return self._each_microbatch(self.input_gradient, remainders) if self.is_mixed else self.seconds

    def _each_microbatch(self, first_halves: Sequence[float], second_halves: Sequence[float]) -> list[float]:
        seconds: list[float] = []
        for forward, first, second, total in zip(self.forward, first_halves, second_halves, self.whole, strict=True):
            seconds += ([forward, first, second] if self.split else [forward, total]) * self.microbatches
        return seconds

    def seconds_in(self, orders: Sequence[Sequence[int]]) -> list[float]:
        """Return the duration of every task in some orders."""
        if not self.is_mixed:
            return self.seconds
        durations, halves = list(self.whole_seconds), self.seconds
        for order in orders:
            for task in order:
                if task % 3 == 2:
                    durations[task - 1], durations[task] = halves[task - 1], halves[task]
        return durations

    def whole_in(self, orders: Sequence[Sequence[int]]) -> frozenset[int]:
        """Return the first halves in some orders that stand for whole backward passes: their second is in none."""
        if not self.is_mixed:
            return frozenset()
        tasks = {task for order in orders for task in order}
        return frozenset(task for task in tasks if task % 3 == 1 and task + 1 not in tasks)

    @cached_property
    def successors(self) -> list[list[tuple[int, float]]]:
        """For every task, those that read from it, with the seconds that its value takes to them."""
        readers: list[list[tuple[int, float]]] = [[] for _ in range(self.tasks)]
        for stage in range(self.graph.stages):
            for m in range(self.microbatches):
                for reader in self.graph.successors[stage]:
                    hop = self.hop_of(stage, reader)
                    readers[self.task(stage, m, 0)].append((self.task(reader, m, 0), hop))
                    readers[self.task(reader, m, 1)].append((self.task(stage, m, 1), hop))
                for kind in range(len(self.kinds) - 1):
                    readers[self.task(stage, m, kind)].append((self.task(stage, m, kind + 1), 0))
        return readers

    @cached_property
    def predecessors(self) -> list[list[tuple[int, float]]]:
        """For every task, those that it reads from, with the seconds that their values take."""
        producers: list[list[tuple[int, float]]] = [[] for _ in range(self.tasks)]
        for task, readers in enumerate(self.successors):
            for reader, hop in readers:
                producers[reader].append((task, hop))
        return producers

    @cached_property
    def live_change(self) -> list[float]:
        """Bytes by which every task changes what its worker holds: from its start (more) or from its end on (less).

        Of backward passes in halves; a whole one lets go of what its second half would.
        """
        last_kind = len(self.kinds) - 1
        changes: list[float] = []
        for stage in range(self.graph.stages):
            size = self.bytes_of(stage)
            changes += [size if kind == 0 else -size if kind == last_kind else 0.0 for kind in range(last_kind + 1)] * (
                self.microbatches
            )
        return changes

    @cached_property
    def lower_bound(self) -> float:
        """No order ends earlier: each worker's own work behind its first input, and the longest way of a microbatch."""
        chain, seconds = play_orders(self, [], self.least_seconds), self.least_seconds
        assert chain is not None  # without orders there is no circle
        bound = chain.makespan
        for worker in range(self.count):
            tasks = [task for task in range(self.tasks) if self.workers[self.split_task(task)[0]] == worker]
            load = sum(seconds[task] for task in tasks)
            bound = max(bound, min(chain.heads[t] for t in tasks) + load + min(chain.tails[t] for t in tasks))
        return bound


@dataclass(frozen=True, slots=True)
class PlayedOrders:
    """When each task runs.

    Attributes:
        makespan: seconds from 0 to the last task's end.
        heads: the start of every task.
        tails: for every task, the least seconds from its end to the end of the whole.
        seconds: the duration of every task.
    """

    makespan: float
    heads: list[float]
    tails: list[float]
    seconds: list[float]


def play_orders(
    problem: ScheduleProblem, orders: Sequence[Sequence[int]], seconds: list[float] | None = None
) -> PlayedOrders | None:
    """Return when each task runs; None where tasks wait for each other in a circle.

    Args:
        problem: the tasks, their seconds, and what they read.
        orders: the tasks of every worker, first to last; tasks that are in none wait only for what they read.
        seconds: durations of the tasks; None: those that they have in these orders.
    """
    seconds, successors = problem.seconds_in(orders) if seconds is None else seconds, problem.successors
    following = [-1] * problem.tasks
    missing = [len(read) for read in problem.predecessors]
    for order in orders:
        for previous, next_task in pairwise(order):
            following[previous] = next_task
            missing[next_task] += 1
    heads: list[float] = [0] * problem.tasks
    ready = [task for task, count in enumerate(missing) if not count]
    ordered_tasks: list[int] = []
    while ready:
        task = ready.pop()
        ordered_tasks.append(task)
        end = heads[task] + seconds[task]
        next_task = following[task]
        if next_task >= 0:
            if heads[next_task] < end:
                heads[next_task] = end
            missing[next_task] -= 1
            if not missing[next_task]:
                ready.append(next_task)
        for reader, hop in successors[task]:
            if heads[reader] < end + hop:
                heads[reader] = end + hop
            missing[reader] -= 1
            if not missing[reader]:
                ready.append(reader)
    if len(ordered_tasks) < problem.tasks:
        return None
    tails: list[float] = [0] * problem.tasks
    for task in reversed(ordered_tasks):
        next_task = following[task]
        tail = seconds[next_task] + tails[next_task] if next_task >= 0 else 0
        for reader, hop in successors[task]:
            tail = max(tail, hop + seconds[reader] + tails[reader])
        tails[task] = tail
    return PlayedOrders(max(heads[task] + seconds[task] for task in ordered_tasks), heads, tails, seconds)


def must_precede(problem: ScheduleProblem, task: int, other_task: int, whole_passes: Collection[int] = ()) -> bool:
    """Return whether a task must come before another of its own stage: microbatches ascend, kinds follow each other.

    Args:
        problem: the tasks, which are numbered by stage, microbatch and kind.
        task, other_task: numbers of two tasks, of any stages and workers.
        whole_passes: first halves that stand for whole backward passes, behind earlier microbatches' second halves.
    """
    stage, microbatch, kind = problem.split_task(task)
    other_stage, other_microbatch, other_kind = problem.split_task(other_task)
    if stage != other_stage or microbatch > other_microbatch:
        return False
    return kind <= (2 if other_task in whole_passes else other_kind)


def peak_bytes(problem: ScheduleProblem, order: Sequence[int], whole_passes: Collection[int] | None = None) -> float:
    """Return the most bytes of live activations that a worker holds with its tasks in this order.

    Args:
        problem: the tasks, and what they hold.
        order: the worker's tasks, or some that follow each other.
        whole_passes: first halves that stand for whole backward passes; None: those without a second half in the order.
    """
    whole_passes = problem.whole_in([order]) if whole_passes is None else whole_passes
    alive = peak = 0.0
    for task in order:
        alive += problem.live_change[task] if task not in whole_passes else problem.live_change[task + 1]
        peak = max(peak, alive)
    return peak


def fits_memory(problem: ScheduleProblem, orders: Sequence[Sequence[int]]) -> bool:
    """Return whether no worker holds more than it may."""
    return all(
        peak_bytes(problem, order) <= problem.bound_of(worker) * (1 + SLACK) for worker, order in enumerate(orders)
    )


def orders_to_lanes(problem: ScheduleProblem, orders: Sequence[Sequence[int]]) -> Lanes:
    """Return the lanes of orders."""
    whole_passes = problem.whole_in(orders)

    def action(task: int) -> Action:
        stage, microbatch, kind = problem.split_task(task)
        return Action(ActionKind.BACKWARD if task in whole_passes else problem.kinds[kind], stage, microbatch)

    return tuple(tuple(map(action, order)) for order in orders)


def lanes_to_orders(problem: ScheduleProblem, lanes: Lanes) -> Orders:
    """Return the orders of lanes of the same stages.

    Where halves take no longer than the whole, a whole backward pass counts as its two halves. That is never slower:
    other stages get their gradients earlier.
    """
    last_kind = len(problem.kinds) - 1
    kinds = {
        ActionKind.FORWARD: (0,),
        ActionKind.BACKWARD: (1,) if problem.is_mixed else tuple(range(1, last_kind + 1)),
        ActionKind.BACKWARD_INPUT: (1,),
        ActionKind.BACKWARD_WEIGHT: (last_kind,) if problem.split else (),
    }
    return [[problem.task(a.stage, a.microbatch or 0, kind) for a in lane for kind in kinds[a.kind]] for lane in lanes]
