"""Memory reserve: what plans leave free of every device, for what no prediction knows."""

from __future__ import annotations

from dataclasses import dataclass

from polylane.cluster.cluster import Cluster
from polylane.cluster.figures import figure, format_size
from polylane.errors import PolylaneError


@dataclass(frozen=True)
class MemoryReserve:
    """Memory that is kept free on every device.

    Attributes:
        share: fraction of the device's memory.
        bytes: bytes of it, on top of the fraction.
    """

    share: float = 0.0
    bytes: int = 0

    def of(self, memory: float) -> int:
        """Return the bytes that are kept free of so much memory: never more than all of it."""
        return min(int(memory), round(self.share * memory) + self.bytes)

    def __str__(self) -> str:
        return f"{self.share:.3g} of a device's memory" if self.bytes == 0 else format_size(self.bytes)


# A twentieth: other processes of the machine, and what predictions of memory are mostly off by.
USUAL = MemoryReserve(share=0.05)


def parse_reserve(text: str) -> MemoryReserve:
    """Parse a reserve: a share of the memory ("5%"), or a size ("2 GiB"); "0" keeps nothing.

    Raises:
        PolylaneError: the text is neither, or a share of all memory or more.
    """
    share = text.strip().removesuffix("%")
    try:
        if share != text.strip() or float(share) == 0:
            reserve = MemoryReserve(share=float(share) / 100)
            if 0 <= reserve.share < 1:
                return reserve
    except ValueError:  # no number before the percent sign; the sentence below says what is expected
        pass
    size = figure(text)
    if size is None or not size[0] >= 0 or size[1] != "size":
        raise PolylaneError(f'--reserve takes a share of the memory or a size, as in 5% or "2 GiB", not {text!r}')
    return MemoryReserve(bytes=int(size[0]))


def refuse_whole_reserve(cluster: Cluster, workers: int, reserve: MemoryReserve) -> None:
    """Refuse a reserve that leaves nothing of a device.

    Args:
        cluster: the devices, of which plans take the first ones.
        workers: the most workers that a plan has.
        reserve: what is kept free on each of them.

    Raises:
        PolylaneError: the smallest of the devices has no more memory than the reserve.
    """
    min_memory = min(device.memory for device in cluster.devices(range(min(workers, cluster.count))))
    if reserve.of(min_memory) >= min_memory:
        raise PolylaneError(
            f"--reserve {reserve} takes all of a device's memory, which is {format_size(min_memory)}: keep less free"
        )


def memory_limit(cluster: Cluster, workers: int, reserve: MemoryReserve = USUAL, memory: float | None = None) -> float:
    """Return the bytes that any worker may use: the least of what the devices have, without the reserve.

    Args:
        cluster: the devices, of which plans take the first ones.
        workers: the most workers that a plan has: any device may get any stage.
        reserve: what is kept free on each of them.
        memory: the most that the user allows, which is not made smaller by the reserve; None: no bound.
    """
    ranks = range(min(workers, cluster.count))
    min_memory = min(float(device.memory - reserve.of(device.memory)) for device in cluster.devices(ranks))
    return min_memory if memory is None else min(min_memory, float(memory))
