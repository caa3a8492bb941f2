"""Metrics of an earlier attempt: whole lines of steps that were made are kept, and nothing else ends the run."""

from __future__ import annotations

import json
from pathlib import Path

from polylane.commands.logs.metrics_file import MetricsFile, find_last_step, lines_until

STEPS = [json.dumps({"step": step, "loss": 0.5}) for step in (1, 2, 3)]
NO_STEPS = ["", "{", "[]", "3", "{}", '{"step": "x"}', '{"step": null}', '{"step": Infinity}']
ODD = [*NO_STEPS, "[" * 100_000, '"' + "9" * 5000]


def test_lines_of_steps_that_were_made_are_kept(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("\n".join([*ODD, STEPS[0], *ODD, STEPS[1], STEPS[2], *ODD]))
    assert lines_until(metrics, 2).splitlines() == STEPS[:2]
    assert find_last_step(metrics) == 3


def test_of_what_is_no_text_nothing_is_known(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert (lines_until(metrics, 2), find_last_step(metrics)) == ("", 0)
    metrics.write_bytes(b"\xff\xfe\n")
    assert (lines_until(metrics, 2), find_last_step(metrics)) == ("", 0)


def test_a_last_line_that_is_torn_is_cut_off(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(STEPS[0] + "\n" + STEPS[1][:7])
    file = MetricsFile(metrics, append=True)
    file.append(STEPS[2])
    file.close()
    assert metrics.read_text().splitlines() == [STEPS[0], STEPS[2]]
