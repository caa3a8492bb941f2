"""What a timeline says of itself: busy time, live microbatches, files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule
from polylane.observe.timeline import Span, Timeline, union_intervals
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.schedules import NAMES


def span(rank: int, kind: ActionKind, start: float, end: float, microbatch: int | None = 0, stage: int = 0) -> Span:
    return Span(rank, Action(kind, stage, microbatch), start, end)


# rank 0 computes 10..14 and 16..18, sends under its backward and reduces 17..20, two of which nothing covers;
# rank 1 receives 10..12 and then computes; rank 2 does nothing
MIXED = Timeline(
    spans=(
        span(0, ActionKind.BACKWARD, 16, 18),
        span(0, ActionKind.FORWARD, 10, 14),
        span(0, ActionKind.SEND, 16.5, 17),
        span(0, ActionKind.REDUCE, 17, 20, None),
        span(1, ActionKind.RECEIVE, 10, 12),
        span(1, ActionKind.FORWARD, 12, 15),
        span(1, ActionKind.FORWARD, 13, 14, 1),
    ),
    ranks=3,
)


def test_makespan_runs_from_the_first_start_to_the_last_end() -> None:
    assert (MIXED.start(), MIXED.makespan()) == (10, 10)


def test_busy_counts_overlapping_compute_once() -> None:
    assert MIXED.busy() == (6, 3, 0)


def test_utilization_is_coloured_area_over_the_rectangle() -> None:
    assert MIXED.utilization() == 9 / 30


def test_an_empty_timeline() -> None:
    empty = Timeline((), ranks=2)
    assert (empty.makespan(), empty.busy(), empty.utilization()) == (0, (0, 0), 0.0)
    assert empty.peak_live_microbatches() == (0, 0)
    assert empty.from_zero() == empty


def test_lanes_are_in_order_of_start_the_longer_first() -> None:
    long, short = span(0, ActionKind.BACKWARD, 1, 5), span(0, ActionKind.SEND, 1, 2)
    assert Timeline((short, span(1, ActionKind.STEP, 0, 1), long), ranks=2).lanes()[0] == (long, short)


def test_union_joins_what_touches_and_drops_what_is_empty() -> None:
    spans = [span(0, ActionKind.STEP, *ends) for ends in [(4, 5), (0, 2), (1, 1.5), (2, 3), (8, 8)]]
    assert union_intervals(spans) == [(0, 3), (4, 5)]


def test_live_microbatches_from_forward_to_backward() -> None:
    spans = [span(0, ActionKind.FORWARD, i, i + 1, i) for i in range(3)]
    spans += [span(0, ActionKind.BACKWARD, 3 + i, 4 + i, i) for i in range(3)]
    assert Timeline((*spans, span(1, ActionKind.FORWARD, 9, 10)), ranks=2).peak_live_microbatches() == (3, 1)


def test_an_end_makes_room_for_a_start_at_the_same_moment() -> None:
    spans = [span(0, kind, 2 * i + shift, 2 * i + shift + 1, i)
             for i in range(3) for shift, kind in enumerate((ActionKind.FORWARD, ActionKind.BACKWARD))]  # fmt: skip
    assert Timeline(tuple(spans), ranks=1).peak_live_microbatches() == (1,)


def test_live_microbatches_over_steps_pieces_and_stages() -> None:
    pieces = [(ActionKind.FORWARD, 0), (ActionKind.FORWARD, 1), (ActionKind.BACKWARD, 2), (ActionKind.BACKWARD, 3)]
    two_steps = [span(0, kind, step + at, step + at + 1) for step in (0, 4) for kind, at in pieces]
    assert Timeline(tuple(two_steps), ranks=1).peak_live_microbatches() == (1,)
    two_stages = [replace(s, action=replace(s.action, stage=stage)) for s in two_steps for stage in (0, 4)]
    assert Timeline(tuple(two_stages), ranks=1).peak_live_microbatches() == (1,)  # two halves of it


@pytest.mark.parametrize("schedule", NAMES)
def test_a_picture_counts_the_live_microbatches_that_its_table_has(schedule: str) -> None:
    drawn = draw_schedule(ScheduleShape(schedule=schedule, stages=4, microbatches=8))
    assert drawn.timeline.peak_live_microbatches() == drawn.peak_live


def test_a_microbatch_of_no_duration_is_live_once() -> None:
    spans = (span(0, ActionKind.FORWARD, 1, 1), span(0, ActionKind.BACKWARD, 1, 1))
    assert Timeline(spans, ranks=1).peak_live_microbatches() == (1,)


def test_from_zero_shifts_everything_alike() -> None:
    shifted = MIXED.from_zero()
    assert (shifted.start(), shifted.makespan(), shifted.busy()) == (0, 10, (6, 3, 0))
    assert shifted.spans[0] == span(0, ActionKind.BACKWARD, 6, 8)


def test_json_round_trip_is_exact() -> None:
    action = Action(ActionKind.SEND, 1, 2, value='relu_"<&>', peer=0, gradient=True)
    timeline = Timeline(
        (Span(1, action, 0.1 + 0.2, 1e300, bytes=2**53 + 1), Span(0, Action(ActionKind.STEP, 0), 3, 4)),
        ranks=2, unit="ticks", title="näive </script>", notes={"a": "b"},
    )  # fmt: skip
    back = Timeline.from_dict(json.loads(json.dumps(timeline.to_dict())))
    assert back == timeline
    assert type(back.spans[1].start) is int
    assert type(back.spans[0].action.kind) is ActionKind


def test_the_schema() -> None:
    assert Timeline((span(1, ActionKind.FORWARD, 0, 1, 3, stage=2),), ranks=2, unit="ticks", title="t").to_dict() == {
        "polylane": 1,
        "kind": "timeline",
        "title": "t",
        "unit": "ticks",
        "ranks": 2,
        "notes": {},
        "columns": [
            *("rank", "kind", "stage", "microbatch", "value", "peer", "gradient", "start", "end", "waited", "bytes"),
        ],
        "spans": [[1, "forward", 2, 3, None, None, False, 0, 1, 0, 0]],
    }


def test_waiting_inside_an_action_is_no_computing() -> None:
    timeline = Timeline((Span(0, Action(ActionKind.FORWARD, 0, 0), 0, 10, waited=4),), ranks=1)
    assert timeline.busy() == (6,)
    assert timeline.utilization() == 0.6
    assert Timeline.from_dict(timeline.to_dict()) == timeline


def test_sent_bytes_are_those_that_a_rank_gives_away() -> None:
    kinds = {
        ActionKind.FORWARD: 1,
        ActionKind.BACKWARD: 2,
        ActionKind.SEND: 4,
        ActionKind.RECEIVE: 8,
        ActionKind.REDUCE: 16,
        ActionKind.STEP: 32,
    }
    spans = [Span(rank, Action(kind, 0), 0, 1, bytes=size) for rank in (0, 2) for kind, size in kinds.items()]
    assert Timeline(tuple(spans), ranks=4).sent() == (55, 0, 55, 0)
    assert MIXED.sent() == (0, 0, 0)


def test_files_without_bytes_are_read() -> None:
    sized = Timeline(tuple(replace(one, bytes=7, waited=0.5) for one in MIXED.spans), ranks=3)
    data = sized.to_dict()
    assert data["columns"].pop() == "bytes" and {row.pop() for row in data["spans"]} == {7}
    assert Timeline.from_dict(data) == replace(sized, spans=tuple(replace(one, bytes=0) for one in sized.spans))


def test_columns_are_read_by_name() -> None:
    data = MIXED.to_dict()
    data["columns"] = ["later", *reversed(data["columns"])]
    data["spans"] = [["?", *reversed(row)] for row in data["spans"]]
    assert Timeline.from_dict(data) == MIXED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"polylane": 2}, "not a timeline: expected"),
        ({"kind": "plan"}, "not a timeline: expected"),
        ({"unit": ...}, "this timeline lacks unit"),
        ({"columns": ["rank"]}, "this timeline lacks columns: kind, columns: stage"),
        ({"spans": [[0, "nap", 0, 0, None, None, False, 0, 1]]}, "span 0 of this timeline cannot be read.*'nap'"),
        ({"spans": [[0, "step"]]}, "span 0 of this timeline cannot be read"),
        ({"columns": ["rank", "bytes"]}, "this timeline lacks columns: kind, columns: stage"),
        ({"spans": [[7, "step", 0, None, None, None, False, 0, 1, 0, 0]]}, "outside the timeline's 3 ranks"),
    ],
)
def test_files_that_are_not_timelines_are_refused(change: dict[str, object], message: str) -> None:
    data = {key: value for key, value in (MIXED.to_dict() | change).items() if value is not ...}
    with pytest.raises(ValueError, match=message):
        Timeline.from_dict(data)


@pytest.mark.parametrize(("rank", "start", "end"), [(2, 0, 1), (-1, 0, 1), (0, 2, 1), (0, float("nan"), 1)])
def test_spans_that_mean_nothing_are_refused(rank: int, start: float, end: float) -> None:
    with pytest.raises(ValueError, match="rank"):
        Timeline((span(rank, ActionKind.STEP, start, end),), ranks=2)
