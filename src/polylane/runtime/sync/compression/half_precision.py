"""Half-precision compression: gradients travel with half the bytes of float32, a quarter of those of float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polylane.runtime.sync.compression.compressor import (
    BucketGradients,
    GradientCompressor,
    NoCompression,
    PendingReduction,
    ReducedBucket,
    flatten_gradients,
)
from polylane.runtime.sync.flat_packing import split_views
from polylane.runtime.transport.protocol import Transport


class HalfPrecisionCompressor(GradientCompressor):
    """Sums a bucket of gradients rounded to half precision; added up in the gradients' own dtype, rank after rank.

    An all-reduce in half precision would round each partial sum as well, in an order that is its algorithm's. Here the
    ranks exchange the rounded gradients and add them up themselves. Two ranks swap them whole: one round. More than two
    add up a part each, which goes to all rounded once more: a reduce-scatter and an all-gather. So the relative error
    of a sum of alike summands is at most one unit in the last place (bfloat16: 2^-8 = 0.4%, float16: 2^-11 = 0.05%),
    whatever the number of ranks.

    Since no partial sum is rounded, nothing needs to be divided by the number of ranks first, as it does for an
    all-reduce in float16; and what comes in are shares of the global mean already. bfloat16 has the range of float32.
    float16 has 40 binades and ends at 65504, so each message is scaled as block floating point is: by the power of two
    that brings its largest finite number to 2^14 or more, below 2^15. The power travels with the message, so that ranks
    need not agree on one, and no step is skipped. A power of two loses no bits: a number is rounded to float16's 11
    bits as long as it is at most 2^29 times smaller than the largest of its message, and is 0 from 2^40 times on. What
    is infinite or no number stays so: it arrives at all ranks alike, where clipping, or a check of the user's own, sees
    it as on one device, and it does not touch the others. A bucket of a dtype that is no wider than the wire's is
    summed plainly.

    Bytes of a bucket of n elements and f flags handed over by each of p ranks, where a message has s = 1 power of two
    in float16, else s = 0: 2 (n + f + s) where p is 2, else 2 p (c + s) + 2 f with c = ceil(n / p): parts for the p - 1
    others, and the sum of its own. Leaving a rank: 2 (n + f + s), or (p - 1) (4 (c + s) + 2 f), half of an all-reduce
    in float32 but for the flags and powers.

    Args:
        dtype: of the messages, float16 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._uncompressed = NoCompression()

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        if shares.flags.dtype.itemsize <= self.dtype.itemsize:
            return self._uncompressed.launch_sum(shares, transport)
        vector = flatten_gradients(replace(shares, optional=(), flags=shares.flags[:0]))
        return (_PendingAllGather if len(shares.ranks) == 2 else _PendingTwoStepSum)(
            shares, vector, WireFormat(self.dtype), transport
        )


# Of a dtype's bits: as which whole numbers, where the exponent begins, what is added to it.
_EXPONENT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@dataclass(frozen=True)
class WireFormat:
    """Layout of a message: rounded numbers, behind them flags, and where the numbers are scaled the power of two.

    Attributes:
        dtype: of the message, float16 or bfloat16.
    """

    dtype: torch.dtype

    @property
    def scale_slots(self) -> int:
        """1 where the dtype's range is less than float32's, so that the power of two is one more number; else 0."""
        return int(torch.finfo(self.dtype).tiny > torch.finfo(torch.float32).tiny)

    def pack(self, numbers: Tensor, flags: Tensor) -> Tensor:
        """A message of numbers of one dimension, and of flags, which are 0 or 1 and never scaled."""
        if not self.scale_slots:
            return torch.cat([numbers.to(self.dtype), flags.to(self.dtype)]) if len(flags) else numbers.to(self.dtype)
        power = _scaling_power(numbers)
        small = (numbers * _power_of_two(power, numbers.dtype)).to(self.dtype)
        return torch.cat([small, flags.to(self.dtype), power.to(torch.int16).view(self.dtype)])

    def unpack_flags(self, message: Tensor, count: int) -> Tensor:
        """The flags of a message, which follow its ``count`` numbers."""
        return message[count : len(message) - self.scale_slots]

    def add_messages(self, messages: Sequence[Tensor], total: Tensor) -> Tensor:
        """The sum of the messages' numbers, one after the other, written over a vector of the gradients' dtype."""
        for i, message in enumerate(messages):
            numbers = message[: len(total)]
            if self.scale_slots:
                back = -message[-1:].view(torch.int16).to(torch.int32)
                numbers = numbers.to(total.dtype).mul_(_power_of_two(back, total.dtype))
            if i:
                total += numbers  # widened as it is added
            else:
                total.copy_(numbers)
        return total


def _scaling_power(numbers: Tensor) -> Tensor:
    """Of which power of two numbers are multiplied; a tensor, so that no device is waited for."""
    if not len(numbers):
        return numbers.new_zeros(1, dtype=torch.int32)
    finite = torch.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    exponent = torch.frexp(torch.linalg.vector_norm(finite, torch.inf)).exponent.view(1)
    most = _EXPONENT[numbers.dtype][2] - 1  # of a power that has a normal reciprocal
    return (15 - exponent).clamp(-most, most)


def _power_of_two(power: Tensor, dtype: torch.dtype) -> Tensor:
    """Exact powers of two, made of their bits: pow() may round."""
    whole, start, bias = _EXPONENT[dtype]
    return ((power.to(whole) + bias) << start).view(dtype)


class _PendingAllGather(PendingReduction):
    """Every rank gets all vectors whole; see :class:`.codec.Flight`."""

    def __init__(self, shares: BucketGradients, vector: Tensor, form: WireFormat, transport: Transport) -> None:
        self._bucket_gradients, self._vector, self._wire_format = shares, vector, form
        self._pending = transport.all_gather(form.pack(vector, shares.flags), shares.ranks)

    def wait(self) -> ReducedBucket:
        messages = self._pending.wait().view(len(self._bucket_gradients.ranks), -1).unbind()
        flags = [self._wire_format.unpack_flags(message, len(self._vector)) for message in messages]
        return _unpack_sums(self._bucket_gradients, self._wire_format.add_messages(messages, self._vector), flags)


class _PendingTwoStepSum(PendingReduction):
    """Every rank adds up its part of the vectors, and all get the sums; see :class:`.codec.Flight`."""

    def __init__(self, shares: BucketGradients, vector: Tensor, form: WireFormat, transport: Transport) -> None:
        self._bucket_gradients, self._vector, self._wire_format, self._transport = shares, vector, form, transport
        # Equal parts, one for each rank to add up; the flags go with the second round only.
        ranks, none = len(shares.ranks), shares.flags[:0]
        self._part = part = -(-len(vector) // ranks)
        rest = part * ranks - len(vector)
        pieces = (F.pad(vector, (0, rest)) if rest else vector).view(ranks, part)
        messages = [form.pack(piece, none) for piece in pieces]
        self._parts = transport.all_to_all(messages, [messages[0].shape] * ranks, shares.ranks)

    def start_next_round(self) -> None:
        """The second round; see :meth:`.codec.Flight.advance`."""
        total = self._wire_format.add_messages(self._parts.wait(), self._vector.new_empty(self._part))
        self._sums = self._transport.all_gather(
            self._wire_format.pack(total, self._bucket_gradients.flags), self._bucket_gradients.ranks
        )

    def wait(self) -> ReducedBucket:
        messages = self._sums.wait().view(len(self._bucket_gradients.ranks), -1).unbind()
        for i, message in enumerate(messages):
            own = self._vector[i * self._part : (i + 1) * self._part]
            self._wire_format.add_messages([message], own)
        return _unpack_sums(
            self._bucket_gradients,
            self._vector,
            [self._wire_format.unpack_flags(message, self._part) for message in messages],
        )


def _unpack_sums(shares: BucketGradients, vector: Tensor, flags: Sequence[Tensor]) -> ReducedBucket:
    """The sums that a vector as :func:`flatten_gradients` makes it holds, and who had gradients by everybody's
    flags.
    """
    gradients = split_views(vector, [gradient.shape for gradient in shares.gradients])
    return ReducedBucket(tuple(gradients), shares.names_without_gradient(sum(flags[1:], flags[0])))
