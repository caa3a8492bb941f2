"""What plans leave free: a share or a size of every device, never more than there is, and said."""

from __future__ import annotations

import pytest

from polylane.cluster.figures import figure, format_size
from polylane.cluster.spec import parse
from polylane.errors import PolylaneError
from polylane.planner.memory_reserve import USUAL, MemoryReserve, memory_limit, parse_reserve

CLUSTER = parse("8:a100-80g")


def test_the_limit_is_what_is_left_of_the_smallest_device() -> None:
    assert memory_limit(CLUSTER, 8) == pytest.approx(0.95 * 80 * 2**30)
    assert memory_limit(CLUSTER, 8, MemoryReserve(bytes=2**30)) == 79 * 2**30
    assert memory_limit(CLUSTER, 8, MemoryReserve()) == 80 * 2**30
    assert memory_limit(CLUSTER, 99, MemoryReserve(bytes=1 << 60)) == 0, "more than there is leaves nothing"


def test_a_bound_of_the_user_is_not_made_smaller() -> None:
    assert memory_limit(CLUSTER, 8, memory=1e9) == 1e9
    assert memory_limit(CLUSTER, 8, memory=1e12) == memory_limit(CLUSTER, 8)


@pytest.mark.parametrize(
    ("text", "reserve"),
    [
        ("5%", USUAL),
        ("12.5%", MemoryReserve(share=0.125)),
        ("2 GiB", MemoryReserve(bytes=2 << 30)),
        ("0", MemoryReserve()),
    ],
)
def test_shares_and_sizes(text: str, reserve: MemoryReserve) -> None:
    assert parse_reserve(text) == reserve


@pytest.mark.parametrize("text", ["lots", "100%", "-5%", "nan%", "5", "2 GB/s", ""])
def test_bad_reserves(text: str) -> None:
    with pytest.raises(PolylaneError, match="--reserve takes a share of the memory or a size"):
        parse_reserve(text)


@pytest.mark.parametrize(
    ("size", "text"), [(80 * 2**30, "80.0 GiB"), (512, "512 B"), (1536, "1.50 KiB"), (-(2**30), "-1.00 GiB")]
)
def test_memory_is_said_in_the_units_it_is_sold_in(size: int, text: str) -> None:
    assert format_size(size) == text
    assert size < 0 or (figure(text) or (0,))[0] == pytest.approx(size)
