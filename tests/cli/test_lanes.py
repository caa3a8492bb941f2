"""polylane lanes: the swimlanes of every schedule, as text, as JSON and as pictures."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.cli.tiny_recipe import call


def test_lanes_as_json_and_pictures(tmp_path: Path) -> None:
    svg, html = tmp_path / "pictures" / "lanes.svg", tmp_path / "lanes.html"
    line = ("lanes", "1f1b", "--stages", "4", "--microbatches", "8")
    result = json.loads(call(*line, "--json", "--svg", svg, "--html", html).stdout)
    assert (result["busy"], result["area"], result["makespan"]) == (96, 132, 33)
    assert result["utilization"] == pytest.approx(96 / 132)
    assert result["peak_live_microbatches"] == [4, 3, 2, 1]
    assert svg.read_text().startswith("<svg")
    assert "<html" in html.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: [a, b]", "stages must be a mapping from a stage's name to what it comes after"),
        ("stages: {a: , b: {after: [c]}}", "stages.b.after: there is no stage 'c', known are a, b"),
        ("stages: {a: {after: [b]}, b: {after: [a]}}", "stages a -> b -> a wait for each other"),
        ("stages: {a: {ticks: 2}}", "stages.a: a stage may say after: [names of stages], forward: ticks, backward"),
        ("stages: {a: {weight: 3}}", "the weight half of stage 0 takes 3 ticks, its whole backward only 2"),
        ("stages: {a: {forward: -1}}", "forward must be a duration of at least 0 ticks"),
        ("stages: {a: , a: }", "a is there twice"),
    ],
)
def test_wrong_stages_for_lanes(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text(text)
    done = call("lanes", "1f1b", "--stages", str(tmp_path / "stages.yaml"), "--microbatches", "2")
    assert done.exit_code == 2 and says in done.stderr


def test_lanes_of_branches() -> None:
    file = Path(__file__).parents[2] / "examples" / "lanes" / "branches.yaml"
    told = json.loads(call("lanes", "1f1b", "--stages", str(file), "--microbatches", "4", "--json").stdout)
    assert told["stages"] == 4 and told["peak_live_microbatches"] == [3, 2, 2, 1] and told["busy"] == 4 * (3 * 3 + 6)
    shown = call("lanes", "afab", "--stages", str(file), "--microbatches", "2").stdout
    assert "stages: 0 stem, 1 near, 2 far, 3 head" in shown


@pytest.mark.parametrize(
    ("line", "busy", "area", "live"),
    [
        ("zb-h1 --stages 4 --microbatches 8", 96, 108, [4, 4, 4, 4]),
        ("zb-h2 --stages 4 --microbatches 8", 96, 108, [7, 7, 7, 7]),
        ("zb-v --stages 4 --microbatches 8", 192, 204, [4, 4, 4, 4]),
        ("interleaved --stages 4 --microbatches 8", 192, 228, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved --stages 4 --chunks 1 --microbatches 8", 96, 132, [4, 3, 2, 1]),
        ("afab --stages 4 --microbatches 8 --hop 1", 96, 156, [8, 8, 8, 8]),
        ("1f1b --stages 4 --microbatches 8 --hop 1", 96, 196, [4, 3, 2, 1]),
        ("auto --stages 4 --microbatches 8 --hop 1 --live 4", 96, 156, [4, 4, 3, 2]),
        ("auto --stages 4 --microbatches 8 --chunks 2", 192, 204, [4, 4, 4, 4]),
        ("zb-h1 --stages 4 --microbatches 8 --backward 3 --weight 1", 128, 152, [4, 4, 4, 4]),
    ],
)
def test_lanes_of_every_schedule(line: str, busy: int, area: int, live: list[float]) -> None:
    told = json.loads(call("lanes", *line.split(), "--json").stdout)
    assert (told["busy"], told["area"], told["peak_live_microbatches"]) == (busy, area, live)


def test_lanes_compared(tmp_path: Path) -> None:
    page = tmp_path / "schedules.html"
    line = ("lanes", "--compare", "--stages", "4", "--microbatches", "8")
    told = json.loads(call(*line, "--json", "--html", page).stdout)
    by_title = {each["title"]: each for each in told["schedules"]}
    assert {title: each["makespan"] for title, each in by_title.items()} == {
        "naive": 96,
        "afab": 33,
        "1f1b": 33,
        "interleaved, 2 chunks": 28.5,
        "zb-h1": 27,
        "zb-h2": 27,
        "zb-v, 2 chunks": 25.5,
        "auto, 4 live": 27,
        "auto": 27,
        "pipedream": 33,
        "pipedream, vertical sync": 33,
        "pipedream-2bw, 2 batches": 57,
    }
    assert [round(each["messages_over_1f1b"] * 3) for each in told["schedules"]] == [3] * 3 + [7, 3, 3, 6] + [3] * 5
    assert [max(each["peak_live_microbatches"]) for each in told["schedules"]] == [1, 8, 4, 5.5, 4, 7] + [4] * 6
    assert by_title["zb-h2"]["worker_utilization"] == [1] * 4 and told["left_out"] == {}
    assert page.read_text().count("<svg") == 12 and "pipedream-2bw" in page.read_text()
    shown = call(*line).stdout
    assert re.search(r"zb-v, 2 chunks +25.5 +94.1 % +100.0 % +- +4 +1 +0 +2 x", shown)


def test_what_is_left_out_of_a_comparison_is_said() -> None:
    file = Path(__file__).parents[2] / "examples" / "lanes" / "branches.yaml"
    told = json.loads(call("lanes", "--compare", "--stages", file, "--microbatches", "1", "--json").stdout)
    assert set(told["left_out"]) == {"interleaved, 2 chunks", "zb-v, 2 chunks", "pipedream-2bw, 2 batches"}
    assert "needs at least 2 microbatches" in told["left_out"]["pipedream-2bw, 2 batches"]


def test_chunks_need_stages_that_they_divide() -> None:
    file = Path(__file__).parents[2] / "examples" / "lanes" / "branches.yaml"
    done = call("lanes", "interleaved", "--stages", file, "--chunks", "3", "--microbatches", "4")
    assert done.exit_code == 2 and "4 stages cannot be dealt to workers in chunks of 3" in done.stderr


def test_lanes_as_text() -> None:
    shown = call("lanes", "afab", "--stages", "2", "--microbatches", "2", "--forward", "1,2", "--backward", "2").stdout
    assert "utilization" in shown
    assert "stage 1 │" in shown
    assert "peak live microbatches: 2 on stage 0, 2 on stage 1" in shown
    assert "\x1b" not in shown
