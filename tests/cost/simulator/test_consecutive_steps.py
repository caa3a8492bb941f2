"""Consecutive steps: where a worker goes on before the others are done, and where it does not."""

from __future__ import annotations

import pytest

from polylane.cost.predict import overlap_seconds
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task, TransferTime
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import SCHEDULES, schedule_lanes, splits_backward
from tests.support.simulated_tasks import reduce, scheduled

# All three take as long as the others: theory's F = I = W.
EQUAL: dict[ActionKind, float] = {
    ActionKind.FORWARD: 1,
    ActionKind.BACKWARD: 2,
    ActionKind.BACKWARD_INPUT: 1,
    ActionKind.BACKWARD_WEIGHT: 1,
}


def step_of(schedule: str, stages: int, microbatches: int, hop: float = 0) -> list[list[Task]]:
    passes = scheduled(schedule_lanes(schedule, stages, microbatches), EQUAL, TransferTime(latency=hop))
    return [[*lane, Task(Action(ActionKind.STEP, rank))] for rank, lane in enumerate(passes)]


def period(lanes: list[list[Task]]) -> float:
    alone = simulate_tasks(lanes)
    return alone.makespan() - overlap_seconds(lanes, alone)


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 3), (2, 8), (4, 7), (4, 8), (8, 24)])
def test_zb_h2_has_no_bubble_where_steps_follow_each_other(stages: int, microbatches: int) -> None:
    lanes = step_of("zb-h2", stages, microbatches)
    assert simulate_tasks(lanes).makespan() == 3 * microbatches + stages - 1
    assert period(lanes) == 3 * microbatches


@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb-h1"])
@pytest.mark.parametrize("hop", [0, 1])
def test_a_first_stage_that_ends_last_lets_no_step_begin_early(schedule: str, hop: float) -> None:
    lanes = step_of(schedule, 4, 8, hop)
    assert period(lanes) == simulate_tasks(lanes).makespan()


@pytest.mark.parametrize("schedule", [*SCHEDULES, "zb-h1", "zb-h2"])
def test_many_steps_take_their_periods(schedule: str) -> None:
    lanes = step_of(schedule, 4, 8, hop=0.25)
    one, many = simulate_tasks(lanes).makespan(), simulate_tasks([lane * 7 for lane in lanes]).makespan()
    assert many == pytest.approx(one + 6 * period(lanes))
    assert splits_backward(schedule) or period(lanes) == one


def test_a_sum_over_all_workers_is_waited_for() -> None:
    lanes = [[*lane[:-1], reduce("tied", 0, (0, 1, 2, 3)), lane[-1]] for lane in step_of("zb-h2", 4, 8)]
    assert period(lanes) == simulate_tasks(lanes).makespan() == 27


def test_nothing_overlaps_nothing() -> None:
    assert overlap_seconds([], simulate_tasks([])) == 0
