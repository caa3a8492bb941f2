"""Shared cores: the lanes of one host, its cores, and how much computing lanes slow each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Shares that add up to 1 may exceed it by rounding, which must not count as contention.
_ENOUGH = 1 + 1e-12


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The lanes of one host, which share its cores and memory bandwidth.

    Attributes:
        lanes: indices of the lanes on this host.
        cores: number of lanes that may compute at the same time without sharing a core.
        contention: speed of each of k computing lanes relative to one alone, with enough cores, since they share memory
            bandwidth, for some k: 1.0 for k = 1 by default, linear between the given counts, constant beyond the
            last; None: always 1.0.

    Raises:
        ValueError: cores or a contention are not above 0, or a lane is listed twice.
    """

    lanes: tuple[int, ...]
    cores: float
    contention: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        if not self.cores > 0:
            raise ValueError(f"cores of a host must be more than 0, not {self.cores}")
        if len(set(self.lanes)) < len(self.lanes):
            raise ValueError(f"lanes of a host must differ, not {self.lanes}")
        for count in range(1, len(self.lanes) + 1):
            if not 0 < self.slowdown(count) < float("inf"):
                raise ValueError(f"contention of {count} lanes must be more than 0, not {self.slowdown(count)}")

    def slowdown(self, count: int) -> float:
        """Return the relative speed of each of ``count`` >= 1 lanes that compute at once."""
        if self.contention is None:
            return 1.0
        points = sorted({1: 1.0, **self.contention}.items())
        low, start = max(point for point in points if point[0] <= count)
        high, end = min((point for point in points if point[0] > count), default=(count, start))
        return start if high == low else start + (end - start) * (count - low) / (high - low)


def water_fill_level(capacity: float, demands: Sequence[tuple[float, int]]) -> float:
    """Return the water level of a capacity that users share equally, none taking more than its demand.

    Args:
        capacity: total that is shared, in the unit of the demands.
        demands: (demand of a user, number of such users) pairs.

    Returns:
        The level: every user gets the smaller of it and its demand; infinity where all demands are met.
    """
    if sum(demand * count for demand, count in demands) <= capacity * _ENOUGH:
        return float("inf")
    # In ascending order: a demand below the current equal share is met in full, which raises the share of the
    # others.
    free_capacity, users = capacity, sum(count for _, count in demands)
    for demand, count in sorted(demands):
        if demand * users > free_capacity:
            break
        free_capacity -= demand * count
        users -= count
    return free_capacity / users
