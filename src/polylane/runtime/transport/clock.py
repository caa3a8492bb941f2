"""Clock synchronization: the offset of this worker's clock to that of rank 0."""

from __future__ import annotations

import statistics
import time
from pathlib import Path

from polylane.runtime.transport.protocol import Transport

ROUNDS = 11  # odd, so that the median is one of them


def measure_clock_offset(transport: Transport) -> float:
    """Return the seconds to subtract from this worker's ``time.perf_counter()``; a collective of all workers.

    Workers of one host share its clock. Between hosts the clock is read after each of several barriers, which all
    workers leave at nearly the same time; the median difference is accurate to about the network's latency.
    """
    if len(set(transport.all_gather_object(_boot_identity()))) == 1:
        return 0.0
    readings = []
    for _ in range(ROUNDS):
        transport.barrier()
        readings.append(time.perf_counter())
    # The median: single barriers that a busy host leaves late do not matter.
    references: list[float] = transport.all_gather_object(readings)[0]
    return statistics.median(reading - reference for reading, reference in zip(readings, references, strict=True))


def _boot_identity() -> str:
    """Return an identifier of the running kernel: it differs between hosts, not between containers of a host."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # a system other than Linux, or a sandbox without /proc
        import platform

        return platform.node()
