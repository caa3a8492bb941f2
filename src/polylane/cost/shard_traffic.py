"""Sharded data parallelism (ZeRO-3, FSDP): seconds that parameter all-gathers and reduce-scatters add to a pass."""

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


@dataclass(frozen=True)
class ShardTraffic:
    """Collectives of parameter-sharded replicas (ZeRO-3) during the passes of one microbatch.

    Attributes:
        waits, backward_waits: exposed seconds, added to each pass.
        sent, backward_sent: bytes that the rank sends in each pass.
    """

    waits: float = 0.0
    backward_waits: float = 0.0
    sent: float = 0.0
    backward_sent: float = 0.0


@dataclass(frozen=True)
class ShardTrafficSeconds:
    """Seconds of the collectives of parameter-sharded replicas for one microbatch.

    Attributes:
        gathers: seconds of all-gathers of parameters.
        scatters: seconds of reduce-scatters of gradients.
    """

    gathers: float
    scatters: float

    @property
    def seconds(self) -> float:
        """Seconds of all collectives, run one after another."""
        return self.gathers + self.scatters

    @staticmethod
    def of(
        cluster: Cluster, scattered: Sequence[float], gathered: Sequence[float], ranks: Ranks
    ) -> ShardTrafficSeconds:
        """Price reduce-scatters of blocks of gradients and all-gathers of blocks of parameters, one by one.

        All other groups do the same at the same time.

        Args:
            cluster: the devices and links of all workers.
            scattered: bytes of each block of gradients.
            gathered: bytes of each block of parameters, once for each pass that gathers it.
            ranks: ranks among which a parameter is sharded.
        """
        gather, scatter = (
            # Transformer blocks are mostly of one size: each distinct size is priced once.
            sum(
                count * network.collective_seconds(cluster, kind, size, ranks, None)
                for size, count in Counter(blocks).items()
            )
            for kind, blocks in (("all_gather", gathered), ("reduce_scatter", scattered))
        )
        return ShardTrafficSeconds(gather, scatter)


def exposed_seconds(compute: float, travel: float) -> float:
    """Return the seconds of collectives that computation does not hide.

    Collectives overlap with the computation of other blocks, but at least :data:`EXPOSED` of their time is exposed; if
    they take longer than the computation, all that exceeds it is.

    Args:
        compute: seconds of the computation that runs at the same time.
        travel: seconds of the collectives without overlap.
    """
    return max(EXPOSED * travel, travel - compute)
