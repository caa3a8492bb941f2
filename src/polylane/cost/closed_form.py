"""Sharded replicas (ZeRO-3, FSDP): what gathering parameters and scattering gradients adds to computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from polylane.cluster.cluster import Cluster
from polylane.cluster.rank_span import Ranks
from polylane.cost.network import collectives as network

# Of the seconds that gathering parameters and scattering gradients take, the share that is not hidden behind
# computation: the collectives take units and memory bandwidth from it, and the first of each pass has nothing to hide
# behind. Fitted to published FSDP trainings on A100 and H100 (MosaicML llm-foundry, scripts/train/benchmarking).
EXPOSED = 0.8


def concurrent_collective_seconds(cluster: Cluster, kind: str, sizes: Sequence[float], ranks: Ranks) -> float:
    """Seconds of a collective for each of these sizes in bytes, while all other ranks do the same."""
    alike = Counter(sizes).items()
    return sum(count * network.collective_seconds(cluster, kind, size, ranks, None) for size, count in alike)


@dataclass(frozen=True)
class ShardTrafficSeconds:
    """What replicas that hold a part of everything exchange for one microbatch.

    Attributes:
        gathers: seconds of all-gathers of parameters.
        scatters: seconds of reduce-scatters of gradients.
    """

    gathers: float
    scatters: float

    @property
    def seconds(self) -> float:
        """Of all of it, one after the other."""
        return self.gathers + self.scatters

    @staticmethod
    def of(cluster: Cluster, blocks: Sequence[float], ranks: Ranks, gathers: int = 2) -> ShardTrafficSeconds:
        """Of blocks with so many bytes of parameters, gathered so often."""
        once = concurrent_collective_seconds(cluster, "all_gather", blocks, ranks)
        return ShardTrafficSeconds(
            gathers * once, concurrent_collective_seconds(cluster, "reduce_scatter", blocks, ranks)
        )


def exposed_seconds(compute: float, travel: float) -> float:
    """Seconds by which computation takes longer with collectives of some seconds beside it.

    They run beside the computation of other blocks, but :data:`EXPOSED` of their time is lost anyway; and they take
    what they take.
    """
    return max(EXPOSED * travel, travel - compute)
