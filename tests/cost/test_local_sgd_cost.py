"""Replicas that sum their parameters every so many steps, and nothing between (local SGD)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from polylane.cluster.cluster import Cluster
from polylane.cluster.cluster_file import from_mapping
from polylane.cluster.spec import parse
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.network.collectives import collective_seconds
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import Prediction, predict
from polylane.errors import PolylaneError
from polylane.graph.capture.capture import capture
from polylane.observe.timeline import Span, Timeline
from polylane.plan.spec import parse as spec_of
from polylane.planner import problem as setup
from polylane.planner.problem import fit_plan
from polylane.schedule.action import ActionKind
from polylane.yaml_file import parse as mapping
from tests.support import planning_graphs

SITES = """
hosts:
  - {devices: 2, device: a100-80g, link: nvlink-3, site: paris}
  - {devices: 2, device: a100-80g, link: nvlink-3, site: rome}
links:
  sites: {bandwidth: 1 Gb/s, latency: 10 ms}
"""


def predicted(
    plan: str,
    period: int,
    cluster: str | Cluster = "8:a100-80g",
    batch: int = 64,
    every: bool = False,
    chunks: int = 1,
    **how: object,
) -> Prediction:
    found = planning_graphs.basis(planning_graphs.blocks(8, 256), "8:a100-80g", TrainingOptions(**how))  # type: ignore[arg-type]
    found = replace(found, cluster=parse(cluster) if isinstance(cluster, str) else cluster)
    spec = spec_of(f"{plan},every={period}").with_chunks(chunks)
    return predict(found, *fit_plan(found, spec, batch), batch, every=every)


def sums(timeline: Timeline | None, rank: int = 0) -> list[Span]:
    assert timeline is not None
    return [s for s in timeline.spans if s.action.kind is ActionKind.REDUCE and s.rank == rank]


@pytest.mark.parametrize("plan, period", [("data=4", 1), ("pipeline=2,tensor=2", 8), ("data=1", 32)])
def test_one_replica_or_every_step_is_as_it_was(plan: str, period: int) -> None:
    found = planning_graphs.basis(planning_graphs.blocks(8, 256), "8:a100-80g")
    plain = predict(found, *setup.fit_plan(found, spec_of(plan), 64), 64)
    again = predicted(plan, period)
    assert (again.timeline, again.local_step_timeline, again.seconds) == (plain.timeline, None, plain.seconds)


@pytest.mark.parametrize("period", [2, 32])
@pytest.mark.parametrize("replicas", [2, 8])
def test_a_step_is_that_of_one_replica_and_its_share_of_a_sum(period: int, replicas: int) -> None:
    found = predicted(f"data={replicas}", period)
    alone = predicted("data=1", 1, batch=64 // replicas)
    each = [
        collective_seconds(
            parse("8:a100-80g"),
            "all_reduce",
            s.bytes / bytes_per_rank("all_reduce", 1, replicas),
            range(replicas),
            None,
        )
        for s in sums(found.timeline)
    ]
    assert found.local_step_timeline is not None and not sums(found.local_step_timeline)
    assert found.local_step_timeline.makespan() == pytest.approx(alone.seconds, rel=1e-9)
    assert found.seconds == pytest.approx(alone.seconds + sum(each) / period, rel=1e-5)


def test_parameters_are_summed_after_the_step_once_each() -> None:
    found = predicted("data=4", 8)
    spans, (step,) = sums(found.timeline), [s for s in found.timeline.spans if s.action.kind is ActionKind.STEP]
    assert min(s.start for s in spans) >= step.end
    parameters = sum(p.bytes for p in planning_graphs.blocks(8, 256).parameters.values())
    assert sum(s.bytes for s in spans) == pytest.approx(bytes_per_rank("all_reduce", parameters, 4), rel=1e-3)
    mean = found.mean_over_period(lambda timeline: sum(s.bytes for s in sums(timeline)) if sums(timeline) else 0.0)
    assert mean == pytest.approx(sum(s.bytes for s in spans) / 8)


def test_masters_are_summed_where_passes_run_in_16_bits() -> None:
    low, whole = (predicted("data=4", 8, dtype=dtype) for dtype in ("bfloat16", "float32"))
    assert sum(s.bytes for s in sums(low.timeline)) == sum(s.bytes for s in sums(whole.timeline))


@pytest.mark.parametrize("plan", ["data=2,pipeline=2", "data=2,tensor=2", "data=2,pipeline=2,sequence=2"])
def test_one_worker_stands_for_all_that_are_like_it(plan: str) -> None:
    few, every = predicted(plan, 4), predicted(plan, 4, every=True)
    assert few.seconds == pytest.approx(every.seconds, rel=1e-9)
    assert few.utilization == pytest.approx(every.utilization, rel=1e-9)
    assert few.utilization + few.moving + few.waiting + few.bubble == pytest.approx(1)


def test_sums_within_a_replica_stay() -> None:
    """Along the sequence every rank has a summand of each gradient, of its own replica or of all."""
    alone, together = predicted("data=2,sequence=2", 4, every=True), predicted("data=1,sequence=2", 1, batch=32)
    assert [s.bytes for s in sums(alone.local_step_timeline)] == [s.bytes for s in sums(together.timeline)]
    assert alone.local_step_timeline is not None
    assert alone.local_step_timeline.makespan() == pytest.approx(together.seconds, rel=1e-9)


def test_stages_that_hold_the_same_weights_still_sum() -> None:
    found = planning_graphs.basis(planning_graphs.example("gpt"), "4:a100-80g")
    prediction = predict(found, *setup.fit_plan(found, spec_of("data=2,pipeline=2,every=4"), 8), 8)
    tied = [s for s in sums(prediction.local_step_timeline) if str(s.action.value).startswith("tied")]
    assert tied and len(tied) == len(sums(prediction.local_step_timeline))


def test_interleaved_stages_sum_their_parameters_too() -> None:
    found = predicted("data=2,pipeline=2,microbatches=4", 4, chunks=2)
    assert not sums(found.local_step_timeline) and sums(found.timeline)
    assert (
        found.local_step_timeline is not None
        and found.local_step_timeline.makespan() < found.seconds < found.timeline.makespan()
    )


# Slow links ----------------------------------------------------------------------------------------------------------


def test_between_sites_a_sum_takes_what_their_link_takes() -> None:
    cluster = from_mapping(mapping(SITES))
    seldom, often = predicted("data=4", 32, cluster), predicted("data=4", 1, cluster)
    parameters = sum(p.bytes for p in planning_graphs.blocks(8, 256).parameters.values())
    # Both sites' devices share their site's connection, over which each way at least one sum goes.
    least = parameters / (1e9 / 8)
    taken = sum(s.end - s.start for s in sums(seldom.timeline))
    assert taken >= least
    assert often.seconds >= least and seldom.seconds < often.seconds / 10
    assert seldom.seconds >= least / 32


def test_a_line_says_sites_as_a_file_does() -> None:
    file = from_mapping(mapping(SITES.replace("{bandwidth: 1 Gb/s, latency: 10 ms}", "internet-1g")))
    line = parse("2x1x2:a100-80g,sites=internet-1g")
    for period in (1, 32):
        assert predicted("data=4", period, line).seconds == predicted("data=4", period, file).seconds


def test_replicas_that_step_alone_share_no_statistics() -> None:
    """Batch normalization then sees the samples of one replica: nothing is summed inside its passes."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    trainable = [name for name, _ in model.named_parameters()]
    basis = planning_graphs.basis(
        capture(model, planning_graphs.mean_square, torch.zeros(2, 16), trainable=trainable), "4:a100-80g"
    )
    lines = ("data=4", "data=4,every=4", "data=4,servers=1,staleness=2", "data=4,servers=1")
    waits = [predict(basis, *setup.fit_plan(basis, spec_of(s), 64), 64).stages[0].passes.waits for s in lines]
    assert waits[0] == waits[3] > 0 and waits[1] == waits[2] == 0


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "plan, period, sentence",
    [
        ("data=4", 0, "every=0 must be a whole number of at least 1"),
        ("data=4,shard=optimizer", 8, "shard: optimizer needs replicas that are alike"),
        ("[data=2 | 1]", 8, "every: 8 needs as many replicas of every stage"),
    ],
)
def test_what_cannot_be_is_refused(plan: str, period: int, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        predicted(plan, period)
