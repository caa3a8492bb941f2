"""Out of memory: recognise what torch, Python and the system say when memory runs out, and say it in one sentence."""

from __future__ import annotations

import errno
import re
from dataclasses import dataclass
from pathlib import Path

from polylane.cluster.figures import format_size
from polylane.errors import PolylaneError, describe_place

# How torch's allocators, and the C++ library under them, say that there is no memory; torch 2.9 to 2.14.
_WORDS = re.compile(r"can't allocate memory|not enough memory|out of memory|std::bad_alloc|Cannot allocate memory")
_ASKED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|B|[KMGT]iB)", re.IGNORECASE)
_FACTORS = {"bytes": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


@dataclass(frozen=True)
class MemoryNeed:
    """What is known of a worker whose memory ran out.

    Attributes:
        rank: its rank; None for a process that is no worker.
        asked: bytes that it asked for in vain; None if that was not said.
        predicted: bytes that the plan was predicted to take on it; None if that is not known.
        was_killed: whether the system killed it.
        stage, microbatch, module, source: where it happened, as far as it is known.
    """

    rank: int | None
    asked: int | None = None
    predicted: int | None = None
    was_killed: bool = False
    stage: int | None = None
    microbatch: int | None = None
    module: str | None = None
    source: str | None = None


class OutOfMemory(PolylaneError):
    """A worker, or the process that starts them, cannot get the memory that it asks for.

    Attributes:
        need: which worker, where, and how much.

    Examples:
        >>> import polylane
        >>> from polylane.runtime.workers.out_of_memory import OutOfMemory
        >>> issubclass(OutOfMemory, polylane.PolylaneError)
        True
    """

    def __init__(self, need: MemoryNeed) -> None:
        self.need = need
        super().__init__(need)

    def __str__(self) -> str:
        need = self.need
        name = "this process" if need.rank is None else f"worker {need.rank}"
        event = "was killed by the system because memory ran out" if need.was_killed else "ran out of memory"
        place = describe_place(need.stage, need.microbatch, need.module, need.source)
        extra = "" if need.asked is None else f", asking for {format_size(need.asked)} more"
        predicted = (
            "" if need.predicted is None else f"; the plan was predicted to take {format_size(need.predicted)} there"
        )
        return (
            f"{name} {event}{place}{extra}{predicted}: `polylane plan --memory SIZE` finds a plan that takes less, and "
            "so do recompute=full, more microbatches or more workers in the plan"
        )


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception says that memory ran out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    return isinstance(error, RuntimeError) and bool(_WORDS.search(str(error)))


def out_of_memory(
    error: BaseException,
    rank: int | None,
    stage: int | None = None,
    microbatch: int | None = None,
    module: str | None = None,
    source: str | None = None,
) -> OutOfMemory | None:
    """Return the error for the user, if an exception says that memory ran out; else None.

    Args:
        error: what torch, Python or the system raised.
        rank: rank of the worker that raised; None for another process.
        stage, microbatch, module, source: where it happened, as far as it is known.
    """
    if not is_out_of_memory(error):
        return None
    match = _ASKED.search(str(error))
    requested_bytes = None if match is None else round(float(match[1]) * _FACTORS[match[2].lower()])
    return OutOfMemory(MemoryNeed(rank, requested_bytes, None, False, stage, microbatch, module, source))


def count_system_kills() -> int:
    """Return how many processes the system has killed for want of memory since it started; 0 if it does not say."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
