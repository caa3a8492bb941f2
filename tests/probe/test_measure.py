"""A quick measurement of this machine, in real workers; and the file that it becomes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from polylane.cluster import cluster_file as read
from polylane.errors import PolylaneError
from polylane.probe import measure
from polylane.probe.conclusion import conclude
from polylane.probe.effort import Effort, concurrent_counts, thorough
from polylane.probe.link_speed import summing_groups
from polylane.probe.measure import WorkerMeasurements, further_dtypes, measure_machine, traffic_worlds
from polylane.yaml_file import parse
from tests.support.known_measurements import quick
from tests.support.workers.child_processes import children

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def told() -> Counter[str]:
    return Counter()


@pytest.fixture(scope="module")
def others() -> set[int]:
    """Processes of other tests that are still there."""
    return children()


@pytest.fixture(scope="module")
def seen(told: Counter[str], others: set[int]) -> WorkerMeasurements:
    def tell(what: str, parts: int) -> None:
        told[what] += parts

    return measure_machine(2, quick(), tell)


def figures(data: Any) -> Iterator[float]:
    if isinstance(data, dict):
        for value in data.values():
            yield from figures(value)
    elif isinstance(data, float):
        yield data


def test_everything_was_measured(seen: WorkerMeasurements, others: set[int]) -> None:
    effort = quick()
    assert [each.name for each in seen.timed_cases[: len(effort.cases)]] == [case.name for case in effort.cases]
    assert "float64" in {each.dtype for each in seen.timed_cases}
    assert {(each.kind, each.size) for each in seen.timed_traffic} == {
        (kind, size)
        for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
        for size in effort.sizes
    }
    assert set(seen.contention) == {2} and seen.threads == 1 and seen.gpu is None
    for each in seen.timed_cases:
        assert 0 < each.forward < 1 and 0 < each.backward < 1
    for carried in seen.timed_traffic:
        assert 0 < carried.seconds < 1 and 0 < carried.cpu < 4
    assert children() <= others


def test_progress_is_told_to_the_last_part(seen: WorkerMeasurements, told: Counter[str]) -> None:
    assert sum(told.values()) == quick().progress_ticks(2, len(further_dtypes("cpu")), traffic_worlds(2))
    assert set(told) == {"operators", "messages", "workers at once", "sums between computations"}


def test_a_file_says_it_and_reads_back_as_the_same_cluster(seen: WorkerMeasurements) -> None:
    measured = conclude(seen, 2)
    text = measured.text("2026-01-02 03:04", 0.5)
    assert read.from_mapping(parse(text)) == measured.cluster
    assert text.startswith("# Measured by polylane probe, 2026-01-02 03:04: 2 workers of 1 thread, torch ")
    assert measured.device.worst_case in text
    cluster, device, link = measured.cluster, measured.cluster.device(0), measured.cluster.link((0, 1))
    assert cluster.count == 2 and cluster.cores(0) is not None
    assert 0 < (cluster.contention(0) or {})[2] <= 1
    assert device.type == "cpu" and 1e8 < device.achieved["float32"] <= device.flops["float32"] < 1e13
    assert 1e8 < device.bandwidth < 1e13 and 1e-8 < device.overhead < 1e-2
    assert 1e6 < link.bandwidth < 1e13 and 0 < link.cpu < 4
    assert all(math.isfinite(each) and each >= 0 for each in figures(device.model_dump() | {"link": link.model_dump()}))
    assert all(float(f"{each:.4g}") == each for each in figures(device.model_dump()))  # nobody can read more digits


def test_one_worker_has_no_links() -> None:
    seen = measure_machine(1, quick())
    assert seen.timed_traffic == () and seen.contention == {}
    measured = conclude(seen, 1)
    assert measured.cluster.count == 1 and measured.link is None
    assert read.from_mapping(parse(measured.text("now", 0.0))) == measured.cluster


def test_copies_that_cannot_run_at_once_are_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "measure_model_contention", lambda *arguments: {})
    with pytest.raises(PolylaneError, match="3 copies of a small model cannot run here at once; give fewer --workers"):
        measure._measure_contention(quick(), 3)


@pytest.mark.parametrize("workers", [0, 100_000])
def test_workers_that_cannot_be_are_refused_before_any_starts(workers: int, others: set[int]) -> None:
    with pytest.raises(PolylaneError, match="--workers"):
        measure_machine(workers, quick())
    assert children() <= others


def test_who_computes_side_by_side() -> None:
    assert [concurrent_counts(n) for n in (1, 2, 3, 4, 6, 8)] == [[], [2], [2, 3], [2, 4], [2, 4, 6], [2, 4, 8]]


@pytest.mark.parametrize("workers", [2, 4])
def test_a_thorough_measurement_fits_in_a_minute(workers: int) -> None:
    effort: Effort = thorough("cpu")
    operators = (len(effort.cases) + 3 * len(effort.dtype_cases)) * effort.case_seconds
    worlds, together = (2, workers) if workers > 2 else (2,), 1 + len(concurrent_counts(workers))
    sums = sum(len(summing_groups(count)) * effort.sums_rounds for count in worlds)
    carried = effort.progress_ticks(workers, 0, worlds) / effort.rounds - len(effort.cases) - together - sums
    added = 2 * sums * effort.sums_seconds  # two loops for each tick; how many fit is counted by all workers at once
    shared = together * effort.contention_seconds
    assert effort.rounds * (operators + carried * effort.traffic_seconds + shared + added) < 45
