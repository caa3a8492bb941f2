"""Vocabulary parallelism: embedding lookup and cross entropy on a rank that has a part of the classes (Megatron-LM)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polylane.placement.kernels.accumulation_dtype import HALF, accumulation_dtype, upcast
from polylane.placement.kernels.collective_op import all_reduce_sum
from polylane.placement.kernels.reduction import max_over_axes
from polylane.placement.placement import with_offsets
from polylane.placement.redistribute import Axis, all_reduce_differentiable

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers of a loss's reduction

Ranges = tuple[tuple[int, int], ...]


def local_position(index: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Find where a rank with some ranges of a dimension has the elements that an index names.

    Returns:
        The positions in the rank's part (0 for elements that it does not have), and whether it has them.
    """
    at, mask = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool)
    for start, stop, offset in with_offsets(ranges):
        in_range = (index >= start) & (index < stop)
        at, mask = torch.where(in_range, index - start + offset, at), mask | in_range
    return at, mask


def check_range(index: Tensor, size: int) -> None:
    """Check indices against the whole dimension, as an operator on all of it does; without waiting for the device.

    Raises:
        RuntimeError: an index is not in [0, size); on an accelerator it is an assertion of the device.
    """
    torch._assert_async(((index >= 0) & (index < size)).all(), f"index out of range: not one of {size}")


def lookup(ranges: Ranges, size: int, padding: int, table: Tensor, indices: Tensor) -> Tensor:
    """Look up indices (...) in the rows of an embedding's table that this rank has; return (..., f), 0 for other rows.

    Args:
        ranges: ranges of the table's rows that this rank has.
        size: number of rows of the whole table.
        padding: index of the row that gets no gradient; -1: none.
        table: (rows, f), the local rows.
        indices: rows of the whole table.
    """
    check_range(indices, size)
    if not table.shape[0]:
        return table.sum(0).expand(*indices.shape, table.shape[1])  # zeros, with a gradient for the table
    at, mask = local_position(indices, ranges)
    # The local index of the row without a gradient, if this rank has it.
    padding_at = (padding - start + offset for start, stop, offset in with_offsets(ranges) if start <= padding < stop)
    rows = functional.embedding(at, table, next(padding_at, None))
    return rows.masked_fill_(~mask.unsqueeze(-1), 0)


@dataclass(frozen=True)
class ShardedClassLoss:
    """Cross entropy or negative log likelihood over some of the classes, some of the samples, or both.

    Called like torch's operator on the local part. Where classes are sharded, no rank ever has all logits of a sample
    (Shoeybi et al., Megatron-LM, section 3): ranks all-reduce the largest logit, the sum of exponentials and the
    target's logit; the loss is then whole on each of them. A likelihood (of given logarithms) is linear in its scores,
    so that every rank returns a partial sum.

    Attributes:
        logits: whether scores are logits (cross entropy), or logarithms of probabilities.
        classes: number of classes over all ranks.
        dtype: dtype of the loss where scores come in a half-precision type.
        ranges: ranges of the classes that this rank has; None: all classes.
    """

    logits: bool
    classes: int
    dtype: torch.dtype
    ranges: Ranges | None = None

    __module__ = "polylane"
    __name__ = "class_loss"

    def __call__(
        self,
        scores: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        reduction: int = MEAN,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        *,
        vocabulary: Axis | None = None,
        counted: Sequence[Axis] = (),
    ) -> Tensor:
        """
        Args:
            scores: local part of (C), (N, C) or (N, C, ...).
            target: class indices, in the scores' shape without classes; or probabilities, in the local scores' shape.
            weight: (C), of all classes; of the local ones where targets are probabilities.
            reduction, ignore_index, label_smoothing: as in torch's cross_entropy.
            vocabulary: the axis that shards the classes; None if they are whole.
            counted: axes that shard the samples of a mean: the loss is then a partial sum of it.
        """
        dtype = self.dtype if scores.dtype in HALF else scores.dtype
        dim = 0 if scores.dim() == 1 else 1
        if target.is_floating_point():
            terms = self._loss_of_probabilities(scores, target, weight, label_smoothing, dim, vocabulary)
            count: Any = terms.numel()
        else:
            ignored = target == ignore_index
            index = target.long().masked_fill(ignored, 0)
            check_range(index, self.classes)
            cast = None if weight is None else weight.to(accumulation_dtype(scores.dtype))
            terms = self._loss_of_classes(scores, index, cast, label_smoothing, dim, vocabulary).masked_fill(ignored, 0)
            count = (torch.ones_like(terms) if cast is None else cast[index]).masked_fill(ignored, 0)
        if reduction == NONE:
            return terms.to(dtype)
        loss = terms.sum()
        # The mean's divisor counts the targets of all ranks: a sum of local means would weigh ranks wrongly.
        if reduction == MEAN and isinstance(count, Tensor):
            loss = loss / all_reduce_sum(counted, count.sum())
        elif reduction == MEAN:
            loss = loss / count
        return loss.to(dtype)

    def _loss_of_classes(
        self, scores: Tensor, index: Tensor, weight: Tensor | None, smoothing: float, dim: int, axis: Axis | None
    ) -> Tensor:
        """Return the loss of every sample, for a class index as target."""
        ranges = self.ranges if self.ranges is not None else ((0, self.classes),)
        at, mask = local_position(index, ranges)
        if not self.logits:
            right = _gather_own(scores, at, mask, dim).to(accumulation_dtype(scores.dtype))
            return -right if weight is None else -right * weight[index]
        smoothed: Tensor | None = None
        if smoothing:
            scales = scores.new_ones(self.classes, dtype=accumulation_dtype(scores.dtype)) if weight is None else weight
            # Label smoothing needs a weighted sum over all logits: this rank's weights are those of its classes.
            smoothed = torch.cat([scales[start:stop] for start, stop in ranges] or [scales[:0]])
        normalizer, right, weighted = _CrossEntropyTerms.apply(scores, at, mask, smoothed, dim, axis)  # type: ignore[no-untyped-call]
        loss = normalizer - right
        if weight is not None:
            loss = loss * weight[index]
        if smoothing:
            total = self.classes if weight is None else weight.sum()
            loss = loss * (1 - smoothing) + smoothing / self.classes * (total * normalizer - weighted)
        return loss  # type: ignore[no-any-return]

    def _loss_of_probabilities(
        self, scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, dim: int, axis: Axis | None
    ) -> Tensor:
        """Return the loss of every sample, for probabilities of the local classes as target."""
        if smoothing:
            target = target * (1 - smoothing) + smoothing / self.classes
        if weight is not None:
            target = target * weight.view([-1 if d == dim else 1 for d in range(scores.dim())])
        none = torch.zeros((), dtype=torch.long, device=scores.device)
        at = none.expand([n for d, n in enumerate(scores.shape) if d != dim])
        # Only the log-sum-exp is used; the other two terms come from position 0, masked.
        normalizer, _, _ = _CrossEntropyTerms.apply(scores, at, torch.zeros_like(at, dtype=torch.bool), None, dim, axis)  # type: ignore[no-untyped-call]
        sums = torch.stack([target.sum(dim).to(normalizer.dtype), (target * scores.to(normalizer.dtype)).sum(dim)])
        sums = sums if axis is None else all_reduce_differentiable(axis, sums)
        return sums[0] * normalizer - sums[1]  # type: ignore[no-any-return]


def _gather_own(x: Tensor, at: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Return the element at one position along ``dim``, without that dimension; 0 where another rank has it."""
    if not x.shape[dim]:
        return x.sum(dim)  # zeros that depend on x, for its gradient
    return x.gather(dim, at.unsqueeze(dim)).squeeze(dim).masked_fill(~mask, 0)


class _CrossEntropyTerms(torch.autograd.Function):
    """The terms of a cross entropy of logits x, without the classes' dimension and whole on every rank.

    These are the log-sum-exp, the logit at one position, and, where there are weights, the weighted sum of all logits.
    Incoming gradients are whole; the backward pass needs no communication, and saves nothing of x's size but x itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, at: Tensor, mask: Tensor, weight: Tensor | None, dim: int, axis: Axis | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        values, axes = upcast(x), [] if axis is None else [axis]
        if weight is not None:
            weight = weight.view([-1 if d == dim else 1 for d in range(x.dim())])
        highest = max_over_axes(axes, values, [dim])
        sums = [(values - highest).exp_().sum(dim), _gather_own(values, at, mask, dim)]
        sums += [] if weight is None else [(values * weight).sum(dim)]
        # One all-reduce for all row sums, after that of the maximum.
        totals = all_reduce_sum(axes, torch.stack(sums))
        normalizer = totals[0].log() + highest.squeeze(dim)
        ctx.dim = dim
        ctx.save_for_backward(x, normalizer, at, mask, weight)
        return normalizer, totals[1].clone(), totals[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, normalizer, at, mask, weight = ctx.saved_tensors
        dim = ctx.dim
        grad = (x.to(normalizer.dtype) - normalizer.unsqueeze(dim)).exp_().mul_(grads[0].unsqueeze(dim))
        if x.shape[dim]:
            grad.scatter_add_(dim, at.unsqueeze(dim), grads[1].masked_fill(~mask, 0).unsqueeze(dim))
        if weight is not None:
            grad += weight * grads[2].unsqueeze(dim)
        return grad.to(x.dtype), None, None, None, None, None
