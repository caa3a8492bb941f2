"""Host: lanes that share cores."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharedCores:
    """Lanes that share cores.

    Attributes:
        lanes: which.
        cores: how many of them may compute at the same time without slowing each other.
        contention: how fast each of k lanes is that compute at the same time, on cores enough, in parts of the speed of
            one alone, since they share the bandwidth of the memory. A function of k, or some of its values: of 1 it is
            1.0 unless told; between counts it is linear, beyond the last one constant.

    Raises:
        ValueError: no cores, a lane twice, or a contention that is not above 0.
    """

    lanes: tuple[int, ...]
    cores: float
    contention: Mapping[int, float] | Callable[[int], float] | None = None

    def __post_init__(self) -> None:
        if not self.cores > 0:
            raise ValueError(f"cores of a host must be more than 0, not {self.cores}")
        if len(set(self.lanes)) < len(self.lanes):
            raise ValueError(f"lanes of a host must differ, not {self.lanes}")
        for count in range(1, len(self.lanes) + 1):
            if not 0 < self.slowdown(count) < float("inf"):
                raise ValueError(f"contention of {count} lanes must be more than 0, not {self.slowdown(count)}")

    def slowdown(self, count: int) -> float:
        """The contention of so many lanes, at least 1."""
        if self.contention is None:
            return 1.0
        if not isinstance(self.contention, Mapping):
            return self.contention(count)
        known = sorted({1: 1.0, **self.contention}.items())
        low, start = max(each for each in known if each[0] <= count)
        high, end = min((each for each in known if each[0] > count), default=(count, start))
        return start if high == low else start + (end - start) * (count - low) / (high - low)
