"""Sum of sparse gradients: ranks exchange the rows of a table that they have looked up, indices and values.

    round     message of each rank              bytes
    first     number of its rows                8
    second    their indices and values          rows x (8 + row size x bytes of the dtype), to each other rank

All ranks concatenate the rows in the order of the ranks and add up equal indices: the sum has the rows that any of them
has touched, as on one device, and the optimizer's lazy updates leave all others alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from polylane.runtime.sync.compression.compressor import PendingReduction, ReducedBucket
from polylane.runtime.transport.protocol import PendingTransfer, Transport

# Sent in place of a number of rows by a rank whose parameter has no gradient at all.
NO_GRADIENT = -1


@dataclass
class SparseReduction(PendingReduction):
    """The pending sum of the sparse gradient of one table.

    Attributes:
        name: canonical name of the table.
        table: the parameter, for shape and dtype.
        gradient: this worker's own gradient, coalesced; None where it has none.
        ranks: the ranks that sum it.
        transport: connects the replicas that exchange rows.
        counts: the pending numbers of rows of all ranks.
    """

    name: str
    table: nn.Parameter
    gradient: Tensor | None
    ranks: tuple[int, ...]
    transport: Transport
    counts: PendingTransfer

    def __post_init__(self) -> None:
        self._rows: list[PendingTransfer] | None = None

    def start_next_round(self) -> None:
        counts: list[int] = self.counts.wait().tolist()
        if all(count == NO_GRADIENT for count in counts):
            return
        rows, width = [max(count, 0) for count in counts], self.table[0].numel() if len(self.table) else 0
        if self.gradient is None:
            device = self.table.device
            indices = torch.empty(0, dtype=torch.int64, device=device)
            values = torch.empty(0, dtype=self.table.dtype, device=device)
        else:
            indices, values = self.gradient.indices().view(-1), self.gradient.values().reshape(-1)
        self._rows = [
            self.transport.all_gather(indices, self.ranks, rows),
            self.transport.all_gather(values, self.ranks, [count * width for count in rows]),
        ]

    def wait(self) -> ReducedBucket:
        if self._rows is None:
            return ReducedBucket((torch.zeros_like(self.table),), frozenset((self.name,)))
        indices, values = (transfer.wait() for transfer in self._rows)
        shape = tuple(self.table.shape)
        total = torch.sparse_coo_tensor(
            indices.view(1, -1), values.view(-1, *shape[1:]), shape, check_invariants=False
        ).coalesce()
        return ReducedBucket((total,), frozenset())


def launch_sparse_sum(
    name: str, table: nn.Parameter, gradient: Tensor | None, ranks: tuple[int, ...], transport: Transport
) -> SparseReduction:
    """Start to sum a table's sparse gradient over ranks.

    Args:
        name: canonical name of the table.
        table: the parameter, the same shape on all ranks.
        gradient: this worker's gradient, sparse; None where it has none or another rank gives it.
        ranks: the ranks that sum it, one of the transport's groups.
        transport: connects the replicas that exchange rows.
    """
    sparse_gradient = None if gradient is None else gradient.detach().coalesce()
    count = NO_GRADIENT if sparse_gradient is None else sparse_gradient.indices().shape[1]
    counts = torch.tensor([count], dtype=torch.int64, device=table.device)
    return SparseReduction(name, table, sparse_gradient, ranks, transport, transport.all_gather(counts, ranks))
