"""What a rank computes that has some of the classes only: its rows of a table, its logits of a softmax."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from polylane.placement.kernels.accumulation_dtype import HALF, accumulation_dtype, upcast
from polylane.placement.kernels.collective_op import all_reduce_max, all_reduce_sum
from polylane.placement.redistribute import Axis, all_reduce_differentiable

NONE, MEAN, SUM = 0, 1, 2  # torch's numbers for how a loss is reduced

Ranges = tuple[tuple[int, int], ...]


def local_position(index: Tensor, ranges: Ranges) -> tuple[Tensor, Tensor]:
    """Where a rank that has some ranges of a dimension finds what an index names.

    Returns:
        The positions among its own, 0 where it has not got it, and whether it has got it.
    """
    at, own, length = torch.zeros_like(index), torch.zeros_like(index, dtype=torch.bool), 0
    for start, stop in ranges:
        inside = (index >= start) & (index < stop)
        at, own = torch.where(inside, index - start + length, at), own | inside
        length += stop - start
    return at, own


def check_range(index: Tensor, size: int) -> None:
    """Refuse, as an operator on the whole dimension does, what lies outside of it; waits for no device.

    Raises:
        RuntimeError: an index that is not one of ``size``; on an accelerator an assertion of the device.
    """
    torch._assert_async(((index >= 0) & (index < size)).all(), f"index out of range: not one of {size}")


@dataclass(frozen=True)
class ShardedLookup:
    """Rows of an embedding's table: those that this rank has, and zeros for others.

    Attributes:
        ranges: of the table's rows that this rank has.
        size: number of rows of the whole table.
        padding: the row that gets no gradient; -1: none.
    """

    ranges: Ranges
    size: int
    padding: int

    __module__ = "polylane"
    __name__ = "lookup"

    def __call__(self, table: Tensor, indices: Tensor) -> Tensor:
        """Table (rows in hand, f), indices (...) -> (..., f)."""
        check_range(indices, self.size)
        if not table.shape[0]:
            return table.sum(0).expand(*indices.shape, table.shape[1])  # zeros that hang together with the table
        at, own = local_position(indices, self.ranges)
        rows = functional.embedding(at, table, self._padding())
        return rows.masked_fill_(~own.unsqueeze(-1), 0)

    def _padding(self) -> int | None:
        """The row without a gradient, among those that this rank has."""
        length = 0
        for start, stop in self.ranges:
            if start <= self.padding < stop:
                return self.padding - start + length
            length += stop - start
        return None


@dataclass(frozen=True)
class ShardedClassLoss:
    """Cross entropy or negative log likelihood, of some of the classes, of some of the samples, or of both.

    Called like torch's operator on what is in hand. Where classes are cut, it never has all logits of a sample on one
    rank (Shoeybi et al., Megatron-LM, section 3): ranks exchange the largest logit, the sum of exponentials and the
    target's logit; the loss is then whole on each of them. A likelihood (logarithms are given) is linear in what it
    reads, so that every rank gives a summand.

    Attributes:
        logits: whether scores are given (cross entropy), or logarithms of probabilities.
        classes: how many there are, whole.
        dtype: of the loss where scores come in a half-precision type.
        ranges: of the classes that this rank has; None: all.
    """

    logits: bool
    classes: int
    dtype: torch.dtype
    ranges: Ranges | None = None

    __module__ = "polylane"
    __name__ = "class_loss"

    def of(self, ranges: Ranges) -> ShardedClassLoss:
        """The same on a rank that has some of the classes."""
        return replace(self, ranges=ranges)

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
            scores: (C), (N, C) or (N, C, ...), in hand.
            target: without the classes' dimension: which class; with it: a probability for each, in hand.
            weight: (C), of all classes; of those in hand where targets are probabilities.
            reduction, ignore_index, label_smoothing: as in torch.
            vocabulary: the axis that cuts the classes.
            counted: axes that cut the samples of a mean: the loss is then a summand of it.
        """
        dtype = self.dtype if scores.dtype in HALF else scores.dtype
        dim = 0 if scores.dim() == 1 else 1
        if target.is_floating_point():
            each = self._loss_of_probabilities(scores, target, weight, label_smoothing, dim, vocabulary)
            count: Any = each.numel()
        else:
            ignored = target == ignore_index
            index = target.long().masked_fill(ignored, 0)
            check_range(index, self.classes)
            own = None if weight is None else weight.to(accumulation_dtype(scores.dtype))
            each = self._loss_of_classes(scores, index, own, label_smoothing, dim, vocabulary).masked_fill(ignored, 0)
            count = (torch.ones_like(each) if own is None else own[index]).masked_fill(ignored, 0)
        if reduction == NONE:
            return each.to(dtype)
        loss = each.sum()
        if reduction == MEAN and isinstance(count, Tensor):
            loss = loss / all_reduce_sum(counted, count.sum())
        elif reduction == MEAN:
            loss = loss / count
        return loss.to(dtype)

    def _loss_of_classes(
        self, scores: Tensor, index: Tensor, weight: Tensor | None, smoothing: float, dim: int, axis: Axis | None
    ) -> Tensor:
        """The loss of every sample, for the class that is right."""
        ranges = self.ranges if self.ranges is not None else ((0, self.classes),)
        if not self.logits:
            at, own = local_position(index, ranges)
            right = _gather_own(scores, at, own, dim).to(accumulation_dtype(scores.dtype))
            return -right if weight is None else -right * weight[index]
        smoothed: Tensor | None = None
        if smoothing:
            mine = scores.new_ones(self.classes, dtype=accumulation_dtype(scores.dtype)) if weight is None else weight
            smoothed = torch.cat([mine[start:stop] for start, stop in ranges] or [mine[:0]])
        at, own = local_position(index, ranges)
        normalizer, right, weighted = _CrossEntropyTerms.apply(scores, at, own, smoothed, dim, axis)  # type: ignore[no-untyped-call]
        loss = normalizer - right
        if weight is not None:
            loss = loss * weight[index]
        if smoothing:
            every = self.classes if weight is None else weight.sum()
            loss = loss * (1 - smoothing) + smoothing / self.classes * (every * normalizer - weighted)
        return loss  # type: ignore[no-any-return]

    def _loss_of_probabilities(
        self, scores: Tensor, target: Tensor, weight: Tensor | None, smoothing: float, dim: int, axis: Axis | None
    ) -> Tensor:
        """The loss of every sample, for probabilities of the classes in hand."""
        if smoothing:
            target = target * (1 - smoothing) + smoothing / self.classes
        if weight is not None:
            target = target * weight.view([-1 if d == dim else 1 for d in range(scores.dim())])
        none = torch.zeros((), dtype=torch.long, device=scores.device)
        at = none.expand([n for d, n in enumerate(scores.shape) if d != dim])
        normalizer, _, _ = _CrossEntropyTerms.apply(scores, at, torch.zeros_like(at, dtype=torch.bool), None, dim, axis)  # type: ignore[no-untyped-call]
        both = torch.stack([target.sum(dim).to(normalizer.dtype), (target * scores.to(normalizer.dtype)).sum(dim)])
        both = both if axis is None else all_reduce_differentiable(axis, both)
        return both[0] * normalizer - both[1]  # type: ignore[no-any-return]


def _gather_own(x: Tensor, at: Tensor, own: Tensor, dim: int) -> Tensor:
    """What lies at one position along ``dim``, without that dimension; 0 where it is another rank's."""
    if not x.shape[dim]:
        return x.sum(dim)  # zeros that hang together with x
    return x.gather(dim, at.unsqueeze(dim)).squeeze(dim).masked_fill(~own, 0)


class _CrossEntropyTerms(torch.autograd.Function):
    """What a cross entropy needs of logits x, without the classes' dimension and whole on every rank.

    These are the logarithm of the sum of exponentials, the logit at one position, and, where there are weights, the sum
    of all with a weight for each. Gradients are whole; the backward pass needs no communication, and of the size of x
    only x itself is kept.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, at: Tensor, own: Tensor, weight: Tensor | None, dim: int, axis: Axis | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        values, axes = upcast(x), [] if axis is None else [axis]
        if weight is not None:
            weight = weight.view([-1 if d == dim else 1 for d in range(x.dim())])
        highest = values.amax(dim) if x.shape[dim] else values.new_full(at.shape, -torch.inf)
        highest = all_reduce_max(axes, highest)
        sums = [(values - highest.unsqueeze(dim)).exp_().sum(dim), _gather_own(values, at, own, dim)]
        sums += [] if weight is None else [(values * weight).sum(dim)]
        every = all_reduce_sum(axes, torch.stack(sums))
        normalizer = every[0].log() + highest
        ctx.dim = dim
        ctx.save_for_backward(x, normalizer, at, own, weight)
        return normalizer, every[1].clone(), every[-1].clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, normalizer, at, own, weight = ctx.saved_tensors
        dim = ctx.dim
        grad = (x.to(normalizer.dtype) - normalizer.unsqueeze(dim)).exp_().mul_(grads[0].unsqueeze(dim))
        if x.shape[dim]:
            grad.scatter_add_(dim, at.unsqueeze(dim), grads[1].masked_fill(~own, 0).unsqueeze(dim))
        if weight is not None:
            grad += weight * grads[2].unsqueeze(dim)
        return grad.to(x.dtype), None, None, None, None, None
