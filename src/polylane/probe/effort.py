"""Measuring effort: cases, sizes, rounds and seconds of a probe."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polylane.probe import cases as sweep
from polylane.probe.cases import OperatorCase
from polylane.probe.link_speed import group_arrangements, kinds_of, summing_groups

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Effort:
    """How much is measured, and for how long.

    Attributes:
        cases: operators of the sweep in the main dtype.
        dtype_cases: operators in each further dtype, to fit its matmul rate.
        rounds: number of times everything is measured.
        case_seconds: seconds for each case in a round.
        stream_bytes: bytes of the array that measures memory bandwidth, much more than caches hold.
        sizes: sizes in bytes of the measured messages and collectives.
        traffic_seconds: seconds for each size of each kind of traffic in a round.
        contention_seconds: seconds for each number of concurrent workers in a round.
        warm_seconds: seconds of computation before a device is measured.
        sums_seconds: seconds of a loop of computations, with and without sums in between.
        sums_rounds: number of times that both loops are run in a round.
    """

    cases: tuple[OperatorCase, ...]
    dtype_cases: tuple[OperatorCase, ...]
    rounds: int
    case_seconds: float
    stream_bytes: int
    sizes: tuple[int, ...]
    traffic_seconds: float
    contention_seconds: float
    warm_seconds: float
    sums_seconds: float = 0.08
    sums_rounds: int = 3

    def progress_ticks(self, workers: int, dtypes: int, worlds: Sequence[int] = ()) -> int:
        """Return the number of progress ticks of a probe.

        Args:
            workers: processes that compute at once.
            dtypes: number of dtypes besides the main one.
            worlds: numbers of workers whose messages are measured, each in a world of its own.
        """
        ticks = len(self.cases) + dtypes * len(self.dtype_cases)
        ticks += 1 + len(concurrent_counts(workers)) if workers > 1 else 0
        for count in worlds:
            ticks += sum(len(kinds_of(ranks)) for ranks, _ in group_arrangements(count)) * len(self.sizes)
            ticks += len(summing_groups(count)) * self.sums_rounds
        return ticks * self.rounds


def concurrent_counts(workers: int) -> list[int]:
    """Return the numbers of workers that compute at once: 2, 4, 8..., and all."""
    powers = [2**power for power in range(1, workers.bit_length())]
    return sorted({*(power for power in powers if power <= workers), *([workers] if workers > 1 else [])})


def thorough(device_type: str) -> Effort:
    """Return the default effort: under a minute for up to four workers on two cores."""
    cases = sweep.gpu_cases() if device_type == "cuda" else sweep.cpu_cases()
    return Effort(
        cases=tuple(cases),
        dtype_cases=tuple(case for case in cases if case.family == "matmul")[:14],
        rounds=3,
        case_seconds=0.06,
        stream_bytes=(1024 if device_type == "cuda" else 128) * MB,
        sizes=(KB, 4 * KB, 16 * KB, 64 * KB, 256 * KB, MB, 4 * MB, 16 * MB),
        traffic_seconds=0.03,
        contention_seconds=0.5,
        warm_seconds=0.5,
    )
