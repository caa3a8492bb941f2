"""Reports: what is said of a worker that does not go on, when, and that a file holds all of it."""

from __future__ import annotations

import functools
import json
import operator
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import polylane
from polylane.cli import app
from polylane.diagnosis.call_order import format_ranks
from polylane.diagnosis.culprit import Finding, Wait
from polylane.diagnosis.page_layout import Phase
from polylane.diagnosis.report import Doing, HangReport, RankReport, classify, describe_finding
from polylane.diagnosis.report_file import draw_timeline, from_dict, to_dict
from polylane.diagnosis.stacks import (
    CodePlace,
    Frame,
    called_by_polylane,
    find_main_stack,
    find_place,
    is_at_breakpoint,
    parse_stacks,
)
from polylane.observe.swimlane import render as swimlane
from polylane.observe.timeline import Span, Timeline
from polylane.schedule.action import Action, ActionKind

FORWARD = Action(ActionKind.FORWARD, 1, 0)
RECEIVE = Action(ActionKind.RECEIVE, 0, 0, "h", 1, True)
WAITS = "message 3 from rank 1 to rank 0"
RANKS = {
    0: RankReport(0, "a", 40, "training", 12, RECEIVE, 9.0, Doing.WAITING, waits_on=WAITS),
    1: RankReport(1, "a", 41, "training", 12, FORWARD, 9.1, Doing.STOPPED, "mlp/linear", "model.py:31", stacks="T"),
}
TIMELINE = Timeline((Span(0, Action(ActionKind.FORWARD, 0, 0), 1.0, 1.5), Span(1, FORWARD, 1.5, 2.0)), 2)
WALL = time.mktime((2026, 5, 4, 14, 3, 22, 0, 0, -1))
RUNNING = {0: (RECEIVE, 1.5), 1: (FORWARD, 2.0)}
REPORT = HangReport("rank 1 hangs", (1,), tuple(RANKS.values()), TIMELINE, RUNNING, 11.0, WALL)


def test_the_sentence_says_who_where_since_when_what_and_who_waits() -> None:
    assert describe_finding(Finding((1,), waits_for={0: (1,)}), RANKS, WALL) == (
        "rank 1 (process 41 on a) has made no progress for 9.1 s, since 14:03:12, in step 12, forward of microbatch 0 "
        "on stage 1, at mlp/linear (model.py:31): it is stopped (SIGSTOP, or Ctrl-Z); kill -CONT 41 lets it go on; "
        "rank 0 waits for it"
    )


def test_a_link_is_to_blame_where_all_have_arrived() -> None:
    said = describe_finding(Finding(link=Wait("all", 3, (0, 1)), waits_for={0: (), 1: ()}), RANKS, WALL)
    assert "no worker is to blame, the link between them carries nothing" in said


@pytest.mark.parametrize(
    ("state", "late", "phase", "waits", "doing"),
    [
        ("T", 9, Phase.LOADING, False, Doing.STOPPED),
        ("t", 9, Phase.TRAINING, True, Doing.DEBUGGED),
        ("S", 9, Phase.TRAINING, False, Doing.HOLDS_INTERPRETER),
        ("D", 9, Phase.TRAINING, False, Doing.HELD),
        ("S", 0.1, Phase.TRAINING, True, Doing.WAITING),
        ("R", 0.1, Phase.LOADING, False, Doing.LOADING),
        ("R", 0.1, Phase.TRAINING, False, Doing.COMPUTING),
        ("S", 0.1, Phase.SCRIPT, False, Doing.IN_SCRIPT),
        ("S", 0.1, Phase.SCRIPT, True, Doing.WAITING),
        ("Z", 9, Phase.TRAINING, True, Doing.GONE),
    ],
)
def test_what_a_process_does(state: str, late: float, phase: Phase, waits: bool, doing: Doing) -> None:
    assert classify(state, late, phase, waits) is doing


def test_the_users_line_is_the_innermost_of_no_library() -> None:
    frames = parse_stacks("""Thread 0x0000000000000010 (most recent call first):
  File "/x/threading.py", line 1 in run

Current thread 0x0000000000000020 (most recent call first):
  File "/v/lib/python3/site-packages/torch/_ops.py", line 5 in __call__
  File "<stage 0 (3)>", line 8 in forward
  File "/home/me/train.py", line 30 in main
""")[0x20]
    assert find_place(frames, {"<stage 0 (3)>": {"8": ["fc/linear", "m.py:4"]}}) == CodePlace("fc/linear", "m.py:4")
    assert find_place(frames, {}) == CodePlace("main", "train.py:30")
    assert find_place([], {}) == CodePlace()


OWN_JOB = str(Path(polylane.__file__).parent / "runtime" / "job.py")
# As py-spy 0.4 writes it on Linux, by the numbers that the system gives to threads.
SPY = f"""Process 4711: /v/bin/python train.py
Python v3.11.7 (/v/bin/python3.11)

Thread 4711 (active+gil): "MainThread"
    Linear.forward (/v/lib/python3/site-packages/torch/nn/modules/linear.py:125)
    forward (<stage 0 (3)>:8)
    Set.__getitem__ (/home/me/my data (old)/set.py:30)
    Job.step ({OWN_JOB}:140)
    <module> (/home/me/train.py:9)
Thread 4712 (idle): "pool (a) of "x""
    wait (/v/lib/python3.11/threading.py:320)
"""
SPY_NATIVE = """Thread 4711 (idle): "MainThread"
    clock_nanosleep (libc.so.6)
    time_sleep (/build/python/Modules/timemodule.c:2133)
    at::native::add(at::Tensor const&, int) (torch/lib/libtorch_cpu.so)
    main.<locals>.<lambda> (/home/me/train.py:30)
    0x7f505b04524a (libc.so.6)
"""
SPY_LOCALS = r"""Thread 0x7F505B826B80 (idle)
    read (/home/me/train.py:30)
        Arguments:
            text: "x\n    evil (/home/me/evil.py:3)"
        Locals:
            place: <Place (/home/me/evil.py:3)>
    main (/home/me/train.py:40)
"""


def test_py_spys_stacks_are_read_as_faulthandlers_are() -> None:
    frames = find_main_stack(SPY, 0x7F505B826B80, 4711)
    assert [frame.line for frame in frames] == [125, 8, 30, 140, 9]
    assert find_place(frames, {"<stage 0 (3)>": {"8": ["fc/linear", "m.py:4"]}}) == CodePlace("fc/linear", "m.py:4")
    assert find_place(frames, {}) == CodePlace("Set.__getitem__", "set.py:30")
    assert called_by_polylane(frames) == frames[:4]
    assert parse_stacks(SPY)[4712] == [Frame("/v/lib/python3.11/threading.py", 320, "wait")]


def test_native_frames_and_local_values_are_no_calls_of_python() -> None:
    (frame,) = find_main_stack(SPY_NATIVE, 0x20, 4711)
    assert frame == Frame("/home/me/train.py", 30, "main.<locals>.<lambda>")
    main = find_main_stack(SPY_LOCALS, 0x7F505B826B80, 4711)  # where the system's number of a thread is not known
    assert main == [Frame("/home/me/train.py", 30, "read"), Frame("/home/me/train.py", 40, "main")]


def test_a_stack_of_no_main_thread_is_empty() -> None:
    assert find_main_stack(SPY, 0x20, 5000) == find_main_stack("", 0x20, 5000) == []


def test_a_scripts_own_calls_are_not_those_that_polylane_makes() -> None:
    frames = [
        Frame("/v/lib/python3/site-packages/torch/_ops.py", 5, "__call__"),
        Frame("/home/me/model.py", 7, "forward"),
        Frame(str(Path(polylane.__file__).parent / "runtime" / "job.py"), 140, "step"),
        Frame("/home/me/train.py", 30, "main"),
    ]
    assert called_by_polylane(frames) == frames[:3]
    assert called_by_polylane(frames[3:]) == []
    assert not Frame(str(Path(sysconfig.get_path("scripts")) / "polylane"), 8, "<module>").is_users


def test_a_breakpoint_is_where_a_debugger_was_called_from_the_users_line() -> None:
    users, library = Frame("/home/me/train.py", 30, "main"), sysconfig.get_path("stdlib")
    debugger = Frame(f"{library}/bdb.py", 90, "trace_dispatch")
    assert is_at_breakpoint([Frame(f"{library}/cmd.py", 126, "cmdloop"), debugger, users])
    assert not is_at_breakpoint([users, debugger])  # python -m pdb train.py


def test_between_steps_of_a_script_is_after_a_step() -> None:
    ranks = {**RANKS, 1: RankReport(1, "a", 41, "script", 3, None, 9.1, Doing.IN_SCRIPT, "main", "train.py:31")}
    assert describe_finding(Finding((1,), waits_for={0: (1,)}), ranks, WALL) == (
        "rank 1 (process 41 on a) has made no progress for 9.1 s, since 14:03:12, after step 3, at main (train.py:31): "
        "it is between steps, in your code; rank 0 waits for it"
    )


def test_ranks_in_words() -> None:
    said = ["rank 1", "ranks 0 and 2", "ranks 0 to 2", "ranks 0, 1 and 5"]
    assert [format_ranks(ranks) for ranks in ([1], [2, 0], [0, 1, 2], [0, 1, 5])] == said


def test_a_file_holds_all_of_a_report() -> None:
    assert from_dict(json.loads(json.dumps(to_dict(REPORT)))) == REPORT


# By what is wrong: the keys that lead to a value of a report, and what stands there instead.
EDITS: dict[str, tuple[tuple[Any, ...], Any]] = {
    "no kind": (("kind",), "timeline"),
    "a rank that is a number": (("ranks",), [3]),
    "a time that is a text": (("ranks", 0, "stalled"), "long"),
    "a time without an end": (("ranks", 0, "stalled"), float("inf")),
    "a rank that is a text": (("ranks", 0, "rank"), "0"),
    "stacks that are a number": (("ranks", 1, "stacks"), 3),
    "a phase that is nothing": (("ranks", 1, "phase"), None),
    "a process that does nothing known": (("ranks", 1, "doing"), "FLYING"),
    "a moment after all years": (("wall",), 1e300),
    "a moment that is no number": (("now",), float("nan")),
    "culprits that are texts": (("culprits",), ["a"]),
    "one culprit": (("culprits",), 3),
    "what had not ended of a rank below 0": (("unfinished",), {"-1": [FORWARD.to_row(), 1.0]}),
    "a stage that is a text": (("unfinished",), {"0": [["forward", "x"], 1.0]}),
    "no such kind of action": (("ranks", 0, "action"), ["fly", 0]),
    "an action of nothing": (("ranks", 0, "action"), []),
    "lanes that fill all memory": (("timeline", "ranks"), 10**12),
    "a span's stage that is a text": (("timeline", "spans", 0, 2), "x"),
    "a span's start that is a text": (("timeline", "spans", 0, 7), "0"),
    "no timeline": (("timeline",), None),
    "a sentence that is nothing": (("sentence",), None),
}


def edit_report(keys: tuple[Any, ...], value: Any) -> Any:
    data = json.loads(json.dumps(to_dict(REPORT)))
    *path, last = keys
    functools.reduce(operator.getitem, path, data)[last] = value
    return data


@pytest.mark.parametrize("edit", EDITS)
def test_what_is_no_report_is_refused(edit: str) -> None:
    with pytest.raises(ValueError):
        from_dict(edit_report(*EDITS[edit]))


@pytest.mark.parametrize("data", [{}, [], "why", 1, None])
def test_what_is_no_object_is_refused(data: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        from_dict(data)


def test_the_culprit_is_red_and_the_steps_before_have_room() -> None:
    drawn = draw_timeline(REPORT)
    assert [span.rank for span in drawn.spans if span.is_hung] == [1]
    assert drawn.makespan() == 1.5  # one second of steps, and no more than half of that for what did not end
    assert "#ff0000" in swimlane.svg(drawn) and "does not go on" in swimlane.html(drawn)
    assert "!" in swimlane.text(drawn)


def test_the_command_tells_it_again(tmp_path: Path) -> None:
    runner = CliRunner()
    missing = runner.invoke(app, ["why", str(tmp_path)])
    assert missing.exit_code == 2 and "none of its workers hung or failed" in missing.stderr
    (tmp_path / "why.json").write_text(json.dumps(to_dict(REPORT)))
    told = runner.invoke(app, ["why", str(tmp_path), "--svg", str(tmp_path / "why.svg")])
    assert told.exit_code == 0, told.stderr
    for words in ("rank 1 hangs", "is stopped", "message 3 from rank 1", "What rank 1 was calling"):
        assert words in told.stdout
    assert "#ff0000" in (tmp_path / "why.svg").read_text()
    for wrong in ("[" * 100_000, "[]", json.dumps(edit_report(("timeline", "ranks"), 10**12))):
        (tmp_path / "why.json").write_text(wrong)
        broken = runner.invoke(app, ["why", str(tmp_path)])
        assert broken.exit_code == 2 and "cannot be read" in broken.stderr and broken.stderr.count("\n") == 1
