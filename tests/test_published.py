"""The comparison with published measurements: kinds of files, scores, and what blocks are."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.published import __main__ as published
from benchmarks.published import costs as published_costs
from benchmarks.published import gpipe as published_gpipe
from benchmarks.published import rows as published_rows
from benchmarks.published.amoebanet import AmoebaNet
from benchmarks.published.gpipe import Experiment
from benchmarks.published.rows import KINDS, Decoder
from benchmarks.published.scores import Case, mean_error, percentile, problems, rank_correlation, ranks, regret
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.schedule.action import ActionKind

PLAN = {
    "model": "tiny",
    "layers": "4",
    "hidden": "256",
    "ffn": "1024",
    "heads": "8",
    "seq_len": "64",
    "vocab": "512",
    "gpu": "A100",
    "gpus": "4",
    "gpus_per_node": "8",
    "inter_link": "",
    "precision": "fp16",
    "data": "2",
    "tensor": "2",
    "pipeline": "1",
    "schedule": "1f1b",
    "microbatch": "2",
    "global_batch": "16",
    "recompute": "full",
    "step_seconds": "0.5",
}


def write(path: Path, *records: dict[str, str]) -> Path:
    lines = [",".join(records[0]), *(",".join(record.values()) for record in records)]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_regret_is_what_the_pick_costs_over_the_best() -> None:
    cases = [Case("a", 2.0, 1.0), Case("b", 1.6, 1.1), Case("c", 4.0, 3.0)]
    assert regret(cases) == pytest.approx(0.25)
    assert regret([Case("a", 1.0, 5.0), Case("b", 2.0, 6.0)]) == 0.0


def test_errors_are_relative_and_absolute() -> None:
    assert mean_error([Case("a", 2.0, 1.0), Case("b", 2.0, 2.2)]) == pytest.approx(0.3)


def test_problems_have_four_plans() -> None:
    few = [Case("x", 1.0, 1.0, "few")] * 3
    many = [Case("y", 1.0, 1.0, "many")] * 4
    alone = [Case("z", 1.0, 1.0)] * 5
    assert problems([*few, *many, *alone]) == [many]


def test_rank_correlation() -> None:
    assert ranks([5.0, 1.0, 5.0, 9.0]) == [2.5, 1.0, 2.5, 4.0]
    assert rank_correlation([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert rank_correlation([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    assert rank_correlation([1, 2, 3, 4], [1, 1, 1, 1]) == 0.0
    assert rank_correlation([1, 2, 3], [1, 3, 2]) == pytest.approx(0.5)


def test_percentiles_lie_between_values() -> None:
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == pytest.approx(2.5)
    assert percentile([1.0, 2.0], 1.0) == 2.0
    with pytest.raises(ValueError, match="nothing"):
        percentile([], 0.5)


@pytest.mark.parametrize("name", KINDS)
def test_files_are_known_by_their_columns(name: str) -> None:
    assert published_rows.kind_of([*KINDS[name].columns, "remark"]) == name


def test_missing_columns_are_named() -> None:
    columns = [c for c in KINDS["gpt_plans"].columns if c not in ("tensor", "step_seconds")]
    with pytest.raises(PolylaneError, match=r"columns tensor, step_seconds are missing for a .* gpt_plans"):
        published_rows.kind_of(columns)


def test_a_plan_is_read(tmp_path: Path) -> None:
    (row,) = published_rows.read(write(tmp_path / "plans.csv", PLAN))
    assert row.model == Decoder(4, 256, 1024, 8, 64, 512, fused=False)
    assert (row.data, row.tensor, row.pipeline, row.microbatch, row.batch) == (2, 2, 1, 2, 16)
    assert row.method == TrainingOptions(dtype="float16", recompute="full", overlap=False)
    assert (row.seconds, row.problem) == (0.5, ("tiny", "4", "16"))


def test_flops_per_second_are_turned_into_seconds(tmp_path: Path) -> None:
    kept = ("layers", "hidden", "heads", "seq_len", "vocab", "gpus", "gpus_per_node", "recompute")
    sizes = {name: PLAN[name] for name in kept}
    fsdp = {
        **sizes,
        "model": "m",
        "gpu": "h100_80gb",
        "params": "1000000",
        "compute_dtype": "bf16",
        "master_weights": "bf16",
        "sharding": "zero2",
        "microbatch": "4",
        "global_batch": "16",
        "model_tflops_per_gpu": "1",
    }
    (row,) = published_rows.read(write(tmp_path / "fsdp.csv", fsdp))
    assert row.method == TrainingOptions(dtype="bfloat16", masters=False, recompute="full")
    assert row.shard == "gradients"
    assert row.seconds == pytest.approx(3 * (2 * 1e6 * 64 + 4 * 4 * 256 * 64**2) * 16 / 4 / 1e12)
    large = {
        **sizes,
        "params_billion": "1",
        "gpu": "a100_80gb",
        "tensor": "2",
        "pipeline": "2",
        "data": "1",
        "global_batch": "16",
        "compute_dtype": "fp16",
        "hardware_tflops_per_gpu": "1",
    }
    (row,) = published_rows.read(write(tmp_path / "megatron.csv", large))
    forward = 24 * 16 * 64 * 4 * 256**2 * (1 + 64 / (6 * 256) + 512 / (16 * 4 * 256))
    assert row.microbatch is None
    assert row.seconds == pytest.approx(4 * forward / 4 / 1e12)


@pytest.mark.parametrize(
    ("column", "value", "said"),
    [
        ("gpu", "X1", "line 2: gpu 'X1' is not known, known are A100"),
        ("recompute", "some", "line 2: recompute 'some' is not known, known are full, none"),
        ("hidden", "wide", "line 2: hidden must be a whole number from 1, not 'wide'"),
        ("tensor", "0", "line 2: tensor must be a whole number from 1, not '0'"),
        ("step_seconds", "-1", "line 2: step_seconds must be a number above 0, not '-1'"),
        ("step_seconds", "nan", "line 2: step_seconds must be a number above 0, not 'nan'"),
    ],
)
def test_a_value_that_means_nothing_is_named(tmp_path: Path, column: str, value: str, said: str) -> None:
    with pytest.raises(PolylaneError, match=said):
        published_rows.read(write(tmp_path / "plans.csv", {**PLAN, column: value}))


def test_what_is_compared_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PolylaneError, match="--folder FOLDER"):
        published.files([], None)
    with pytest.raises(PolylaneError, match="has no file of a known kind"):
        published.files([], tmp_path)
    plans = write(tmp_path / "plans.csv", PLAN)
    write(tmp_path / "other.csv", {"a": "1"})
    assert published.files([], tmp_path) == [plans]
    assert published.files([Path("plans.csv")], tmp_path) == [plans]
    assert published.main([str(tmp_path / "other.csv")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_prediction_of_a_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    slow, fast = PLAN, {**PLAN, "data": "4", "tensor": "1"}
    path = write(tmp_path / "plans.csv", slow, fast)
    first, second = (published_costs.predicted(row) for row in published_rows.read(path))
    assert 0 < second < first < 10
    assert published.main([str(path)]) == 0
    assert "plans.csv: 2 rows, error" in capsys.readouterr().out


def test_blocks_are_all_alike() -> None:
    model = Decoder(0, 64, 256, 4, 16, 128, fused=False)
    graph = published_costs.captured(model, False)
    where = published_costs.parts(graph)
    size = where.block[1] - where.block[0]
    assert where.before[1] + published_costs.LAYERS * size == where.behind[0]
    block, rest = published_costs.elements(model, 1)
    assert block == 12 * 64**2 + 13 * 64
    assert rest == 128 * 64 + 16 * 64 + 2 * 64


@pytest.mark.parametrize("tensor", [1, 2])
def test_a_block_counts_for_all_of_them(tensor: int) -> None:
    model = Decoder(0, 64, 256, 4, 16, 128, fused=False)
    found = published_costs.cluster("a100-80g", 2, 8, "infiniband-hdr-200")
    clock = published_costs.clock_of(found.device(0), "float16", "float16")
    names = ("forward", "backward", "waits", "backward_waits", "issued", "backward_issued", "sent")

    def parts(layers: int) -> list[list[float]]:
        own = published_costs.sheet(model, False, tensor, layers)
        table, where = published_costs.priced(own, found, tensor, 4, clock), published_costs.parts(own.graph)
        ranges = (where.before, where.block, where.behind, (0, len(own.graph.nodes)))
        return [[table.between(name, *each) for name in names] for each in ranges]

    three, five = parts(3), parts(5)
    assert three[1] == pytest.approx(five[1])
    if tensor == 1:  # elsewhere, the first and the last block may lie otherwise
        assert three[0] == pytest.approx(five[0])
        assert three[2] == pytest.approx(five[2])
        assert [a + 5 * b + c for a, b, c in zip(*three[:3], strict=True)] == pytest.approx(five[3])


def test_products_in_8_bits_are_quicker_and_nothing_else_is() -> None:
    own = published_costs.sheet(Decoder(0, 1024, 4096, 16, 512, 1024, fused=True), False, 1)
    found = published_costs.cluster("h100-80g", 1, 8, "roce-400")
    tables = [
        published_costs.priced(own, found, 1, 8, published_costs.clock_of(found.device(0), "bfloat16", products))
        for products in ("bfloat16", "float8")
    ]
    for position, node in enumerate(own.graph.nodes):
        plain, low = (table.between("forward", position, position + 1) for table in tables)
        assert low < plain if node.op.startswith("aten.linear") else low == pytest.approx(plain, abs=1e-12)


def test_scores_of_a_printed_line() -> None:
    cases = [Case(str(i), i, i * 1.1, "p") for i in range(1, 5)]
    assert published.summary(cases) == (
        "4 rows, error 10.0%, mean +10.0%; 1 problems, regret 0.00% (p95 0.0%), rank correlation 1.000"
    )
    assert math.isclose(cases[0].error, 0.1)


GPIPE = {
    "stages": "2",
    "microbatches": "4",
    "torchgpipe_samples_per_second": "41.133",
    "torchgpipe_speedup": "1.539",
    "gpipe_paper_speedup": "1.07",
}
SMALL = Experiment(2, 4, 8, (3, 3), layers=0, filters=32)


@pytest.mark.parametrize(
    ("layers", "filters", "published"),
    [(18, 208, "81.5M"), (18, 416, "319.0M"), (18, 544, "542.7M"), (36, 544, "1.06B"), (72, 512, "1.84B")],
)
def test_amoebanet_has_the_published_number_of_parameters(layers: int, filters: int, published: str) -> None:
    with torch.device("meta"):
        model = AmoebaNet(layers, filters)
    count = sum(parameter.numel() for parameter in model.parameters())
    assert published == (f"{count / 1e9:.2f}B" if count > 1e9 else f"{count / 1e6:.1f}M")
    assert len(model.blocks) == layers + 6


def test_amoebanet_classifies_images() -> None:
    scores = AmoebaNet(3, 16, classes=5)(torch.rand(2, 3, 224, 224))
    assert scores.shape == (2, 5)
    assert scores.isfinite().all()
    with pytest.raises(ValueError, match="divisible by 3"):
        AmoebaNet(4, 16)


def test_speedups_are_read(tmp_path: Path) -> None:
    other = {**GPIPE, "stages": "4", "microbatches": "8", "torchgpipe_speedup": "2.5", "gpipe_paper_speedup": ""}
    first, second = published_rows.read(write(tmp_path / "gpipe.csv", GPIPE, other))
    assert first.run == Experiment(2, 4, 256, (9, 15))
    assert second.run == Experiment(4, 8, 8 * 90, (3, 6, 7, 8))
    assert (first.speedup, second.speedup) == (1.539, 2.5)
    assert "1.07x" in first.name and "TPU" not in second.name
    with pytest.raises(PolylaneError, match="line 2: stages must be at most 8"):
        published_rows.read(write(tmp_path / "gpipe.csv", {**GPIPE, "stages": "9"}))


def test_experiments_divide_the_model() -> None:
    for run in published_gpipe.PUBLISHED:
        assert (sum(run.balance), len(run.balance)) == (24, run.stages)
        assert published_gpipe.experiment(run.stages, run.microbatches) == run
    assert published_gpipe.experiment(3, 4).balance == ()
    assert published_gpipe.experiment(8, 2).balance == (2, 2, 2, 3, 3, 4, 4, 4)


def test_nothing_is_recomputed_of_the_last_microbatch_but_a_single_one() -> None:
    found = published_gpipe.priced(SMALL.layers, SMALL.filters)
    for microbatches, recomputed in ((4, [2, 1, 0]), (1, [0])):
        run = replace(SMALL, microbatches=microbatches)
        prediction = predict(found, *published_gpipe.divided(found, run), run.batch, exact=False)
        messages = published_gpipe.travels(found, published_gpipe.divided(found, run)[0], 2)
        lane = [each.action for each in published_gpipe.tasks(prediction, messages, 0, 0.0)]
        passes = [a.microbatch for a in lane if a.kind is ActionKind.FORWARD]
        assert passes == [*range(microbatches), *recomputed]
        for before, after in itertools.pairwise(lane):  # recomputation goes on while the gradient travels
            assert after.kind is not ActionKind.FORWARD or before.kind is not ActionKind.RECEIVE


def test_a_stage_recomputes_while_it_would_wait() -> None:
    run = replace(SMALL, microbatches=1)
    found = published_gpipe.priced(run.layers, run.filters)
    partition, plan = published_gpipe.divided(found, run)
    first, last = predict(found, partition, plan, run.batch, exact=False).stages
    (message,) = published_gpipe.travels(found, partition, run.batch)
    assert [c.producer for c in partition.crossings] == [0, 0]  # what the last block gave, and what it was given
    assert message.seconds == pytest.approx(sum(c.bytes for c in partition.crossings) / 2 * 8 / (0.75 * 15.75e9))
    taken = first.passes.forward + 2 * last.passes.forward + last.passes.backward + first.passes.backward
    taken += 2 * (message.seconds + message.latency) + 5 * found.host_overhead + first.update_seconds
    assert published_gpipe.seconds(run) == pytest.approx(taken)


def test_speedups_of_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def small(stages: int, microbatches: int) -> Experiment:
        return Experiment(stages, microbatches, 4 * microbatches, layers=SMALL.layers, filters=SMALL.filters)

    monkeypatch.setattr(published_rows, "experiment", small)
    monkeypatch.setattr(published_gpipe, "BASE", small(2, 1))
    path = write(tmp_path / "gpipe.csv", {**GPIPE, "microbatches": "1", "torchgpipe_speedup": "1"}, GPIPE)
    assert published.main([str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "gpipe.csv: 2 rows, error" in printed[0]
    assert "+0.0%" in printed[2] and "1.000 x" in printed[2]
    assert 1 < published_gpipe.speedup(small(2, 4)) < 2
