"""How ranks are spread over the tree, in figures that one can count by hand."""

from polylane.cluster.link import Link
from polylane.cluster.rank_span import HostBlock, Level, count_ranks_between, span_of

INSIDE = Link(kind="inside", bandwidth=300e9, latency=10e-6)
BETWEEN = {
    Level.RACK: Link(kind="hosts", bandwidth=25e9, latency=30e-6),
    Level.SITE: Link(kind="racks", bandwidth=12e9, latency=40e-6),
    Level.CLUSTER: Link(kind="sites", bandwidth=1e9, latency=10e-3),
}
# Four hosts of eight in one rack, two of four in another one, two of eight at another site: 56 devices.
BLOCKS = (
    HostBlock(0, 0, 4, 8, 0, 0, INSIDE),
    HostBlock(32, 4, 2, 4, 1, 0, INSIDE),
    HostBlock(40, 6, 2, 8, 2, 1, INSIDE),
)


def counted(ranks: range | tuple[int, ...]) -> list[tuple[str, int, int, int, tuple[tuple[int, int], ...]]]:
    crossings = span_of(BLOCKS, BETWEEN, ranks).crossings
    return [(each.link.kind, each.ring_edges, each.unit_count, each.max_units, each.units) for each in crossings]


def test_one_host() -> None:
    assert counted(range(8)) == [("inside", 7, 8, 8, ((8, 8),))]
    assert counted(range(32, 35)) == [("inside", 2, 3, 3, ((3, 4),))]


def test_a_rank_of_each_host() -> None:
    assert counted(range(0, 32, 8)) == [("hosts", 3, 4, 4, ((1, 8),))]


def test_some_ranks_of_each_host() -> None:
    assert counted(range(0, 32, 2)) == [("inside", 12, 4, 4, ((4, 8),)), ("hosts", 3, 4, 4, ((4, 8),))]
    assert counted(range(6, 10)) == [("inside", 2, 2, 2, ((2, 8),)), ("hosts", 1, 2, 2, ((2, 8),))]


def test_a_step_that_does_not_divide_a_host() -> None:
    """0 3 6 | 9 12 15 | 18 21 | 24 27 30."""
    assert counted(range(0, 32, 3)) == [
        ("inside", 7, 3, 3, ((2, 8), (3, 8))),
        ("hosts", 3, 4, 4, ((2, 8), (3, 8))),
    ]


def test_a_rank_of_each_rack_leaves_its_host() -> None:
    assert counted((0, 32)) == [("hosts", 0, 2, 1, ((1, 4), (1, 8))), ("racks", 1, 2, 2, ((1, 8), (1, 32)))]


def test_everything() -> None:
    """56 devices on 8 hosts in 3 racks at 2 sites: 48 + 5 + 1 + 1 edges."""
    assert counted(range(56)) == [
        ("inside", 48, 8, 8, ((4, 4), (8, 8))),
        ("hosts", 5, 8, 4, ((4, 4), (8, 8))),
        ("racks", 1, 3, 2, ((8, 8), (16, 16), (32, 32))),
        ("sites", 1, 2, 2, ((16, 16), (40, 40))),
    ]


def test_the_order_of_ranks_says_nothing() -> None:
    assert counted(range(30, -1, -3)) == counted(range(0, 31, 3)) == counted(tuple(range(30, -1, -3)))


def test_how_many_ranks_are_in_an_interval() -> None:
    for ranks in (range(3, 40, 7), range(39, 2, -5), range(4), (5, 1, 9)):
        for first in range(0, 42, 3):
            for end in range(first, 44, 5):
                assert count_ranks_between(ranks, first, end) == sum(first <= rank < end for rank in ranks)
