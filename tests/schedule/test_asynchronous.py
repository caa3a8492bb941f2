"""PipeDream and PipeDream-2BW, lane by lane, and the versions of the weights that they keep."""

from __future__ import annotations

import pytest

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule, lanes_summary
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.asynchronous import pipedream, pipedream_2bw
from polylane.schedule.schedules import ASYNCHRONOUS, assign_stages, live_bound, schedule_lanes
from polylane.schedule.stage_graph import StageGraph

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
    for name in ASYNCHRONOUS:
        says = f"the schedule {name} is asynchronous: polylane lanes draws it, but no plan runs it"
        for call in (
            lambda name=name: schedule_lanes(name, 2, 2),
            lambda name=name: live_bound(name, 2, 2, 0),
            lambda name=name: assign_stages(name, 2, 1),
        ):
            with pytest.raises(ValueError, match=says):
                call()


@pytest.mark.parametrize(
    ("shape", "says"),
    [
        ({"schedule": "1f1b", "vertical_sync": True}, "vertical sync is an option of pipedream, not of 1f1b"),
        ({"schedule": "pipedream", "batches": 2}, "several batches are drawn of pipedream-2bw, not of pipedream"),
        ({"schedule": "pipedream", "chunks": 2}, "pipedream has one stage on a worker, not 2 chunks"),
    ],
)
def test_options_of_other_schedules(shape: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        draw_schedule(ScheduleShape(stages=4, microbatches=8, **shape))  # type: ignore[arg-type]
