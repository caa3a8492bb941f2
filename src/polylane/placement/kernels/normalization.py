"""Normalization over sharded dimensions: partial sums are all-reduced to the mean and variance of the whole.

All are called as ``function(axes, ...)``, see :class:`~polylane.placement.kernels.collective_op.AxisCollective`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.placement.kernels.accumulation_dtype import upcast
from polylane.placement.kernels.collective_op import all_reduce_sum
from polylane.placement.redistribute import Axis


class _Normalized(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * weight + bias; RMS norm leaves out the mean.

    Saves the input and its moments for backward, not the output.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, axes: Sequence[Axis],
        dims: list[int], count: int, eps: float, centred: bool,
    ) -> Tensor:  # fmt: skip
        values = upcast(x)
        # Two passes (mean, then squared deviations): a one-pass variance would cancel for large means.
        mean = all_reduce_sum(axes, values.sum(dims, keepdim=True)) / count if centred else values.new_zeros(())
        away = values - mean
        inverse = (all_reduce_sum(axes, away.square().sum(dims, keepdim=True)) / count + eps).rsqrt()
        out = away.mul_(inverse)
        if weight is not None:
            out = out * weight
        if bias is not None:
            out = out + bias
        ctx.save_for_backward(x, weight, bias, mean, inverse)
        ctx.axes, ctx.dims, ctx.count, ctx.centred = axes, dims, count, centred
        return out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, bias, mean, inverse = ctx.saved_tensors
        grad = upcast(grads[0])
        normal = (upcast(x) - mean) * inverse
        inner = grad if weight is None else grad * weight
        # Both sums of the backward pass in one all-reduce.
        local_sums = [(inner * normal).sum(ctx.dims, keepdim=True)]
        if ctx.centred:
            local_sums.append(inner.sum(ctx.dims, keepdim=True))
        sums = all_reduce_sum(ctx.axes, torch.stack(local_sums)) / ctx.count
        back = inner - normal * sums[0]
        if ctx.centred:
            back = back - sums[1]
        return (
            (back * inverse).to(x.dtype),
            # Gradients of weight and bias are this rank's: their placement says whether they are partial over an axis.
            None if weight is None else (grad * normal).sum_to_size(weight.shape).to(weight.dtype),
            None if bias is None else grad.sum_to_size(bias.shape).to(bias.dtype),
            *[None] * 5,
        )


class ShardedLayerNorm:
    """aten.layer_norm (Ba et al., 2016) with sharded normalized dimensions, and weights sharded alike.

    Args:
        dtype: dtype of the result.
    """

    __name__ = "layer_norm"
    centred = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(
        self, axes: Sequence[Axis], x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
        bias: Tensor | None = None, eps: float = 1e-5, *_: Any,
    ) -> Tensor:  # fmt: skip
        dims = list(range(x.dim() - len(normalized_shape), x.dim()))
        count = math.prod(normalized_shape)
        return _Normalized.apply(x.to(self.dtype), weight, bias, axes, dims, count, eps, self.centred)  # type: ignore[no-any-return, no-untyped-call]


class ShardedRmsNorm(ShardedLayerNorm):
    """aten.rms_norm (Zhang and Sennrich, 2019) with sharded normalized dimensions, and the weight sharded alike."""

    __name__ = "rms_norm"
    centred = False

    def __call__(  # type: ignore[override]
        self, axes: Sequence[Axis], x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Tensor:  # fmt: skip
        eps = torch.finfo(upcast(x).dtype).eps if eps is None else eps
        return super().__call__(axes, x, normalized_shape, weight, None, eps)


class ShardedGroupNorm:
    """aten.group_norm (Wu and He, 2018) with a sharded spatial dimension.

    Args:
        count: number of values in a group, over all ranks.
        dtype: dtype of the operator's result.
    """

    __name__ = "group_norm"

    def __init__(self, count: int, dtype: torch.dtype) -> None:
        self.count, self.dtype = count, dtype

    def __call__(
        self, axes: Sequence[Axis], x: Tensor, num_groups: int, weight: Tensor | None = None,
        bias: Tensor | None = None, eps: float = 1e-5, *_: Any,
    ) -> Tensor:  # fmt: skip
        grouped = x.reshape(x.shape[0], num_groups, x.shape[1] // num_groups, *x.shape[2:])
        shape = (1, *grouped.shape[1:3], *[1] * (x.dim() - 2))
        weight, bias = (None if t is None else t.reshape(shape) for t in (weight, bias))
        dims = list(range(2, grouped.dim()))
        out: Tensor = _Normalized.apply(grouped.to(self.dtype), weight, bias, axes, dims, self.count, eps, True)  # type: ignore[no-untyped-call]
        return out.reshape(x.shape)


class ShardedInstanceNorm(ShardedGroupNorm):
    """aten.instance_norm (Ulyanov et al., 2016) with its own statistics, and a sharded spatial dimension."""

    __name__ = "instance_norm"

    def __call__(  # type: ignore[override]
        self, axes: Sequence[Axis], x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: None, variance: None,
        use_input_stats: bool, momentum: float, eps: float, *_: Any,
    ) -> Tensor:  # fmt: skip
        return super().__call__(axes, x, x.shape[1], weight, bias, eps)


class ShardedBatchNorm:
    """Batch normalization in training with sharded samples or space: statistics are summed over the axes, too.

    Args:
        function: the operator on local values, called as ``function(part, x, ...)``.
    """

    __name__ = "batch_norm"

    def __init__(self, function: Callable[..., Tensor]) -> None:
        self.function = function

    def __call__(self, axes: Sequence[Axis], part: SampleSlice, x: Tensor, *args: Any) -> Tensor:
        def everywhere(sums: Tensor) -> Tensor:
            sums.copy_(all_reduce_sum(axes, sums.clone()))
            return sums if part.sum_replicas is None else part.sum_replicas(sums)

        # An empty part has no mean, so that it must not count as this rank's samples.
        rank_part = dataclasses.replace(part, sum_replicas=everywhere, weight=part.weight if x.numel() else 0)
        return self.function(rank_part, x, *args)
