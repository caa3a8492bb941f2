"""Schedules beside those of torch.distributed.pipelining, for the sizes of torch's own tests of its schedules.

Played by one simulator, with passes of one tick and backward passes of two: ours take as long, or less, with as many
live microbatches, or fewer.
"""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as theirs
from torch.distributed.pipelining.stage import _PipelineStageBase

from polylane.cost.simulator.schedule_tasks import simulate_schedule
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.live import peak_live
from polylane.schedule.problem import ScheduleProblem
from polylane.schedule.schedules import assign_stages, schedule_lanes
from polylane.schedule.search import find_schedule
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes

# (chunks, microbatches, workers), from TestSchedulePlan of torch's test/distributed/pipelining/test_schedule.py.
SIZES = [
    *((2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8)),
    *((4, 16, 4), (4, 32, 4), (4, 64, 4)),
    *((4, 16, 16), (4, 32, 32), (4, 128, 64)),
    *((3, 2, 2), (3, 8, 2), (3, 12, 4)),
    *((4, 6, 3), (4, 10, 5)),
    *((2, 3, 4), (2, 4, 4), (2, 10, 4), (2, 15, 4)),
]
KINDS = {
    theirs.F: ActionKind.FORWARD,
    theirs.B: ActionKind.BACKWARD,
    theirs.I: ActionKind.BACKWARD_INPUT,
    theirs.W: ActionKind.BACKWARD_WEIGHT,
}


class _Stage(_PipelineStageBase):
    """A stage that computes nothing: torch's schedules ask only how many there are."""

    def __init__(self, workers: int, stages: int) -> None:
        self.submod, self.group, self.group_rank, self.stage_index = None, None, 0, 0  # type: ignore[assignment]
        self.group_size, self.num_stages, self.has_backward = workers, stages, True

    def _create_grad_recv_info(self, *_: Any) -> Any:
        raise NotImplementedError

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError


def lanes_of_torch(schedule: Any, chunks: int, microbatches: int, workers: int) -> Lanes:
    made = schedule([_Stage(workers, workers * chunks) for _ in range(chunks)], microbatches)
    return tuple(
        tuple(
            Action(KINDS[each.computation_type], each.stage_index, each.microbatch_index)
            for each in made.pipeline_order[worker]
            if each is not None
        )
        for worker in range(workers)
    )


def ticks(lanes: Lanes, stages: int) -> float:
    return simulate_schedule(lanes, 1, 2, graph=StageGraph.chain(stages)).makespan()


def test_there_are_as_many_sizes() -> None:
    assert len(SIZES) == 23


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_interleaved(size: tuple[int, int, int]) -> None:
    chunks, microbatches, workers = size
    whole = lanes_of_torch(theirs.ScheduleInterleaved1F1B, *size)
    ours = schedule_lanes("interleaved", chunks * workers, microbatches, assign_stages("interleaved", workers, chunks))
    assert ticks(ours, chunks * workers) <= ticks(whole, chunks * workers)
    assert max(peak_live(ours)) <= max(peak_live(whole))


@pytest.mark.parametrize("size", [size for size in SIZES if size[0] == 2], ids=str)
def test_v(size: tuple[int, int, int]) -> None:
    _, microbatches, workers = size
    whole = lanes_of_torch(theirs.ScheduleZBVZeroBubble, *size)
    ours = schedule_lanes("zb-v", 2 * workers, microbatches, assign_stages("zb-v", workers, 2))
    assert ticks(ours, 2 * workers) <= ticks(whole, 2 * workers)
    assert max(peak_live(ours)) <= max(peak_live(whole))


# Searching the order of many passes takes seconds; of the largest size, 98,304 of them, minutes and to no avail.
@pytest.mark.parametrize(
    "size",
    [
        pytest.param(s, id=str(s), marks=[pytest.mark.slow] if s[0] * s[1] * s[2] > 130 else [])
        for s in SIZES
        if s[2] < 64
    ],
)
def test_found_beside_interleaved_zero_bubble(size: tuple[int, int, int]) -> None:
    """On the same stages of the same workers, and no more live chunks on any of them."""
    chunks, microbatches, workers = size
    whole = lanes_of_torch(theirs.ScheduleInterleavedZeroBubble, *size)
    stages = chunks * workers
    found = find_schedule(
        ScheduleProblem(
            graph=StageGraph.chain(stages),
            workers=assign_stages("interleaved", workers, chunks),
            microbatches=microbatches,
            forward=(1,) * stages,
            input_gradient=(1,) * stages,
            weight_gradient=(1,) * stages,
            memory=tuple(map(float, peak_live(whole))),
        ),
        effort=100_000,
    )
    assert ticks(found.lanes, stages) == found.makespan <= ticks(whole, stages)
    assert all(ours <= most for ours, most in zip(peak_live(found.lanes), peak_live(whole), strict=True))
