"""A backend of torch.distributed whose operations end at once and carry nothing: what is left is the host's own time.

It counts as one of accelerators, so that what runs is what would run over NCCL. Results are zeros, and sums a worker's
own summand, so the numbers of a training mean nothing.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from polylane.runtime.transport.choose import VARIABLE
from polylane.runtime.workers import world

NAME = "silent"


class SilentWork(dist.Work):
    """An operation that has ended.

    Args:
        results: the tensors that it would have written.
    """

    def __init__(self, results: Sequence[Tensor]) -> None:
        super().__init__()
        self._results = results

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Sequence[Tensor]]:
        future = torch.futures.Future[Sequence[Tensor]]()
        future.set_result(self._results)
        return future


class SilentGroup(dist.ProcessGroup):
    """A communicator of workers that hear nothing of each other."""

    def getBackendName(self) -> str:
        return NAME

    def _set_group_desc(self, description: str) -> None:
        pass

    @property
    def group_name(self) -> str:
        return dist.distributed_c10d._world.pg_names[self]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> SilentWork:
        return SilentWork(tensors)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> SilentWork:
        for tensor in tensors if opts.rootRank != self.rank() else ():
            if tensor.dtype is torch.uint8:  # others hold what is equal already: torch compares shapes so
                tensor.data.zero_()
        return SilentWork(tensors)

    def all_gather_single(self, output: Tensor, tensor: Tensor, opts: Any = None) -> SilentWork:
        output.data.zero_()
        return SilentWork([output])

    reduce_scatter_single = all_gather_single

    def alltoall_base(self, output: Tensor, tensor: Tensor, received: Any, sent: Any, opts: Any = None) -> SilentWork:
        return self.all_gather_single(output, tensor)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> SilentWork:
        for part in outputs[0]:  # all ranks have the same
            part.copy_(inputs[0])
        return SilentWork(outputs[0])

    def barrier(self, opts: Any = None) -> SilentWork:
        return SilentWork([])


def become_silent_worker() -> None:
    """Make this worker one whose tensors travel over the silent backend."""

    def create_group(store: dist.Store, rank: int, size: int, timeout: timedelta) -> SilentGroup:
        return SilentGroup(rank, size)

    torch.set_num_threads(1)
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, create_group, devices=["cpu"])
    os.environ[VARIABLE] = "gloo"
    assert world._started is not None
    world._started = replace(world._started, backend=NAME)
