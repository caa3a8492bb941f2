"""Reductions and softmax over a sharded dimension: every rank reduces its part, then collectives reduce the results.

All are called as ``function(axes, x, ...)``, see :class:`~polylane.placement.kernels.collective_op.AxisCollective`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.placement.kernels.accumulation_dtype import accumulation_dtype, upcast
from polylane.placement.kernels.collective_op import all_reduce_max, all_reduce_sum
from polylane.placement.redistribute import Axis, all_reduce_differentiable


def max_over_axes(axes: Sequence[Axis], x: Tensor, dims: Sequence[int]) -> Tensor:
    """Return the maximum over dimensions, which are kept with size 1."""
    lowest = -math.inf if x.is_floating_point() else torch.iinfo(x.dtype).min
    # amax refuses an empty dimension: a rank without a part contributes the lowest value.
    empty = any(x.shape[d] == 0 for d in dims)
    shape = [1 if d in dims else n for d, n in enumerate(x.shape)]
    return all_reduce_max(axes, x.new_full(shape, lowest) if empty else x.amax(list(dims), keepdim=True))


class ShardedSoftmax:
    """aten.softmax, log_softmax and _safe_softmax (zeros instead of nan where all scores are -inf).

    Args:
        dim: index of the softmax's dimension, from 0.
        dtype: dtype of the operator's result.
        log: whether to return the logarithm.
        safe: whether a row of -inf gives zeros.
    """

    __name__ = "softmax"

    def __init__(self, dim: int, dtype: torch.dtype, log: bool = False, safe: bool = False) -> None:
        self.dim, self.dtype, self.log, self.safe = dim, dtype, log, safe

    def __call__(self, axes: Sequence[Axis], x: Tensor, *_: Any, **__: Any) -> Tensor:
        return _Softmax.apply(x.to(self.dtype), axes, self.dim, self.log, self.safe)  # type: ignore[no-any-return, no-untyped-call]


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[Axis], dim: int, log: bool, safe: bool) -> Tensor:
        values = upcast(x)
        # Two all-reduces forward: the maximum for a stable exponential, then the sum of exponentials.
        peak = max_over_axes(axes, values, [dim])
        if safe:
            peak = peak.masked_fill(peak == -math.inf, 0.0)
        shifted = values - peak
        shares = shifted.exp()
        sums = all_reduce_sum(axes, shares.sum(dim, keepdim=True))
        if safe:
            sums = sums.masked_fill(sums == 0.0, 1.0)
        out = (shifted - sums.log() if log else shares / sums).to(x.dtype)
        ctx.axes, ctx.dim, ctx.log = axes, dim, log
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (out,) = ctx.saved_tensors
        grad, values = upcast(grads[0]), upcast(out)
        # One all-reduce backward: the row's sum in the gradient of softmax.
        inner = all_reduce_sum(ctx.axes, (grad if ctx.log else grad * values).sum(ctx.dim, keepdim=True))
        back = grad - values.exp() * inner if ctx.log else values * (grad - inner)
        return back.to(out.dtype), None, None, None, None


class ShardedReduction:
    """A reduction over sharded dimensions: aten.logsumexp, or a norm of a positive, finite order.

    Args:
        function: :class:`LogSumExp` or :class:`PowerNorm`, applied to (x, axes, dims, *settings).
        dims: indices of the reduced dimensions, from 0.
        keepdim: whether reduced dimensions stay, with size 1.
        dtype: dtype of the operator's result.
        settings: further arguments of ``function``.
    """

    def __init__(
        self, function: type[LogSumExp | PowerNorm], dims: Sequence[int], keepdim: bool, dtype: torch.dtype,
        *settings: float,
    ) -> None:  # fmt: skip
        self.function, self.settings = function, settings
        self.dims, self.keepdim, self.dtype = tuple(dims), keepdim, dtype
        self.__name__ = function.operator

    def __call__(self, axes: Sequence[Axis], x: Tensor, *_: Any, **__: Any) -> Tensor:
        out: Tensor = self.function.apply(x.to(self.dtype), axes, self.dims, *self.settings)  # type: ignore[no-untyped-call]
        return out if self.keepdim else out.squeeze(self.dims)


class LogSumExp(torch.autograd.Function):
    """The logarithm of the sum of exponentials; reduced dimensions stay, with size 1."""

    operator = "logsumexp"

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[Axis], dims: Sequence[int]) -> Tensor:
        values = upcast(x)
        peak = max_over_axes(axes, values, dims)
        # A row that is all -inf, or has +inf: subtracting an infinite peak would give nan.
        base = peak.masked_fill(peak.abs() == math.inf, 0.0)
        out = (all_reduce_sum(axes, (values - base).exp().sum(list(dims), keepdim=True)).log() + base).to(x.dtype)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, out = ctx.saved_tensors
        return grads[0] * (x - out.masked_fill(out.abs() == math.inf, 0.0)).exp(), None, None


class ShardedMean:
    """aten.mean of a part of the reduced values, as a partial sum of the mean.

    Args:
        count: number of values in the whole mean, over all ranks.
        dtype: dtype of the operator's result.
    """

    __module__, __name__ = "polylane", "mean"

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype

    def __call__(self, x: Tensor, dim: Any = None, keepdim: bool = False, **_: Any) -> Tensor:
        return (x.sum(dim, keepdim, dtype=accumulation_dtype(self.dtype)) / self.count).to(self.dtype)


def _sum_differentiable(axes: Sequence[Axis], x: Tensor) -> Tensor:
    for axis in axes:
        x = all_reduce_differentiable(axis, x)
    return x


class ShardedVariance:
    """aten.var, std, var_mean and std_mean over sharded dimensions.

    Variance and mean are returned as partial sums; a standard deviation, and the mean with it, are whole.

    Args:
        dims: indices of the reduced dimensions, from 0.
        keepdim: whether reduced dimensions stay, with size 1.
        count: number of reduced values, over all ranks.
        correction: subtracted from ``count`` in the divisor (Bessel's correction: 1).
        root: whether to return the standard deviation.
        mean: whether to return the mean, too.
        dtype: dtype of the operator's result.
    """

    __name__ = "variance"

    def __init__(
        self, dims: Sequence[int], keepdim: bool, count: int, correction: float, root: bool, mean: bool,
        dtype: torch.dtype,
    ) -> None:  # fmt: skip
        self.dims, self.keepdim, self.count, self.correction = list(dims), keepdim, count, correction
        self.root, self.mean, self.dtype = root, mean, dtype

    def __call__(self, axes: Sequence[Axis], x: Tensor, *_: Any, **__: Any) -> Any:
        values = upcast(x.to(self.dtype))
        partial_mean = values.sum(self.dims, keepdim=True) / self.count
        # The mean is needed whole for the deviations; as a result it stays this rank's partial sum ``partial_mean``.
        mean = all_reduce_sum(axes, partial_mean.detach().clone())
        # Detached: the gradient of the variance by the mean is zero, because deviations sum to zero.
        out = (values - mean).square().sum(self.dims, keepdim=self.keepdim) / max(self.count - self.correction, 0.0)
        if self.root:
            out = _sum_differentiable(axes, out)
            # The root's slope at 0 is infinite; its gradient is set to 0 as torch does.
            zero = out == 0.0
            out = out.masked_fill(zero, 1.0).sqrt().masked_fill(zero, 0.0)
        if not self.mean:
            return out.to(self.dtype)
        if self.root:
            partial_mean = _sum_differentiable(axes, partial_mean)
        return out.to(self.dtype), (partial_mean if self.keepdim else partial_mean.squeeze(self.dims)).to(self.dtype)


class PowerNorm(torch.autograd.Function):
    """The norm of a positive, finite order; reduced dimensions stay, with size 1."""

    operator = "norm"

    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[Axis], dims: Sequence[int], order: float) -> Tensor:
        powers = upcast(x).abs().pow(order).sum(list(dims), keepdim=True)
        out = all_reduce_sum(axes, powers).pow(1.0 / order).to(x.dtype)
        ctx.save_for_backward(x, out)
        ctx.order = order
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, out = ctx.saved_tensors
        if ctx.order == 2.0:
            return grads[0] * (x / out).masked_fill(out == 0.0, 0.0), None, None, None
        slope = x.sgn() * (x.abs() / out).pow(ctx.order - 1.0)
        return grads[0] * slope.masked_fill((out == 0.0) | (x == 0.0), 0.0), None, None, None


class ShardedPosition:
    """aten.argmax and argmin: the position of the first extreme along a dimension of which every rank has a part.

    Args:
        dim: index of the dimension, from 0.
        keepdim: whether it stays, with size 1.
        size: of the whole dimension.
        sign: 1 for the largest value, -1 for the smallest.
        ranges: ranges of the dimension that this rank has, as (start, stop).
    """

    __name__ = "position"

    def __init__(self, dim: int, keepdim: bool, size: int, sign: int, ranges: Sequence[tuple[int, int]]) -> None:
        self.dim, self.keepdim, self.size, self.sign, self.ranges = dim, keepdim, size, sign, tuple(ranges)

    def __call__(self, axes: Sequence[Axis], x: Tensor, *_: Any, **__: Any) -> Tensor:
        values = x.detach() if x.is_floating_point() else x.long()
        values = values if self.sign > 0 else -values
        if x.is_floating_point():  # NaN is before all others, for torch as well
            values = values.nan_to_num(math.inf, torch.finfo(x.dtype).max, -math.inf)
        extreme = max_over_axes(axes, values, [self.dim])
        places = [torch.arange(start, stop, device=x.device) for start, stop in self.ranges]
        shape = [-1 if d == self.dim else 1 for d in range(x.dim())]
        positions = torch.cat([*places, torch.arange(0, device=x.device)]).view(shape)
        # Equal extremes: the first counts, on whichever rank it is.
        positions = torch.where(values == extreme, positions, self.size)
        first = -max_over_axes(axes, -positions, [self.dim])
        return first if self.keepdim else first.squeeze(self.dim)


class ShardedExtreme:
    """aten.amax, amin, max, min, any and all; equal extremes share the gradient.

    Args:
        dims: indices of the reduced dimensions, from 0.
        keepdim: whether reduced dimensions stay, with size 1.
        dtype: dtype of the operator's result.
        sign: 1 for the largest value, -1 for the smallest.
        truth: whether values are taken as truth values: any (sign 1) or all (sign -1).
    """

    __name__ = "extreme"

    def __init__(self, dims: Sequence[int], keepdim: bool, dtype: torch.dtype, sign: int, truth: bool) -> None:
        self.dims, self.keepdim, self.dtype, self.sign, self.truth = tuple(dims), keepdim, dtype, sign, truth

    def __call__(self, axes: Sequence[Axis], x: Tensor, *_: Any, **__: Any) -> Tensor:
        # Collectives have no boolean type, and the sign of an unsigned one cannot be flipped.
        if self.truth or x.dtype in (torch.bool, torch.uint8):
            x = (x != 0 if self.truth else x).to(torch.int32)
        out: Tensor = _Extreme.apply(x, axes, self.dims, self.sign)  # type: ignore[no-untyped-call]
        return (out if self.keepdim else out.squeeze(self.dims)).to(self.dtype)


class _Extreme(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, axes: Sequence[Axis], dims: Sequence[int], sign: int) -> Tensor:
        out = max_over_axes(axes, x, dims) if sign > 0 else -max_over_axes(axes, -x, dims)
        if x.is_floating_point():
            # torch divides the gradient evenly between equal extremes, which may be on different ranks.
            count = all_reduce_sum(axes, (x == out).sum(list(dims), keepdim=True))
            ctx.save_for_backward(x, out, count)
        else:
            ctx.mark_non_differentiable(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, out, count = ctx.saved_tensors
        return torch.where(x == out, grads[0] / count, 0.0).to(x.dtype), None, None, None
