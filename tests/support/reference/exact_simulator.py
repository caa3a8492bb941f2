"""A player of tasks that is slow, simple and exact, to check the quick one by."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from fractions import Fraction

from polylane.cost.simulator.task import Task
from polylane.schedule.action import ActionKind


@dataclass
class ExactPlayer:
    """Lanes of passes and messages on one host, in exact fractions; every event looks at everything."""

    lanes: list[list[Task]]
    cores: Fraction
    now: Fraction = Fraction(0)
    at: dict[int, int] = field(default_factory=dict)
    left: dict[tuple[str, Hashable], Fraction] = field(default_factory=dict)
    there: set[Hashable] = field(default_factory=set)
    ends: dict[tuple[int, int], Fraction] = field(default_factory=dict)

    def run(self) -> dict[tuple[int, int], Fraction]:
        """When the task at each (lane, place) ends."""
        queues: dict[tuple[int, int | None], list[Task]] = {}
        self.at = dict.fromkeys(range(len(self.lanes)), 0)
        while True:
            self._advance(queues)
            computing = [n for n in self.left if n[0] == "lane"]
            moving = [queue[0] for queue in queues.values() if queue]
            for task in moving:
                self.left.setdefault(("key", task.key), Fraction(task.transfer.seconds))
            rates = dict.fromkeys(computing, min(Fraction(1), self.cores / max(1, len(computing))))
            rates |= {("key", t.key): Fraction(1) for t in moving}
            if not rates:
                return self.ends
            pause = min(self.left[each] / rate for each, rate in rates.items())
            self.now += pause
            for each, rate in rates.items():
                self.left[each] -= pause * rate
            for each in [each for each in rates if not self.left[each]]:
                del self.left[each]
                if each[0] == "key":
                    self.there.add(each[1])
                    queue = next(q for q in queues.values() if q and q[0].key == each[1])
                    queue.pop(0)
                else:
                    assert isinstance(each[1], int)
                    self._leave(each[1])

    def _leave(self, lane: int) -> None:
        self.ends[lane, self.at[lane]] = self.now
        self.at[lane] += 1

    def _advance(self, queues: dict[tuple[int, int | None], list[Task]]) -> None:
        for lane, tasks in enumerate(self.lanes):
            while self.at[lane] < len(tasks) and ("lane", lane) not in self.left:
                task = tasks[self.at[lane]]
                if task.action.kind is ActionKind.RECEIVE and task.key not in self.there:
                    break
                if task.action.kind is ActionKind.SEND:
                    queues.setdefault((lane, task.action.peer), []).append(task)
                if task.action.kind is ActionKind.FORWARD:
                    self.left["lane", lane] = Fraction(task.seconds)
                else:
                    self._leave(lane)
