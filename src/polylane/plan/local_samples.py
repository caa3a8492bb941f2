"""Local samples: how many samples of a microbatch one replica of a stage has."""

from __future__ import annotations

from polylane.plan.plan import Plan


def local_samples(plan: Plan, stage: int, batch: int) -> int:
    """Return the most samples that a replica of a stage has in one microbatch.

    Args:
        plan: the meshes, the number of microbatches, and whether replicas split each of them.
        stage: number of the stage.
        batch: number of samples of a step, over all replicas.
    """
    parts = 1 if plan.takes_turns else plan.degree("data", stage)
    return -(-batch // (plan.microbatches * parts))
