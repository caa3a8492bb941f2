"""Synchronized batch normalization: a microbatch that is divided over replicas has the statistics of the whole.

Ioffe and Szegedy, Batch Normalization (ICML'15), algorithm 1, with sums over replicas; torch's SyncBatchNorm does not
run on CPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from polylane.errors import PolylaneError
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.symbolic_sizes import is_dynamic

VALUES = 2  # values per channel that training needs: one has no variance

# A squared mean this many times the variance costs it four of float64's sixteen digits.
_CANCELS = 1e4


class SyncStatistics(torch.autograd.Function):
    """Normalize by statistics over all replicas; one all-reduce forward, one backward.

    In float64, means that are large beside their variance take a second one forward. Numbers of 16 bits are normalized
    in 32, and rounded once, as torch's own operator does it: so the result has their dtype under autocast, too.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, part: SampleSlice, eps: float) -> Any:
        assert part.sum_replicas is not None
        input_values, channels = x, x.shape[1]
        x = x.to(torch.float32 if x.dtype.itemsize == 2 else x.dtype)
        count = x.numel() // max(channels, 1)
        # In float64, because the variance is a difference of large numbers: mean of squares minus squared mean.
        sums = torch.zeros(2 * channels + 1, dtype=torch.float64, device=x.device)
        # Padding samples (weight 0), and a replica without values, take part in the collective and count for nothing.
        moments = None
        if part.weight and count:
            moments = [moment.double() for moment in _moments(x)]
            sums[:channels] = moments[0] * count
            sums[channels:-1] = (moments[1] + moments[0] * moments[0]) * count
            sums[-1] = count
        part.sum_replicas(sums)
        total = sums[-1]
        mean = sums[:channels] / total
        # Of equal values the difference may be less than zero by rounding.
        variance = (sums[channels:-1] / total - mean * mean).clamp_(min=0)
        # Where the difference loses more digits than values of this precision have: squares around the common mean.
        # All replicas have the same sums, so that all decide alike.
        if x.dtype is torch.float64 and bool((mean * mean > _CANCELS * (variance + eps)).any()):
            squares = torch.zeros_like(mean) if moments is None else (moments[1] + (moments[0] - mean).square()) * count
            part.sum_replicas(squares)
            variance = squares / total
        common = mean.to(x.dtype), variance.to(x.dtype)
        ctx.save_for_backward(input_values, weight, *common)
        ctx.part, ctx.total, ctx.eps, ctx.has_bias = part, total, eps, bias is not None
        ctx.mark_non_differentiable(mean, variance, total)
        return _normalize(x, weight, bias, *common, eps).to(input_values.dtype), mean, variance, total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        input_values, weight, mean, variance = ctx.saved_tensors
        grad, x, part = grads[0].to(mean.dtype), input_values.to(mean.dtype), ctx.part
        own = _sum_gradients(grad, x, mean, variance, ctx.eps)
        sums = own.to(torch.float64, copy=True)  # ``own`` stays this replica's: parameters' gradients are summed later
        part.sum_replicas(sums)
        means = (sums / ctx.total).to(grad.dtype)
        # Padding samples must not contribute to the gradient of what they were computed from.
        scale = (variance + ctx.eps).rsqrt() * part.weight
        scale = scale if weight is None else scale * weight
        shape = [1, -1] + [1] * (x.dim() - 2)
        dx = (grad - _normalize(x, means[0], means[1], mean, variance, ctx.eps)) * scale.view(shape).to(grad.dtype)
        d_weight, d_bias = own[0] if weight is not None else None, own[1] if ctx.has_bias else None
        return dx.to(input_values.dtype), d_weight, d_bias, None, None


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean and the biased variance of each channel."""
    if type(x) is Tensor and x.dtype is torch.float32 and x.device.type in ("cpu", "cuda"):
        # The kernel of torch's own normalization: on a CPU four times as fast as a reduction over several dimensions.
        # It adds in float64 there; what is in float64 itself it adds one after the other, which loses digits.
        mean, variance = torch.ops.aten.batch_norm_update_stats(x, None, None, 0.0)
    else:  # float64; and tensors without data, for which that kernel has no version
        variance, mean = torch.var_mean(x, [d for d in range(x.dim()) if d != 1], correction=0)
    return mean, variance


def _sum_gradients(grad: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """Return the sums by channel of the gradient times the normalized values, and of the gradient.

    They are the gradients of weight and bias, and what the gradient of x needs.
    """
    if x.numel() == 0:  # torch's kernel divides by the number of values
        return mean.new_zeros(2, len(mean))
    output_mask = [False, True, True]
    _, *sums = torch.ops.aten.native_batch_norm_backward(
        grad, x, None, mean, variance, None, None, False, eps, output_mask
    )
    return torch.stack(sums)


def _normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, variance: Tensor, eps: float
) -> Tensor:
    """Return (x - mean) / sqrt(variance + eps) * weight + bias by channel, in one pass over x."""
    if x.numel() == 0:  # torch's kernel looks at the first channel's weight, which may not be there
        return x.clone()
    weight, bias = (None if factor is None else factor.to(x.dtype) for factor in (weight, bias))
    return torch.batch_norm(x, weight, bias, mean, variance, False, 0.0, eps, False)


def batch_norm(
    part: SampleSlice,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool = True,
    is_common: bool = False,
) -> Tensor:
    """aten.batch_norm in training, over all replicas' samples of the microbatch.

    Args:
        part: the samples of this replica, which sums over all; the other arguments are those of torch.batch_norm.
        is_common: whether ``x`` has no samples, and is the same on every replica: they have its values once, not each.
    """
    if part.sum_replicas is None:
        _require_values(part, x.numel() // max(x.shape[1], 1))
        if part.keep_statistics is not None and running_mean is not None and running_var is not None:
            # With a momentum of 1 running statistics become those of this microbatch alone.
            mean, variance = torch.zeros_like(running_mean), torch.zeros_like(running_var)
            result = torch.batch_norm(x, weight, bias, mean, variance, training, 1.0, eps, cudnn_enabled)
            part.keep_statistics(mean, variance)
            return result
        return torch.batch_norm(x, weight, bias, running_mean, running_var, training, momentum, eps, cudnn_enabled)
    out, mean, variance, total = SyncStatistics.apply(x, weight, bias, part, eps)  # type: ignore[no-untyped-call]
    count = part.weight * x.numel() // max(x.shape[1], 1)
    # This replica's own values are enough, mostly; the sum over all is read where they are not, for which a host waits.
    if count < VALUES:
        _require_values(part, int(total))
    if running_mean is not None and running_var is not None:
        with torch.no_grad():
            # torch's running variance is unbiased, the normalizing one is not.
            count = x.numel() // x.shape[1] if is_common else total
            unbiased = variance * (count / (count - 1))
            if part.keep_statistics is not None:
                part.keep_statistics(mean, unbiased)
            else:
                move_statistics(running_mean, mean, momentum)
                move_statistics(running_var, unbiased, momentum)
    return out  # type: ignore[no-any-return]


def move_statistics(running: Tensor, of_microbatch: Tensor, momentum: float) -> None:
    """Move running statistics towards those of a microbatch, in place."""
    running.mul_(1 - momentum).add_(of_microbatch.to(running.dtype), alpha=momentum)


def _require_values(part: SampleSlice, count: int) -> None:
    """Check that channels have two values at least, as torch.nn does (the operator itself would return nan).

    Raises:
        PolylaneError: there are fewer; the message names the microbatch.
    """
    if count < VALUES:
        raise PolylaneError(
            f"BatchNorm has {count} value per channel in microbatch {part.microbatch} of a batch of {part.batch}: use "
            "fewer microbatches, or leave out a last batch that is so short"
        )


def sync_batch_norms(graph: fx.Graph, part: fx.Node) -> bool:
    """Make training batch normalizations see all replicas; return whether there was any."""
    is_any = False
    for node in graph.nodes:
        call = getattr(node.target, "own", None)
        is_any = is_any or (call is not None and call.normalizes)  # the user's own Python, synchronized by its context
        if node.op == "call_function" and str(node.target) == "aten.batch_norm.default" and node.args[5]:
            node.meta["op"] = str(node.target)
            value: Any = node.args[0]
            is_common = not any(map(is_dynamic, value.meta["val"].shape))
            node.target, node.args, is_any = batch_norm, (part, *node.args, *([True] if is_common else [])), True
    return is_any


def batch_norm_arguments(args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the arguments of a call of torch.nn.functional.batch_norm by name, defaults included."""
    binding = _BATCH_NORM.bind(*args, **(kwargs or {}))
    binding.apply_defaults()
    return binding.arguments


_BATCH_NORM = inspect.signature(functional.batch_norm)
