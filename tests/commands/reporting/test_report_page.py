"""The page of a run, as a file: what is on it, what it says is missing, how large it is, and that nothing escapes."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shlex
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from polylane.cli import app
from polylane.commands.progress import describe_test
from polylane.commands.reporting import curves
from polylane.commands.reporting.page_lanes import MOST_RANKS, count_traffic
from polylane.commands.reporting.page_verdict import describe_changes, find_verdict, rate_other_batches
from polylane.commands.reporting.report_page import build_page, write_report
from polylane.commands.reporting.run_files import read_noise, read_run
from polylane.efficiency.batch_rules import adascale_gain
from polylane.errors import PolylaneError
from tests.support.runs import write_run

HOSTILE = """</script><script>alert(1)</script><img src=x onerror=alert(2)> {{data}} ' " & \u2028"""


def data_of(page: str) -> Any:
    found = re.search(r'<script type="text/plain" id="data">([^<]*)</script>', page)
    assert found
    return json.loads(gzip.decompress(base64.b64decode(found[1])))


def test_the_page_has_all_parts_of_a_run(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run"))
    (run,) = data_of(page.read_text())["runs"]
    assert (
        run["state"] == "ended"
        and run["verdict"].startswith("2.9 times the speed of one device, on 4 workers")
        and run["missing"] == []
    )
    assert [picture["key"] for picture in run["pictures"]] == ["typical", "slowest", "first", "last"]
    assert run["predicted"] and run["theory"] and run["pictures"][0]["headline"].endswith("the typical step")
    assert {"loss", "metrics", "learning_rate", "gradient_norm", "noise", "throughput"} <= run["charts"].keys()
    text = "resumed at step 30, 4 workers, plan changed to data=2,pipeline=2"
    assert run["events"] == [{"step": 30, "text": text, "mark": "↻"}]
    assert run["memory"]["measured"] == [(1 << 28) + rank * (1 << 20) for rank in range(4)]
    assert len(run["memory"]["predicted"]) == 4 and run["goodput"]["wall"] == 100
    assert {kind for kind, _ in run["traffic"]} >= {"gradients between replicas", "values to other stages"}
    assert sum(size for _, size in run["traffic"]) == sum(run["pictures"][0]["sent"])
    for row in run["pictures"][0]["account"]:
        assert sum(row[1:4]) + sum(row[4].values()) == pytest.approx(run["pictures"][0]["lanes"]["extent"], rel=1e-4)
    assert run["stages"][0]["sends"] and "stages: 2" in run["plan_text"]


def test_ten_thousand_steps_on_64_ranks_are_less_than_half_a_megabyte(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", steps=10_000, stages=8, replicas=8, microbatches=16))
    assert page.stat().st_size < 500_000
    (run,) = data_of(page.read_text())["runs"]
    assert "10,000 steps" in run["downsampled"]
    picture = run["pictures"][0]
    assert len(picture["lanes"]["lanes"]) <= MOST_RANKS and len(picture["account"]) == 64
    assert "of 64 ranks are drawn" in picture["left_out"]
    drawn = {stage for lane in picture["lanes"]["lanes"] for stage in lane["main"][3::14]}
    assert drawn == set(range(8))  # some rank of every stage
    assert all(len(line["x"]) <= curves.MOST_POINTS for chart in run["charts"].values() for line in chart.values())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000), st.integers(4, 60))
def test_a_thinned_curve_keeps_its_ends_and_its_highest_and_lowest(values: list[float], limit: int) -> None:
    steps, kept = curves.thin(([float(n) for n in range(len(values))], values), limit)
    assert len(kept) <= max(limit, 4) and steps == sorted(set(steps))
    assert (kept[0], kept[-1], min(kept), max(kept)) == (values[0], values[-1], min(values), max(values))
    assert all(values[int(step)] == value for step, value in zip(steps, kept, strict=True))


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6)), min_size=1, max_size=300), st.integers(1, 40))
def test_means_of_neighbouring_rows_leave_out_none(values: list[tuple[float, float]], limit: int) -> None:
    rows = [(float(step), row) for step, row in enumerate(values)]
    means = curves.average(rows, limit)
    assert len(means) == min(limit, len(rows)) and means[-1][0] == rows[-1][0]
    counts = [end - start for start, end in pairwise([-1.0, *(step for step, _ in means)])]
    for column in (0, 1):
        total = sum(count * row[column] for count, (_, row) in zip(counts, means, strict=True))
        assert total == pytest.approx(sum(row[column] for row in values), rel=1e-9, abs=1e-3)


def test_every_word_of_the_users_is_data(tmp_path: Path) -> None:
    page = write_report(write_run(tmp_path / "run", name=HOSTILE)).read_text()
    assert "alert(" not in page and page.count("<script") == 4
    (run,) = data_of(page)["runs"]
    assert run["recipe"] == HOSTILE and HOSTILE.strip() in run["charts"]["metrics"]  # in one line
    folder = tmp_path / "<b>&'name"
    assert "<title>&lt;b&gt;&amp;&#x27;name · polylane</title>" in build_page([write_run(folder)])


def test_the_page_forbids_the_network_and_other_scripts(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    for is_live, connect in ((False, "connect-src 'none'"), (True, "connect-src 'self'")):
        page = build_page([folder], is_live)
        policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
        assert policy and "default-src 'none'" in policy[1] and connect in policy[1]
        assert policy[1].count("'sha256-") == 3 and "script-src 'unsafe-inline'" not in policy[1]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("metrics.jsonl",), "no curves"),
        (("timelines.json",), "no step is drawn"),
        (("predicted.json",), "what was predicted"),
        (("predicted.json", "timelines.json", "plan.yaml"), "no step is drawn"),
    ],
)
def test_what_a_folder_lacks_is_said(tmp_path: Path, names: tuple[str, ...], words: str) -> None:
    folder = write_run(tmp_path / "run")
    for name in names:
        (folder / name).unlink()
    (run,) = data_of(build_page([folder]))["runs"]
    assert any(words in sentence for sentence in run["missing"])


def test_an_older_run_has_a_page(tmp_path: Path) -> None:
    """It has one timeline, and lines with a loss alone."""
    folder = write_run(tmp_path / "run")
    steps = json.loads((folder / "timelines.json").read_text())["steps"]
    (folder / "timelines.json").unlink()
    (folder / "timeline.json").write_text(json.dumps(steps["last"]))
    (folder / "metrics.jsonl").write_text('{"step": 1, "epoch": 1, "loss": null}\n{"step": 2, "loss": 1.5}\n{"st')
    (folder / "predicted.json").unlink()
    (run,) = data_of(build_page([folder]))["runs"]
    assert run["charts"]["loss"]["loss"] == {"x": [2], "y": [1.5]} and len(run["pictures"]) == 1
    assert "computing" in run["verdict"] and any("1 of the lines" in words for words in run["missing"])
    assert run["stages"] == [{"stage": 0, "ranks": [0, 1, 2, 3]}, {"stage": 1, "ranks": [0, 1, 2, 3]}]


def test_a_batch_that_grows_is_an_event(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    change = {"step": 40, "size": 128, "noise_scale": 161.1, "gain": 1.56, "rate_factor": 2.67}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"batch": change}) + "\n")
    (run,) = data_of(build_page([folder]))["runs"]
    assert run["missing"] == []  # a line that is known
    text = "batches of 128 samples after step 40, with 2.67 times the learning rate of the first batch"
    assert run["events"][-1] == {"step": 40, "text": text, "mark": "⇕"}
    assert [event["step"] for event in run["events"]] == [30, 40]


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "timelines.json", "predicted.json", "goodput.json", "why.json", "plan.yaml"]
)
@pytest.mark.parametrize(
    "content", ["", "[]", "{}", "null", '{"steps": 3}', '{"stages": 7, "memory": {}, "changes": [1]}', "\x00"]
)
def test_a_file_of_anything_is_no_traceback(tmp_path: Path, name: str, content: str) -> None:
    folder = write_run(tmp_path / "run")
    (folder / name).write_text(content)
    assert data_of(build_page([folder]))["runs"]


def test_no_run_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(PolylaneError, match=r"no folder of a run|no files of a run"):
            read_run(path)


def test_the_run_that_is_under_way_is_shown_in_place_of_the_one_before(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_run(folder / "unfinished", steps=20)
    (folder / "unfinished" / "model.safetensors").unlink()
    run = read_run(folder)
    assert len(run.steps) == 20 and any("earlier" in words for words in run.missing)


def test_a_verdict_of_measured_shares_where_the_run_has_none(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    (folder / "goodput.json").unlink()
    verdict = find_verdict(read_run(folder))
    assert verdict.startswith("3 times the speed of one device, on 4 workers; ") and "% computing" in verdict


def test_changes_are_computed(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    sentences = describe_changes(read_run(folder))
    assert "Twice as many microbatches (8): 1.14 times as fast, simulated (pipeline=2,microbatches=8)." in sentences
    row = {"step": 100, "computing": 0.5, "waiting": 0.3, "waiting_for": {"3": 0.3}, "loading": 0.2}
    with (folder / "metrics.jsonl").open("w") as file:
        file.write("\n".join(json.dumps({**row, "step": step}) for step in range(3)))
    (folder / "predicted.json").unlink()
    sentences = describe_changes(read_run(folder))
    assert sentences[0].startswith("No waits for rank 3: up to 1.43 times as fast")
    assert any(words.startswith("Data that is not there when a step needs it: 20%") for words in sentences)
    goodput = json.loads((folder / "goodput.json").read_text())
    slow = {"slow": {"sentence": "host-b (rank 3) computes at 0.50 times the speed", "gain": 1.5}}
    (folder / "goodput.json").write_text(json.dumps(goodput | slow))
    sentences = describe_changes(read_run(folder))
    assert sentences[0] == "host-b (rank 3) computes at 0.50 times the speed."
    assert not any(words.startswith("No waits for") for words in sentences)


def test_batches_are_rated_by_the_noise_scale(tmp_path: Path) -> None:
    rated = rate_other_batches(read_run(write_run(tmp_path / "run")))
    assert (rated["scale"], rated["batch"]) == (300, 64)
    now = next(row for row in rated["rows"] if row[0] == 64)
    assert now[1:] == [1] * 6
    double = next(row for row in rated["rows"] if row[0] == 128)
    assert double[1] == pytest.approx(1 / adascale_gain(300, 128, 64), rel=1e-3)


def test_the_noise_is_that_of_the_gradients_as_adam_divides_them() -> None:
    plain = {"scale": 300.0, "low": 200.0, "high": 500.0}
    assert read_noise({"noise": plain}) == plain and read_noise({}) == read_noise({"noise": "y"}) == {}
    for batches in (0, 9):  # before its second batch there is no mean of it
        adam = {"scale": 20.0, "batches": batches}
        assert read_noise({"noise": {**plain, "adam": adam}})["scale"] == (20 if batches else 300)


def test_other_batches_are_rated_beside_the_run_s_and_not_beside_a_short_one(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    noise = {"g2": 0.1, "s": 20.0, "scale": 300.0, "low": 200.0, "high": 400.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 61, "samples": 5, "noise": noise}) + "\n")
    assert rate_other_batches(read_run(folder))["batch"] == 64
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"batch": {"step": 60, "size": 32, "rate_factor": 0.5}}) + "\n")
        file.write(json.dumps({"step": 62, "samples": 32, "noise": noise}) + "\n")
    assert rate_other_batches(read_run(folder))["batch"] == 32


def test_the_command_line_is_one_that_a_shell_takes(tmp_path: Path) -> None:
    folder, command = write_run(tmp_path / "run"), ["polylane", "train", "a file.py", "--set", "name='x' \"y\" $z"]
    predicted = json.loads((folder / "predicted.json").read_text())
    predicted["environment"]["command"] = command
    (folder / "predicted.json").write_text(json.dumps(predicted))
    (run,) = data_of(build_page([folder]))["runs"]
    assert shlex.split(run["environment"]["command"]) == command
    assert run["environment"]["devices"] == "cpu"


@pytest.mark.parametrize(
    ("name", "shown"),
    [("a\nb", "a b"), ("", "(no name)"), ("\t ", "(no name)"), ("x\u202ey", "x y"), ("größe", "größe")],
)
def test_names_of_metrics_are_one_line_that_is_seen(tmp_path: Path, name: str, shown: str) -> None:
    (run,) = data_of(build_page([write_run(tmp_path / "run", name=name)]))["runs"]
    assert list(run["charts"]["metrics"]) == [shown] and shown in dict(run["facts"])
    assert describe_test(0.5, {name: 0.25}) == f", test loss 0.5000, {shown} 0.2500"


def test_bytes_are_counted_once(tmp_path: Path) -> None:
    timeline = read_run(write_run(tmp_path / "run")).timelines["typical"]
    assert sum(size for _, size in count_traffic(timeline)) == sum(timeline.sent())


def test_the_command_writes_the_page_of_one_run_or_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a"), write_run(tmp_path / "b", steps=80)
    runner = CliRunner()
    assert runner.invoke(app, ["report", "a"]).output == "a/report.html\n"
    assert runner.invoke(app, ["report", "a", "b"]).output == "report-a-b.html\n"
    assert [run["name"] for run in data_of((tmp_path / "report-a-b.html").read_text())["runs"]] == ["a", "b"]
    assert runner.invoke(app, ["report", "a", "--html", "page.html"]).exit_code == 0 and Path("page.html").exists()
    for arguments in (["report", "nothing"], ["report", "a", "b", "a"]):
        result = runner.invoke(app, arguments)
        assert result.exit_code == 2 and isinstance(result.exception, SystemExit | PolylaneError)
