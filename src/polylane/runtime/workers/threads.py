"""Threads: with how many of them a worker computes, on its share of the host's cores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from polylane.graph.python_state.autograd_engine import start_autograd_engine
from polylane.runtime.workers.world import World, affine_cores


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
    if world.accelerator is not None:
        torch.set_num_threads(max(thread_count, affine_cores() // workers))
    try:
        yield
    finally:
        torch.set_num_threads(thread_count)


def limit_to_one_thread() -> None:
    """Make this process safe to fork; must be called before its first tensor operation."""
    torch.set_num_threads(1)
    # While autograd counts the devices that there are; later a forked process could not go backward.
    start_autograd_engine()


def threads_per_worker(workers: int) -> int:
    """Return the number of intra-op threads of each worker of this host: its share of the cores, at least one."""
    if torch.get_num_threads() > 1:  # an OpenMP pool may have started here; a single thread never uses it
        return 1
    return max(1, affine_cores() // workers)
