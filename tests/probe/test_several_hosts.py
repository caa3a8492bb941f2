"""Several hosts as a cluster: which are near each other, which devices are slow, and how their ranks are numbered."""

from __future__ import annotations

import itertools

import pytest

from polylane.errors import PolylaneError
from polylane.probe.effort import KB, MB
from polylane.probe.health.facts import WorkerHealth
from polylane.probe.health.meeting import PairMeasurement
from polylane.probe.several_hosts import (
    HostWorkers,
    choose_sizes,
    find_racks,
    find_speeds,
    group_workers,
    refuse_unreached,
)

FAST, SLOW = 1.2e9, 1.1e8


def measured(racks: str, slow_direction: bool = False) -> list[PairMeasurement]:
    """Pairs of hosts, a letter for the rack of each; links in a rack are fast."""
    pairs = itertools.permutations(range(len(racks)), 2)
    return [
        PairMeasurement(a, b, "", 1e-4, FAST if racks[a] == racks[b] or (slow_direction and a < b) else SLOW)
        for a, b in pairs
    ]


@pytest.mark.parametrize("slow_direction", [False, True])
@pytest.mark.parametrize(
    ("racks", "numbers"), [("aa", [0, 0]), ("aab", [0, 0, 1]), ("abab", [0, 1, 0, 1]), ("abc", [0, 0, 0])]
)
def test_hosts_that_reach_each_other_fast_are_in_one_rack(racks: str, numbers: list[int], slow_direction: bool) -> None:
    assert find_racks(len(racks), measured(racks, slow_direction)) == numbers


def test_hosts_of_equal_links_are_in_one_rack_however_slow_these_are() -> None:
    assert find_racks(3, measured("abc")) == [0, 0, 0]


def worker(rank: int, host: str, seconds: float = 1.0) -> WorkerHealth:
    return WorkerHealth(rank=rank, host=host, machine=host, address=host, cores=2, matmul_seconds=seconds)


def test_workers_are_grouped_by_host() -> None:
    hosts = group_workers([worker(0, "x"), worker(1, "x"), worker(2, "y")], ["cpu"] * 3)
    assert hosts == [HostWorkers("x", "x", range(2), "cpu", 2), HostWorkers("y", "y", range(2, 3), "cpu", 2)]
    with pytest.raises(PolylaneError, match="x has the ranks 0, 2: a cluster file numbers devices host by host"):
        group_workers([worker(0, "x"), worker(1, "y"), worker(2, "x")], ["cpu"] * 3)


def test_a_slow_device_has_a_speed_beside_those_of_its_kind() -> None:
    times = {"x": (1.0, 1.0), "y": (1.1, 2.0), "z": (9.0, 9.0)}
    rows = [(host, seconds) for host, pair in times.items() for seconds in pair]
    facts = [worker(rank, host, seconds) for rank, (host, seconds) in enumerate(rows)]
    kinds = ["cpu"] * 4 + ["another cpu"] * 2
    assert find_speeds(group_workers(facts, kinds), facts) == {3: 0.5}


def test_a_host_that_is_not_reached_is_named() -> None:
    hosts = group_workers([worker(0, "x"), worker(1, "y")], ["cpu"] * 2)
    with pytest.raises(PolylaneError, match=r"x does not reach y \(timed out\); polylane doctor"):
        refuse_unreached(hosts, [PairMeasurement(0, 1, "timed out"), PairMeasurement(1, 0)])


def test_a_slow_link_is_measured_with_small_messages() -> None:
    sizes = (KB, MB, 4 * MB, 16 * MB)
    assert choose_sizes(sizes, 1.25e8) == sizes and choose_sizes(sizes, 1.25e7) == (KB, MB)
