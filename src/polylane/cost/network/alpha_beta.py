"""How long collectives take: latency and bytes, by the volumes that every rank sends in a ring.

The alpha-beta model: Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005.
"""

from __future__ import annotations

from dataclasses import dataclass

# Nominal rates where nothing is known of a device; only their ratio matters for what to choose.
FLOPS_PER_SECOND = 5e10
BYTES_PER_SECOND = 1e10


@dataclass(frozen=True)
class RankSpeed:
    """How fast one rank is; only their ratios matter for what to choose.

    Attributes:
        flops: floating-point operations per second.
        bytes: read and written in its own memory, per second.
        latency: seconds until a collective begins to move bytes.
        bandwidth: bytes per second from rank to rank.
    """

    flops: float = FLOPS_PER_SECOND
    bytes: float = BYTES_PER_SECOND
    latency: float = 3e-4
    bandwidth: float = 1e9

    def roofline(self, flops: float, moved: float) -> float:
        """Seconds of an operation: its arithmetic or its ``moved`` bytes, whichever takes longer.

        Source: Williams, Waterman, Patterson, "Roofline", CACM 2009.
        """
        return max(flops / self.flops, moved / self.bytes)


def bytes_per_rank(collective: str, size: float, degree: int) -> float:
    """Bytes that every rank sends.

    Args:
        collective: "all_reduce", "all_gather", "reduce_scatter", "all_to_all", or "" for none.
        size: of the whole value in bytes, as it is where all its parts are together.
        degree: ranks.

    Raises:
        ValueError: an unknown collective.
    """
    if collective == "" or degree < 2:
        return 0.0
    others = (degree - 1) / degree
    shares = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others, "all_to_all": others / degree}
    if collective not in shares:
        raise ValueError(f"{collective} is no collective")
    return shares[collective] * size


def collective_seconds(collective: str, size: float, degree: int, rates: RankSpeed) -> float:
    """Of one collective that somebody waits for; arguments as in :func:`bytes_per_rank`."""
    if collective == "" or degree < 2:
        return 0.0
    return rates.latency + bytes_per_rank(collective, size, degree) / rates.bandwidth


def overlapped_seconds(collective: str, size: float, degree: int, rates: RankSpeed) -> float:
    """Of a collective that many values share and nobody waits for: no latency, arguments as in
    :func:`bytes_per_rank`.
    """
    return bytes_per_rank(collective, size, degree) / rates.bandwidth


def exchange_seconds(size: float, messages: int, rates: RankSpeed) -> float:
    """Seconds of messages that every rank sends inside an operator, ``size`` bytes in all."""
    return messages * rates.latency + size / rates.bandwidth
