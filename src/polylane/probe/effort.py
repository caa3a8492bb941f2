"""How much is measured, and how long it may take."""

from __future__ import annotations

from dataclasses import dataclass

from polylane.probe import cases as sweep
from polylane.probe.cases import OperatorCase
from polylane.probe.link_speed import group_arrangements, kinds_of

KB, MB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class Effort:
    """Sizes and seconds.

    Attributes:
        cases: of the sweep.
        dtype_cases: cases in each further dtype, which tell how fast its matmuls are.
        rounds: in which everything is measured.
        case_seconds: for each case in a round.
        stream_bytes: of an array with which memory is streamed: much more than caches hold.
        sizes: bytes of messages and collectives.
        traffic_seconds: for each size of each kind in a round.
        contention_seconds: in which workers compute side by side, for each number of them in a round.
        warm_seconds: in which a device computes before it is measured.
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

    def progress_ticks(self, workers: int, dtypes: int) -> int:
        """Into how many parts the work is divided that progress is told by, with so many further dtypes."""
        found = len(self.cases) + dtypes * len(self.dtype_cases)
        if workers > 1:
            found += sum(len(kinds_of(ranks)) for ranks, _ in group_arrangements(workers)) * len(self.sizes)
            found += 1 + len(concurrent_counts(workers))
        return found * self.rounds


def concurrent_counts(workers: int) -> list[int]:
    """How many workers are let compute at once: 2, 4, 8..., and all."""
    powers = [2**power for power in range(1, workers.bit_length())]
    return sorted({*(each for each in powers if each <= workers), *([workers] if workers > 1 else [])})


def thorough(device_type: str) -> Effort:
    """Under a minute for up to four workers on two cores."""
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
