"""Attention block by block: some queries against some keys, with the online softmax, and the gradients of that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from polylane.placement.wide import wide

# Positions along a sequence as (start, stop), in ascending order.
Span = tuple[tuple[int, int], ...]

# Queries whose scores are in memory at a time.
ROWS = 512


def length(span: Span) -> int:
    """How many positions there are."""
    return sum(stop - start for start, stop in span)


def visible(queries: Span, keys: Span, causal: bool) -> int:
    """How many scores there are: pairs of a query and a key that it sees. Causal: those no later than itself."""
    if not causal:
        return length(queries) * length(keys)

    def before(x: int, start: int, stop: int) -> int:
        """Scores of all queries before position ``x`` with the keys from ``start`` to ``stop``."""
        rising = min(max(x - start, 0), stop - start)
        return rising * (rising + 1) // 2 + max(x - stop, 0) * (stop - start)

    return sum(before(b, c, d) - before(a, c, d) for a, b in queries for c, d in keys)


@dataclass(frozen=True)
class Queries:
    """Queries and all that goes with them.

    Attributes:
        query: (..., heads, l, E).
        mask: (..., l or 1, s or 1), as torch's own operator takes it, or None.
        span: positions of the ``l`` queries.
        causal: whether a query sees only the keys up to its own position.
        factor: of the scores.
        grouped: whether heads of the query share heads of keys and values.
    """

    query: Tensor
    mask: Tensor | None
    span: Span
    causal: bool
    factor: float
    grouped: bool

    def every_head(self, x: Tensor) -> Tensor:
        """Keys or values with as many heads as the query has."""
        if not self.grouped or x.shape[-3] == self.query.shape[-3]:
            return x
        return x.repeat_interleave(self.query.shape[-3] // x.shape[-3], -3)

    def own_heads(self, gradient: Tensor, x: Tensor) -> Tensor:
        """The gradient of ``x`` from that of :meth:`every_head`."""
        if gradient.shape == x.shape:
            return gradient
        groups = (*gradient.shape[:-3], x.shape[-3], gradient.shape[-3] // max(x.shape[-3], 1))
        return gradient.reshape(*groups, *gradient.shape[-2:]).sum(-3)


@dataclass(frozen=True)
class Block:
    """Keys and values.

    Attributes:
        key: (..., heads, s, E).
        value: (..., heads, s, Ev).
        span: positions of the ``s`` keys.
        columns: which columns of the mask are theirs; None where it has no others.
    """

    key: Tensor
    value: Tensor
    span: Span
    columns: Span | None = None


@dataclass(frozen=True)
class Tile:
    """Some rows of the scores of a block: as many as there are in memory at a time.

    Attributes:
        start, stop: the rows.
        first: position of the first.
        keys: the leading keys of the block that any of the rows sees.
        cut: whether some row does not see all of these.
    """

    start: int
    stop: int
    first: int
    keys: int
    cut: bool


def tiles(queries: Span, keys: Span, causal: bool, rows: int = ROWS) -> Iterator[Tile]:
    """The scores of a block that there are, tile by tile; nothing where no query sees a key."""
    at = 0
    for a, b in queries:
        for first in range(a, b, rows):
            last = min(first + rows, b) - 1
            seen = length(tuple((c, min(d, last + 1)) for c, d in keys if c <= last)) if causal else length(keys)
            of_all = length(tuple((c, min(d, first + 1)) for c, d in keys if c <= first)) if causal else seen
            if seen:
                yield Tile(at, at + last + 1 - first, first, seen, of_all < seen)
            at += last + 1 - first


def _scores(queries: Queries, block: Block) -> Iterator[tuple[Tile, Tensor]]:
    """Tiles and their scores, masked, in the precision that softmax wants."""
    key, mask = queries.every_head(block.key), _of(queries.mask, block.columns)
    positions = _positions(block.span, key.device) if queries.causal else None
    for tile in tiles(queries.span, block.span, queries.causal):
        part = key[..., : tile.keys, :].transpose(-2, -1)
        scores = (queries.query[..., tile.start : tile.stop, :] @ part).to(wide(key.dtype)) * queries.factor
        if mask is not None:
            shown = mask if mask.shape[-2] == 1 else mask[..., tile.start : tile.stop, :]
            shown = shown if mask.shape[-1] == 1 else shown[..., : tile.keys]
            scores = scores.masked_fill(~shown, -math.inf) if mask.dtype == torch.bool else scores + shown
        if tile.cut:
            assert positions is not None
            rows = torch.arange(tile.first, tile.first + tile.stop - tile.start, device=key.device)
            scores = scores.masked_fill(positions[: tile.keys] > rows.unsqueeze(-1), -math.inf)
        yield tile, scores


def _of(mask: Tensor | None, columns: Span | None) -> Tensor | None:
    if mask is None or columns is None or mask.shape[-1] == 1:
        return mask
    return torch.cat([mask[..., start:stop] for start, stop in columns], -1) if columns else mask[..., :0]


def _positions(span: Span, device: torch.device) -> Tensor:
    parts = [torch.arange(start, stop, device=device) for start, stop in span]
    return torch.cat(parts) if parts else torch.arange(0, device=device)


def finite(x: Tensor) -> Tensor:
    """0 where there was nothing to look at, so that differences stay numbers."""
    return x.masked_fill(x == -math.inf, 0.0)


class Sums:
    """Softmax(scores) V over the blocks seen so far (Milakov and Gimelshein, Online normalizer calculation for
    softmax, 2018).

    Attributes:
        numerator: (..., heads, l, Ev): values weighted with exp(score - largest).
        largest: (..., heads, l, 1): of the scores.
        total: (..., heads, l, 1): of the weights.
    """

    def __init__(self, queries: Queries, key: Tensor, value: Tensor) -> None:
        query = queries.query
        heads = [list(x.shape[:-2]) for x in (query, key, value)]
        if queries.grouped:
            heads[1][-1] = heads[2][-1] = query.shape[-3]
        scores = torch.broadcast_shapes(heads[0], heads[1])
        given = torch.broadcast_shapes(scores, heads[2])
        rows, dtype = query.shape[-2], wide(query.dtype)
        self.numerator = query.new_zeros((*given, rows, value.shape[-1]), dtype=dtype)
        self.largest = query.new_full((*scores, rows, 1), -math.inf, dtype=dtype)
        self.total = query.new_zeros((*scores, rows, 1), dtype=dtype)

    def add(self, queries: Queries, block: Block) -> None:
        """Look at one more block."""
        value = queries.every_head(block.value)
        for tile, scores in _scores(queries, block):
            largest, total, numerator = (
                x[..., tile.start : tile.stop, :] for x in (self.largest, self.total, self.numerator)
            )
            new = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights, shrink = (scores - finite(new)).exp_(), (largest - finite(new)).exp_()
            total.mul_(shrink).add_(weights.sum(-1, keepdim=True))
            numerator.mul_(shrink).add_(weights.to(value.dtype) @ value[..., : tile.keys, :])
            largest.copy_(new)

    def rescale(self, largest: Tensor) -> None:
        """Refer to a larger maximum."""
        shrink = (self.largest - finite(largest)).exp_()
        self.total.mul_(shrink)
        self.numerator.mul_(shrink)
        self.largest = largest

    def result(self) -> tuple[Tensor, Tensor]:
        """Attention's value (0 for queries that see nothing), and the logarithm of every row's sum of exp(score)."""
        out = self.numerator / self.total.masked_fill(self.total == 0.0, 1.0)
        return out, finite(self.largest) + self.total.log()


@dataclass(frozen=True)
class Gradients:
    """The way back: the gradients of the queries, summed up block by block.

    Attributes:
        queries: as forward.
        gradient: (..., heads, l, Ev), of the value.
        logsum: (..., heads, l, 1), as :meth:`Sums.result` gives it.
        overlap: like ``logsum``: of every row, the gradient times the value, summed.
        query: sum of the gradients so far, changed in place.
        mask: the same, in the mask's shape; None where nobody asks.
    """

    queries: Queries
    gradient: Tensor
    logsum: Tensor
    overlap: Tensor
    query: Tensor
    mask: Tensor | None

    def add(self, block: Block) -> tuple[Tensor, Tensor]:
        """Look at a block again; returns the gradients of its keys and values that these queries give."""
        queries, factor = self.queries, self.queries.factor
        key, value = queries.every_head(block.key), queries.every_head(block.value)
        of_key, of_value = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (key, value))
        for tile, scores in _scores(queries, block):
            query, gradient, logsum, overlap = (
                x[..., tile.start : tile.stop, :] for x in (queries.query, self.gradient, self.logsum, self.overlap)
            )
            shares = (scores - finite(logsum)).exp_()
            slopes = (gradient @ value[..., : tile.keys, :].transpose(-2, -1)).to(shares.dtype)
            slopes = (slopes.sum_to_size(shares.shape) - overlap).mul_(shares)
            low = slopes.to(key.dtype)
            _add(of_value[..., : tile.keys, :], shares.to(value.dtype).transpose(-2, -1) @ gradient)
            _add(of_key[..., : tile.keys, :], (low.transpose(-2, -1) @ query) * factor)
            _add(self.query[..., tile.start : tile.stop, :], (low @ key[..., : tile.keys, :]) * factor)
            self._of_mask(tile, slopes, block.columns)
        return queries.own_heads(of_key, block.key), queries.own_heads(of_value, block.value)

    def _of_mask(self, tile: Tile, slopes: Tensor, columns: Span | None) -> None:
        if self.mask is None:
            return
        rows = self.mask if self.mask.shape[-2] == 1 else self.mask[..., tile.start : tile.stop, :]
        if self.mask.shape[-1] == 1:
            _add(rows, slopes)
            return
        at = 0
        for start, stop in ((0, tile.keys),) if columns is None else columns:
            size = min(stop - start, tile.keys - at)
            _add(rows[..., start : start + size], slopes[..., at : at + size])
            at += size


def _add(total: Tensor, summand: Tensor) -> None:
    """Add to a tensor that was broadcast."""
    total.add_(summand.sum_to_size(total.shape))
