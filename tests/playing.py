"""Tasks in few words, and what a timeline says of them."""

from __future__ import annotations

from collections.abc import Sequence

from polylane.cost.task import Task, Transfer
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, Kind

FORWARD = Action(Kind.FORWARD, 0, 0)
BACKWARD = Action(Kind.BACKWARD, 0, 0)
STEP = Action(Kind.STEP, 0)


def forward(seconds: float, microbatch: int = 0, waited: float = 0) -> Task:
    return Task(Action(Kind.FORWARD, 0, microbatch), seconds, waited)


def backward(seconds: float) -> Task:
    return Task(BACKWARD, seconds)


def step(seconds: float = 0) -> Task:
    return Task(STEP, seconds)


def send(key: str, transfer: Transfer, peer: int = 1, seconds: float = 0, **more: object) -> Task:
    return Task(Action(Kind.SEND, 0, 0, key, peer), seconds, key=key, transfer=transfer, **more)  # type: ignore[arg-type]


def receive(key: str, seconds: float = 0, **more: object) -> Task:
    return Task(Action(Kind.RECEIVE, 0, 0, key, 0), seconds, key=key, **more)  # type: ignore[arg-type]


def reduce(name: str, seconds: float, lanes: tuple[int, ...], **more: object) -> Task:
    return Task(Action(Kind.REDUCE, 0, value=name), lanes=lanes, transfer=Transfer(seconds), **more)  # type: ignore[arg-type]


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    """In the order of the lane's tasks."""
    return [(str(s.action.kind), s.start, s.end) for s in timeline.spans if s.rank == rank]


def ends(timeline: Timeline) -> list[float]:
    return [max(span.end for span in lane) for lane in timeline.lanes()]


def alone(count: int, seconds: Sequence[float] | float = 1.0) -> list[list[Task]]:
    """Lanes of one forward each."""
    each = [seconds] * count if isinstance(seconds, int | float) else seconds
    return [[forward(s)] for s in each]
