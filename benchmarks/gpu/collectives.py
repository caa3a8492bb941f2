"""Collectives: every operation of torch.distributed that a transport makes, in a world of one worker.

What a GPU alone can show of NCCL: that each call is taken, for every dtype, small and large, and gives its input.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.gpu.setting import Row, Setting, synchronize
from polylane.runtime.transport.pending_work import view_as_bytes, view_as_real
from polylane.runtime.workers.world import backend_of_device, make_group_options

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.complex64, torch.int64)
ELEMENTS = (2, 1 << 20)


def measure(setting: Setting, device: torch.device) -> list[Row]:
    """Run each operation for each dtype; runs in one worker."""
    backend = backend_of_device(device)
    options = make_group_options(backend)
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, pg_options=options)
    group = dist.group.WORLD
    assert group is not None
    rows = []
    for dtype in DTYPES:
        unequal = [name for elements in ELEMENTS for name in run_operations(group, dtype, elements, device)]
        rows.append(Row("collectives", f"{backend}, {str(dtype).removeprefix('torch.')}", {}, not unequal))
        if unequal:
            rows[-1].figures["unequal"] = ", ".join(unequal)
    dist.destroy_process_group()
    return rows


def run_operations(group: dist.ProcessGroup, dtype: torch.dtype, elements: int, device: torch.device) -> list[str]:
    """Return the operations that do not give their input, which a group of one rank must."""
    sent = torch.arange(1, elements + 1, device=device).remainder(7).to(dtype)
    results: dict[str, Tensor] = {}

    def finish(name: str, work: dist.Work, result: Tensor) -> None:
        work.wait()
        results[name] = result

    summed, gathered, scattered, message, exchanged = sent.clone(), *(torch.empty_like(sent) for _ in range(4))
    message.copy_(sent)
    finish("all_reduce", group.allreduce([view_as_real(summed)]), summed)
    finish("all_gather", group.all_gather_single(view_as_bytes(gathered), view_as_bytes(sent)), gathered)
    scatter = group.reduce_scatter_single(view_as_real(scattered), view_as_real(sent), dist.ReduceScatterOptions())
    finish("reduce_scatter", scatter, scattered)
    finish("broadcast", group.broadcast([view_as_bytes(message)], dist.BroadcastOptions()), message)
    exchange = group.alltoall_base(
        view_as_bytes(exchanged), view_as_bytes(sent), [exchanged.nbytes], [sent.nbytes], dist.AllToAllOptions()
    )
    finish("all_to_all", exchange, exchanged)
    synchronize(device)
    return [name for name, result in results.items() if not torch.equal(result, sent)]
