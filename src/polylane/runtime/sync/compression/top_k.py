"""Top-k sparsification: only the largest entries of a gradient are sent, the residual is added to the next one.

Stich, Cordonnier, Jaggi, NeurIPS 2018 (arXiv 1809.07599), algorithm 1 with its memory; Aji, Heafield, EMNLP 2017.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, prod

import torch
from torch import Tensor

from polylane.cost.network.sync_volume import count_top_k_entries
from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.compression import compressor
from polylane.runtime.sync.flat_packing import split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport

# From this number of elements on, a lower bound of the k-th largest is estimated from a sample of _SAMPLE elements
# first: selecting from 1 M elements takes 3 ms instead of 8.
SAMPLED = 1 << 16
_SAMPLE = 1 << 13


class TopKCompressor(compressor.GradientCompressor):
    """Sums the entries of every parameter that each rank selects as its own largest.

    Each rank adds its residual to its gradient, M_k = G_k + E_k. Of each parameter it sends the ceil(fraction x
    elements) entries with the largest |M_k|, and their positions; NaN counts as largest, and of equal ones the first
    are taken. These are set to zero in the residual E_k. All ranks add all entries in the order of the ranks, so they
    get the same bits. In half precision M_k and the sum are kept in float32; entries are sent in the gradient's own
    dtype, and their rounding error stays in the residual.

    So the entries sent and the residuals always add up to the sum of the gradients.

    Bytes of a bucket handed over by each rank: k x (bytes of the dtype + 4) + flags x bytes of the dtype, with k
    entries over all its parameters; positions take 8 bytes from 2^31 elements on. A rank receives as much from every
    other rank: over p ranks that is less than a ring all-reduce of the full gradient if fraction x p is well below 1.

    Args:
        fraction: fraction of the entries that is sent, above 0 and at most 1.

    Attributes:
        error_feedback: residual E_k of every parameter, of this rank.
    """

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self.error_feedback = compressor.ErrorFeedback()

    def launch_sum(self, shares: compressor.BucketGradients, transport: Transport) -> compressor.PendingReduction:
        picks = list[_SelectedEntries]()
        for name, gradient in zip(shares.names, shares.gradients, strict=True):
            count = count_top_k_entries(self.fraction, gradient.numel())
            picks.append(take_largest(self.error_feedback.add_gradient(name, gradient), count, gradient.dtype))
        return _PendingTopK(shares, picks, transport.all_gather(pack_message(shares, picks), shares.ranks))

    def collect_state(self, objective: str, local_model: LocalModel, replica: int) -> WorkerState:
        return self.error_feedback.collect_state(objective, local_model, replica)

    def restore_state(self, objective: str, local_model: LocalModel, replica: int, saved: SavedState) -> None:
        self.error_feedback.restore_state(objective, local_model, replica, saved)


@dataclass(frozen=True)
class _SelectedEntries:
    """The entries of one parameter that are sent."""

    residual: Tensor  # the stored residual as a vector, without these entries
    positions: Tensor  # int64 indices into it
    values: Tensor  # in the gradient's dtype

    def restore_residual(self) -> None:
        """Add the entries to the residual again."""
        self.residual.index_add_(0, self.positions, self.values.to(self.residual.dtype))


def take_largest(owed: Tensor, count: int, dtype: torch.dtype) -> _SelectedEntries:
    """Take the largest entries out of a residual; the rounding error of the cast to ``dtype`` stays in it."""
    places = find_largest(owed, count)
    exact = owed[places]
    values = exact.to(dtype)
    # NaN and infinity leave a zero: their difference would be NaN, and stay in the residual for ever.
    owed[places] = (exact - values.to(exact.dtype)).nan_to_num_(0.0, 0.0, 0.0)
    return _SelectedEntries(owed, places, values)


def find_largest(vector: Tensor, count: int) -> Tensor:
    """Return positions of the entries with the largest absolute values; of equal ones the first.

    Args:
        vector: 1-D, of a real floating-point dtype.
        count: number of entries, from 1 to the vector's length.
    """
    if count == len(vector):
        return torch.arange(count, device=vector.device)
    sizes = vector.abs().nan_to_num_(nan=torch.inf, posinf=torch.inf)
    pool = _find_candidates(sizes, count)
    among = sizes if pool is None else sizes[pool]
    # topk does not say which of equal entries it takes: take all above the k-th value, then equal ones in order.
    bound = among.topk(count, sorted=True).values[-1]
    above = (among > bound).nonzero().view(-1)
    equal = (among == bound).nonzero().view(-1)
    places = torch.cat([above, equal[: count - len(above)]])
    return places if pool is None else pool[places]


def _find_candidates(sizes: Tensor, count: int) -> Tensor | None:
    """Return positions of all entries above a bound that at least ``count`` entries reach; None if that saves nothing.

    The bound is estimated from a sample (as in Lin et al., ICLR 2018, section 3). All entries equal to the k-th largest
    are among the candidates, so that ties are decided as without sampling.
    """
    if len(sizes) < SAMPLED or count * 8 > len(sizes):
        return None
    sample = sizes[:: len(sizes) // _SAMPLE]
    # Four standard deviations beyond the expected rank in the sample, so that too few candidates are rare.
    expected = count * len(sample) / len(sizes)
    bound = sample.topk(ceil(expected + 4 * expected**0.5 + 4)).values[-1]
    pool = (sizes >= bound).nonzero().view(-1)
    return pool if len(pool) >= count else None


def pack_message(shares: compressor.BucketGradients, picks: Sequence[_SelectedEntries]) -> Tensor:
    """Return one rank's message as bytes: values, flags, positions in the bucket."""
    starts, total = list[int](), 0
    for gradient in shares.gradients:
        starts.append(total)
        total += gradient.numel()
    places = torch.cat([pick.positions + start for pick, start in zip(picks, starts, strict=True)])
    values = torch.cat([*(pick.values for pick in picks), shares.flags])
    return torch.cat([values.view(torch.uint8), places.to(_index_dtype(total)).view(torch.uint8)])


def _index_dtype(elements: int) -> torch.dtype:
    return torch.int32 if elements < 1 << 31 else torch.int64


@dataclass
class _PendingTopK(compressor.PendingReduction):
    """Pending all-gather of a bucket's messages."""

    bucket_gradients: compressor.BucketGradients
    selected: list[_SelectedEntries]
    pending: PendingTransfer

    def wait(self) -> compressor.ReducedBucket:
        shapes = [gradient.shape for gradient in self.bucket_gradients.gradients]
        flags = self.bucket_gradients.flags
        total = torch.zeros(sum(map(prod, shapes)), dtype=compressor.sum_dtype(flags.dtype), device=flags.device)
        numbers, places = self._unpack_messages(len(total))
        count = places.shape[1]
        for row, positions in zip(numbers, places, strict=True):  # in the order of ranks: the same bits everywhere
            total.index_add_(0, positions, row[:count].to(total.dtype))
        dropped = self.bucket_gradients.names_without_gradient(numbers[:, count:].sum(0))
        for name, pick in zip(self.bucket_gradients.names, self.selected, strict=True):
            if name in dropped:  # the optimizer skips it: its entries must not be lost
                pick.restore_residual()
        return compressor.ReducedBucket(tuple(split_views(total.to(flags.dtype), shapes)), dropped)

    def _unpack_messages(self, elements: int) -> tuple[Tensor, Tensor]:
        """Return (values then flags, positions) of all ranks: a row for each rank."""
        ranks, flags = len(self.bucket_gradients.ranks), self.bucket_gradients.flags
        dtype, index_dtype = flags.dtype, _index_dtype(elements)
        count = sum(len(pick.positions) for pick in self.selected)
        end = (count + len(flags)) * dtype.itemsize
        messages = self.pending.wait().view(ranks, end + count * index_dtype.itemsize)
        numbers, places = messages[:, :end].reshape(-1).view(dtype), messages[:, end:].reshape(-1).view(index_dtype)
        return numbers.view(ranks, count + len(flags)), places.view(ranks, count)
