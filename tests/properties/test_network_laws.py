"""Laws of clusters and of what collectives take on them, for any tree of hosts and any group of ranks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane import yaml_file
from polylane.cluster.catalogue import link_presets
from polylane.cluster.cluster import Cluster, Hosts, Links
from polylane.cluster.cluster_file import dump, from_mapping
from polylane.cluster.device import Device
from polylane.cluster.link import Kind, Link
from polylane.cluster.rank_span import Level, RankSpan
from polylane.cost.network.alpha_beta import bytes_per_rank
from polylane.cost.network.collectives import collective_curves, collective_seconds, message_seconds
from tests.support import subsets

DEVICE = Device(kind="device", memory=10**9, flops={"float32": 1e12}, bandwidth=1e11)
PRESETS = [Link.model_validate(figures) for figures in link_presets().values()]
COLLECTIVES: tuple[Kind, ...] = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")

law = settings(max_examples=subsets.examples(40), deadline=None)
collectives = st.sampled_from(COLLECTIVES)
sizes = st.floats(1.0, 1e12)
shares = st.floats(0.01, 1.0)
times = st.floats(0.0, 1e-2)
rates = st.floats(1e6, 1e12)
wires = st.lists(shares, min_size=1, max_size=3).map(lambda several: tuple(sorted(several)))


@st.composite
def links(draw: st.DrawFn, plain: bool = False) -> Link:
    """A link of any figures; a plain one is the same for all kinds of collectives, without copies or a switch."""
    if not plain and draw(st.booleans()):
        return draw(st.sampled_from(PRESETS))
    own = {} if plain else draw(own_figures)
    return Link(kind=draw(st.sampled_from(["a", "nvlink-3"])), **draw(plain_figures), **own)


plain_figures = st.fixed_dictionaries(
    {"bandwidth": rates, "latency": times},
    optional={"total": rates, "hop": times, "fraction": shares, "half": st.floats(0.0, 1e8), "wired": wires},
)
own_figures = st.fixed_dictionaries(
    {},
    optional={
        "local": rates,
        "switch": shares,
        "fractions": st.dictionaries(collectives, shares, max_size=2),
        "latencies": st.dictionaries(collectives, times, max_size=2),
    },
)


@st.composite
def clusters(draw: st.DrawFn, plain: bool = False) -> Cluster:
    names = st.sampled_from(["", "a", "b"])
    known = draw(st.lists(links(plain), min_size=2, max_size=3))
    some = st.sampled_from(known)
    group = st.fixed_dictionaries(
        {"count": st.integers(1, 5), "devices": st.integers(1, 9), "link": some, "rack": names, "site": names},
        optional={
            "cores": st.integers(1, 4),
            "speed": st.floats(0.1, 2.0),
            "price": st.floats(0.0, 10.0),
            "contention": st.dictionaries(st.integers(1, 9), shares, max_size=2),
        },
    )
    hosts = tuple(Hosts(device=DEVICE, **each) for each in draw(st.lists(group, min_size=1, max_size=4)))
    between = Links(hosts=draw(some), racks=draw(some), sites=draw(some))
    count = sum(each.count * each.devices for each in hosts)
    speeds = draw(st.dictionaries(st.integers(0, count - 1), st.floats(0.1, 1.0), max_size=2))
    return Cluster(hosts, between, speeds)


@st.composite
def groups(draw: st.DrawFn, plain: bool = False) -> tuple[Cluster, range]:
    cluster = draw(clusters(plain))
    first = draw(st.integers(0, cluster.count - 1))
    return cluster, range(first, draw(st.integers(first + 1, cluster.count)), draw(st.integers(1, 12)))


def shape(span: RankSpan) -> tuple[object, ...]:
    return (
        span.ranks,
        span.level,
        [(c.link, c.level, c.ring_edges, c.unit_count, c.max_units, c.units) for c in span.crossings],
    )


@law
@given(clusters())
def test_a_cluster_that_is_written_and_read_is_the_same(cluster: Cluster) -> None:
    assert from_mapping(yaml_file.parse(dump(cluster))) == cluster


@law
@given(groups(), st.randoms(use_true_random=False))
def test_a_range_is_spread_as_its_ranks_are_one_by_one(group: tuple[Cluster, range], random: object) -> None:
    cluster, ranks = group
    shuffled = list(ranks)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert shape(cluster.span(ranks)) == shape(cluster.span(tuple(shuffled))) == shape(cluster.span(ranks[::-1]))


@law
@given(groups())
def test_a_ring_has_an_edge_less_than_ranks_and_the_level_is_that_of_two_of_them(group: tuple[Cluster, range]) -> None:
    cluster, ranks = group
    span = cluster.span(ranks)
    assert sum(crossing.ring_edges for crossing in span.crossings) == len(ranks) - 1
    assert span.level == max((cluster.level((ranks[0], rank)) for rank in ranks[1:]), default=Level.DEVICE)
    hosts = {cluster.host(rank) for rank in ranks}
    assert (span.level <= Level.HOST) == (len(hosts) == 1)


@law
@given(groups(), collectives, st.lists(sizes, min_size=2, max_size=4), st.none() | st.integers(1, 8))
def test_more_bytes_never_take_less(
    group: tuple[Cluster, range], kind: str, several: list[float], sharing: int | None
) -> None:
    cluster, ranks = group
    seconds = [collective_seconds(cluster, kind, size, ranks, sharing) for size in [0.0, *sorted(several)]]
    assert all(a <= b for a, b in pairwise(seconds))


@law
@given(groups(), collectives, sizes, st.integers(1, 8))
def test_more_groups_on_the_same_links_are_never_faster(
    group: tuple[Cluster, range], kind: str, size: float, sharing: int
) -> None:
    cluster, ranks = group
    alone, few, many = (collective_seconds(cluster, kind, size, ranks, n) for n in (1, sharing, sharing + 1))
    assert alone <= few <= many


@law
@given(clusters(), collectives, sizes, st.data())
def test_one_rank_takes_no_time(cluster: Cluster, kind: str, size: float, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, cluster.count - 1))
    assert collective_seconds(cluster, kind, size, (rank,)) == 0.0
    assert message_seconds(cluster, size, rank, rank) == 0.0


@law
@given(groups(), collectives, sizes, st.none() | st.integers(1, 8))
def test_what_is_chosen_is_no_slower_than_what_it_is_chosen_over(
    group: tuple[Cluster, range], kind: str, size: float, sharing: int | None
) -> None:
    cluster, ranks = group
    curves = collective_curves(cluster.span(ranks), kind, sharing)
    assert not curves if len(ranks) == 1 else curves[0].algorithm == "ring"
    fewest = min((curve.seconds(size) for curve in curves), default=0.0)
    assert collective_seconds(cluster, kind, size, ranks, sharing) == fewest


def ring_seconds(cluster: Cluster, kind: str, size: float, ranks: range, sharing: int | None) -> float:
    """The time of a ring, the first of the algorithms; nothing on a single rank."""
    curves = collective_curves(cluster.span(ranks), kind, sharing)
    return curves[0].seconds(size) if curves else 0.0


@law
@given(groups(plain=True), sizes)
def test_a_ring_s_all_reduce_is_a_reduce_scatter_and_an_all_gather_that_begin_as_one(
    group: tuple[Cluster, range], size: float
) -> None:
    cluster, ranks = group
    whole, *halves = (
        ring_seconds(cluster, kind, size, ranks, None) for kind in ("all_reduce", "reduce_scatter", "all_gather")
    )
    assert max(halves) <= whole <= sum(halves) * (1 + 1e-9)


@law
@given(groups(plain=True), st.sampled_from(["all_reduce", "all_gather", "reduce_scatter"]))
def test_large_values_take_what_the_narrowest_link_needs_for_its_bytes(
    group: tuple[Cluster, range], kind: Kind
) -> None:
    cluster, ranks = group
    size, bound = 1e30, 0.0
    for crossing in cluster.span(ranks).crossings:
        for own, _ in crossing.units:
            inside = crossing.level == Level.HOST
            reached, shared = (
                crossing.link.solo_bandwidth(kind, own if inside else 2),
                crossing.link.shared_bandwidth(kind),
            )
            rate = min(reached, shared / own) if inside and shared is not None else reached * (1 if inside else own)
            rate = rate if inside or shared is None else min(rate, shared)
            bound = max(bound, bytes_per_rank(kind, size, len(ranks)) / rate)
    assert ring_seconds(cluster, kind, size, ranks, 1) == pytest.approx(bound, rel=1e-6)


@law
@given(groups(), collectives, sizes)
def test_the_same_question_has_the_same_answer_and_who_asks_first_changes_nothing(
    group: tuple[Cluster, range], kind: str, size: float
) -> None:
    cluster, ranks = group
    first = collective_seconds(cluster, kind, size, ranks)
    collective_seconds(cluster, "all_reduce", size / 2, range(cluster.count), 3)
    assert collective_seconds(cluster, kind, size, ranks) == first
    assert collective_seconds(from_mapping(yaml_file.parse(dump(cluster))), kind, size, tuple(ranks)) == first


@law
@given(clusters(), sizes, st.integers(1, 8), st.data())
def test_messages_take_more_with_more_bytes_and_more_streams_and_the_same_in_both_directions(
    cluster: Cluster, size: float, streams: int, data: st.DataObject
) -> None:
    ends = st.integers(0, cluster.count - 1)
    source, target = data.draw(ends), data.draw(ends)
    seconds = message_seconds(cluster, size, source, target, streams)
    assert message_seconds(cluster, size / 2, source, target, streams) <= seconds
    assert seconds <= message_seconds(cluster, size, source, target, streams + 1)
    assert seconds == message_seconds(cluster, size, target, source, streams)
