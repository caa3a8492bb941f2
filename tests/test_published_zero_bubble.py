"""Published throughputs and memory of pipeline schedules, predicted from those of 1F1B alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.published import __main__ as published
from benchmarks.published import rows as published_rows
from benchmarks.published import zero_bubble
from benchmarks.published.scores import mean_error, problems, regret
from benchmarks.published.zero_bubble import Gpt, PipelineRun
from polylane.errors import PolylaneError

TINY = Gpt(layers=6, hidden=64, heads=4, samples=2)
COLUMNS = "model,stages,microbatches,schedule,samples_per_gpu_per_second,memory_gb"
# Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024, table 4: (model, stages, microbatches) -> for each schedule
# samples per device and second, by number of microbatches, and GB of memory.
TABLE = {
    ("1.5B", 8, (24, 32, 64)): {
        "ZB-2p": ((14.5, 14.8, 14.9), 59),
        "ZB-1p": ((12.9, 13.4, 14.2), 32),
        "1F1B": ((11.8, 12.5, 13.6), 30),
        "1F1B-I": ((13.1, 13.4, 13.9), 40),
    },
    ("6.2B", 8, (24, 32, 64)): {
        "ZB-2p": ((4.32, 4.35, 4.39), 70),
        "ZB-1p": ((3.88, 4.00, 4.20), 42),
        "1F1B": ((3.50, 3.70, 4.03), 39),
        "1F1B-I": ((4.01, 4.08, 4.19), 48),
    },
    ("14.6B", 16, (48, 64, 128)): {
        "ZB-2p": ((1.81, 1.83, 1.85), 51),
        "ZB-1p": ((1.61, 1.67, 1.76), 33),
        "1F1B": ((1.40, 1.49, 1.64), 32),
        "1F1B-I": ((1.54, 1.59, 1.66), 39),
    },
    ("28.3B", 32, (96, 128, 256)): {
        "ZB-2p": ((0.99, 1.00, 1.00), 74),
        "ZB-1p": ((0.87, 0.90, 0.96), 44),
        "1F1B": ((0.76, 0.80, 0.88), 43),
        "1F1B-I": ((0.82, 0.85, 0.90), 58),
    },
}


def table(path: Path, *names: str) -> list[published_rows.AnyRow]:
    """The rows of these models, or of all."""
    lines = [
        f"{model},{stages},{microbatches},{schedule},{speed},{memory}"
        for (model, stages, counts), schedules in TABLE.items()
        for schedule, (speeds, memory) in schedules.items()
        for microbatches, speed in zip(counts, speeds, strict=True)
        if not names or model in names
    ]
    path.write_text("\n".join([COLUMNS, *lines]) + "\n")
    return published_rows.read(path)


def test_a_row_is_read(tmp_path: Path) -> None:
    row = table(tmp_path / "rows.csv", "6.2B")[3]
    assert isinstance(row, published_rows.Throughput)
    assert row.run == PipelineRun(zero_bubble.MODELS["6.2B"], 8, 24, "zb-h1")
    assert row.seconds == pytest.approx(24 * 3 / 8 / 3.88)
    assert (row.memory, row.problem) == (42e9, ("6.2B", 8, 24))


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("7B,8,24,1F1B,1,1", "line 2: model '7B' is not known, known are 1.5B"),
        ("1.5B,8,24,GPipe,1,1", "line 2: schedule 'GPipe' is not known, known are 1F1B"),
        ("1.5B,7,24,1F1B,1,1", "line 2: stages must be at least 2 and divide 24, .* not 7"),
    ],
)
def test_what_was_not_published_is_refused(tmp_path: Path, row: str, said: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(f"{COLUMNS}\n{row}\n")
    with pytest.raises(PolylaneError, match=said):
        published_rows.read(path)


@pytest.mark.parametrize(("schedule", "blocks"), [("zb-h1", [3, 3]), ("interleaved", [0, 1, 1, 1, 1, 1, 1, 0])])
def test_first_and_last_chunk_have_one_block_less(schedule: str, blocks: list[int]) -> None:
    graph = zero_bubble.captured(TINY)
    partition, plan = zero_bubble.divided(graph, PipelineRun(TINY, 2, 4, schedule))
    found = [
        {n.module.split(".")[1] for n in graph.nodes[first:end] if n.module.startswith("blocks.")}
        for first, end, _ in sorted(partition.pieces, key=lambda piece: piece[2])
    ]
    assert [len(each) for each in found] == blocks
    assert plan.stage_groups == tuple(stage % 2 for stage in range(len(blocks)))


def test_more_memory_is_told_and_less_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zero_bubble.MODELS, "1.5B", TINY)
    path = tmp_path / "rows.csv"
    path.write_text("\n".join([COLUMNS, *(f"1.5B,2,8,{name},100,1" for name in zero_bubble.SCHEDULES)]) + "\n")
    rows = published_rows.read(path)
    told, *others = published.compared(rows)
    assert told.told and told.error == pytest.approx(0)
    assert not any(case.told for case in others)
    (slow,) = published.slowdowns(rows).values()
    ours = [zero_bubble.prediction(row.run) for row in rows if isinstance(row, published_rows.Throughput)]
    assert [case.predicted for case in others] == pytest.approx([slow * each.seconds for each in ours[1:]])
    assert mean_error([told, *others]) == mean_error(others) > 0
    assert published.main([str(path)]) == 0
    one, _, half, whole = published.memories(rows)  # 1F1B, interleaved, ZB-H1, ZB-H2
    assert one.predicted <= half.predicted < whole.predicted


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_given_1f1b_the_other_schedules_are_predicted(tmp_path: Path) -> None:
    rows = table(tmp_path / "rows.csv")
    cases = published.compared(rows)
    assert len(cases) == 48 and sum(case.told for case in cases) == 12
    assert mean_error(cases) < 0.02
    assert max(abs(case.error) for case in cases) < 0.05
    assert [regret(one) for one in problems(cases)] == [0.0] * 12
    assert mean_error(published.memories(rows)) < 0.03
