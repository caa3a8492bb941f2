"""PowerSGD: gradient matrices travel as products of two thin ones (Vogels, Karimireddy, Jaggi, NeurIPS 2019).

The paper is arXiv 1905.13727. Algorithm 1 is one step of subspace iteration on the mean of all ranks' matrices,
algorithm 2 adds what was left out to the next step's gradient.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from polylane.runtime.sync.compression.compressor import (
    BucketGradients,
    GradientCompressor,
    NoCompression,
    PendingReduction,
    ReducedBucket,
    sum_dtype,
)
from polylane.runtime.sync.compression.error_feedback import ErrorFeedback, restore_residual
from polylane.runtime.sync.flat_packing import split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport


class PowerSGDCompressor(GradientCompressor):
    """Sums every matrix M = sum of M_k of a bucket by its projection on r directions that all ranks agree on.

    Each rank k adds what it left out before to its gradient, M_k = G_k + E_k. Then, with Q (m x r) of the last step:
    P = sum of M_k Q (first round); P is orthogonalised, by the same QR decomposition at every rank;
    Q = sum of M_k^T P (second round); the sum is taken to be P Q^T; and E_k = M_k - P (M_k^T P)^T is remembered.

    So P Q^T + sum of E_k = sum of M_k: nothing is lost, only late. All of it is linear in the M_k: what comes out
    depends on their sum alone, not on how many ranks share it, or how unevenly. E_k is what algorithm 2 says: it leaves
    out this rank's own part of what was sent. With the mean of all ranks' parts instead (as some implementations have
    it) the differences between ranks would stay in the memories and grow.

    A parameter of the shape (n, ...) is a matrix of n rows, so a convolution's has a row for each output channel
    (section 3). Vectors, and matrices for which r (n + m) numbers are no fewer bytes than the n m are, go uncompressed
    with the first round, and so do the flags. The first Q is normally distributed, seeded by the parameter's name. In
    half precision all is computed, sent and remembered in float32.

    After a step with a gradient that is not finite, which arrives at all ranks alike, a matrix begins anew. The ranks
    must be devices of one kind with one number of threads: each decomposes P itself, and all are to get the same bits.

    Bytes of a bucket handed over by each rank: (sum of r (n + m) over its compressed matrices + elements of the others
    + flags) x those of a number; of one without compressed matrices, and before ``start``, as the plain sum.

    Args:
        rank: r, at least 1.
        start: steps that are summed plainly at first, while gradients change much.
        seed: of the first Q.
    """

    def __init__(self, rank: int, start: int = 0, seed: int = 0) -> None:
        self.rank, self.start, self.seed = rank, start, seed
        self._uncompressed = NoCompression()
        self._steps = 0  # begun
        self.error_feedback = ErrorFeedback()
        self._directions: dict[str, Tensor] = {}  # Q, transposed: with few rows its products are several times as fast

    def begin_step(self) -> None:
        self._steps += 1

    def launch_sum(self, shares: BucketGradients, transport: Transport) -> PendingReduction:
        low = frozenset(
            name
            for name, g in zip(shares.names, shares.gradients, strict=True)
            if saves_bytes(g.shape, g.dtype, self.rank)
        )
        if self._steps <= self.start or not low:
            return self._uncompressed.launch_sum(shares, transport)
        return _PendingPowerSGD(self, shares, low, transport)

    def directions_of(self, name: str, like: Tensor) -> Tensor:
        """Q^T of a parameter (r x m): that of the last step, or the first one."""
        columns = like[0].numel()
        found = self._directions.get(name)
        if found is None:
            random = torch.Generator().manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))
            found = torch.randn(self.rank, columns, generator=random, dtype=torch.float64)
        return restore_residual(name, found, (self.rank, columns), like.device, sum_dtype(like.dtype))

    def keep_directions(self, name: str, directions: Tensor) -> None:
        """Q^T for the next step; where it is not finite, the parameter begins anew."""
        if bool(directions.isfinite().all()):
            self._directions[name] = directions
        else:
            self._directions.pop(name, None)
            self.error_feedback.drop_residual(name)

    def state_dict(self) -> dict[str, Any]:
        """Steps begun; by parameter, this rank's memory, and Q^T, the same at all ranks."""
        return {"steps": self._steps, "memory": self.error_feedback.state_dict(), "directions": dict(self._directions)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._steps = state["steps"]
        self.error_feedback.load_state_dict(state["memory"])
        self._directions = {name: tensor.clone() for name, tensor in state["directions"].items()}


def saves_bytes(shape: torch.Size, dtype: torch.dtype, rank: int) -> bool:
    """Whether two thin matrices have fewer bytes than the gradient itself."""
    rows, columns = shape[0] if shape else 1, prod(shape[1:])
    return rank * (rows + columns) * sum_dtype(dtype).itemsize < rows * columns * dtype.itemsize


def orthonormalize_rows(rows: Tensor) -> Tensor:
    """Orthonormal rows that span what the given ones do.

    As many rows come out as go in, even where these are all zero: so a matrix whose gradients were zero for some steps
    finds its directions again.
    """
    basis: Tensor = torch.linalg.qr(rows.T).Q
    return basis.T


@dataclass
class _CompressedMatrix:
    """One compressed gradient on its way."""

    name: str
    gradient: Tensor
    error_matrix: Tensor  # M_k, n x m; afterwards E_k: a view of the memory
    left: Tensor  # P^T, r x n
    right: Tensor  # Q^T, r x m

    def reconstruct_gradient(self) -> Tensor:
        """P Q^T in the gradient's shape, written over the gradient where it can be."""
        gradient = self.gradient.detach()
        if gradient.dtype == self.left.dtype and gradient.is_contiguous():
            torch.mm(self.left.T, self.right, out=gradient.view(self.error_matrix.shape))
            return gradient
        return torch.mm(self.left.T, self.right).view(gradient.shape).to(gradient.dtype)


class _PendingPowerSGD(PendingReduction):
    """A bucket's two all-reduces; see :class:`.codec.Flight`."""

    def __init__(
        self, codec: PowerSGDCompressor, shares: BucketGradients, low: frozenset[str], transport: Transport
    ) -> None:
        self._compressor, self._bucket_gradients, self._transport = codec, shares, transport
        self._dropped: frozenset[str] = frozenset()
        self._matrices = {
            name: self._begin_matrix(name, gradient)
            for name, gradient in zip(shares.names, shares.gradients, strict=True)
            if name in low
        }
        dtype = sum_dtype(shares.gradients[0].dtype)
        self._uncompressed = {n: g for n, g in zip(shares.names, shares.gradients, strict=True) if n not in low}
        plain = [*self._uncompressed.values(), shares.flags]
        lefts = [matrix.left.reshape(-1) for matrix in self._matrices.values()]
        vector = torch.cat([*lefts, *(tensor.reshape(-1).to(dtype) for tensor in plain)])
        self._pending: PendingTransfer = transport.all_reduce(vector, shares.ranks)

    def _begin_matrix(self, name: str, gradient: Tensor) -> _CompressedMatrix:
        whole = self._compressor.error_feedback.add_gradient(name, gradient).view(gradient.shape[0], -1)
        right = self._compressor.directions_of(name, gradient)
        return _CompressedMatrix(name, gradient, whole, right @ whole.T, right)

    def start_next_round(self) -> None:
        """The second round; see :meth:`.codec.Flight.advance`."""
        lefts = [matrix.left.shape for matrix in self._matrices.values()]
        rest = [gradient.shape for gradient in self._uncompressed.values()]
        summed = split_views(self._pending.wait(), [*lefts, *rest, self._bucket_gradients.flags.shape])
        self._dropped = self._bucket_gradients.names_without_gradient(summed[-1])
        for name, total in zip(self._uncompressed, summed[len(lefts) : -1], strict=True):
            self._uncompressed[name] = total.to(self._bucket_gradients.flags.dtype)
        # P is the same at every rank after the first round; the second one sums Q = sum of M_k^T P.
        for matrix, total in zip(self._matrices.values(), summed, strict=False):
            matrix.left = orthonormalize_rows(total)
            matrix.right = matrix.left @ matrix.error_matrix
        vector = torch.cat([matrix.right.reshape(-1) for matrix in self._matrices.values()])
        self._pending = self._transport.all_reduce(vector, self._bucket_gradients.ranks)
        for matrix in self._matrices.values():
            if matrix.name not in self._dropped:  # of what is thrown away nothing has been sent
                matrix.error_matrix.addmm_(matrix.left.T, matrix.right, alpha=-1)

    def wait(self) -> ReducedBucket:
        summed = split_views(self._pending.wait(), [matrix.right.shape for matrix in self._matrices.values()])
        found = dict(self._uncompressed)
        for matrix, total in zip(self._matrices.values(), summed, strict=True):
            matrix.right = total
            self._compressor.keep_directions(matrix.name, total)
            found[matrix.name] = matrix.reconstruct_gradient()
        return ReducedBucket(tuple(found[name] for name in self._bucket_gradients.names), self._dropped)
