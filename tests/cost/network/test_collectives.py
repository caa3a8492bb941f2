"""Seconds of collectives and messages on clusters, in figures that one can work out by hand."""

import pytest

from polylane.cluster.cluster import Cluster, Hosts, Links
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cluster.rank_span import Ranks
from polylane.cluster.spec import parse
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.network.collectives import (
    collective_curves,
    collective_seconds,
    fastest,
    message_seconds,
)

GB = 1e9
DEVICE = Device(kind="device", memory=80 * 10**9, flops={"bfloat16": 3e14}, achieved={"bfloat16": 2e14}, bandwidth=2e12)
INSIDE = Link(kind="inside", bandwidth=100e9, latency=10e-6, hop=1e-6)
OUTSIDE = Link(kind="outside", bandwidth=10e9, total=20e9, latency=50e-6, hop=20e-6)


def boxes(hosts: int, devices: int, inside: Link | None = INSIDE, outside: Link = OUTSIDE) -> Cluster:
    return Cluster((Hosts(count=hosts, devices=devices, device=DEVICE, link=inside),), Links(hosts=outside))


def ring(cluster: Cluster, kind: str, size: float, ranks: Ranks, groups: int | None = 1) -> float:
    return collective_curves(cluster.span(ranks), kind, groups)[0].seconds(size)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "reduce_scatter"])
def test_a_ring_inside_a_host_takes_what_every_rank_sends_and_its_steps(kind: str) -> None:
    steps = 14 if kind == "all_reduce" else 7
    expected = 10e-6 + steps * 1e-6 + bytes_per_rank(kind, GB, 8) / 100e9
    assert ring(boxes(1, 8), kind, GB, range(8)) == pytest.approx(expected, rel=1e-12)


def test_an_all_to_all_takes_what_every_rank_sends() -> None:
    expected = 10e-6 + 7e-6 + bytes_per_rank("all_to_all", GB, 8) / 100e9
    assert ring(boxes(1, 8), "all_to_all", GB, range(8)) == pytest.approx(expected, rel=1e-12)


def test_a_broadcast_passes_all_of_the_value_on() -> None:
    assert ring(boxes(1, 4), "broadcast", GB, range(4)) == pytest.approx(10e-6 + 3e-6 + GB / 100e9, rel=1e-12)


def test_between_hosts_the_slowest_link_counts_and_every_hop_is_that_of_its_level() -> None:
    """Two hosts of four: a ring crosses from host to host once, and each host has the links of all four."""
    expected = 50e-6 + 2 * (6 * 1e-6 + 20e-6) + 2 * 7 / 8 * GB / 20e9
    assert ring(boxes(2, 4), "all_reduce", GB, range(8)) == pytest.approx(expected, rel=1e-12)


def test_one_device_of_a_host_has_but_its_own_bandwidth() -> None:
    expected = 50e-6 + 2 * 20e-6 + GB / 10e9
    assert ring(boxes(2, 4), "all_reduce", GB, range(0, 8, 4)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(("groups", "rate"), [(1, 10e9), (2, 10e9), (4, 5e9), (None, 5e9)])
def test_groups_that_share_a_card_get_their_part_of_it(groups: int | None, rate: float) -> None:
    """Four devices share what two of them could use."""
    expected = 50e-6 + 2 * 20e-6 + GB / rate
    assert ring(boxes(2, 4), "all_reduce", GB, range(0, 8, 4), groups) == pytest.approx(expected, rel=1e-12)


def test_devices_of_a_host_share_a_bus() -> None:
    bus = Link(kind="bus", bandwidth=10e9, total=20e9, latency=0.0)
    times = [ring(boxes(1, 8, bus), "all_gather", GB, range(n), 1) for n in (2, 4, 8)]
    assert times == pytest.approx([1 / 2 * GB / 10e9, 3 / 4 * GB / 5e9, 7 / 8 * GB / 2.5e9])
    assert ring(boxes(1, 8, bus), "all_gather", GB, range(2), 4) == pytest.approx(1 / 2 * GB / 2.5e9)
    assert ring(boxes(1, 8, bus), "all_gather", GB, range(2), None) == pytest.approx(1 / 2 * GB / 2.5e9)


def test_an_all_to_all_between_hosts_sends_each_message_straight() -> None:
    """Of what four ranks of a host hold, half leaves it."""
    expected = 50e-6 + 6 * 1e-6 + 20e-6 + (4 * 4 / 8**2) * GB / 20e9
    assert ring(boxes(2, 4), "all_to_all", GB, range(8)) == pytest.approx(expected, rel=1e-12)


def test_a_tree_has_few_steps_between_hosts() -> None:
    """64 hosts: six steps up and six down, where a ring takes 126."""
    cluster = boxes(64, 1, None)
    _, tree = collective_curves(cluster.span(range(64)), "all_reduce", 1)
    assert tree.algorithm == "tree"
    assert tree.seconds(GB) == pytest.approx(50e-6 + 12 * 20e-6 + 2 / 0.92 * GB / 10e9, rel=1e-12)
    small, large = (fastest(cluster, "all_reduce", size, range(64)) for size in (1e3, 10 * GB))
    assert small is not None and large is not None
    assert (small.algorithm, large.algorithm) == ("tree", "ring")
    assert small.seconds(1e3) == pytest.approx(290e-6, rel=1e-2)


def test_what_a_switch_adds_up_passes_the_links_but_once() -> None:
    link = INSIDE.model_copy(update={"switch": 0.8, "fraction": 0.9})
    cluster = boxes(1, 8, link)
    assert collective_seconds(cluster, "all_reduce", GB, range(8)) == pytest.approx(
        12e-6 + 9 / 8 * GB / 80e9, rel=1e-12
    )
    assert collective_seconds(cluster, "all_gather", GB, range(8)) == ring(cluster, "all_gather", GB, range(8))
    chosen = [fastest(cluster, "all_reduce", 10 * GB, range(n)) for n in (2, 3, 4)]
    assert [each.algorithm for each in chosen if each is not None] == ["ring", "ring", "switch"]


def test_two_hosts_hand_their_sums_to_each_other_but_once() -> None:
    """A tree over two: each of them sends the value once, where a ring's have 2 · 7/8 of it to pass on."""
    found = fastest(boxes(2, 4), "all_reduce", GB, range(8))
    assert found is not None
    assert found.algorithm == "tree"
    assert found.seconds(GB) == pytest.approx(50e-6 + 2 * (3 * 1e-6 + 20e-6) + GB / (0.92 * 20e9), rel=1e-12)


def test_messages_reach_half_of_the_bandwidth_at_the_size_that_the_link_says() -> None:
    link = Link(bandwidth=100e9, latency=0.0, half=1e6)
    cluster = boxes(1, 2, link)
    assert ring(cluster, "all_reduce", 1e6, range(2)) == pytest.approx(2 * 1e6 / 100e9)
    assert ring(cluster, "all_reduce", 1e14, range(2)) == pytest.approx(1e14 / 100e9, rel=1e-3)


def test_the_ramp_is_that_of_what_each_device_sends() -> None:
    """Four cards of a host send a quarter each: as long as one card takes for a quarter."""
    link = Link(bandwidth=10e9, latency=0.0, half=1e6)
    many = ring(boxes(2, 4, INSIDE.model_copy(update={"latency": 0.0, "hop": 0.0}), link), "all_reduce", GB, range(8))
    assert many == pytest.approx(ring(boxes(2, 1, None, link), "all_reduce", 7 / 4 * GB / 4, range(2)), rel=1e-12)


def test_an_unknown_collective_is_refused() -> None:
    for kind in ("reduce", "send"):
        with pytest.raises(ValueError, match=f"{kind} is no collective"):
            collective_seconds(boxes(1, 8), kind, 1.0, range(8))


def test_no_collective_takes_no_time_and_no_bytes_take_their_latency() -> None:
    assert collective_seconds(boxes(1, 8), "", GB, range(8)) == 0.0
    assert collective_seconds(boxes(1, 8), "all_gather", 0.0, range(8)) == pytest.approx(17e-6)
    assert message_seconds(boxes(1, 8), 0.0, 0, 1) == pytest.approx(11e-6)


def test_a_message_takes_its_latency_one_hop_and_its_bytes() -> None:
    cluster = boxes(2, 4)
    assert message_seconds(cluster, GB, 0, 1) == pytest.approx(11e-6 + GB / 100e9)
    assert message_seconds(cluster, GB, 0, 4) == pytest.approx(70e-6 + GB / 10e9)
    assert message_seconds(cluster, GB, 3, 3) == 0.0


@pytest.mark.parametrize(("streams", "rate"), [(1, 10e9), (2, 10e9), (4, 5e9)])
def test_messages_that_share_a_card_get_their_part_of_it(streams: int, rate: float) -> None:
    assert message_seconds(boxes(2, 4), GB, 0, 4, streams) == pytest.approx(70e-6 + GB / rate)


def test_a_message_to_another_rack_leaves_its_host_first() -> None:
    hosts = tuple(Hosts(count=2, devices=1, device=DEVICE, rack=rack) for rack in "ab")
    racks = Link(kind="racks", bandwidth=100e9, latency=1e-3)
    cluster = Cluster(hosts, Links(hosts=OUTSIDE, racks=racks))
    assert message_seconds(cluster, GB, 0, 3) == pytest.approx(1e-3 + GB / 10e9)
    assert message_seconds(cluster, GB, 0, 1) == pytest.approx(70e-6 + GB / 10e9)
    assert ring(cluster, "all_gather", GB, range(0, 4, 2)) == pytest.approx(1e-3 + 1 / 2 * GB / 10e9)


# All-reduce times of one host, in seconds: vTrain's traces.
MEASURED = [
    ("8:a100-80g", 2, 2**25, 0.00023),
    ("8:a100-80g", 2, 2**30, 0.0054428),
    ("8:a100-80g", 4, 2**22, 7.732e-05),
    ("8:a100-80g", 4, 2**28, 0.001929),
    ("8:a100-80g", 8, 2**23, 0.0001343),
    ("8:a100-80g", 8, 2**30, 0.008193),
    ("8:v100", 2, 2**25, 0.0015089),
    ("8:v100", 4, 2**25, 0.0006184),
    ("8:v100", 6, 2**28, 0.0098032),
    ("8:v100", 8, 2**30, 0.013969),
]


@pytest.mark.parametrize(("cluster", "ranks", "size", "measured"), MEASURED)
def test_presets_take_the_time_that_was_measured(cluster: str, ranks: int, size: int, measured: float) -> None:
    assert collective_seconds(parse(cluster), "all_reduce", size, range(ranks)) == pytest.approx(measured, rel=0.08)
