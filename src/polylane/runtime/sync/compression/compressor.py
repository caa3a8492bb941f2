"""Gradient compression interface: summing the gradients of a bucket over ranks; and the plain all-reduce.

A sum goes through up to two rounds of messages, so that no rank waits inside the backward pass:

    call                when                                            order
    begin_step          before the last backward pass of a step         once a step
    launch_sum          the bucket's gradients are complete             of the buckets
    start_next_round    after the pass, once all buckets are launched   of the buckets
    wait                the bucket's sums are needed                    any
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import WorkerState
from polylane.runtime.state.model_state import parameter_region
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.flat_packing import flatten_tensors, split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport


@dataclass(frozen=True)
class BucketGradients:
    """One worker's contribution to the sum of a bucket.

    Attributes:
        ranks: the ranks that sum the bucket, ascending.
        names: canonical names of the bucket's parameters, the same at every rank.
        gradients: this worker's gradients in the parameters' shapes, all of one dtype; may be overwritten by the sum.
        optional: those of ``names`` that may have no gradient.
        flags: 1-D, of the gradients' dtype: for each optional parameter 1 if this worker has a gradient, else 0.
    """

    ranks: tuple[int, ...]
    names: tuple[str, ...]
    gradients: tuple[Tensor, ...]
    optional: tuple[str, ...]
    flags: Tensor

    def names_without_gradient(self, flags: Tensor) -> frozenset[str]:
        """Return the parameters without a gradient at any rank, by the summed flags: the optimizer skips them."""
        if not self.optional:  # else the host waits for an accelerator
            return frozenset()
        return frozenset(name for name, had in zip(self.optional, flags.tolist(), strict=True) if not had > 0)


@dataclass(frozen=True)
class ReducedBucket:
    """Summed gradients in the parameters' shapes and dtype, and names of parameters without any gradient."""

    gradients: tuple[Tensor, ...]
    without_gradient: frozenset[str]


class PendingReduction:
    """The pending sum of one bucket; this base has one round of messages."""

    def start_next_round(self) -> None:
        """Start the rounds that need the result of the first one, if there are any.

        Called once for every bucket, in their order, when all of them have been launched: so all ranks issue all
        collectives in one order, whichever of them complete first.
        """

    def wait(self) -> ReducedBucket:
        """Wait for the sum; :meth:`start_next_round` has been called before."""
        raise NotImplementedError


class GradientCompressor:
    """Base of gradient compressors; this one sums uncompressed, by the transport's all-reduce.

    Bytes of a bucket handed over by each rank: (elements + flags) x bytes of the dtype.
    """

    def begin_step(self) -> None:
        """Begin the sums of a step; called at every rank."""

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        """Start to sum a bucket; called during the backward pass, in the order of the buckets.

        Args:
            shares: this worker's gradients of the bucket, and the ranks that sum it.
            transport: connects the workers; the bucket's ranks are one of its groups.
        """
        return PendingPlainReduction(shares, transport.all_reduce(flatten_gradients(shares), shares.ranks))

    def collect_state(self, objective: str, local_model: LocalModel, replica: int) -> WorkerState:
        """Return what the compressor adds to a checkpoint; nothing without compression.

        Args:
            objective: name of the objective whose gradients it sums.
            local_model: parameters and buffers of this worker.
            replica: number of this worker's replica.
        """
        return WorkerState()

    def restore_state(self, objective: str, local_model: LocalModel, replica: int, saved: SavedState) -> None:
        """Go on from a checkpoint; arguments as of :meth:`collect_state`."""


@dataclass
class PendingPlainReduction(PendingReduction):
    """Pending all-reduce of a bucket as one vector: all gradients, then the flags.

    Attributes:
        bucket_gradients: this worker's contribution, with the shapes of the gradients.
        pending: the transport's handle of the summed vector.
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
    """Return all gradients and then the flags as one vector; a single gradient without flags is not copied."""
    # Most models have no optional parameters, so no flags: then a single large gradient is sent from its own memory.
    return flatten_tensors((*shares.gradients, shares.flags) if len(shares.flags) else shares.gradients)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which gradients and residuals are accumulated: float32 for half precision, else itself."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


class ErrorFeedback:
    """Error feedback: the residual that compression left out of a gradient is added to the next one.

    Seide et al., INTERSPEECH 2014, for one bit; Stich, Cordonnier, Jaggi, NeurIPS 2018 (arXiv 1809.07599), "memory".
    Residuals are this rank's own; what is still to be sent is their sum over ranks.

    Attributes:
        residuals: by canonical name, what was not sent yet, in the parameter's shape; a missing one is zero.
    """

    def __init__(self) -> None:
        self.residuals: dict[str, Tensor] = {}

    def collect_state(self, objective: str, local_model: LocalModel, replica: int) -> WorkerState:
        """Return the residuals for a checkpoint; arguments as of :meth:`GradientCompressor.collect_state`."""
        state = WorkerState()
        for name, residual in self.residuals.items():
            region = parameter_region(local_model, name, residual)
            state.add(f"residual/{objective}/{name}@{replica}", region, residual)
        return state

    def restore_state(self, objective: str, local_model: LocalModel, replica: int, saved: SavedState) -> None:
        """Take the residuals of a checkpoint: of as many replicas each its own, else the first the sum of all."""
        self.residuals = {}
        for name, parameter in local_model.tensors.parameters().items():
            if not saved.has(f"residual/{objective}/{name}@0") or name not in local_model.local_names():
                continue
            region = parameter_region(local_model, name, parameter)
            residual = torch.zeros(region.local_shape, dtype=sum_dtype(parameter.dtype), device=parameter.device)
            if saved.fill_sum(f"residual/{objective}/{name}", replica, region, residual):
                self.residuals[name] = residual

    def add_gradient(self, name: str, gradient: Tensor) -> Tensor:
        """Add a gradient to the residual and return that as a vector; the caller subtracts in place what it sends."""
        if name not in self.residuals:
            dtype = sum_dtype(gradient.dtype)
            self.residuals[name] = torch.zeros(gradient.shape, dtype=dtype, device=gradient.device)
        # A view is returned, so that subtracting from it updates the stored residual.
        return self.residuals[name].add_(gradient.detach()).view(-1)
