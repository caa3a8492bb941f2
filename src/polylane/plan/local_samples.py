"""Local samples: how many samples of a microbatch one replica of a stage has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from polylane.plan.plan import Plan


def local_samples(plan: Plan, stage: int, batch: int) -> int:
    """Return the most samples that a replica of a stage has in one microbatch.

    Args:
        plan: the meshes, the number of microbatches, and whether replicas split each of them.
        stage: number of the stage.
        batch: number of samples of a step, over all replicas.
    """
    shares = (1,) if plan.takes_turns else plan.shares or (1,) * plan.degree("data", stage)
    return -(-batch * max(shares) // (plan.microbatches * sum(shares)))


def find_busiest(
    plan: Plan, stage: int, batch: int, speed_of: Callable[[Sequence[int]], float]
) -> tuple[Sequence[int], int]:
    """Return the ranks that take longest for a microbatch of a stage, and the samples of each replica among them.

    Args:
        plan, stage, batch: the same arguments as of :func:`local_samples`.
        speed_of: returns the relative speed of some ranks, which wait for each other.
    """
    devices, total_parts = plan.stages[stage].devices, sum(plan.shares)
    if not plan.shares:
        return devices, local_samples(plan, stage, batch)
    size, samples = len(devices) // len(plan.shares), batch / plan.microbatches
    replicas = [(devices[size * i : size * (i + 1)], -(-samples * n // total_parts)) for i, n in enumerate(plan.shares)]
    ranks, count = max(replicas, key=lambda replica: replica[1] / speed_of(replica[0]))
    return ranks, int(count)
