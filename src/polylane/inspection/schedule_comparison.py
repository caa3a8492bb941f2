"""All schedules side by side, on one model: the same passes, cut into stages or chunks, on the same workers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polylane.inspection.schedule_report import AUTO, DrawnSchedule, ScheduleShape, draw_schedule, lanes_summary
from polylane.schedule.schedules import ASYNCHRONOUS, DEFAULT_CHUNKS, NAMES
from polylane.schedule.stage_graph import StageGraph

BASE = "1f1b"  # the schedule whose messages the others' are compared with


@dataclass(frozen=True, kw_only=True)
class ComparedModel:
    """What all schedules are drawn for.

    Attributes:
        stages: number of workers of a chain, or a graph of stages, of which each worker has one.
        microbatches: number of microbatches in a batch.
        chunks: chunks of a worker in schedules that leave it open; None: as many as they have.
        forward: ticks of the forward pass of a worker's whole part of the model, for all workers or for each.
        backward: ticks of its backward pass, given like ``forward``.
        weight: the ticks of it that weight gradients take, given like ``forward``; None: half of them.
        hop: ticks that a value takes between two workers.
        halving: what a backward pass takes longer in two halves, as a part of it, given like ``forward``.
        replicas: workers at each place of the pipeline that compute whole microbatches in turn, or one number for all;
            empty: one.
    """

    stages: int | StageGraph
    microbatches: int
    chunks: int | None = None
    forward: float | Sequence[float] = 1
    backward: float | Sequence[float] = 2
    weight: float | Sequence[float] | None = None
    hop: float = 0
    halving: float | Sequence[float] = 0
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True)
class ComparedSchedules:
    """The schedules that were drawn, and those that could not be.

    Attributes:
        drawn: by the name in tables, which says their options.
        left_out: why a schedule is missing, by its name.
    """

    drawn: dict[str, DrawnSchedule]
    left_out: dict[str, str]

    def figures(self) -> list[dict[str, Any]]:
        """Return the figures of each schedule, of `lanes_summary`, with its title and what it sends.

        ``messages_over_1f1b`` is the number of messages for each microbatch over that of 1F1B. It is that of bytes too
        where all values between neighbouring chunks are of one size.
        """
        base = _messages_each(self.drawn[BASE]) if BASE in self.drawn else 0
        return [
            {
                "title": title,
                **lanes_summary(drawn),
                "messages_over_1f1b": _messages_each(drawn) / base if base else None,
            }
            for title, drawn in self.drawn.items()
        ]


def compare_schedules(model: ComparedModel) -> ComparedSchedules:
    """Draw every schedule for one model; chunks share the ticks of their stage evenly.

    Raises:
        ValueError: durations that do not fit the stages, or fewer than one stage or microbatch.
    """
    drawn: dict[str, DrawnSchedule] = {}
    left_out: dict[str, str] = {}
    for title, shape in _shapes(model):
        if shape.chunks is not None and isinstance(model.stages, StageGraph):
            left_out[title] = "stages of a file are not cut into chunks here"
            continue
        try:
            drawn[title] = _draw(shape, model)
        except ValueError as error:
            # What no schedule can be drawn with is refused; what one schedule does not have is said.
            if title == BASE or BASE not in drawn:
                raise
            left_out[title] = str(error)
    return ComparedSchedules(dict(sorted(drawn.items(), key=lambda item: _order(item[1].shape))), left_out)


def _shapes(model: ComparedModel) -> Iterator[tuple[str, ScheduleShape]]:
    """Yield every schedule with its title; 1F1B first, which has no options that could be refused."""
    for name in sorted((*NAMES, *ASYNCHRONOUS), key=lambda name: name != BASE):
        shape = ScheduleShape(
            schedule=name,
            stages=model.stages,
            microbatches=model.microbatches,
            chunks=(model.chunks if name == "interleaved" else None) or DEFAULT_CHUNKS.get(name),
            replicas=model.replicas,
        )
        title = f"{name}, {shape.chunks} chunks" if shape.chunks is not None else name
        yield (f"{name}, 2 batches" if name == "pipedream-2bw" else title), shape
        if name == "pipedream":
            yield f"{name}, vertical sync", replace(shape, vertical_sync=True)
    # With the memory of 1F1B, and with as much as it likes.
    for live in (_longest_way(model.stages), None):
        shape = ScheduleShape(
            schedule=AUTO, stages=model.stages, microbatches=model.microbatches, live=live, replicas=model.replicas
        )
        yield AUTO if live is None else f"{AUTO}, {live} live", shape


def _longest_way(stages: int | StageGraph) -> int:
    return stages if isinstance(stages, int) else max(stages.depth_to_end)


def _order(shape: ScheduleShape) -> tuple[int, bool]:
    return (*NAMES, AUTO, *ASYNCHRONOUS).index(shape.schedule), shape.vertical_sync or shape.live is None


def _draw(shape: ScheduleShape, model: ComparedModel) -> DrawnSchedule:
    chunks = shape.chunks or 1
    return draw_schedule(
        shape,
        _share(model.forward, chunks),
        _share(model.backward, chunks),
        weight=None if model.weight is None else _share(model.weight, chunks),
        hop=model.hop,
        halving=[part for part in model.halving for _ in range(chunks)]
        if isinstance(model.halving, Sequence)
        else model.halving,
    )


def _share(ticks: float | Sequence[float], chunks: int) -> float | list[float]:
    """Return the ticks of each chunk: those of one stage are adjacent in the chain."""
    if isinstance(ticks, Sequence):
        return [_divide(stage_ticks, chunks) for stage_ticks in ticks for _ in range(chunks)]
    return _divide(ticks, chunks)


def _divide(ticks: float, chunks: int) -> float:
    return ticks // chunks if isinstance(ticks, int) and ticks % chunks == 0 else ticks / chunks


def _messages_each(drawn: DrawnSchedule) -> float:
    """Return the messages for each microbatch."""
    microbatches = {span.action.microbatch for span in drawn.timeline.spans}
    return drawn.messages / len(microbatches)
