"""Alpha-beta model: seconds of collectives as latency plus bytes over bandwidth, with the volumes of ring algorithms.

Source: Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

# Nominal rates for an unknown device; only their ratios matter to compare choices.
FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10


@dataclass(frozen=True)
class RankSpeed:
    """Speed of one rank; only the ratios of the figures matter to compare choices.

    Attributes:
        flops: floating-point operations per second.
        bytes: bytes read and written in its own memory per second.
        latency: seconds before a collective begins to move bytes.
        bandwidth: bytes per second from rank to rank.
    """

    flops: float = FLOPS_PER_SECOND
    bytes: float = BYTES_PER_SECOND
    latency: float = 3e-4
    bandwidth: float = 1e9

    def roofline(self, flops: float, moved: float) -> float:
        """Return the seconds of an operation: its arithmetic or its ``moved`` bytes, whichever takes longer.

        Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
        """
        return max(flops / self.flops, moved / self.bytes)


def bytes_per_rank(collective: str, size: float, degree: int) -> float:
    """Return the bytes that every rank sends in a collective.

    Args:
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "" for none.
        size: bytes of the full value, unsharded.
        degree: number of ranks in the group.

    Raises:
        ValueError: the name is no collective.
    """
    if collective == "" or degree < 2:
        return 0.0
    # Ring: a reduce-scatter or all-gather passes on all but its own n-th; an all-reduce is both. All-to-all: each
    # rank holds an n-th and keeps an n-th of that.
    share = (degree - 1) / degree
    shares = {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share, "all_to_all": share / degree}
    if collective not in shares:
        raise ValueError(f"{collective} is no collective")
    return shares[collective] * size


def collective_seconds(collective: str, size: float, degree: int, rates: RankSpeed) -> float:
    """Return the seconds of an exposed collective; arguments as in :func:`bytes_per_rank`."""
    if collective == "" or degree < 2:
        return 0.0
    return rates.latency + bytes_per_rank(collective, size, degree) / rates.bandwidth


def exchange_seconds(size: float, messages: int, rates: RankSpeed) -> float:
    """Return the seconds of ``messages`` that every rank sends inside an operator, ``size`` bytes in all."""
    return messages * rates.latency + size / rates.bandwidth
