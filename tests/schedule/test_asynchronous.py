"""PipeDream and PipeDream-2BW, lane by lane, and the versions of the weights that they keep."""

from __future__ import annotations

import pytest

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule, lanes_summary
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.asynchronous import pipedream, pipedream_2bw, steady_step, steps_in_flight, weight_delays
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import one_forward_one_backward

SIGNS = {ActionKind.FORWARD: "", ActionKind.BACKWARD: "<", ActionKind.STEP: "#"}


def drawn(lane: tuple[Action, ...]) -> str:
    """``0 <0 #0``: a forward, a backward and an update behind microbatch 0."""
    return " ".join(f"{SIGNS[a.kind]}{a.microbatch}" for a in lane)


def test_pipedream() -> None:
    assert [drawn(lane) for lane in pipedream(3, 4).lanes] == [
        "0 1 2 <0 #0 3 <1 #1 <2 #2 <3 #3",
        "0 1 <0 #0 2 <1 #1 3 <2 #2 <3 #3",
        "0 <0 #0 1 <1 #1 2 <2 #2 3 <3 #3",
    ]


def test_pipedream_2bw() -> None:
    assert [drawn(lane) for lane in pipedream_2bw(3, 2, 2).lanes] == [
        "0 1 2 <0 3 <1 #1 <2 <3 #3",
        "0 1 <0 2 <1 #1 3 <2 <3 #3",
        "0 <0 1 <1 #1 2 <2 3 <3 #3",
    ]


def test_versions_by_the_papers() -> None:
    stashed, synced, double = pipedream(4, 8), pipedream(4, 8, vertical_sync=True), pipedream_2bw(4, 4, 3)
    assert (stashed.peak_versions(), stashed.staleness()) == ((4, 3, 2, 1), (3, 2, 1, 0))
    assert (synced.peak_versions(), synced.staleness()) == ((4,) * 4, (3,) * 4)
    assert (double.peak_versions(), double.staleness()) == ((2,) * 4, (1,) * 4)
    assert stashed.versions[1] == (0, 0, 0, 1, 2, 3, 4, 5)
    assert synced.versions[1] == (0, 0, 0, 0, 1, 2, 3, 4)
    assert double.versions[1] == (0,) * 8 + (1,) * 4


def test_branches_count_the_longest_way() -> None:
    graph = StageGraph(((), (0,), (0, 1)))  # a skip past the middle
    assert pipedream(graph, 6).peak_versions() == (3, 2, 1)


def test_figures_of_a_run() -> None:
    told = lanes_summary(draw_schedule(ScheduleShape(schedule="pipedream", stages=4, microbatches=8)))
    assert (told["busy"], told["area"], told["steady_utilization"]) == (96, 132, 1)
    assert (told["peak_live_microbatches"], told["weight_versions"]) == ([4, 3, 2, 1], [4, 3, 2, 1])
    short = lanes_summary(draw_schedule(ScheduleShape(schedule="pipedream", stages=4, microbatches=3)))
    assert short["steady_utilization"] is None
    told = lanes_summary(draw_schedule(ScheduleShape(schedule="pipedream-2bw", stages=4, microbatches=3, batches=4)))
    assert (told["busy"], told["steady_utilization"], told["staleness"]) == (4 * 12 * 3, 1, [1] * 4)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 3 microbatches in a batch for 4 stages, not 2"):
        pipedream_2bw(4, 2, 2)
    with pytest.raises(ValueError, match="batches must be a whole number of at least 1, not 0"):
        pipedream_2bw(2, 2, 0)


@pytest.mark.parametrize("stages", [1, 2, 3, 5])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4])
def test_the_steady_step_repeated_is_the_run(stages: int, microbatches: int) -> None:
    steps = 6
    whole = one_forward_one_backward(stages, steps * microbatches)
    for stage, lane in enumerate(steady_step(stages, microbatches)):
        found, updates = list[tuple[ActionKind, int]](), list[int]()
        for step in range(steps + steps_in_flight(stages, microbatches)):
            for action in lane:
                batch = step - action.steps_back
                if 0 <= batch < steps and action.kind is ActionKind.STEP:
                    updates.append(batch)
                    done = sum(kind is ActionKind.BACKWARD for kind, _ in found)
                    assert done == (batch + 1) * microbatches, "an update comes behind the batch's last backward"
                elif 0 <= batch < steps:
                    assert action.microbatch is not None
                    found.append((action.kind, batch * microbatches + action.microbatch))
        assert found == [(action.kind, action.microbatch) for action in whole[stage]]
        assert updates == list(range(steps))


def test_how_many_updates_the_weights_lack() -> None:
    assert weight_delays("pipedream", 4, 1) == (3, 2, 1, 0)
    assert weight_delays("pipedream", 4, 1, vertical_sync=True) == (3, 3, 3, 3)
    assert weight_delays("pipedream", 4, 2) == (2, 1, 1, 0)
    assert weight_delays("pipedream-2bw", 4, 3) == (1, 1, 1, 1)
    run = pipedream(4, 12)
    for stage, delay in enumerate(weight_delays("pipedream", 4, 1)):
        assert run.versions[stage] == tuple(max(0, m - delay) for m in range(12))
    with pytest.raises(ValueError, match="needs at least 3 microbatches"):
        weight_delays("pipedream-2bw", 4, 2)
