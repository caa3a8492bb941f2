"""Gradient compression: what every way of summing the gradients of a bucket offers, and the plain all-reduce."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.sync.flat_packing import flatten_tensors, split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport


@dataclass(frozen=True)
class BucketGradients:
    """What one worker adds to the sum of a bucket.

    Attributes:
        ranks: the ranks that sum, in order.
        names: the parameters, the same at every rank.
        gradients: of each, what this worker has of it, in the parameter's shape; all of one dtype. The sum may be
            written into them.
        optional: those of the names that need not have a gradient.
        flags: 1-D, of the gradients' dtype: for each optional parameter 1 where this worker has a gradient, else 0.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    gradients: tuple[Tensor, ...]
    optional: tuple[str, ...]
    flags: Tensor

    def names_without_gradient(self, flags: Tensor) -> frozenset[str]:
        """Parameters that nobody has a gradient for, by the sum of everybody's flags: the optimizer skips them."""
        return frozenset(name for name, had in zip(self.optional, flags.tolist(), strict=True) if not had > 0)


@dataclass(frozen=True)
class ReducedBucket:
    """What comes back: the gradients' sums, in the parameters' shapes and dtype, and who has none at all."""

    gradients: tuple[Tensor, ...]
    without_gradient: frozenset[str]


class PendingReduction:
    """The sum of one bucket, under way; this base has one round of messages."""

    def start_next_round(self) -> None:
        """Ask for the rounds that need the result of the first, where there are any.

        It is called once for every bucket, in their order, when all of them have been launched: so all ranks ask for
        all collectives in one order, whichever of them are complete.
        """

    def wait(self) -> ReducedBucket:
        """Wait for the sum; :meth:`advance` has been called."""
        raise NotImplementedError


class GradientCompressor:
    """A way to sum buckets; this base depends on no step and remembers nothing from one step to the next."""

    def begin_step(self) -> None:
        """A step's sums begin; called at every rank alike."""

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        """Start to sum a bucket; called during the backward pass, in the order of the buckets.

        Args:
            shares: the bucket's gradients of this worker, and the ranks that sum it.
            transport: between the workers, with a group of these ranks.
        """
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """What this rank remembers, with which a checkpoint continues exactly; tensors are its own, not copies."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Remember what :meth:`state_dict` gave.

        Args:
            state: of this rank, or of one that stood in its place.
        """


class NoCompression(GradientCompressor):
    """The sum itself, by the transport's all-reduce.

    Bytes of a bucket handed over by each rank: (elements + flags) x those of a number.
    """

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        return PendingPlainReduction(shares, transport.all_reduce(flatten_gradients(shares), shares.ranks))


@dataclass
class PendingPlainReduction(PendingReduction):
    """All gradients of a bucket as one vector, the flags behind them.

    Attributes:
        bucket_gradients: what this worker gave of the bucket.
        pending: the sum of the vectors of all ranks.
    """

    bucket_gradients: BucketGradients
    pending: PendingTransfer

    def wait(self) -> ReducedBucket:
        *gradients, flags = split_views(
            self.pending.wait(),
            [*(gradient.shape for gradient in self.bucket_gradients.gradients), self.bucket_gradients.flags.shape],
        )
        return ReducedBucket(tuple(gradients), self.bucket_gradients.names_without_gradient(flags))


def flatten_gradients(shares: BucketGradients) -> Tensor:
    """All gradients as one vector with the flags behind them; a single gradient without flags is not copied."""
    # The flags have no elements in most models: then a single large gradient travels without being copied.
    return flatten_tensors((*shares.gradients, shares.flags) if len(shares.flags) else shares.gradients)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """What sums and memories of gradients are kept in: float32 for half precision, else the dtype itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
