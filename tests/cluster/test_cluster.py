"""Clusters: ranks, hosts, levels and links."""

import copy
import pickle
from dataclasses import replace

import pytest

from polylane.cluster.cluster import Cluster, Hosts, Links, ranks_along
from polylane.cluster.device import Device
from polylane.cluster.link import Link
from polylane.cluster.rank_span import Level
from polylane.cluster.spec import parse
from polylane.errors import PolylaneError

FAST = Device(kind="fast", memory=80 * 10**9, flops={"bfloat16": 3e14}, achieved={"bfloat16": 2e14}, bandwidth=2e12)
SLOW = FAST.model_copy(update={"kind": "slow", "price": 1.0})
INSIDE = Link(kind="inside", bandwidth=300e9, latency=10e-6)
BUS = Link(kind="bus", bandwidth=10e9, latency=20e-6)
HOSTS = Link(kind="hosts", bandwidth=25e9, latency=30e-6)
RACKS = Link(kind="racks", bandwidth=12e9, total=100e9, latency=40e-6)
SITES = Link(kind="sites", bandwidth=1e9, total=1e9, latency=10e-3)


def tree() -> Cluster:
    """Two racks at one site, one at another: 2 x 4 and 1 x 2 devices, then 2 x 1 in the second rack, 1 x 4 far away."""
    hosts = (
        Hosts(count=2, devices=4, device=FAST, link=INSIDE, rack="a", site="here"),
        Hosts(count=1, devices=2, device=SLOW, link=BUS, rack="a", site="here", cores=1),
        Hosts(count=2, devices=1, device=SLOW, rack="b", site="here", speed=0.5, price=3.0),
        Hosts(count=1, devices=4, device=FAST, link=INSIDE, rack="a", site="there"),
    )
    return Cluster(hosts, Links(hosts=HOSTS, racks=RACKS, sites=SITES), {1: 0.8, 10: 0.5})


def test_ranks_count_the_devices_host_by_host() -> None:
    cluster = tree()
    assert cluster.count == 16
    assert [cluster.host(rank) for rank in range(16)] == [0] * 4 + [1] * 4 + [2] * 2 + [3, 4] + [5] * 4
    assert [cluster.device(rank).kind for rank in (0, 7, 8, 11, 12)] == ["fast", "fast", "slow", "slow", "fast"]
    assert [cluster.cores(rank) for rank in (0, 8, 9, 10)] == [None, 1, 1, None]


def test_what_workers_of_a_host_share() -> None:
    alone = Hosts(devices=2, device=FAST, link=BUS)
    sharing = Hosts(devices=2, device=FAST, link=BUS, cores=2, contention={2: 0.9})
    both = Cluster((alone, sharing), Links(hosts=HOSTS))
    assert [(both.cores(rank), both.contention(rank)) for rank in (0, 2)] == [(None, None), (2, {2: 0.9})]


def test_a_straggler_has_the_product_of_all_its_factors() -> None:
    cluster = tree()
    assert [cluster.device(rank).speed for rank in (0, 1, 8, 10, 11)] == [1.0, 0.8, 1.0, 0.25, 0.5]


def test_the_price_is_that_of_all_devices_and_a_group_may_have_its_own() -> None:
    cluster = tree()
    assert cluster.price == 2 * 1.0 + 2 * 3.0
    assert (cluster.device(8).price, cluster.device(10).price) == (1.0, 3.0)


def test_the_different_devices_of_ranks() -> None:
    cluster = tree()
    assert [(device.kind, device.speed) for device in cluster.devices(range(2))] == [("fast", 0.8), ("fast", 1.0)]
    assert [device.speed for device in cluster.devices((1,))] == [0.8]
    assert [device.kind for device in cluster.devices(range(15, -1, -4))] == ["fast", "slow", "fast"]
    for ranks in (range(16), range(1, 16, 5), (10,), (0, 9), range(7, 2, -2)):
        every = {(cluster.device(rank).kind, cluster.device(rank).speed) for rank in ranks}
        found = [(device.kind, device.speed) for device in cluster.devices(ranks)]
        assert set(found) == every


@pytest.mark.parametrize(
    ("ranks", "level", "kind"),
    [
        ((0, 3), Level.HOST, "inside"),
        ((8, 9), Level.HOST, "bus"),
        (range(0, 8, 4), Level.RACK, "hosts"),
        ((0, 1, 9), Level.RACK, "hosts"),
        ((10, 11), Level.RACK, "hosts"),
        ((9, 10), Level.SITE, "racks"),
        (range(12), Level.SITE, "racks"),
        ((0, 12), Level.CLUSTER, "sites"),
        (range(15, 2, -4), Level.CLUSTER, "sites"),
    ],
)
def test_the_narrowest_level_that_has_all_ranks(ranks: range | tuple[int, ...], level: Level, kind: str) -> None:
    cluster = tree()
    assert cluster.level(ranks) == level
    assert cluster.link(ranks).kind == kind


def test_the_devices_of_a_site_share_its_connection() -> None:
    link = Link(kind="far", bandwidth=1e9, latency=0.0)
    assert Links(hosts=link, racks=link).racks == link
    assert Links(sites=link).sites == link.model_copy(update={"total": 1e9})
    wide = link.model_copy(update={"total": 8e9})
    assert Links(sites=wide).sites == wide


def test_racks_of_the_same_name_at_two_sites_are_two_racks() -> None:
    assert tree().level((0, 12)) == Level.CLUSTER


def test_one_device_needs_no_link() -> None:
    assert tree().level((5,)) == Level.DEVICE
    with pytest.raises(ValueError, match="one device needs no link"):
        tree().link((5,))


def test_where_hosts_have_links_of_their_own_the_slowest_one_counts() -> None:
    group = Hosts(devices=2, device=FAST, link=INSIDE)
    cluster = Cluster((group, Hosts(devices=2, device=FAST, link=BUS)), Links(hosts=HOSTS))
    assert {crossing.link.kind for crossing in cluster.span(range(4)).at_level(Level.HOST)} == {"inside", "bus"}
    assert cluster.link(range(4)).kind == "hosts"


@pytest.mark.parametrize("ranks", [(), range(0), (16,), (-1, 3), range(8, 17), range(-4, 4)])
def test_ranks_that_are_not_there_are_refused(ranks: range | tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="0 to 15"):
        tree().span(ranks)


@pytest.mark.parametrize("ask", [Cluster.device, Cluster.host, Cluster.cores])
def test_a_rank_that_is_not_there_is_refused(ask: object) -> None:
    assert callable(ask)
    for rank in (-1, 16):
        with pytest.raises(ValueError, match="0 to 15"):
            ask(tree(), rank)


@pytest.mark.parametrize(
    ("hosts", "links", "sentence"),
    [
        ((), Links(), "hosts: there must be at least one"),
        ((Hosts(devices=8, device=FAST),), Links(), "hosts.0.link is missing: nothing links the 8 devices of a host"),
        ((Hosts(count=4, device=FAST),), Links(), "links.hosts is missing: nothing links the 4 hosts of a rack"),
        (
            (Hosts(device=FAST, rack="a"), Hosts(device=FAST, rack="b")),
            Links(hosts=HOSTS),
            "links.racks is missing: nothing links the 2 racks of a site",
        ),
        (
            (Hosts(device=FAST, site="a"), Hosts(device=FAST, site="b"), Hosts(device=FAST, site="c")),
            Links(hosts=HOSTS, racks=RACKS),
            "links.sites is missing: nothing links the 3 sites",
        ),
    ],
)
def test_devices_that_nobody_links_are_refused(hosts: tuple[Hosts, ...], links: Links, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=f"^{sentence}$"):
        Cluster(hosts, links)


def test_one_host_in_each_of_two_racks_needs_no_link_between_hosts() -> None:
    cluster = Cluster((Hosts(device=FAST, rack="a"), Hosts(device=FAST, rack="b")), Links(racks=RACKS))
    assert cluster.link((0, 1)) == RACKS


@pytest.mark.parametrize(
    ("speeds", "sentence"),
    [
        ({2: 0.5}, "speeds.2: there is no such device, they are 0 to 1"),
        ({0: 0.0}, "speeds.0 must be above 0, not 0"),
    ],
)
def test_a_speed_of_nobody_or_of_nothing_is_refused(speeds: dict[int, float], sentence: str) -> None:
    with pytest.raises(PolylaneError, match=sentence):
        Cluster((Hosts(devices=2, device=FAST, link=INSIDE),), speeds=speeds)


def test_a_cluster_survives_copies_and_pickles_and_forgets_what_it_remembered() -> None:
    cluster = tree()
    cluster.span(range(8))
    for other in (copy.deepcopy(cluster), pickle.loads(pickle.dumps(cluster))):
        assert other == cluster
        assert other.level(range(8)) == cluster.level(range(8))
    faster = replace(cluster, links=cluster.links.model_copy(update={"hosts": INSIDE}))
    assert faster != cluster
    assert faster.link(range(8)).kind == "inside"


def test_groups_that_are_spread_alike_share_a_span() -> None:
    cluster = Cluster((Hosts(count=4, devices=8, device=FAST, link=INSIDE),), Links(hosts=HOSTS))
    assert cluster.span(range(0, 32, 8)) is cluster.span(range(5, 32, 8)) is cluster.span((3, 11, 19, 27))
    assert cluster.span(range(2)) is not cluster.span(range(4))


def test_a_span_of_many_devices_takes_no_list_of_them() -> None:
    cluster = Cluster((Hosts(count=2**17, devices=8, device=FAST, link=INSIDE),), Links(hosts=HOSTS))
    span = cluster.span(range(3, 2**20, 8))
    assert (span.ranks, span.crossings[0].ring_edges) == (2**17, 2**17 - 1)


def test_the_ranks_along_an_axis_of_a_mesh() -> None:
    degrees = {"data": 3, "pipeline": 2, "tensor": 4}
    assert ranks_along(degrees, "tensor", 6) == range(4, 8)
    assert ranks_along(degrees, "pipeline", 6) == range(2, 10, 4)
    assert ranks_along(degrees, "data", 6) == range(6, 30, 8)
    for axis in degrees:
        groups = {ranks_along(degrees, axis, rank) for rank in range(24)}
        assert sorted(rank for group in groups for rank in group) == list(range(24))
    with pytest.raises(ValueError, match="expert is no axis of data, pipeline, tensor"):
        ranks_along(degrees, "expert")


def test_tensor_parallelism_stays_in_a_host_and_data_parallelism_crosses_them() -> None:
    cluster = Cluster((Hosts(count=4, devices=8, device=FAST, link=INSIDE),), Links(hosts=HOSTS))
    degrees = {"data": 2, "pipeline": 2, "tensor": 8}
    assert {axis: cluster.level(ranks_along(degrees, axis)) for axis in degrees} == {
        "data": Level.RACK,
        "pipeline": Level.RACK,
        "tensor": Level.HOST,
    }


def test_what_is_remembered_of_groups_has_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches over large clusters ask for ever new groups; of groups that are spread alike one is kept."""
    monkeypatch.setattr("polylane.cluster.cluster._REMEMBERED", 4)
    cluster = parse("64x8:a100-80g")
    first = cluster.span(range(8))
    assert cluster.span(range(8, 16)) is first
    for count in range(2, 40):
        cluster.span(range(count))
    assert len(cluster._spans) <= 4 and len(cluster._shapes) <= 4
    assert cluster.span(range(8)).ranks == first.ranks == 8
