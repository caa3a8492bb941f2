"""Idle cores: more threads of the host for a worker that compiles a training for an accelerator while others wait."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polylane.runtime.workers.world import World


@contextmanager
def threads_of_idle_cores(world: World, workers: int = 1) -> Iterator[None]:
    """Context manager: a worker of an accelerator computes on its share of all cores of the host inside.

    The model runs once on the host before it moves to the accelerator. Launchers give a worker one thread
    (OMP_NUM_THREADS=1), with which that takes minutes. A worker that trains on the CPU keeps its threads: times of
    operators are those of its training.

    Args:
        world: this worker among all workers.
        workers: how many workers of this host compile at the same time.
    """
    thread_count = torch.get_num_threads()
    if world.accelerator is not None and hasattr(os, "sched_getaffinity"):
        torch.set_num_threads(max(thread_count, len(os.sched_getaffinity(0)) // workers))
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)
