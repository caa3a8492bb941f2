"""Tasks in few words, and what a timeline says of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.memory.peak import MemoryBreakdown, MemoryMargin, TrainedBytes, peak_memory
from polylane.cost.simulator.task import Task, TransferTime
from polylane.observe.timeline import Timeline
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.live import peak_live
from polylane.schedule.schedules import schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import one_forward_one_backward

FORWARD = Action(ActionKind.FORWARD, 0, 0)
BACKWARD = Action(ActionKind.BACKWARD, 0, 0)
STEP = Action(ActionKind.STEP, 0)


def forward(seconds: float, microbatch: int = 0, waited: float = 0) -> Task:
    return Task(Action(ActionKind.FORWARD, 0, microbatch), seconds, waited)


def backward(seconds: float) -> Task:
    return Task(BACKWARD, seconds)


def step(seconds: float = 0) -> Task:
    return Task(STEP, seconds)


def send(key: str, transfer: TransferTime, peer: int = 1, seconds: float = 0, **more: object) -> Task:
    return Task(Action(ActionKind.SEND, 0, 0, key, peer), seconds, key=key, transfer=transfer, **more)  # type: ignore[arg-type]


def receive(key: str, seconds: float = 0, **more: object) -> Task:
    return Task(Action(ActionKind.RECEIVE, 0, 0, key, 0), seconds, key=key, **more)  # type: ignore[arg-type]


def reduce(name: str, seconds: float, lanes: tuple[int, ...], **more: object) -> Task:
    return Task(Action(ActionKind.REDUCE, 0, value=name), lanes=lanes, transfer=TransferTime(seconds), **more)  # type: ignore[arg-type]


def scheduled(
    lanes: Sequence[Sequence[Action]], ticks: dict[ActionKind, float], transfer: TransferTime
) -> list[list[Task]]:
    """The passes of a chain of stages, each between its receive and its send."""

    def tasks_of(action: Action) -> Iterator[Task]:
        stage, microbatch, last = action.stage, action.microbatch, len(lanes) - 1
        if action.kind is ActionKind.BACKWARD_WEIGHT:  # no other stage waits for it
            yield Task(action, ticks[action.kind])
            return
        back = action.kind is not ActionKind.FORWARD
        source, target = (stage + 1, stage - 1) if back else (stage - 1, stage + 1)
        if 0 <= source <= last:
            yield Task(Action(ActionKind.RECEIVE, stage, microbatch, "", source, back), key=(source, stage, microbatch))
        yield Task(action, ticks[action.kind])
        if 0 <= target <= last:
            sent = Action(ActionKind.SEND, stage, microbatch, "", target, back)
            yield Task(sent, key=(stage, target, microbatch), transfer=transfer)

    return [[task for action in lane for task in tasks_of(action)] for lane in lanes]


def times(timeline: Timeline, rank: int) -> list[tuple[str, float, float]]:
    """In the order of the lane's tasks."""
    return [(str(s.action.kind), s.start, s.end) for s in timeline.spans if s.rank == rank]


def ends(timeline: Timeline) -> list[float]:
    return [max(span.end for span in lane) for lane in timeline.lanes()]


def alone(count: int, seconds: Sequence[float] | float = 1.0) -> list[list[Task]]:
    """Lanes of one forward each."""
    each = [seconds] * count if isinstance(seconds, int | float) else seconds
    return [[forward(s)] for s in each]


def live_bound(schedule: str, stages: int | StageGraph, microbatches: int, stage: int) -> int:
    """The most microbatches that a stage has between the start of their forward and the end of their backward."""
    return max(peak_live(schedule_lanes(schedule, stages, microbatches), stage))


def interleaved_live_bound(ranks: int, chunks: int, microbatches: int, rank: int) -> int:
    """How many passes of interleaved 1F1B a rank holds at most between the start of a forward and its backward's end.

    A microbatch counts once for every virtual stage that holds it: each is 1/chunks of what a microbatch keeps on the
    rank. Of a multiple of the ranks that is larger than they are, rank 0 holds ranks + (ranks - 1)/chunks microbatches.
    """
    largest_round, after = -(-microbatches // max(1, microbatches // ranks)), ranks - rank - 1
    warm_up = after if chunks == 1 else (chunks - 1) * largest_round + 2 * after
    return min(chunks * microbatches, warm_up + 1)


def one_stage_memory(
    need: PeakMemory, load: TrainedBytes, live: int, microbatches: int, margin: MemoryMargin | None = None
) -> MemoryBreakdown:
    """Memory of a worker of one stage that, as in 1F1B, has up to ``live`` microbatches between their passes."""
    lane = one_forward_one_backward(live, microbatches)[0]
    return peak_memory(lane, {0: need}, {0: load.trained}, load, margin=margin)
