"""State sharding: what replicas of a stage share out among themselves (ZeRO), and among how many of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polylane.plan.sync import Shard, SyncOptions


@dataclass(frozen=True)
class StateSharding:
    """What is sharded over the replicas of a stage, as the plan's sync options say it.

    Attributes:
        kind: "optimizer" states, "gradients" as well, "parameters" as well (ZeRO-1, -2, -3: Rajbhandari et al., 2020;
            the last two are FSDP's SHARD_GRAD_OP and FULL_SHARD); "none" also for a stage without replicas.
        degree: number of replicas in a sharding group; 1 where nothing is sharded.
        in_passes: whether gradients are reduce-scattered in every backward pass, and not once after the last one: with
            sharded parameters always, with sharded gradients where a step has several microbatches.
    """

    kind: Shard = "none"
    degree: int = 1
    in_passes: bool = False

    @classmethod
    def of(cls, sync: SyncOptions, replicas: int, microbatches: int = 1) -> StateSharding:
        """Return the sharding of a stage.

        Args:
            sync: the plan's synchronization, with the kind of sharding and the size of its groups.
            replicas: number of replicas of the stage.
            microbatches: number of microbatches of a step.
        """
        degree = min(sync.within or replicas, replicas)
        if sync.shard == "none" or degree == 1:
            return UNSHARDED
        return cls(sync.shard, degree, sync.shard == "parameters" or (sync.shard == "gradients" and microbatches > 1))

    @property
    def gradient_collective(self) -> str:
        """Collective over a group that reduces gradients after the last backward pass; "" if the passes do it."""
        return "" if self.in_passes else "all_reduce" if self.kind == "none" else "reduce_scatter"

    @property
    def parameter_collective(self) -> str:
        """Collective over a group that distributes updated parameters before the next step; "" for none."""
        return "all_gather" if self.kind in ("optimizer", "gradients") else ""

    @property
    def gathers_parameters(self) -> bool:
        """Whether replicas gather parameters block by block in every pass (ZeRO-3)."""
        return self.kind == "parameters"

    def count_updated(self, elements: int) -> int:
        """Return how many of the trained elements one replica's optimizer updates."""
        return -(-elements // self.degree)

    def group(self, replicas: Sequence[int], index: int = 0) -> Sequence[int]:
        """Return the sharding group of the replica with this index: consecutive ones, as the runtime has them."""
        if self.kind == "none":
            return replicas
        start = index // self.degree * self.degree
        return replicas[start : start + self.degree]


UNSHARDED = StateSharding()
