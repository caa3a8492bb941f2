"""polylane lanes of a file of stages: its errors call stages by the names that the file gives them."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from polylane.cli import app
from polylane.inspection import schedule_report
from polylane.schedule.search import find_schedule

BRANCHES = Path(__file__).parent.parent.parent / "examples" / "lanes" / "branches.yaml"


def lanes(file: Path) -> Any:
    return CliRunner().invoke(app, ["lanes", "1f1b", "--stages", str(file), "--microbatches", "2"])


@pytest.mark.parametrize(
    ("stages", "says"),
    [
        (
            "{stem: , near: {after: [far]}, far: {after: [stem, near]}}",
            "stages near -> far -> near wait for each other",
        ),
        ("{own: {after: [own]}}", "stages own -> own wait for each other"),
    ],
)
def test_a_circle_is_told_by_names(stages: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text(f"stages: {stages}")
    done = lanes(tmp_path / "stages.yaml")
    assert done.exit_code == 2 and done.stderr == f"polylane: stages {tmp_path / 'stages.yaml'}: {says}\n"


@pytest.mark.parametrize("replicas", [(), ("--replicas", "2")])
def test_stages_that_cannot_be_dealt_in_chunks_are_one_sentence(replicas: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("stages: {own: }")
    words = ["lanes", "interleaved", "--stages", str(tmp_path / "one.yaml"), "--microbatches", "5", *replicas]
    done = CliRunner().invoke(app, words)
    assert (done.exit_code, done.stderr) == (2, "polylane: 1 stage cannot be dealt to workers in chunks of 2\n")


def test_halves_of_stages_in_a_file(tmp_path: Path) -> None:
    """A stage that says no weight half has half of its backward pass."""
    file = tmp_path / "stages.yaml"
    file.write_text("stages: {a: {backward: 4, weight: 1}, b: {after: [a]}}")
    done = CliRunner().invoke(app, ["lanes", "zb-h1", "--stages", str(file), "--microbatches", "1"])
    assert done.stdout.splitlines()[3:5] == ["stage 0 │  0 · ·<0<0<0=0", "stage 1 │  · 0<0=0 · · ·"]


@pytest.fixture
def _searched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same problem always gives the same order: a comparison takes what was found for a single command."""
    monkeypatch.setattr(schedule_report, "find_schedule", functools.cache(find_schedule))


def makespan(*words: str) -> float:
    done = CliRunner().invoke(app, ["lanes", *words, "--stages", "3", "--microbatches", "6", "--json"])
    assert done.exit_code == 0, done.output
    return float(json.loads(done.stdout)["makespan"])


@pytest.mark.usefixtures("_searched_once")
def test_what_halving_costs() -> None:
    """All halved, none, and those that are worth it; the weight half takes what halving costs."""
    assert (makespan("1f1b", "--halving", "0.5"), makespan("zb-h1"), makespan("zb-h1", "--halving", "0.5")) == (
        24,
        20,
        26,
    )
    assert makespan("zb-h1", "--halving", "0,0,0.5") == 26  # the last stage is the one that never waits
    assert makespan("auto", "--halving", "0.5", "--live", "4") == 22
    assert makespan("auto", "--halving", "0.5", "--live", "3") <= 24
    done = CliRunner().invoke(app, ["lanes", "auto", "--stages", "2", "--microbatches", "2", "--halving", "-1"])
    assert done.exit_code == 2 and "halving must be a part of at least 0, not -1" in done.stderr
    words = ["--compare", "--stages", "3", "--microbatches", "6", "--halving", "0.5", "--json"]
    table = {
        each["title"]: each["makespan"]
        for each in json.loads(CliRunner().invoke(app, ["lanes", *words]).stdout)["schedules"]
    }
    assert table["zb-h1"] == 26 and table["auto"] <= 22 and table["auto, 3 live"] <= 24


def test_the_example() -> None:
    assert "stages: 0 stem, 1 near, 2 far, 3 head" in lanes(BRANCHES).stdout


def test_replicas_in_turn_are_drawn_as_they_run() -> None:
    """Twice the time and twice the workers on the first stage: the picture of `polylane.schedule.round_robin`."""
    words = ["--stages", "2", "--microbatches", "4", "--replicas", "2,1", "--forward", "2,1", "--backward", "2,1"]
    done = CliRunner().invoke(app, ["lanes", "1f1b", *words])
    assert done.stdout.splitlines()[:6] == [
        "1f1b · stages 2 · replicas 2, 1 · microbatches 4",
        "utilization 66.7 % (24/36) · makespan 12 ticks",
        "                 │  0   2   4   6   8  10 ticks",
        "rank 0 · stage 0 │  0 0 2 2<0<0 · ·<2<2 · ·",
        "rank 1 · stage 0 │  1 1 3 3 · ·<1<1 · ·<3<3",
        "rank 2 · stage 1 │  · · 0<0 1<1 2<2 3<3 · ·",
    ]
    table = CliRunner().invoke(app, ["lanes", "--compare", *words, "--json"])
    found = json.loads(table.stdout)
    assert [(each["schedule"], each["makespan"], each["replicas"]) for each in found["schedules"]] == [
        ("naive", 14, [2, 1]),
        ("afab", 12, [2, 1]),
        ("1f1b", 12, [2, 1]),
    ]
    assert set(found["left_out"]) >= {"zb-h1", "pipedream", "auto"}


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zb-h1", "pipedream", "pipedream-2bw"])
def test_equal_replicas_are_pipelines_side_by_side(schedule: str) -> None:
    """Each has its own part of the microbatches: the time, the memory and the weights of a pipeline of that part."""
    common = [schedule, "--stages", "2", "--hop", "1", "--json"]
    alone, both = (
        json.loads(CliRunner().invoke(app, ["lanes", *common, *words]).stdout)
        for words in (["--microbatches", "3"], ["--microbatches", "6", "--replicas", "2"])
    )
    assert both["makespan"] == alone["makespan"] and both["messages"] == 2 * alone["messages"]
    for key in ("worker_utilization", "peak_live_microbatches", "weight_versions", "staleness"):
        assert both[key] == [each for each in alone[key] for _ in range(2)], key


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("zb-h1 --replicas 2,1", "zb-h1 needs as many replicas of every stage; naive, afab, 1f1b may have different"),
        ("1f1b --replicas 2,1,1", "replicas names 3 numbers for 2 stages: give one number, or one per stage"),
        ("1f1b --replicas 9", "9 replicas cannot compute 8 microbatches in turn"),
        ("auto --replicas 2", "auto finds orders of workers that do the same, not of replicas in turn"),
        ("pipedream --replicas 3", "shares the microbatches of an update evenly: 8 is no multiple of 3 replicas"),
        ("1f1b --replicas 2,x", "--replicas takes a whole number from 1 to 262,144, or one for each stage as in 2,1"),
        ("1f1b --replicas 0", "--replicas takes a whole number from 1"),
    ],
)
def test_replicas_that_cannot_be_drawn(words: str, says: str) -> None:
    done = CliRunner().invoke(app, ["lanes", *words.split(), "--stages", "2", "--microbatches", "8"])
    assert done.exit_code == 2 and says in done.stderr and done.stderr.count("\n") == 1


def test_figures_of_workers_break_between_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    printed = CliRunner().invoke(app, ["lanes", "1f1b", "--stages", "6", "--microbatches", "6"]).stdout
    figures = printed[printed.index("utilization from first to last pass") :].splitlines()
    assert max(map(len, figures)) <= 60
    assert all(line.endswith((",", *"012345")) for line in figures) and figures[-1].endswith("on stage 5")
