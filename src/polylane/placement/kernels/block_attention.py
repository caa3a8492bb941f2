"""Blockwise attention with the online softmax: some queries against some keys, and its gradients.

Milakov and Gimelshein, Online normalizer calculation for softmax, 2018; Dao et al., FlashAttention, 2022.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.graph.traced_sizes import traced_max, traced_min
from polylane.placement.kernels.accumulation_dtype import accumulation_dtype
from polylane.placement.placement import with_offsets

# Positions along a sequence as disjoint ranges (start, stop), in ascending order.
Span = tuple[tuple[int, int], ...]

# Number of queries whose scores are in memory at a time.
ROWS = 512


def span_length(span: Span) -> int:
    """Return the number of positions in a span."""
    return sum(stop - start for start, stop in span)


def count_scores(queries: Span, keys: Span, causal: bool) -> int:
    """Return the number of scores: pairs of a query and a key that it sees; causal: keys no later than the query."""
    if not causal:
        return span_length(queries) * span_length(keys)

    def before(x: int, start: int, stop: int) -> int:
        """Count the scores of all queries before position ``x`` with the keys from ``start`` to ``stop``."""
        # Queries inside the range see 1, 2, ... of its keys (a triangle); those behind it see all (a rectangle).
        rising = traced_min(traced_max(x - start, 0), stop - start)
        return rising * (rising + 1) // 2 + traced_max(x - stop, 0) * (stop - start)

    return sum(before(b, c, d) - before(a, c, d) for a, b in queries for c, d in keys)


@dataclass(frozen=True)
class AttentionQueries:
    """Some queries, and what their scores depend on besides the keys.

    Attributes:
        query: tensor of shape (..., heads, l, E).
        mask: (..., l or 1, s or 1), boolean or additive as torch's operator takes it, or None.
        span: positions of the ``l`` queries in the sequence.
        causal: whether a query sees only the keys up to its own position.
        scale: factor of the scores before softmax.
        shares_heads: whether several heads of the query share one head of keys and values (GQA).
    """

    query: Tensor
    mask: Tensor | None
    span: Span
    causal: bool
    scale: float
    shares_heads: bool

    def repeat_heads(self, x: Tensor) -> Tensor:
        """Return keys or values with as many heads as the query has."""
        if not self.shares_heads or x.shape[-3] == self.query.shape[-3]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[-3], -3)

    def reduce_heads(self, gradient: Tensor, x: Tensor) -> Tensor:
        """Return the gradient of ``x`` from the gradient of :meth:`repeat_heads`'s result: summed over each group."""
        if gradient.shape == x.shape:
            return gradient
        groups = (*gradient.shape[:-3], x.shape[-3], gradient.shape[-3] // max(x.shape[-3], 1))
        return gradient.reshape(*groups, *gradient.shape[-2:]).sum(-3)


@dataclass(frozen=True)
class KeyValueBlock:
    """Some keys and their values.

    Attributes:
        key: tensor of shape (..., heads, s, E).
        value: tensor of shape (..., heads, s, Ev).
        span: positions of the ``s`` keys in the sequence.
        columns: the mask's columns for these keys; None where the mask has no others.
    """

    key: Tensor
    value: Tensor
    span: Span
    columns: Span | None = None


@dataclass(frozen=True)
class ScoreTile:
    """Some rows of a block's scores, few enough to be in memory at a time.

    Attributes:
        start, stop: range of rows among the local queries.
        first: position of the first row's query in the sequence.
        keys: number of leading keys of the block that any of the rows sees.
        is_masked: whether some row does not see all of these keys.
    """

    start: int
    stop: int
    first: int
    keys: int
    is_masked: bool


def tiles(queries: Span, keys: Span, causal: bool, rows: int = ROWS) -> Iterator[ScoreTile]:
    """Yield the tiles of a block's scores; none where no query sees a key."""
    at = 0
    for a, b in queries:
        for first in range(a, b, rows):
            # A causal tile needs the keys up to its last query; the causal mask only if its first query does not see
            # all of those.
            last = min(first + rows, b) - 1
            count = (
                span_length(tuple((c, min(d, last + 1)) for c, d in keys if c <= last)) if causal else span_length(keys)
            )
            of_all = span_length(tuple((c, min(d, first + 1)) for c, d in keys if c <= first)) if causal else count
            if count:
                yield ScoreTile(at, at + last + 1 - first, first, count, of_all < count)
            at += last + 1 - first


def _scores(queries: AttentionQueries, block: KeyValueBlock) -> Iterator[tuple[ScoreTile, Tensor]]:
    """Yield the tiles of a block, with their masked scores in the accumulation dtype."""
    key, mask = queries.repeat_heads(block.key), _mask_columns(queries.mask, block.columns)
    positions = span_positions(block.span, key.device) if queries.causal else None
    for tile in tiles(queries.span, block.span, queries.causal):
        part = key[..., : tile.keys, :].transpose(-2, -1)
        scores = (queries.query[..., tile.start : tile.stop, :] @ part).to(
            accumulation_dtype(key.dtype)
        ) * queries.scale
        if mask is not None:
            rows = narrow_mask(mask, -2, tile.start, tile.stop - tile.start)
            shown = narrow_mask(rows, -1, 0, tile.keys)
            scores = scores.masked_fill(~shown, -math.inf) if mask.dtype == torch.bool else scores + shown
        if tile.is_masked:
            assert positions is not None
            rows = torch.arange(tile.first, tile.first + tile.stop - tile.start, device=key.device)
            scores = scores.masked_fill(positions[: tile.keys] > rows.unsqueeze(-1), -math.inf)
        yield tile, scores


def narrow_mask(mask: Tensor, dim: int, start: int, length: int) -> Tensor:
    """Return a range of a mask's rows or columns; a dimension of size 1 broadcasts, and stays."""
    return mask if mask.shape[dim] == 1 else mask.narrow(dim, start, length)


def _mask_columns(mask: Tensor | None, columns: Span | None) -> Tensor | None:
    if mask is None or columns is None or mask.shape[-1] == 1:
        return mask
    return torch.cat([mask[..., start:stop] for start, stop in columns], -1) if columns else mask[..., :0]


def span_positions(span: Span, device: torch.device) -> Tensor:
    """Return the positions of a span, one after the other."""
    parts = [torch.arange(start, stop, device=device) for start, stop in span]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def zero_if_infinite(x: Tensor) -> Tensor:
    """Return ``x`` with 0 in place of -inf (a row that saw no key), so that differences do not become nan."""
    return x.masked_fill(x == -math.inf, 0.0)


class OnlineSoftmax:
    """Softmax(scores) V over the blocks seen so far.

    Attributes:
        numerator: (..., heads, l, Ev), sum of values weighted with exp(score - row_max).
        row_max: (..., heads, l, 1), the largest score of every row so far.
        weight_sum: (..., heads, l, 1), sum of the weights exp(score - row_max).
    """

    def __init__(self, queries: AttentionQueries, key: Tensor, value: Tensor) -> None:
        query = queries.query
        # Batch dimensions broadcast: scores to those of query and key, the result to those of the value too.
        heads = [list(x.shape[:-2]) for x in (query, key, value)]
        if queries.shares_heads:
            heads[1][-1] = heads[2][-1] = query.shape[-3]
        scores = torch.broadcast_shapes(heads[0], heads[1])
        results = torch.broadcast_shapes(scores, heads[2])
        rows, dtype = query.shape[-2], accumulation_dtype(query.dtype)
        self.numerator = query.new_zeros((*results, rows, value.shape[-1]), dtype=dtype)
        self.row_max = query.new_full((*scores, rows, 1), -math.inf, dtype=dtype)
        self.weight_sum = query.new_zeros((*scores, rows, 1), dtype=dtype)

    def add_block(self, queries: AttentionQueries, block: KeyValueBlock) -> None:
        """Add the scores of one more block of keys."""
        value = queries.repeat_heads(block.value)
        for tile, scores in _scores(queries, block):
            largest, total, numerator = (
                x[..., tile.start : tile.stop, :] for x in (self.row_max, self.weight_sum, self.numerator)
            )
            # A larger maximum rescales what was summed with the old one (in place: the three are views of the state).
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - zero_if_infinite(new)).exp_(), (largest - zero_if_infinite(new)).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            numerator.mul_(shrink).add_(weights.to(value.dtype) @ value[..., : tile.keys, :])
            largest.copy_(new)

    def raise_max(self, largest: Tensor) -> None:
        """Rescale the sums to a larger maximum, as found by other ranks."""
        shrink = (self.row_max - zero_if_infinite(largest)).exp_()
        self.weight_sum.mul_(shrink)
        self.numerator.mul_(shrink)
        self.row_max = largest

    def result(self) -> tuple[Tensor, Tensor]:
        """Return attention's output (0 for queries that see no key), and every row's log-sum-exp of scores."""
        out = self.numerator / self.weight_sum.masked_fill(self.weight_sum == 0.0, 1.0)
        return out, zero_if_infinite(self.row_max) + self.weight_sum.log()


@dataclass(frozen=True)
class AttentionGradients:
    """The backward pass: gradients of the queries, accumulated block by block.

    Attributes:
        queries: the same queries as in the forward pass.
        gradient: (..., heads, l, Ev), gradient of attention's output.
        logsum: (..., heads, l, 1), log-sum-exp of scores from :meth:`OnlineSoftmax.result`.
        row_dot: shape of ``logsum``, every row's dot product of output and its gradient.
        query_gradient: sum of the queries' gradients so far, changed in place.
        mask_gradient: sum of the mask's gradients so far, in the mask's shape; None if the mask needs none.
    """

    queries: AttentionQueries
    gradient: Tensor
    logsum: Tensor
    row_dot: Tensor
    query_gradient: Tensor
    mask_gradient: Tensor | None

    def add_block(self, block: KeyValueBlock) -> tuple[Tensor, Tensor]:
        """Add a block's contribution; return the gradients of its keys and values from these queries."""
        queries, factor = self.queries, self.queries.scale
        key, value = queries.repeat_heads(block.key), queries.repeat_heads(block.value)
        of_key, of_value = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (key, value))
        for tile, scores in _scores(queries, block):
            query, gradient, logsum, overlap = (
                x[..., tile.start : tile.stop, :] for x in (queries.query, self.gradient, self.logsum, self.row_dot)
            )
            # Probabilities are recomputed from the log-sum-exp; nothing of the scores' size was saved.
            shares = (scores - zero_if_infinite(logsum)).exp_()
            slopes = (gradient @ value[..., : tile.keys, :].transpose(-2, -1)).to(shares.dtype)
            # Gradient of softmax: p * (dp - sum(p * dp)), where the sum equals row_dot = out . d_out.
            slopes = (slopes.sum_to_size(shares.shape) - overlap).mul_(shares)
            low = slopes.to(key.dtype)
            _add_broadcast(of_value[..., : tile.keys, :], shares.to(value.dtype).transpose(-2, -1) @ gradient)
            _add_broadcast(of_key[..., : tile.keys, :], (low.transpose(-2, -1) @ query) * factor)
            _add_broadcast(
                self.query_gradient[..., tile.start : tile.stop, :], (low @ key[..., : tile.keys, :]) * factor
            )
            self._add_mask_gradient(tile, slopes, block.columns)
        return queries.reduce_heads(of_key, block.key), queries.reduce_heads(of_value, block.value)

    def _add_mask_gradient(self, tile: ScoreTile, slopes: Tensor, columns: Span | None) -> None:
        if self.mask_gradient is None:
            return
        rows = narrow_mask(self.mask_gradient, -2, tile.start, tile.stop - tile.start)
        if self.mask_gradient.shape[-1] == 1:
            _add_broadcast(rows, slopes)
            return
        # ``slopes`` has the block's keys one after the other, the mask's columns are ranges of the whole sequence; a
        # causal tile may end inside a range.
        for start, stop, at in with_offsets(((0, tile.keys),) if columns is None else columns):
            size = min(stop - start, tile.keys - at)
            _add_broadcast(rows[..., start : start + size], slopes[..., at : at + size])


def _add_broadcast(total: Tensor, summand: Tensor) -> None:
    """Add to a tensor what was broadcast from its shape: sum over the broadcast dimensions."""
    total.add_(summand.sum_to_size(total.shape))
