"""PowerSGD: low-rank gradient compression, a gradient matrix is sent as two thin factors.

Vogels, Karimireddy, Jaggi, NeurIPS 2019 (arXiv 1905.13727). Algorithm 1 is one step of subspace iteration on the sum of
all ranks' matrices; algorithm 2 adds the residual to the next step's gradient (error feedback).
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from polylane.runtime.parameters.local_model import LocalModel
from polylane.runtime.state.held_tensors import WorkerState, whole_region
from polylane.runtime.state.model_state import parameter_region
from polylane.runtime.state.saved_state import SavedState
from polylane.runtime.sync.compression import compressor
from polylane.runtime.sync.flat_packing import split_views
from polylane.runtime.transport.protocol import PendingTransfer, Transport
from polylane.runtime.transport.staged import HostStaging


class PowerSGDCompressor(compressor.GradientCompressor):
    """Sums every matrix M = sum of M_k of a bucket by its projection on r directions that are equal at all ranks.

    For a gradient G_k (n x m) of rank k, its residual E_k, and Q (m x r) of the last step:

        each rank           M_k = G_k + E_k
        first round         P = sum of M_k Q,  orthogonalised by the same QR decomposition at every rank
        second round        Q = sum of M_k^T P
        summed gradient     P Q^T
        each rank           E_k = M_k - P (M_k^T P)^T,  kept for the next step

    So P Q^T + sum of E_k = sum of M_k: nothing is lost, only delayed. All of it is linear in the M_k: the result
    depends on their sum alone, not on how it is spread over ranks. E_k is that of algorithm 2: it subtracts this rank's
    own contribution. Subtracting the mean of all ranks' contributions instead (as some implementations do) would leave
    the differences between ranks in the residuals, where they grow.

    A parameter of the shape (n, ...) is a matrix of n rows, so a convolution's has a row for each output channel
    (section 3). Vectors, and matrices for which r (n + m) numbers take no fewer bytes than n m, are sent uncompressed
    with the first round, and so are the flags. The first Q is normally distributed, seeded by the parameter's name. In
    half precision everything is computed, sent and kept in float32.

    After a step with a gradient that is not finite, which all ranks see, a matrix starts anew. The ranks must be
    devices of one kind with one number of threads: each decomposes P itself, and all must get the same bits.

    Bytes of a bucket handed over by each rank: (sum of r (n + m) over its compressed matrices + elements of the others
    + flags) x bytes of the dtype; without compressed matrices, and before ``start``, those of the uncompressed sum.

    Args:
        rank: rank r of the approximation, at least 1.
        start: number of first steps that are not compressed, while gradients change quickly.

    Attributes:
        error_feedback: residual E_k of every compressed parameter, of this rank.
    """

    def __init__(self, rank: int, start: int = 0) -> None:
        self.rank, self.start = rank, start
        self._steps = 0  # number of begin_step calls
        self.error_feedback = compressor.ErrorFeedback()
        # Whether each of some directions was finite, on its way to the host.
        self._checks: list[tuple[tuple[str, ...], PendingTransfer]] = []
        self._directions: dict[str, Tensor] = {}  # Q^T (r x m): products with few rows are several times as fast

    def begin_step(self) -> None:
        self._drop_overflown()
        self._steps += 1

    def launch_sum(self, shares: compressor.BucketGradients, transport: Transport) -> compressor.PendingReduction:
        low = frozenset(
            name
            for name, g in zip(shares.names, shares.gradients, strict=True)
            if saves_bytes(g.shape, g.dtype, self.rank)
        )
        if self._steps <= self.start or not low:
            return super().launch_sum(shares, transport)
        return _PendingPowerSGD(self, shares, low, transport)

    def directions_of(self, name: str, like: Tensor) -> Tensor:
        """Return Q^T of a parameter (r x m): that of the last step, or a random one."""
        columns = like[0].numel()
        directions = self._directions.get(name)
        if directions is None:
            # From the name, not from a running generator: equal on all ranks without communication. crc32, because
            # Python's own hash of strings differs between processes.
            random = torch.Generator().manual_seed(zlib.crc32(f"0 {name}".encode()))
            directions = torch.randn(self.rank, columns, generator=random, dtype=torch.float64)
        return directions.to(like.device, compressor.sum_dtype(like.dtype))

    def keep_directions(self, directions: Mapping[str, Tensor]) -> None:
        """Store each parameter's Q^T for the next step, which first drops the state of those that are not finite."""
        self._directions.update(directions)
        finite = torch.stack([of_parameter.isfinite().all() for of_parameter in directions.values()])
        # Not read before the next step: the host would wait for an accelerator to end this one.
        self._checks.append((tuple(directions), HostStaging(finite.device).begin_to_host(finite)))

    def _drop_overflown(self) -> None:
        """Have the parameters start anew whose directions of the latest step are not finite."""
        for names, pending in self._checks:
            for name, is_finite in zip(names, pending.wait().tolist(), strict=True):
                if not is_finite:
                    self._directions.pop(name, None)
                    self.error_feedback.residuals.pop(name, None)
        self._checks.clear()

    def collect_state(self, objective: str, local_model: LocalModel, replica: int) -> WorkerState:
        self._drop_overflown()
        state = self.error_feedback.collect_state(objective, local_model, replica)
        state.plain[f"powersgd/{objective}"] = self._steps
        for name, directions in self._directions.items():
            state.add(self._name_of(objective, name, local_model), whole_region(directions.shape), directions)
        return state

    def restore_state(self, objective: str, local_model: LocalModel, replica: int, saved: SavedState) -> None:
        self.error_feedback.restore_state(objective, local_model, replica, saved)
        self._steps, self._directions = saved.plain.get(f"powersgd/{objective}", 0), {}
        self._checks.clear()  # of the directions that were there
        for name in local_model.local_names() & local_model.tensors.parameters().keys():
            key = self._name_of(objective, name, local_model)
            if saved.has(key):  # else it is of another cut of the parameter, or of another rank: it starts anew
                self._directions[name] = saved.read_whole(key).to(local_model.world.device)

    def _name_of(self, objective: str, name: str, local_model: LocalModel) -> str:
        label = parameter_region(local_model, name, local_model.tensors.parameters()[name]).label
        return f"directions{self.rank}/{objective}/{name}{label}"


def saves_bytes(shape: torch.Size, dtype: torch.dtype, rank: int) -> bool:
    """Return whether the two factors of a gradient take fewer bytes than the gradient itself."""
    rows, columns = shape[0] if shape else 1, prod(shape[1:])
    return rank * (rows + columns) * compressor.sum_dtype(dtype).itemsize < rows * columns * dtype.itemsize


def orthonormalize_rows(rows: Tensor) -> Tensor:
    """Return as many orthonormal rows, which span at least the space of the given rows.

    Householder QR yields orthonormal rows even for zeros: so a matrix whose gradients were zero for some steps finds
    its directions again.
    """
    basis: Tensor = torch.linalg.qr(rows.T).Q
    return basis.T


@dataclass
class _CompressedMatrix:
    """One gradient whose factors are being summed."""

    name: str
    gradient: Tensor
    error_matrix: Tensor  # M_k, n x m; E_k after the second round has started: a view of the stored residual
    left: Tensor  # P^T, r x n
    right: Tensor  # Q^T, r x m

    def reconstruct_gradient(self) -> Tensor:
        """Return P Q^T in the gradient's shape, in the gradient's own memory if dtype and strides allow."""
        gradient = self.gradient.detach()
        if gradient.dtype == self.left.dtype and gradient.is_contiguous():
            torch.mm(self.left.T, self.right, out=gradient.view(self.error_matrix.shape))
            return gradient
        return torch.mm(self.left.T, self.right).view(gradient.shape).to(gradient.dtype)


class _PendingPowerSGD(compressor.PendingReduction):
    """The two all-reduces of a bucket: P and uncompressed gradients with flags; then Q."""

    def __init__(
        self, codec: PowerSGDCompressor, shares: compressor.BucketGradients, low: frozenset[str], transport: Transport
    ) -> None:
        self._compressor, self._bucket_gradients, self._transport = codec, shares, transport
        self._dropped: frozenset[str] = frozenset()
        self._matrices = {
            name: self._begin_matrix(name, gradient)
            for name, gradient in zip(shares.names, shares.gradients, strict=True)
            if name in low
        }
        dtype = compressor.sum_dtype(shares.gradients[0].dtype)
        self._uncompressed = {n: g for n, g in zip(shares.names, shares.gradients, strict=True) if n not in low}
        plain = [*self._uncompressed.values(), shares.flags]
        lefts = [matrix.left.reshape(-1) for matrix in self._matrices.values()]
        vector = torch.cat([*lefts, *(tensor.reshape(-1).to(dtype) for tensor in plain)])
        self._pending: PendingTransfer = transport.all_reduce(vector, shares.ranks)

    def _begin_matrix(self, name: str, gradient: Tensor) -> _CompressedMatrix:
        error_matrix = self._compressor.error_feedback.add_gradient(name, gradient).view(gradient.shape[0], -1)
        right = self._compressor.directions_of(name, gradient)
        return _CompressedMatrix(name, gradient, error_matrix, right @ error_matrix.T, right)

    def start_next_round(self) -> None:
        lefts = [matrix.left.shape for matrix in self._matrices.values()]
        uncompressed_shapes = [gradient.shape for gradient in self._uncompressed.values()]
        summed = split_views(self._pending.wait(), [*lefts, *uncompressed_shapes, self._bucket_gradients.flags.shape])
        self._dropped = self._bucket_gradients.names_without_gradient(summed[-1])
        for name, total in zip(self._uncompressed, summed[len(lefts) : -1], strict=True):
            self._uncompressed[name] = total.to(self._bucket_gradients.flags.dtype)
        # P is the same at every rank after the first round; the second one sums Q = sum of M_k^T P.
        for matrix, total in zip(self._matrices.values(), summed, strict=False):
            matrix.left = orthonormalize_rows(total)
            matrix.right = matrix.left @ matrix.error_matrix
        vector = torch.cat([matrix.right.reshape(-1) for matrix in self._matrices.values()])
        self._pending = self._transport.all_reduce(vector, self._bucket_gradients.ranks)
        # matrix.right is still this rank's own M_k^T P here: the sum replaces it in wait.
        for matrix in self._matrices.values():
            if matrix.name not in self._dropped:  # the sum of a dropped gradient is discarded: keep all of M_k
                matrix.error_matrix.addmm_(matrix.left.T, matrix.right, alpha=-1)

    def wait(self) -> compressor.ReducedBucket:
        summed = split_views(self._pending.wait(), [matrix.right.shape for matrix in self._matrices.values()])
        gradients = dict(self._uncompressed)
        for matrix, total in zip(self._matrices.values(), summed, strict=True):
            matrix.right = total
            gradients[matrix.name] = matrix.reconstruct_gradient()
        self._compressor.keep_directions({matrix.name: matrix.right for matrix in self._matrices.values()})
        return compressor.ReducedBucket(tuple(gradients[name] for name in self._bucket_gradients.names), self._dropped)
