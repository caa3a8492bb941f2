"""Gradients in half precision on the wire: half the bytes of float32, a quarter of those of float64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from polylane.runtime.sync.codec import Flight, Plain, Shares, Summed, joined, parted
from polylane.runtime.transport.protocol import Transport


class Wire:
    """Sums a bucket of gradients rounded to half precision; added up in the gradients' own dtype, rank after rank.

    An all-reduce in half precision would round each partial sum as well, in an order that is its algorithm's. Here the
    ranks exchange the rounded gradients and add them up themselves. Two ranks swap them whole: one round. More than two
    add up a part each, which goes to all rounded once more: a reduce-scatter and an all-gather. So the relative error
    of a sum of alike summands is at most one unit in the last place (bfloat16: 2^-8 = 0.4%, float16: 2^-11 = 0.05%),
    whatever the number of ranks.

    Since no partial sum is rounded, nothing needs to be divided by the number of ranks first, as it does for an
    all-reduce in float16; and what comes in are shares of the global mean already. float16 ends at 65504 and has only
    zero below 3e-8, bfloat16 has the range of float32. What is beyond the end becomes infinite, and what is infinite or
    no number stays so: it arrives at all ranks alike, where clipping, or a check of the user's own, sees it as on one
    device. A bucket of a dtype that is no wider than the wire's is summed plainly.

    Bytes of a bucket of n elements and flags handed over by each of p ranks: 2 n where p is 2, else 2 c p with
    c = ceil(n / p): parts for the p - 1 others, and the sum of its own. Leaving a rank: 2 n, or 4 c (p - 1), half of an
    all-reduce in float32.

    Args:
        dtype: float16 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._plain = Plain()

    def begin(self) -> None:
        """Nothing depends on the step."""

    def launch(self, shares: Shares, transport: Transport) -> Flight:
        """See :meth:`.codec.Codec.launch`."""
        if shares.flags.dtype.itemsize <= self.dtype.itemsize:
            return self._plain.launch(shares, transport)
        return (_Swap if len(shares.ranks) == 2 else _Parts)(shares, joined(shares), self.dtype, transport)

    def state_dict(self) -> dict[str, Any]:
        """Nothing is remembered."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing is remembered."""


class _Swap:
    """Every rank gets all vectors whole; see :class:`.codec.Flight`."""

    def __init__(self, shares: Shares, vector: Tensor, dtype: torch.dtype, transport: Transport) -> None:
        self._shares, self._vector = shares, vector
        self._pending = transport.all_gather(vector.to(dtype), shares.ranks)

    def advance(self) -> None:
        """There is one round."""

    def wait(self) -> Summed:
        """See :meth:`.codec.Flight.wait`."""
        vectors = self._pending.wait().view(len(self._shares.ranks), len(self._vector))
        return parted(self._shares, _added(vectors.unbind(), self._vector))


class _Parts:
    """Every rank adds up its part of the vectors, and all get the sums; see :class:`.codec.Flight`."""

    def __init__(self, shares: Shares, vector: Tensor, dtype: torch.dtype, transport: Transport) -> None:
        self._shares, self._vector, self._transport = shares, vector, transport
        ranks = len(shares.ranks)
        part = -(-len(vector) // ranks)
        pieces = F.pad(vector.to(dtype), (0, part * ranks - len(vector))).view(ranks, part).unbind()
        self._parts = transport.all_to_all(pieces, [(part,)] * ranks, shares.ranks)

    def advance(self) -> None:
        """The second round; see :meth:`.codec.Flight.advance`."""
        parts = self._parts.wait()
        total = _added(parts, torch.empty_like(parts[0], dtype=self._vector.dtype))
        self._sums = self._transport.all_gather(total.to(parts[0].dtype), self._shares.ranks)

    def wait(self) -> Summed:
        """See :meth:`.codec.Flight.wait`."""
        return parted(self._shares, self._vector.copy_(self._sums.wait()[: len(self._vector)]))


def _added(vectors: Sequence[Tensor], total: Tensor) -> Tensor:
    """The sum, one after the other, written over a vector of a wider dtype."""
    total.copy_(vectors[0])
    for vector in vectors[1:]:
        total += vector  # widened as it is added
    return total
