"""What is chosen for published trainings of sharded replicas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.published import __main__ as published
from benchmarks.published import choices as published_choices
from benchmarks.published.rows import Decoder, Row
from polylane.cost.operators.training_options import TrainingOptions

MODEL = Decoder(2, 64, 256, 4, 32, 128, fused=True)
ROW = Row(
    kind="fsdp_mpt",
    name="tiny",
    model=MODEL,
    device="a100-40g",
    link="roce-200",
    gpus=2,
    per_host=8,
    data=2,
    tensor=1,
    pipeline=1,
    microbatch=2,
    batch=12,
    method=TrainingOptions(dtype="bfloat16", masters=False),
    products="bfloat16",
    seconds=0.01,
    problem=None,
    shard="parameters",
)


def test_every_way_with_the_batch_is_tried() -> None:
    every = list(published_choices.choices(ROW))
    assert [(each.recompute, each.microbatch) for each in every] == [
        (recompute, size) for recompute in ("none", "full") for size in (1, 2, 3, 6)
    ]
    for kept, again in zip(every[:4], every[4:], strict=True):
        assert again.seconds > kept.seconds and again.memory < kept.memory
    assert [each.memory for each in every[:4]] == sorted(each.memory for each in every[:4])


def test_the_fastest_that_fits_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    every = list(published_choices.choices(ROW))
    ran, best = published_choices.choose(ROW)
    assert (ran.recompute, ran.microbatch) == ("none", 2)
    assert best == min(every, key=lambda each: each.seconds)
    # With less memory than that takes, the next; with none, nothing.
    limit = best.memory - 1
    monkeypatch.setattr(published_choices.Choice, "fits", property(lambda self: self.memory <= limit))
    _, less = published_choices.choose(ROW)
    assert less is not None and less.memory <= limit and less.seconds >= best.seconds
    limit = 0
    assert published_choices.choose(ROW)[1] is None


def test_rows_with_products_in_8_bits_or_whole_replicas_leave_no_choice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert published_choices.can_choose(ROW)
    assert not published_choices.can_choose(replace(ROW, products="float8"))
    assert not published_choices.can_choose(replace(ROW, shard="none"))
    path = tmp_path / "rows.csv"
    path.write_text("stages,microbatches,torchgpipe_speedup\n2,4,1.5\n")
    assert published.main([str(path), "--choose"]) == 2
    assert "--choose needs rows of sharded replicas" in capsys.readouterr().err


def test_a_report_says_what_was_chosen_and_what_ran() -> None:
    line, summary = published_choices.report([ROW])
    assert "ran none, 2" in line and line.endswith("tiny")
    assert summary.startswith("1 rows, error ") and summary.endswith("0 ran that should not fit")
