"""The swimlane in characters, SVG, HTML and Perfetto's format: what is drawn, and that nothing escapes."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from html.parser import HTMLParser
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

import pytest

from polylane.inspection.schedule_report import ScheduleShape, draw_schedule, lanes_summary
from polylane.observe.swimlane.layout import (
    STYLES,
    build_rows,
    format_bytes,
    format_duration,
    format_headline,
    style_shares,
    time_axis,
)
from polylane.observe.swimlane.render import ansi, gallery, html, perfetto, svg, text
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import COMPUTE, Action, ActionKind
from tests.support import subsets
from tests.support.call_counts import calls

RENDERERS = [text, ansi, svg, html, perfetto]
ROWS = ("main", "thin")
SVG = "{http://www.w3.org/2000/svg}"
NASTY = """<script>alert("1")</script> & 'x' ]]> {{data}} \x00"""


def lanes_timeline(schedule: str, stages: int, microbatches: int, forward: int = 1, backward: int = 2) -> Timeline:
    return draw_schedule(
        ScheduleShape(schedule=schedule, stages=stages, microbatches=microbatches), forward, backward
    ).timeline


def measured(title: str = "measured", value: str = "relu") -> Timeline:
    """Two ranks, in seconds from 100: rank 0 sends to rank 1, whose reduce runs beside its backward."""
    return Timeline(
        spans=(
            Span(0, Action(ActionKind.FORWARD, 0, 0), 100.0, 100.2),
            Span(0, Action(ActionKind.SEND, 0, 0, value, peer=1), 100.2, 100.3),
            Span(1, Action(ActionKind.RECEIVE, 1, 0, value, peer=0), 100.0, 100.3),
            Span(1, Action(ActionKind.FORWARD, 1, 0), 100.3, 100.5),
            Span(1, Action(ActionKind.BACKWARD, 1, 0), 100.5, 100.9),
            Span(1, Action(ActionKind.REDUCE, 1, None, value), 100.7, 101.0),
            Span(0, Action(ActionKind.STEP, 0), 100.9, 101.0),
        ),
        ranks=2,
        title=title,
    )


def sized() -> Timeline:
    """As `measured`, with bytes, and a collective inside the first forward."""
    said = {ActionKind.SEND: 1_200_000, ActionKind.RECEIVE: 1_200_000, ActionKind.REDUCE: 660_000}
    first, *others = measured().spans
    others = [replace(span, bytes=said.get(span.action.kind, 0)) for span in others]
    return replace(measured(), spans=(replace(first, waited=0.05, bytes=4321), *others))


@cache
def large(ranks: int = 8, spans: int = 10_000) -> Timeline:
    kinds = list(ActionKind)
    return Timeline(
        spans=tuple(
            Span(rank, Action(kinds[i % len(kinds)], rank, i % 64, "v", 0), i * 1e-3, i * 1e-3 + 9e-4)
            for rank in range(ranks)
            for i in range(spans)
        ),
        ranks=ranks,
    )


class Page(HTMLParser):
    """Checks that tags close in order, and keeps what is between them."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: dict[str, list[str]] = {}
        self.feed(source)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "img", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="timeline">(.*?)</script>', page, re.DOTALL)
    assert found
    return json.loads(found[1])


# --- characters ---


def test_theory_is_drawn_as_on_paper() -> None:
    assert text(lanes_timeline("1f1b", 3, 4, 1, 1)) == (
        "1f1b · stages 3 · microbatches 4\n"
        "utilization 66.7 % (24/36) · makespan 12 ticks\n"
        "        │  0   2   4   6   8  10 ticks\n"
        "stage 0 │  0 1 2 · ·<0 3<1 ·<2 ·<3\n"
        "stage 1 │  · 0 1 ·<0 2<1 3<2 ·<3 ·\n"
        "stage 2 │  · · 0<0 1<1 2<2 3<3 · ·\n"
        "0 forward   <0 backward   · bubble\n"
    )


def test_a_cell_per_tick_with_wide_numbers() -> None:
    first = text(lanes_timeline("naive", 1, 11, 1, 2), width=200).splitlines()[3]
    assert first.endswith("  9 <9 <9 10<10<10")


def test_time_is_drawn_in_columns() -> None:
    assert text(measured(), width=36) == (
        "measured\n"
        "utilization 45.0 % · makespan 1 s · a column is 50 ms\n"
        "                 │ 0 s\n"
        "rank 0 · stage 0 │ 0▓▓▓~~············##\n"
        "rank 1 · stage 1 │ ····~~0▓▓▓0░░░░░░░++\n"
        "                 │               ++++++\n"
        "▓ forward   ░ backward   ~ send / receive   + collective   # step   · bubble\n"
    )


def test_what_each_rank_sent_stands_below() -> None:
    drawn = text(sized(), width=36)
    assert "makespan 1 s · 1.9 MB sent" in drawn.splitlines()[1]
    assert drawn.endswith("· bubble\nsent by each rank: 1.2 MB, 660 kB\n")
    assert text(sized(), width=30).endswith("sent by each rank: 1.2 MB, 660\nkB\n")


def test_ticks_that_do_not_fit_are_drawn_in_columns() -> None:
    drawn = text(lanes_timeline("afab", 4, 100), width=60)
    assert "a column is" in drawn
    assert max(len(line) for line in drawn.splitlines()[2:-1]) <= 60 + len(" ticks")


def test_ansi_shows_the_same_characters() -> None:
    for timeline in (lanes_timeline("1f1b", 4, 8), measured()):
        coloured = ansi(timeline)
        assert "\x1b[44;97m" in coloured
        plain = re.sub(r"\x1b\[[\d;]*m", "", coloured)
        assert [line.rstrip() for line in plain.splitlines()] == text(timeline).splitlines()


# --- SVG ---


def test_svg_of_theory() -> None:
    root = ElementTree.fromstring(svg(lanes_timeline("1f1b", 4, 8)))
    texts = [element.text for element in root.iter(f"{SVG}text")]
    assert texts[:2] == ["1f1b · stages 4 · microbatches 8", "utilization 72.7 % (96/132) · makespan 33 ticks"]
    assert {"stage 0", "stage 3", "ticks", "30", "forward", "backward", "bubble"} <= set(texts)
    fills = [element.get("fill") for element in root.iter(f"{SVG}rect")]
    assert fills.count(STYLES[ActionKind.FORWARD].fill) == fills.count(STYLES[ActionKind.BACKWARD].fill) == 4 * 8 + 1
    assert texts.count("7") == 8


def test_svg_puts_communication_beside_compute_on_a_thin_row() -> None:
    boxes = {
        title.text.split(":")[0]: box
        for box in ElementTree.fromstring(svg(measured())).iter(f"{SVG}rect")
        for title in box.iter(f"{SVG}title")
    }
    reduce, backward = boxes["reduce, stage 1, relu, rank 1"], boxes["backward, stage 1, microbatch 0, rank 1"]
    assert float(reduce.attrib["y"]) > float(backward.attrib["y"]) + float(backward.attrib["height"])
    assert float(reduce.attrib["height"]) < float(backward.attrib["height"])
    send, forward = (
        boxes["send, stage 0, microbatch 0, relu, rank 0, peer 1"],
        boxes["forward, stage 0, microbatch 0, rank 0"],
    )
    assert send.attrib["y"] == forward.attrib["y"]


def test_svg_says_what_a_span_is() -> None:
    titles = [title.text for title in ElementTree.fromstring(svg(measured())).iter(f"{SVG}title")]
    assert "send, stage 0, microbatch 0, relu, rank 0, peer 1: 100 ms from 200 ms" in titles


def test_svg_says_what_a_message_carries() -> None:
    titles = [title.text for title in ElementTree.fromstring(svg(sized())).iter(f"{SVG}title")]
    said = "1.2 MB in at most 100 ms (12.0 MB/s or more)"
    assert titles[0] == "measured · utilization 42.5 % · makespan 1 s · 1.9 MB sent"
    assert f"send, stage 0, microbatch 0, relu, rank 0, peer 1, {said}: 100 ms from 200 ms" in titles
    assert f"receive, stage 1, microbatch 0, relu, rank 1, peer 0, {said}: 100 ms from 200 ms" in titles
    assert "reduce, stage 1, relu, rank 1, 660 kB in at most 300 ms (2.2 MB/s or more): 300 ms from 700 ms" in titles
    inside = "50 ms of it in collectives, 4.3 kB sent in collectives"
    assert f"forward, stage 0, microbatch 0, rank 0, {inside}: 200 ms from 0 s" in titles


def waiting_timeline() -> Timeline:
    """Of three stages the first is slow; the second waits inside its forward as well, and a reduce waits for rank 1."""
    forward, message = partial(Action, ActionKind.FORWARD), partial(Action, microbatch=0, value="h")
    return Timeline(
        (
            Span(0, forward(0, 0), 0, 5),
            Span(0, message(ActionKind.SEND, 0, peer=1), 5, 5.5),
            Span(1, message(ActionKind.RECEIVE, 1, peer=0), 0, 6),
            Span(1, forward(1, 0), 6, 8, 0.5),
            Span(2, forward(1, 0), 6, 8, 1.5),
            Span(1, Action(ActionKind.REDUCE, 1, value="w"), 8, 9),
            Span(2, Action(ActionKind.REDUCE, 1, value="w"), 8.5, 9),
        ),
        ranks=3,
    )


@pytest.mark.parametrize("timeline", [waiting_timeline(), measured(), sized(), lanes_timeline("1f1b", 4, 8)])
def test_the_coloured_area_is_the_share_that_computes(timeline: Timeline) -> None:
    """In pictures, on pages and in the lines of a terminal; what waits is hatched, and what idles is empty."""
    account = account_time(timeline)
    root = ElementTree.fromstring(svg(timeline))
    passes = {STYLES[kind].fill for kind in COMPUTE}
    area = Counter[str]()
    for box in root.iter(f"{SVG}rect"):
        if list(box) and "update" not in str(box[0].text):
            assert float(box.attrib["height"]) <= 26
            seam = 1 if float(box.attrib["width"]) > 3 else 0
            paint = "computing" if box.attrib["fill"] in passes else box.attrib["fill"]
            area[paint] += (float(box.attrib["width"]) + seam) * float(box.attrib["height"])
    whole = sum(
        float(e.attrib["width"]) * 26
        for e in root.iter(f"{SVG}rect")
        if e.get("class") == "idle" and e.get("height") == "26"
    )
    shares = account.shares()
    assert area["computing"] / whole == pytest.approx(shares["computing"], abs=2e-4)
    assert area["url(#waiting)"] / whole == pytest.approx(shares["waiting"], abs=2e-4)
    drawn, lanes = Counter[int](), data_of(html(timeline))["lanes"]
    for lane in lanes:
        for at in range(0, len(lane["main"]), 14):
            start, end, *_, state, _, moving, waiting = lane["main"][at : at + 14]
            drawn[state] += end - start - moving - waiting
            drawn[1] += moving
            drawn[2] += waiting
    parts = [drawn[state] / (account.makespan * timeline.ranks) for state in range(3)]
    assert parts == pytest.approx([shares[name] for name in ("computing", "moving", "waiting")], abs=1e-8)


def test_waits_are_hatched_and_say_for_whom() -> None:
    timeline = waiting_timeline()
    assert "/" in text(timeline, width=80).splitlines()[3] and "/ waiting" in text(timeline)
    titles = [title.text for title in ElementTree.fromstring(svg(timeline)).iter(f"{SVG}title")]
    assert any(words and words.startswith("waiting for rank 0, receive, stage 1") for words in titles)
    assert any(words and "1 s waiting for rank 1" in words for words in titles)
    assert 'class="hatched"' in html(timeline)


def test_a_title_names_recipe_plan_and_reason() -> None:
    timeline = replace(
        measured("measured · step 44"), notes={"recipe": "gpt.py", "plan": "data=2", "reason": "slowest"}
    )
    texts = [element.text for element in ElementTree.fromstring(svg(timeline)).iter(f"{SVG}text")]
    assert texts[0] == "measured · step 44 · gpt.py · data=2" and str(texts[1]).endswith(" · slowest")
    assert Page(html(timeline)).words["h1"] == [texts[0]] and text(timeline).splitlines()[0] == texts[0]


def test_bars_of_a_comparison_have_numbers() -> None:
    page = gallery(
        "all", [], [], {"interleaved": lanes_timeline("interleaved", 4, 8), "afab": lanes_timeline("afab", 4, 8)}
    )
    assert page.count('class="number"') == 2 * (4 * 8 * 2) + 2 * (4 * 8)


def test_svg_boxes_lie_where_their_time_is() -> None:
    root = ElementTree.fromstring(svg(lanes_timeline("naive", 2, 1, 1, 2)))
    boxes = [box for box in root.iter(f"{SVG}rect") if list(box)]
    left, scale = min(float(box.attrib["x"]) for box in boxes), 480 / 6
    assert sorted((float(box.attrib["x"]) - left) / scale for box in boxes) == [0, 1, 2, 4]


# --- HTML ---


def test_html_is_one_well_formed_file() -> None:
    source = html(lanes_timeline("1f1b", 4, 8))
    page = Page(source)
    assert not [tag for tag, attributes in page.tags if {"src", "href"} & attributes.keys()]
    assert (
        "http:" not in source and "https:" not in source and "default-src 'none'" in source and "@import" not in source
    )
    assert page.words["h1"] == ["1f1b · stages 4 · microbatches 8"]
    assert page.words["td"][:6] == ["72.7 %", "24 ticks", "0 ticks", "0", "9 ticks", "4"]
    assert "all, of 132 ticks" in page.words["th"]


def test_html_holds_every_span() -> None:
    data = data_of(html(measured()))
    assert data["values"] == ["relu"]
    assert data["extent"] == pytest.approx(1.0)
    kinds = list(ActionKind)
    assert data["lanes"][0]["main"][:28] == [
        *(0, 0.2, kinds.index(ActionKind.FORWARD), 0, 0, -1, -1, 0, 0, 0, 0, -1, 0, 0),
        *(0.2, 0.3, kinds.index(ActionKind.SEND), 0, 0, 0, 1, 0, 0, 0, 1, -1, 0, 0),
    ]
    assert data["lanes"][1]["thin"] == [0.7, 1.0, kinds.index(ActionKind.REDUCE), 1, -1, 0, -1, 0, 0, 0, 1, -1, 0, 0]


def test_html_holds_bytes_and_how_long_they_took_at_most() -> None:
    data = data_of(html(sized()))
    lanes = [[lane[row][i : i + 14] for i in range(0, len(lane[row]), 14)] for lane in data["lanes"] for row in ROWS]
    assert [span[8:] for span in lanes[0][:2]] == [[4321, 0, 0, -1, 0.05, 0], [1_200_000, 0.1, 1, -1, 0, 0]]
    assert lanes[2][0][:2] == [0.2, 0.3] and lanes[2][0][8:] == [1_200_000, 0.1, 1, -1, 0, 0]
    reduce = list(ActionKind).index(ActionKind.REDUCE)
    assert lanes[3] == [[0.7, 1.0, reduce, 1, -1, 0, -1, 0, 660_000, 0.3, 1, -1, 0, 0]]


def test_html_has_a_column_of_bytes_where_there_are_any() -> None:
    assert "sent" not in Page(html(measured())).words["th"]
    page = Page(html(sized()))
    assert page.words["th"][6] == "sent"
    assert [page.words["td"][i] for i in (6, 13, -1)] == ["1.2 MB", "660 kB", "1.9 MB"]


@pytest.mark.skipif(shutil.which("node") is None, reason="runs the page's script in node")
def test_pointing_at_a_message_says_its_bytes_and_its_waiting() -> None:
    """The functions of the page that put a span into words, run apart from it."""
    source = html(sized())
    script = re.search(r"<script>(.*?)</script>", source, re.DOTALL)
    assert script
    fields = re.search(r"const FIELDS.*?\n}\n", script[1], re.DOTALL)
    words = re.search(r"// --- words ---\n(.*?)\n// ---", script[1], re.DOTALL)
    assert fields and words
    told = f"""const data = {json.dumps(data_of(source))}, WAITING = 2;
    {fields[0]} {words[1]}
    const said = data.lanes.flatMap((lane, rank) => [lane.main, lane.thin].flatMap(flat => {{
      const row = {{ ...unpack(flat), rank }};
      return Array.from({{ length: row.count }}, (_, i) => describe(data, row, i));
    }}));
    console.log(JSON.stringify(said));"""
    done = subprocess.run(["node", "-e", told], capture_output=True, text=True, timeout=60, check=True)
    said = json.loads(done.stdout)
    assert said[0] == (
        "forward · rank 0 · stage 0 · microbatch 0\nstart 0 µs\nduration 200 ms\n"
        "of it in collectives: 50 ms\nsent in collectives: 4.3 kB"
    )
    assert said[3] == (
        "receive · rank 1 · stage 1 · microbatch 0\nrelu\npeer: rank 0\nstart 200 ms\nduration 100 ms\n"
        "1.2 MB in at most 100 ms (12.0 MB/s or more)"
    )
    assert said[-1].endswith("duration 300 ms\n660 kB in at most 300 ms (2.2 MB/s or more)")


# --- Perfetto ---


def test_perfetto_counts_in_microseconds() -> None:
    trace = perfetto(measured())
    complete = {(e["pid"], e["name"]): e for e in trace["traceEvents"] if e["ph"] == "X"}
    forward = complete[(1, "forward 0")]
    assert (forward["ts"], forward["dur"]) == (pytest.approx(3e5), pytest.approx(2e5))
    assert (forward["cat"], forward["args"]) == ("forward", {"stage": 1, "microbatch": 0})
    assert complete[(1, "reduce")]["tid"] != complete[(1, "backward 0")]["tid"]
    names = {(e["pid"], e["args"].get("name")) for e in trace["traceEvents"] if e["ph"] == "M"}
    assert {(0, "rank 0"), (1, "rank 1"), (1, "compute"), (1, "communication")} <= names


def test_perfetto_leads_an_arrow_from_a_send_to_its_receive() -> None:
    events = perfetto(measured())["traceEvents"]
    (start,), (end,) = ([e for e in events if e["ph"] == phase] for phase in "sf")
    assert (start["pid"], end["pid"], start["id"] == end["id"]) == (0, 1, True)
    receive = next(e for e in events if e["ph"] == "X" and e["cat"] == "receive")
    assert receive["ts"] <= end["ts"] <= receive["ts"] + receive["dur"]
    assert start["ts"] <= end["ts"]


def test_perfetto_says_bytes_and_at_least_how_fast() -> None:
    trace = perfetto(sized())
    said = {e["cat"]: e["args"] for e in trace["traceEvents"] if e["ph"] == "X" and e["args"].get("bytes")}
    assert {cat: (args["bytes"], args.get("at least")) for cat, args in said.items()} == {
        "forward": (4321, None),
        "send": (1_200_000, "12.0 MB/s"),
        "receive": (1_200_000, "12.0 MB/s"),
        "reduce": (660_000, "2.2 MB/s"),
    }
    assert trace["otherData"]["sent bytes"] == [1_204_321, 660_000]
    assert "sent bytes" not in perfetto(measured())["otherData"]


def test_perfetto_threads_never_hold_two_messages_at_once() -> None:
    spans = tuple(
        Span(0, Action(ActionKind.SEND, 0, i, "v", 0), start, start + 3) for i, start in enumerate((0, 1, 2, 3))
    )
    threads = [e["tid"] for e in perfetto(Timeline(spans, 1))["traceEvents"] if e["ph"] == "X"]
    assert threads == [1, 2, 3, 1]


# --- all of them ---


@pytest.mark.parametrize("render", RENDERERS)
@pytest.mark.parametrize(
    "timeline",
    [
        Timeline((), ranks=0),
        Timeline((), ranks=3, unit="ticks"),
        Timeline((Span(0, Action(ActionKind.STEP, 0), 5, 5),), ranks=1),
        Timeline((Span(1, Action(ActionKind.STEP, 0), 2, 3),), ranks=2, unit="ticks"),
    ],
)
def test_little_or_nothing_to_draw(render: Callable[[Timeline], object], timeline: Timeline) -> None:
    assert render(timeline)
    ElementTree.fromstring(svg(timeline))
    Page(html(timeline))


def test_every_string_is_escaped() -> None:
    nasty = measured(title=NASTY, value=NASTY)
    words = [element.text for element in ElementTree.fromstring(svg(nasty)).iter()]
    assert NASTY.replace("\x00", "?") in words
    source = html(nasty)
    page = Page(source)
    assert page.words["h1"] == [NASTY.replace("\x00", "?")]
    assert [tag for tag, _ in page.tags].count("script") == 2
    assert data_of(source)["values"] == [NASTY]
    json.loads(json.dumps(perfetto(nasty)))


@pytest.mark.parametrize("render", subsets.one_in(3, RENDERERS, first=2))
def test_drawing_costs_no_more_per_span_however_many_there_are(render: Callable[[Timeline], object]) -> None:
    few, many = (calls(partial(render, large(4, spans))) for spans in (300, 1500))
    assert many < 5 * few


@pytest.mark.parametrize("render", subsets.one_in(2, [text, ansi, svg, html], first=1))
def test_eight_ranks_of_ten_thousand_spans_are_drawn_in_less_than_five_megabytes(
    render: Callable[[Timeline], object],
) -> None:
    assert len(str(render(large()))) < 5_000_000


def test_the_coloured_area_stays_true_where_spans_are_too_small_to_draw() -> None:
    timeline = large(ranks=1)
    bins = 300
    (row,) = build_rows(timeline)
    drawn = style_shares([*row.main, *row.thin], 0, timeline.makespan() / bins, bins)
    assert sum(sum(one.values()) for one in drawn) / bins == pytest.approx(0.9, abs=1e-3)


def test_lanes_are_labelled_by_stage_in_theory_and_by_rank_where_measured() -> None:
    assert [row.label for row in build_rows(lanes_timeline("afab", 2, 1))] == ["stage 0", "stage 1"]
    both = (Span(0, Action(ActionKind.FORWARD, 0, 0), 0, 1), Span(0, Action(ActionKind.FORWARD, 2, 0), 1, 2))
    assert [row.label for row in build_rows(Timeline(both, 2))] == ["rank 0 · stage 0, 2", "rank 1"]


@pytest.mark.parametrize(
    ("value", "unit", "said"),
    [
        (33, "ticks", "33 ticks"),
        (1, "ticks", "1 tick"),
        (0.5, "ticks", "0.5 ticks"),
        (123456789, "ticks", "123456789 ticks"),
        (1.5, "seconds", "1.5 s"),
        (0.0123456, "seconds", "12.35 ms"),
        (4.2e-6, "seconds", "4.2 µs"),
        (0, "seconds", "0 s"),
    ],
)
def test_durations_are_said_as_people_do(value: float, unit: str, said: str) -> None:
    assert format_duration(value, unit) == said


@pytest.mark.parametrize(
    ("count", "said"),
    [
        *((0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (99_949, "99.9 kB"), (99_950, "100 kB"), (999_499, "999 kB")),
        *((999_500, "1.0 MB"), (340e6, "340 MB"), (1.25e9, "1.2 GB"), (5e12, "5.0 TB")),
    ],
)
def test_sizes_are_said_as_people_do(count: float, said: str) -> None:
    assert format_bytes(count) == said


def test_the_headline_says_what_was_sent_where_anything_was() -> None:
    assert format_headline(measured()) == "utilization 45.0 % · makespan 1 s"
    assert format_headline(sized()).endswith(" · makespan 1 s · 1.9 MB sent")


def test_axis_marks_are_round() -> None:
    assert [label for _, label in time_axis(33, "ticks").marks] == ["0", "5", "10", "15", "20", "25", "30"]
    assert time_axis(0.033, "seconds").unit == "ms"
    assert time_axis(2, "ticks").marks == ((0, "0"), (1, "1"), (2, "2"))
    assert time_axis(0, "seconds").marks == ((0, "0"),)


def test_halves_of_backward_passes_and_chunks_in_characters() -> None:
    assert text(lanes_timeline("zb-h1", 2, 2)) == (
        "zb-h1 · stages 2 · microbatches 2\n"
        "utilization 85.7 % (12/14) · makespan 7 ticks\n"
        "        │  0         5 ticks\n"
        "stage 0 │  0 1 ·<0=0<1=1\n"
        "stage 1 │  · 0<0 1<1=0=1\n"
        "0 forward   <0 input gradients   =0 weight gradients   · bubble\n"
    )
    assert text(lanes_timeline("zb-v", 2, 1)).splitlines()[3:] == [
        "rank 0 · stage 0, 3 │   0a   ·   ·  0b <0b =0b   ·   · <0a =0a",
        "rank 1 · stage 1, 2 │    ·  0a  0b   ·   · <0b =0b <0a =0a   ·",
        "0 forward   <0 input gradients   =0 weight gradients   · bubble",
    ]


def test_updates_of_no_length_are_marked() -> None:
    """In the cell of the pass before, or as a narrow box over its end."""
    timeline = draw_schedule(ScheduleShape(schedule="pipedream", stages=2, microbatches=2)).timeline
    assert text(timeline).splitlines()[3:] == [
        "stage 0 │  0 1 · ·<0#0 ·<1#1",
        "stage 1 │  · 0<0#0 1<1#1 · ·",
        "0 forward   <0 backward   # step   · bubble",
    ]
    assert text(replace(timeline, unit="seconds"), width=60).count("#") == 4 + 1  # and the legend
    titles = [each.text for each in ElementTree.fromstring(svg(timeline)).iter(f"{SVG}title")]
    assert "update, stage 1, after microbatch 0" in titles


def test_chunks_have_letters_in_pictures() -> None:
    timeline = lanes_timeline("interleaved", 2, 2)
    numbers = {each.text for each in ElementTree.fromstring(svg(timeline)).iter(f"{SVG}text")}
    assert {"0a", "1a", "0b", "1b"} <= numbers
    data = re.search(r'id="timeline">(.*?)</script>', html(timeline))
    assert data is not None
    assert [lane["stages"] for lane in json.loads(data[1])["lanes"]] == [[0, 2], [1, 3]]


def test_fills_of_passes_differ_in_lightness() -> None:
    """So that a grey print of a split schedule is readable as well."""
    kinds = (ActionKind.FORWARD, ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT)

    def lightness(fill: str) -> float:
        red, green, blue = (int(fill[at : at + 2], 16) / 255 for at in (1, 3, 5))
        return float(0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2)

    ascending = sorted(lightness(STYLES[kind].fill) for kind in kinds)
    assert all(after > 1.4 * before for before, after in pairwise(ascending))


def test_summary_of_a_schedule() -> None:
    assert lanes_summary(draw_schedule(ScheduleShape(schedule="1f1b", stages=4, microbatches=8))) == {
        "schedule": "1f1b",
        "stages": 4,
        "chunks": 1,
        "microbatches": 8,
        "utilization": 96 / 132,
        "worker_utilization": pytest.approx([24 / 33, 24 / 30, 24 / 27, 1]),
        "steady_utilization": pytest.approx(1),
        "makespan": 33,
        "busy": 96,
        "area": 132,
        "peak_live_microbatches": [4, 3, 2, 1],
        "weight_versions": [1, 1, 1, 1],
        "staleness": [0, 0, 0, 0],
        "messages": 48,
    }
