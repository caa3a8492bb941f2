"""Several hosts: what their posts say, joined, is judged as if one had seen it all; and a silent host is named."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.diagnosis import host_post
from polylane.diagnosis.culprit import RankState, Wait, find_culprits
from polylane.diagnosis.host_post import (
    Answer,
    HangVerdict,
    HostPost,
    abbreviate_lines,
    join_reports,
    shift_report,
)
from polylane.diagnosis.judgement import RankRecord, judge
from polylane.diagnosis.page_layout import Phase, Record
from polylane.diagnosis.patience import (
    LONG_SECONDS,
    MARGIN_SECONDS,
    SILENT_MARGIN_SECONDS,
    SILENT_SECONDS,
    silence_bound,
)
from polylane.diagnosis.report import Doing, HangReport, RankReport, describe_finding, describe_silence
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind
from tests.diagnosis.program_states import states_at
from tests.diagnosis.test_culprit_laws import run_until_all_stand
from tests.properties.test_program_laws import Lowered, lowereds
from tests.support import subsets

BOUND = 8.0
FORWARD = Action(ActionKind.FORWARD, 1, 0)


def stalled(rank: int, state: RankState, seconds: float = 9.0) -> RankRecord:
    """The record of a rank in a step that ran before."""
    return RankRecord(rank, state, stalled=seconds, bound=BOUND, patience=BOUND)


def told(records: list[RankRecord], hosts: int, secret: bytes) -> dict[int, list[RankRecord]]:
    """By host, its records as others read them; rank r is on host r % hosts."""
    own = {host: [each for each in records if each.rank % hosts == host] for host in range(hosts)}
    texts = {host: HostPost(1, ranks=tuple(each)).to_bytes(f"t {host}", secret) for host, each in own.items()}
    ranks = {host: [each.rank for each in own[host]] for host in own}
    return {host: list(HostPost.from_bytes(texts[host], f"t {host}", ranks[host], secret).ranks) for host in own}


@given(lowereds(), st.data())
@settings(max_examples=subsets.examples(60), deadline=None)
def test_the_records_of_all_hosts_name_exactly_the_stopped_rank(made: Lowered, data: st.DataObject) -> None:
    programs = made.programs
    stopped = data.draw(st.sampled_from([p.rank for p in programs if p.actions]))
    at = data.draw(st.integers(0, len(programs[stopped].actions) - 1))
    states = states_at(programs, run_until_all_stand(programs, stopped, at))
    if states[stopped].is_waiting:
        states[stopped] = replace(states[stopped], is_frozen=True)
    records = [abbreviate_lines(stalled(rank, state)) for rank, state in states.items()]
    by_host = told(records, data.draw(st.integers(2, 3)), data.draw(st.sampled_from([b"", b"secret"])))
    found = judge(each for own in by_host.values() for each in own)
    assert found.is_hang and found.finding.culprits == found.victims == (stopped,)
    # Without the host of that rank nobody else is blamed, until that host has been silent for long enough.
    hidden = [
        rank for own in by_host.values() if stopped in [each.rank for each in own] for rank in [e.rank for e in own]
    ]
    known = [each for own in by_host.values() for each in own if each.rank not in hidden]
    assert not judge(known).is_hang and not judge(known, dict.fromkeys(hidden, BOUND - 1)).is_hang
    silent = judge(known, dict.fromkeys(hidden, BOUND + 1))
    assert silent.is_hang == any(each.state.is_waiting for each in known)
    assert not silent.finding.culprits and {*silent.finding.elsewhere} <= {*hidden}
    assert not {*silent.victims} & {*hidden}


def test_a_host_whose_watch_had_ended_long_before_is_not_blamed() -> None:
    waits = stalled(0, RankState(Wait("all", 3, (0, 1)), {"all": 3}))
    assert judge([waits], {1: 10.0}).is_hang
    assert not judge([waits], {1: 300.0}).is_hang
    assert not judge([replace(waits, stalled=3.0)], {1: 10.0}).is_hang


def test_a_silent_host_is_lost_as_soon_as_a_connection_has_broken() -> None:
    state = RankState(Wait("all", 3, (0, 1)), {"all": 3})
    asks = replace(stalled(0, state, 0.5), asks=True)
    found = judge([asks, RankRecord(2)], {1: 3.1})
    assert found.is_hang and found.culprits == (1,) and found.victims == (0, 2)
    assert not judge([stalled(0, state, 0.5)], {1: 3.1}).is_hang
    assert not judge([asks, RankRecord(1)]).is_hang  # its host is heard
    assert not judge([asks, RankRecord(1, doing=Doing.GONE)], {1: 3.1}).is_hang  # its host has said that it ended


def test_none_of_several_hosts_is_blamed_where_nothing_is_heard_of_any() -> None:
    state = RankState(Wait("all", 3, (0, 1, 2)), {"all": 3})
    asks = replace(stalled(0, state, 0.5), asks=True)
    found = judge([asks], {1: 3.1, 2: 3.1}, knows_lost=False)
    assert found.is_hang and found.finding.elsewhere == (1, 2) and not found.culprits and not found.is_lost


def test_who_is_heard_and_goes_on_is_not_blamed() -> None:
    waits = stalled(0, RankState(Wait("all", 3, (0, 1)), {"all": 3}))
    found = judge([waits, RankRecord(1)])
    assert found.finding.culprits == (1,) and not found.is_hang


def test_a_link_is_blamed_once_none_of_its_ranks_goes_on() -> None:
    state = RankState(Wait("all", 3, (0, 1)), {"all": 3})
    assert judge([stalled(0, state), stalled(1, state)]).victims == (0, 1)
    assert not judge([stalled(0, state), stalled(1, state, 2.0)]).is_hang


def test_servers_and_ended_workers_are_waited_for_by_nobody() -> None:
    state = RankState(None, {"all": 2})
    for quiet in (RankRecord(1, state, Doing.GONE, stalled=99, bound=8), RankRecord(1, state, phase=Phase.SERVING)):
        assert not judge([stalled(0, RankState(Wait("all", 3, (0, 1)), {"all": 3})), quiet]).is_hang


@pytest.mark.parametrize(
    ("record", "seconds"),
    [
        (Record(round=3, phase=Phase.TRAINING, usual=2_000_000_000), 2 + SILENT_MARGIN_SECONDS),
        (Record(round=1, phase=Phase.TRAINING, is_new=True), SILENT_SECONDS),
        (Record(phase=Phase.COMPILING), SILENT_SECONDS),
        (Record(round=3, phase=Phase.SAVING, usual=60_000_000_000), 60 + MARGIN_SECONDS),
    ],
)
def test_a_silent_host_is_waited_for(record: Record, seconds: float) -> None:
    """Also while others compile or save, for the process that speaks for a host does neither."""
    assert silence_bound(record, None) == seconds < LONG_SECONDS


# ---- sentences -------------------------------------------------------------------------------------------------------

HOSTS = {0: "a", 1: "a", 2: "b", 3: "b"}
RANKS = {rank: RankReport(rank, HOSTS[rank], 40 + rank, "training", 12, FORWARD, 9.0, Doing.WAITING) for rank in HOSTS}


def test_a_link_between_hosts_is_named_by_them() -> None:
    found = find_culprits({rank: RankState(Wait("all", 3, (0, 1, 2, 3)), {"all": 3}) for rank in HOSTS})
    said = describe_finding(found, RANKS, 0.0, HOSTS)
    assert said.startswith("ranks 0 and 1 on a and ranks 2 and 3 on b have all begun 1 operation between them")
    assert said.endswith("on stage 1: no worker is to blame, the link between a and b carries nothing")


def test_a_silent_host_is_named_with_its_ranks_and_who_waits() -> None:
    state = RankState(Wait("all", 3, (0, 1, 2, 3)), {"all": 3})
    found = judge([stalled(0, state), stalled(1, state)], {2: 9.1, 3: 9.1})
    assert describe_silence(found.finding, RANKS, HOSTS, {"b": 9.1}) == (
        "b, with ranks 2 and 3, has not been heard from for 9.1 s: it is down or stopped as a whole, or the link to it "
        "carries nothing; ranks 0 and 1 on a have waited for ranks 2 and 3 for 9.0 s, in step 12, forward of "
        "microbatch 0 on stage 1"
    )
    said = describe_silence(found.finding, RANKS, HOSTS, {"b": 3.1}, is_lost=True)
    assert ", and connections with it have broken: it is down, or all workers there have ended; ranks 0" in said


# ---- posts -----------------------------------------------------------------------------------------------------------

WAITS = st.builds(Wait, st.text(max_size=8), st.integers(1, 2**48 - 1), st.just((0, 1, 5)))
STATES = st.builds(
    RankState, st.none() | WAITS, st.dictionaries(st.text(max_size=8), st.integers(1, 2**48), max_size=3), st.booleans()
)
SECONDS = st.floats(0, 1e9) | st.just(float("inf"))
RECORDS = st.builds(
    RankRecord,
    st.sampled_from([1, 5]),
    STATES,
    st.sampled_from(list(Doing)),
    st.sampled_from(list(Phase)),
    st.floats(0, 1e9),
    SECONDS,
    SECONDS,
)
REPORT = HangReport(
    "",
    (),
    (replace(RANKS[1], stacks="Thread 0x1", host="b"),),
    Timeline((Span(1, FORWARD, -3.0, -2.0),), 6),
    {1: (FORWARD, -2.0)},
    0.0,
    7.0,
)
POSTS = st.builds(
    HostPost,
    st.integers(0, 2**40),
    st.booleans(),
    st.lists(RECORDS, max_size=2).map(tuple),
    st.none() | st.builds(HangVerdict, st.integers(1, 9), st.just((0, 5)), st.just((5,)), st.text(max_size=9)),
    st.none() | st.just(Answer(0, 2, REPORT)),
)


@given(POSTS, st.sampled_from([b"", b"secret"]), st.data())
@settings(max_examples=subsets.examples(50))
def test_a_post_is_read_as_it_was_written_and_as_nothing_else(
    post: HostPost, secret: bytes, data: st.DataObject
) -> None:
    text = post.to_bytes("this 1", secret)
    assert HostPost.from_bytes(text, "this 1", (1, 5), secret) == post
    cut = data.draw(st.integers(0, len(text) - 1))
    wrong = [text[:cut]]
    if secret:
        wrong += [text[:cut] + bytes([text[cut] ^ 1]) + text[cut + 1 :], text[32:], post.to_bytes("this 2", secret)]
    for each in wrong:
        with pytest.raises(ValueError):
            HostPost.from_bytes(each, "this 1", (1, 5), secret)
    if post.ranks or post.answer:
        with pytest.raises(ValueError, match="another host"):
            HostPost.from_bytes(text, "this 1", (), secret)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=9) | st.dictionaries(st.sampled_from(["a", "number"]), inner, max_size=2),
    max_leaves=12,
)


@given(
    st.fixed_dictionaries({"number": JSON}, optional={"ranks": JSON, "verdict": JSON, "answer": JSON, "ended": JSON})
)
@settings(max_examples=subsets.examples(100))
def test_what_is_no_post_is_an_error_in_one_way(plain: object) -> None:
    with suppress(ValueError):
        HostPost.from_bytes(json.dumps(plain).encode(), "", (1, 5))


@pytest.mark.parametrize("text", [b"[" * 100_000, b"\xff", b"", b"{}", b"[]", b"1"])
def test_what_is_no_object_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError):
        HostPost.from_bytes(text, "", (1, 5))


def test_a_report_with_other_types_is_refused() -> None:
    for wrong in ({"stalled": "9"}, {"stalled": float("nan")}, {"host": 3}, {"pid": "x"}, {"more": 1}, {"rank": 0}):
        plain = json.loads(HostPost(1, answer=Answer(0, 1, REPORT)).to_bytes(""))
        plain["answer"][2]["ranks"][0] |= wrong
        with pytest.raises(ValueError):
            HostPost.from_bytes(json.dumps(plain).encode(), "", (1, 5))
    plain = json.loads(HostPost(1, answer=Answer(0, 1, REPORT)).to_bytes(""))
    plain["answer"][2]["timeline"]["spans"][0][2] = "x"  # the stage of an action that is drawn
    with pytest.raises(ValueError):
        HostPost.from_bytes(json.dumps(plain).encode(), "", (1, 5))


def test_reports_of_hosts_whose_clocks_differ_are_joined_by_ages() -> None:
    own = HangReport(
        "", (), (RANKS[0],), Timeline((Span(0, FORWARD, 101.0, 102.0),), 1), {0: (FORWARD, 102.0)}, 104.0, 50.0
    )
    joined = join_reports([own, shift_report(REPORT, 104.0)])
    assert [(span.rank, span.start, span.end) for span in joined.timeline.spans] == [
        (0, 101.0, 102.0),
        (1, 101.0, 102.0),
    ]
    assert joined.unfinished == {0: (FORWARD, 102.0), 1: (FORWARD, 102.0)}
    assert [each.rank for each in joined.ranks] == [0, 1] and joined.now == 104.0 and joined.wall == 50.0


def test_a_post_that_is_too_large_says_less(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(post: HostPost, most: int) -> Answer | None:
        monkeypatch.setattr(host_post, "MOST_BYTES", most)
        return HostPost.from_bytes(post.to_bytes(""), "", (1, 5)).answer

    post = HostPost(1, answer=Answer(0, 1, REPORT))
    first = read(post, len(post.to_bytes("")) - 1)
    assert first is not None and not first.report.timeline.spans and first.report.ranks[0].stacks
    second = read(post, len(HostPost(1, answer=first).to_bytes("")) - 1)
    assert second is not None and second.report.ranks == (replace(REPORT.ranks[0], stacks=""),)
    assert read(post, 10) is None
