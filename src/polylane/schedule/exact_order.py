"""Exact optimum of a small scheduling problem: an integer program over which of two passes of a worker comes first.

Where a backward pass takes less time at once than in two halves, it also decides which are whole. Such a pass is its
first half with the seconds of both, and a second half without any right behind it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from polylane.schedule.problem import SLACK, Orders, ScheduleProblem, must_precede, play_orders

MOST_PAIRS = 60  # pairs of passes whose order is open, above which the program is not tried
TOLERANCE = 1e-5  # by which the solver may miss a bound: a tighter one makes it repair its own solutions
NODES = 20_000  # of its branch and bound, so that the answer does not depend on how fast the machine is

_Pair = tuple[int, int]


def optimal_orders(
    problem: ScheduleProblem, within: float, most_pairs: int = MOST_PAIRS
) -> tuple[float, Orders] | None:
    """Return the least makespan and its orders; None where the problem is too large, or nothing is proven.

    Binary variables say which of two tasks on one worker comes first; starts are continuous. Passes of a stage are in
    ascending order of microbatch, kind after kind, as in all schedules here.

    Args:
        problem: the tasks, their seconds and the memory there is.
        within: a makespan that is known to be reached, with which pairs are ordered in advance.
        most_pairs: pairs whose order may be open at most.
    """
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp  # type: ignore[import-untyped]
    from scipy.sparse import csr_array  # type: ignore[import-untyped]

    fixed, pairs = _open_pairs(problem, within)
    if len(pairs) > most_pairs:
        return None
    halved = _first_halves(problem)
    rows = _Rows(problem, within, fixed, pairs, halved)
    binaries = len(pairs) + len(halved)
    count = problem.tasks + 1 + binaries
    matrix = csr_array((rows.values, (rows.rows, rows.columns)), shape=(len(rows.least), count))
    objective = np.zeros(count)
    objective[problem.tasks] = 1
    upper = np.concatenate([np.full(problem.tasks + 1, within * (1 + TOLERANCE)), np.ones(binaries)])
    lower = np.zeros(count)
    lower[problem.tasks] = min(problem.lower_bound, within)
    kinds = np.concatenate([np.zeros(problem.tasks + 1), np.ones(binaries)])
    solved = milp(
        objective,
        constraints=LinearConstraint(matrix, np.array(rows.least), np.inf),
        bounds=Bounds(lower, upper),
        integrality=kinds,
        options={"node_limit": NODES, "mip_rel_gap": 1e-6},
    )
    if solved.status != 0 or solved.x is None:
        return None
    pair_choices, at_once = np.split(solved.x[problem.tasks + 1 :] > 0.5, [len(pairs)])
    chosen = {pair for pair, yes in zip(pairs, pair_choices, strict=True) if yes}
    chosen |= {(later, earlier) for earlier, later in pairs if (earlier, later) not in chosen}
    left_out = {task + 1 for task, yes in zip(halved, at_once, strict=True) if yes}
    orders = [[task for task in order if task not in left_out] for order in _sort_orders(problem, fixed | chosen)]
    played = play_orders(problem, orders)
    # A solver's tolerance is no proof of an order: what it found is played, like any other.
    return None if played is None else (played.makespan, orders)


def _first_halves(problem: ScheduleProblem) -> list[int]:
    """Return the first halves of the backward passes of which the program decides whether they are whole."""
    return [task for task in range(problem.tasks) if task % 3 == 1] if problem.is_mixed else []


def _open_pairs(problem: ScheduleProblem, within: float) -> tuple[set[_Pair], list[_Pair]]:
    """Return the pairs of tasks on one worker whose order is known, as (first, second), and those that are open."""
    free = play_orders(problem, _stage_orders(problem), problem.least_seconds)
    assert free is not None  # each stage by itself waits in no circle
    fixed, pairs, seconds = set[_Pair](), list[_Pair](), problem.least_seconds
    for worker in range(problem.count):
        tasks = [t for t in range(problem.tasks) if problem.workers[problem.split_task(t)[0]] == worker]
        for task, other_task in combinations(tasks, 2):
            # The second cannot start late enough for the first to come before it, and still end within the time.
            latest = {t: within - free.tails[t] - seconds[t] for t in (task, other_task)}
            must_follow = free.heads[task] + seconds[task] > latest[other_task] * (1 + SLACK)
            must_lead = free.heads[other_task] + seconds[other_task] > latest[task] * (1 + SLACK)
            if must_precede(problem, task, other_task) or (must_lead and not must_follow):
                fixed.add((task, other_task))
            elif must_precede(problem, other_task, task) or (must_follow and not must_lead):
                fixed.add((other_task, task))
            else:
                pairs.append((task, other_task))
    return fixed, pairs


def _stage_orders(problem: ScheduleProblem) -> list[list[int]]:
    """Return for each stage and kind its tasks in ascending order of microbatch: no order says less than these."""
    return [
        [problem.task(stage, m, kind) for m in range(problem.microbatches)]
        for stage in range(problem.graph.stages)
        for kind in range(len(problem.kinds))
    ]


def _sort_orders(problem: ScheduleProblem, ordered_pairs: set[_Pair]) -> Orders:
    """Return the orders in which each task comes behind all that are known to come before it."""
    behind = [0] * problem.tasks
    for _, later in ordered_pairs:
        behind[later] += 1
    return [
        sorted(
            (t for t in range(problem.tasks) if problem.workers[problem.split_task(t)[0]] == worker),
            key=lambda task: behind[task],
        )
        for worker in range(problem.count)
    ]


class _Rows:
    """The constraints of the integer program: each row's sum is at least its ``least``.

    Columns are the starts of all tasks, the makespan, one for each open pair, 1 if its first task comes first, and one
    for each backward pass that may be whole, 1 if it is.

    Args:
        problem: the tasks, their seconds and the memory there is.
        within: a makespan that is known to be reached.
        fixed: pairs of tasks on one worker whose order is known.
        pairs: those whose order is open.
        halved: first halves of the backward passes that may be whole.
    """

    def __init__(
        self,
        problem: ScheduleProblem,
        within: float,
        fixed: set[_Pair],
        pairs: list[_Pair],
        halved: list[int],
    ) -> None:
        self.values: list[float] = []
        self.rows: list[int] = []
        self.columns: list[int] = []
        self.least: list[float] = []
        self._problem, self._fixed = problem, fixed
        self._column = {pair: problem.tasks + 1 + number for number, pair in enumerate(pairs)}
        self._whole = {task: problem.tasks + 1 + len(pairs) + number for number, task in enumerate(halved)}
        for task in range(problem.tasks):
            self._add_end({problem.tasks: 1}, task)
            for reader, hop in problem.successors[task]:
                self._add_end({reader: 1}, task, hop)
        for earlier, later in fixed:
            self._add_end({later: 1}, earlier)
        for (earlier, later), column in self._column.items():
            # The constraint of the false one only says that both are within the time.
            self._add_end({later: 1, column: -within}, earlier, -within)
            self._add_end({earlier: 1, column: within}, later)
        for task in halved:
            self._add_whole_rows(task, within)
        for worker, bound in enumerate(problem.memory):
            for sums, lower_bound in self._memory_rows(worker, bound):
                self._add(sums, lower_bound)

    def _add_end(self, sums: dict[int, float], task: int, offset: float = 0) -> None:
        """Ask that a sum be no less than the end of a task, and some seconds more."""
        problem, first_half = self._problem, task - 1 if task % 3 == 2 else task
        sums = {**sums, task: -1}
        if first_half in self._whole:
            sums[self._whole[first_half]] = problem.seconds[task] - problem.whole_seconds[task]
        self._add(sums, problem.seconds[task] + offset)

    def _add_whole_rows(self, task: int, within: float) -> None:
        """Of a whole pass: its second half is right behind it, and those of earlier microbatches are before it."""
        problem, whole_column = self._problem, self._whole[task]
        longer = problem.whole_seconds[task] - problem.seconds[task]
        self._add({task: 1, task + 1: -1, whole_column: longer - within}, -problem.seconds[task] - within)
        stage, microbatch, _ = problem.split_task(task)
        for earlier in range(microbatch):
            second = problem.task(stage, earlier, 2)
            if (task, second) in self._fixed:
                self._add({whole_column: -1}, 0)
            elif (column := self._column.get((second, task))) is not None:
                self._add({column: 1, whole_column: -1}, 0)
            elif (column := self._column.get((task, second))) is not None:
                self._add({column: -1, whole_column: -1}, -1)

    def _memory_rows(self, worker: int, bound: float) -> Iterator[tuple[dict[int, float], float]]:
        """Yield for each forward of a worker: what came before it and itself hold no more than the bound."""
        problem = self._problem
        tasks = [t for t in range(problem.tasks) if problem.workers[problem.split_task(t)[0]] == worker]
        for task in tasks:
            if problem.live_change[task] <= 0:
                continue
            sums: dict[int, float] = {}
            held_bytes = problem.live_change[task]
            for other_task in tasks:
                change = problem.live_change[other_task]
                if other_task == task or not change:
                    continue
                if (other_task, task) in self._fixed:
                    held_bytes += change
                elif (column := self._column.get((other_task, task))) is not None:
                    sums[column] = sums.get(column, 0) - change
                elif (column := self._column.get((task, other_task))) is not None:
                    # Its column is 1 where the other one comes behind.
                    held_bytes += change
                    sums[column] = sums.get(column, 0) + change
            yield sums, held_bytes - bound * (1 + SLACK)

    def _add(self, sums: dict[int, float], lower_bound: float) -> None:
        self.values += sums.values()
        self.columns += sums.keys()
        self.rows += [len(self.least)] * len(sums)
        self.least.append(lower_bound)
