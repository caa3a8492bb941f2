"""Half-precision gradient compression: gradients are sent as float16 or bfloat16, and summed in their own dtype."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from polylane.runtime.sync.compression.compressor import (
    BucketGradients,
    GradientCompressor,
    PendingReduction,
    ReducedBucket,
    flatten_gradients,
)
from polylane.runtime.sync.flat_packing import split_views
from polylane.runtime.transport.protocol import Transport


class HalfPrecisionCompressor(GradientCompressor):
    """Sums a bucket of gradients that are rounded to half precision, in the gradients' own dtype, in order of ranks.

    An all-reduce in half precision would also round every partial sum, in an order of its own. Here the ranks exchange
    the rounded gradients and add them up themselves. Two ranks exchange full vectors: one round. With more ranks each
    sums one part, which is rounded once more and sent to all: a reduce-scatter and an all-gather. So the relative error
    of a sum of equal signs is at most one unit in the last place (bfloat16: 2^-8 = 0.4%, float16: 2^-11 = 0.05%),
    whatever the number of ranks.

    Since no partial sum is rounded, gradients need not be divided by the number of ranks first, as for an all-reduce
    in float16; the losses are scaled for the global mean already. bfloat16 has the range of float32. float16 has 40
    binades and ends at 65504, so each message is scaled as in block floating point: by the power of two that brings its
    largest finite number into [2^14, 2^15). The exponent is sent with the message, so ranks need no common scale, and
    no step is skipped. Scaling by a power of two loses no bits: a number is rounded to float16's 11 bits if it is at
    most 2^29 times smaller than the largest of its message, and flushed to 0 from 2^40 times on. Infinity and NaN stay:
    they arrive at all ranks, where clipping, or a check of the user's own, sees them as on one device, and they do not
    affect other elements. A bucket of a dtype that is no wider than the message's is summed uncompressed.

    Bytes of a bucket of n elements and f flags over p ranks, with s = 1 exponent in a float16 message, else s = 0, and
    c = ceil(n / p) elements in a part (half of an all-reduce in float32, but for flags and exponents):

        ranks        handed over by each rank    leaving each rank
        2            2 (n + f + s)               2 (n + f + s)
        3 or more    2 p (c + s) + 2 f           (p - 1) (4 (c + s) + 2 f)

    Args:
        dtype: dtype of the messages, float16 or bfloat16.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        if shares.flags.dtype.itemsize <= self.dtype.itemsize:
            return super().launch_sum(shares, transport)
        vector = flatten_gradients(replace(shares, optional=(), flags=shares.flags[:0]))
        return (_PendingAllGather if len(shares.ranks) == 2 else _PendingTwoStepSum)(
            shares, vector, WireFormat(self.dtype), transport
        )


# Bit layout of a floating-point dtype: integer dtype of the same width, position of the exponent, exponent bias.
_EXPONENT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


@dataclass(frozen=True)
class WireFormat:
    """Layout of a message: rounded numbers, then flags, then for float16 the exponent of the scale.

    Attributes:
        dtype: dtype of the message, float16 or bfloat16.
    """

    dtype: torch.dtype

    @property
    def scale_slots(self) -> int:
        """1 if the dtype's range is smaller than float32's, so that an exponent is one more element; else 0."""
        return int(torch.finfo(self.dtype).tiny > torch.finfo(torch.float32).tiny)

    def pack(self, numbers: Tensor, flags: Tensor) -> Tensor:
        """Return a message of a vector of numbers, and of flags, which are 0 or 1 and never scaled."""
        if not self.scale_slots:
            return torch.cat([numbers.to(self.dtype), flags.to(self.dtype)]) if len(flags) else numbers.to(self.dtype)
        power = _scaling_power(numbers)
        small = (numbers * _power_of_two(power, numbers.dtype)).to(self.dtype)
        # The exponent's 16 bits are stored as they are, not as a float16 number.
        return torch.cat([small, flags.to(self.dtype), power.to(torch.int16).view(self.dtype)])

    def unpack_flags(self, message: Tensor, count: int) -> Tensor:
        """Return the flags of a message, which follow its ``count`` numbers."""
        return message[count : len(message) - self.scale_slots]

    def add_messages(self, messages: Sequence[Tensor], total: Tensor) -> Tensor:
        """Overwrite ``total``, a vector of the gradients' dtype, by the sum of messages in their order; return it."""
        for i, message in enumerate(messages):
            numbers = message[: len(total)]
            if self.scale_slots:
                back = -message[-1:].view(torch.int16).to(torch.int32)
                numbers = numbers.to(total.dtype).mul_(_power_of_two(back, total.dtype))
            if i:
                total += numbers  # upcast to total's dtype before the addition
            else:
                total.copy_(numbers)
        return total


def _scaling_power(numbers: Tensor) -> Tensor:
    """Return the exponent of the scale of a vector, [1]; a tensor, so that the host does not wait for the device."""
    if not len(numbers):
        return numbers.new_zeros(1, dtype=torch.int32)
    finite = torch.nan_to_num(numbers, nan=0.0, posinf=0.0, neginf=0.0)
    exponent = torch.frexp(torch.linalg.vector_norm(finite, torch.inf)).exponent.view(1)
    limit = _EXPONENT[numbers.dtype][2] - 1  # largest exponent whose power and reciprocal are both normal numbers
    return (15 - exponent).clamp(-limit, limit)


def _power_of_two(power: Tensor, dtype: torch.dtype) -> Tensor:
    """Return exact powers of two, built from their bits: pow() may round."""
    integer_dtype, start, bias = _EXPONENT[dtype]
    return ((power.to(integer_dtype) + bias) << start).view(dtype)


class _PendingAllGather(PendingReduction):
    """Sum of two ranks: both get both vectors and add them up in the order of the ranks."""

    def __init__(self, shares: BucketGradients, vector: Tensor, form: WireFormat, transport: Transport) -> None:
        self._bucket_gradients, self._vector, self._wire_format = shares, vector, form
        self._pending = transport.all_gather(form.pack(vector, shares.flags), shares.ranks)

    def wait(self) -> ReducedBucket:
        messages = self._pending.wait().view(len(self._bucket_gradients.ranks), -1).unbind()
        flags = [self._wire_format.unpack_flags(message, len(self._vector)) for message in messages]
        return _unpack_sums(self._bucket_gradients, self._wire_format.add_messages(messages, self._vector), flags)


class _PendingTwoStepSum(PendingReduction):
    """Sum of three or more ranks in two steps: reduce-scatter by an all-to-all, then an all-gather.

    With three ranks, whose vectors have the parts a, b, c (lower case: rounded to half precision; capitals: sums in the
    gradients' own dtype), each message being one part:

        step                rank 0       rank 1       rank 2       collective
        sends               a0 b0 c0     a1 b1 c1     a2 b2 c2     all_to_all, started by launch_sum
        receives            a0 a1 a2     b0 b1 b2     c0 c1 c2
        adds up             A            B            C            in start_next_round
        sends, rounded      A + flags    B + flags    C + flags    all_gather, started by start_next_round
        receives            A B C        A B C        A B C        rounded alike everywhere: the same bits
    """

    def __init__(self, shares: BucketGradients, vector: Tensor, form: WireFormat, transport: Transport) -> None:
        self._bucket_gradients, self._vector, self._wire_format, self._transport = shares, vector, form, transport
        # Equal parts, one for each rank to sum; the last one is padded. Flags are sent in the second round only.
        ranks, none = len(shares.ranks), shares.flags[:0]
        self._part = part = -(-len(vector) // ranks)
        padding = part * ranks - len(vector)
        pieces = (F.pad(vector, (0, padding)) if padding else vector).view(ranks, part)
        messages = [form.pack(piece, none) for piece in pieces]
        self._parts = transport.all_to_all(messages, [messages[0].shape] * ranks, shares.ranks)

    def start_next_round(self) -> None:
        total = self._wire_format.add_messages(self._parts.wait(), self._vector.new_empty(self._part))
        self._sums = self._transport.all_gather(
            self._wire_format.pack(total, self._bucket_gradients.flags), self._bucket_gradients.ranks
        )

    def wait(self) -> ReducedBucket:
        messages = self._sums.wait().view(len(self._bucket_gradients.ranks), -1).unbind()
        for i, message in enumerate(messages):
            # Also this rank's own part is read from its rounded message: exact sums would differ from other ranks'.
            section = self._vector[i * self._part : (i + 1) * self._part]
            self._wire_format.add_messages([message], section)
        return _unpack_sums(
            self._bucket_gradients,
            self._vector,
            [self._wire_format.unpack_flags(message, self._part) for message in messages],
        )


def _unpack_sums(shares: BucketGradients, vector: Tensor, flags: Sequence[Tensor]) -> ReducedBucket:
    """Return the sums in a vector in the layout of :func:`flatten_gradients`, and the parameters without a gradient."""
    gradients = split_views(vector, [gradient.shape for gradient in shares.gradients])
    return ReducedBucket(tuple(gradients), shares.names_without_gradient(sum(flags[1:], flags[0])))
