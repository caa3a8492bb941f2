"""Laws of timelines: a file gives back every span, with bytes or as it was before there were any."""

from __future__ import annotations

import json
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind

RANKS = 4
TIMES = st.floats(0, 1e6)
ACTIONS = st.builds(
    Action,
    kind=st.sampled_from(ActionKind),
    stage=st.integers(0, 9),
    microbatch=st.none() | st.integers(0, 99),
    value=st.none() | st.text(max_size=8),
    peer=st.none() | st.integers(0, RANKS - 1),
    gradient=st.booleans(),
)
SPANS = st.builds(
    lambda rank, action, start, length, waited, size: Span(rank, action, start, start + length, waited, size),
    *(st.integers(0, RANKS - 1), ACTIONS, TIMES, TIMES, TIMES, st.integers(0, 2**60)),
)
TIMELINES = st.builds(lambda spans: Timeline(tuple(spans), RANKS), st.lists(SPANS, max_size=8))


@given(TIMELINES)
def test_a_file_gives_back_every_span(timeline: Timeline) -> None:
    assert Timeline.from_dict(json.loads(json.dumps(timeline.to_dict()))) == timeline


@given(TIMELINES)
def test_a_file_without_bytes_gives_back_all_the_rest(timeline: Timeline) -> None:
    data = timeline.to_dict()
    at = data["columns"].index("bytes")
    del data["columns"][at]
    for row in data["spans"]:
        del row[at]
    without = tuple(replace(span, bytes=0) for span in timeline.spans)
    assert Timeline.from_dict(json.loads(json.dumps(data))) == replace(timeline, spans=without)


@given(TIMELINES)
def test_what_is_given_away_is_all_that_is_not_received(timeline: Timeline) -> None:
    received = sum(span.bytes for span in timeline.spans if span.action.kind is ActionKind.RECEIVE)
    assert sum(timeline.sent()) == sum(span.bytes for span in timeline.spans) - received
    for rank, sent in enumerate(timeline.sent()):
        alone = Timeline(tuple(span for span in timeline.spans if span.rank == rank), RANKS)
        assert alone.sent()[rank] == sent == sum(alone.sent())
