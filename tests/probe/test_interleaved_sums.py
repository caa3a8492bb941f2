"""Sums between computations: what two loops differ by, on a clock that is played, and what a step then costs."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import yaml

from polylane.cluster import cluster_file as read
from polylane.cluster.catalogue import device_presets
from polylane.cluster.cluster import Cluster
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cost.cost_table import INTERLEAVED_SUM
from polylane.cost.network.collectives import collective_seconds, interleaved_sum_seconds, make_collective_clock
from polylane.errors import PolylaneError
from polylane.probe.conclusion import conclude
from polylane.probe.interleaved_sums import time_delay
from polylane.probe.measure import TransportMeasurements, WorkerMeasurements
from polylane.yaml_file import parse
from tests.support.known_measurements import cluster, messages, operators

LINK = Link(bandwidth=8e9, latency=4e-5, hop=1e-6, sums={2: 5e-4, 4: 1.5e-3})
FILE = """
polylane: 1
hosts:
- {devices: 4, cores: 2, device: cpu, link: {bandwidth: 8 GB/s, latency: 30 us}}
"""


@pytest.mark.parametrize("count", [1, 8, 100])
def test_the_delay_is_what_a_sum_adds_whatever_is_computed(count: int) -> None:
    now, computed, waits = [0.0], 1.25e-3, 4.5e-4

    def tick(seconds: float) -> None:
        now[0] += seconds

    found = time_delay(lambda: tick(computed), lambda: tick(waits), count, lambda: tick(1e-5), lambda: now[0])
    assert found == pytest.approx(waits, rel=1e-9)


def test_a_computation_that_sums_slow_down_counts_with_the_sum() -> None:
    """Caches that are cold behind a wait: no clock around the sum alone would see them."""
    now, cold = [0.0], [False]

    def compute() -> None:
        now[0] += 1.3e-3 if cold[0] else 1e-3
        cold[0] = False

    def add_up() -> None:
        now[0], cold[0] = now[0] + 1e-4, True

    found = time_delay(compute, add_up, 10, lambda: None, lambda: now[0])
    assert found == pytest.approx(1e-4 + 0.9 * 3e-4, rel=1e-9)  # the first computation follows no sum


def test_a_small_sum_takes_what_was_measured_and_its_bytes() -> None:
    host = cluster(LINK, 4)
    for ranks, delay in ((range(2), 5e-4), (range(3), 1e-3), (range(4), 1.5e-3)):
        assert interleaved_sum_seconds(host, 0.0, ranks) == pytest.approx(delay)
        more = collective_seconds(host, "all_reduce", 4096.0, ranks, None)
        more -= collective_seconds(host, "all_reduce", 0.0, ranks, None)
        assert make_collective_clock(host, ranks)(INTERLEAVED_SUM, 4096.0) == pytest.approx(delay + more)
    assert LINK.sum_delay(9) == 1.5e-3
    assert interleaved_sum_seconds(host, 4096.0, range(1)) == 0


def test_a_link_without_the_figure_sums_as_at_any_other_place() -> None:
    host = cluster(LINK.model_copy(update={"sums": {}}), 4)
    for size in (0.0, 512.0, 1e6):
        there = collective_seconds(host, "all_reduce", size, range(4), None)
        assert make_collective_clock(host, range(4))(INTERLEAVED_SUM, size) == there


def test_files_without_the_new_figures_are_read_and_written_as_before() -> None:
    host = read.from_mapping(parse(FILE))
    assert host.hosts[0].crowded is None and host.link((0, 1)).sums == {}
    assert host.for_workers(4) is host
    assert "crowded" not in read.dump(host) and "sums" not in read.dump(host)


def test_a_crowded_host_has_its_own_link_beyond_its_cores() -> None:
    data: dict[str, Any] = yaml.safe_load(FILE)
    data["hosts"][0]["crowded"] = {"preset": "shared-memory", "latency": "2 ms", "sums": {2: "900 us", 4: "1.5 ms"}}
    host = read.from_mapping(data)
    assert host.for_workers(1) is host and host.for_workers(2) is host
    crowd = host.for_workers(3)
    assert crowd.link((0, 1)).latency == 2e-3 and crowd.link((0, 1)).sums == {2: 9e-4, 4: 1.5e-3}
    assert host.for_workers(4) is crowd  # so that what is cached by it is found again
    assert host.link((0, 1)).latency == 3e-5
    assert read.from_mapping(parse(read.dump(host))) == host
    two = replace(host, hosts=(host.hosts[0].model_copy(update={"count": 2, "crowded": None}),), links=_BETWEEN)
    assert two.for_workers(8) is two


_BETWEEN = read.from_mapping({"hosts": [{"count": 2, "device": "cpu"}], "links": {"hosts": "ethernet-10g"}}).links


@pytest.mark.parametrize("given", ["3 GB", -1.0])
def test_sums_are_times(given: object) -> None:
    data: dict[str, Any] = yaml.safe_load(FILE)
    data["hosts"][0]["crowded"] = {"preset": "shared-memory", "sums": {2: given}}
    with pytest.raises(PolylaneError, match="sums"):
        read.from_mapping(data)


def test_a_probes_figures_are_in_its_file() -> None:
    device = Device.model_validate(device_presets()["cpu"])
    slow = LINK.model_copy(update={"latency": 1e-3, "sums": {}})
    crowd = TransportMeasurements(tuple(messages(slow, 4)), {2: 7e-4, 4: 1.5e-3})
    seen = WorkerMeasurements(
        1, None, tuple(operators(device)), device.bandwidth, tuple(messages(LINK, 2)), {}, {}, {2: 5e-4}, crowd
    )
    found = conclude(seen, 4)
    host: Cluster = read.from_mapping(parse(found.text("now", 0.0)))
    assert host == found.cluster
    assert host.link((0, 1)).sums == {2: 5e-4} and host.for_workers(64).link((0, 1)).sums == {2: 7e-4, 4: 1.5e-3}
    assert math.isclose(host.link((0, 1)).latency, 4.2e-5, rel_tol=0.01)  # of two ranks: with both steps
