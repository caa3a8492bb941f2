"""Attention with keyed dropout in tiles: the scores of some queries at a time, computed again for the backward pass.

torch's fused kernels draw their dropout from the global generator, and written out in operators attention keeps scores,
softmax, mask and product of all queries with all keys for the backward pass. Here only queries, keys and values are
kept, and no more than a tile of scores exists: the idea of FlashAttention (Dao et al., 2022) in torch's own operators.
The random numbers of a tile are drawn again from their counters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from polylane.graph.operators.counter_mixer import is_without_data
from polylane.graph.operators.counter_rng import keep_mask

# Number of scores from which on tiles are no slower on a CPU (measured, forward and backward): of fewer, drawing twice
# costs more than the caches save. The same on every device, so that all save the same tensors.
LEAST_SCORES = 1 << 23
_TILE = 1 << 18  # scores in a tile: fit into a core's cache
TILE_ELSEWHERE = 1 << 24  # on accelerators, where every operator is a launch
_LEAST_ROWS = 128  # queries in a tile, so that its products are products of matrices


@dataclass(frozen=True)
class DroppedAttention:
    """What attention with dropout is besides its tensors.

    Attributes:
        part, salt, batch_dim: as of every keyed operator.
        dropout_p: probability that a score's share is dropped, less than 1.
        is_causal: whether a query sees only keys up to its own position.
        factor: number that the scores are multiplied with.
        attend_whole: the same function of query, key, value and mask without tiles, which can be differentiated twice.
        tile: number of scores in a tile; None: what suits the device.
        softmax_dtype: dtype of the softmax and of what the mask is added to; None: that of the products.
    """

    part: Any
    salt: int
    batch_dim: int | None
    dropout_p: float
    is_causal: bool
    factor: float
    attend_whole: Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
    tile: int | None = None
    softmax_dtype: torch.dtype | None = None

    @property
    def scale(self) -> float:
        """What a share that is kept is multiplied with."""
        return 1.0 / (1.0 - self.dropout_p)


def attend_in_tiles(
    call: DroppedAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> Tensor | None:
    """Return the attention of queries to keys, or None where it is better, or can only be, computed as a whole.

    Args:
        call: the dropout and the function.
        query: tensor of shape (..., L, E).
        key: tensor of shape (..., S, E), with as many heads as the values.
        value: tensor of shape (..., S, Ev).
        mask: boolean or additive, broadcast to (..., L, S); None: all keys are seen.
    """
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    shape = (*lead, query.shape[-2], key.shape[-2])
    if not are_many_scores(shape, call.is_causal) or not lead or call.dropout_p >= 1.0:
        return None
    if torch.broadcast_shapes(lead, value.shape[:-2]) != lead:
        return None
    # A mask's gradient is that of all scores.
    if mask is not None and (mask.requires_grad or torch.broadcast_shapes(mask.shape, shape) != shape):
        return None
    # Under autocast products are of 16 bits, and softmax of 32, as it is where attention is computed as a whole.
    if torch.is_autocast_enabled(query.device.type) and query.dtype != torch.float64:
        call = replace(call, softmax_dtype=torch.float32)
    query, key, value = (_cast(tensor).expand(*lead, *tensor.shape[-2:]) for tensor in (query, key, value))
    mask = None if mask is None else mask.expand(shape)
    return _Tiled.apply(call, query, key, value, mask)  # type: ignore[no-any-return, no-untyped-call]


def are_many_scores(shape: Sequence[int], is_causal: bool) -> bool:
    """Return whether scores (..., L, S) are computed in tiles; half of the causal ones are seen by nobody."""
    # Sizes that are traced stand for any size.
    return all(isinstance(size, int) for size in shape) and math.prod(shape) * (1 + is_causal) >= max(LEAST_SCORES, 1)


def _cast(tensor: Tensor) -> Tensor:
    """Return a tensor as autocast gives it to attention: the tiles themselves run without autocast, in both passes."""
    device = tensor.device.type
    if torch.is_autocast_enabled(device) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(device))
    return tensor


@dataclass(frozen=True)
class _Tile:
    """Some queries of some heads, and the keys that they see.

    Attributes:
        lead: where they are in the leading dimensions, as (start, stop).
        rows: where they are among the queries.
        keys: number of keys, from the first on.
    """

    lead: tuple[tuple[int, int], ...]
    rows: tuple[int, int]
    keys: int

    def of_queries(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor of shape (..., L, any)."""
        return tensor[(*(slice(*span) for span in self.lead), slice(*self.rows))]

    def of_keys(self, tensor: Tensor) -> Tensor:
        """Return the view of a tensor of shape (..., S, any)."""
        return tensor[(*(slice(*span) for span in self.lead), slice(self.keys))]


def _tiles(shape: Sequence[int], is_causal: bool, size: int) -> list[_Tile]:
    """Cut the scores (..., L, S) into tiles of about ``size`` scores: of whole heads, if these are small."""
    *lead, rows, columns = shape
    heads = max(1, size // (min(rows, _LEAST_ROWS) * columns))
    spans: list[list[tuple[int, int]]] = []
    for length in reversed(lead):
        spans.insert(0, _cut(length, heads))
        heads //= length
    box_heads = math.prod(positions[0][1] for positions in spans)
    cuts = _cut(rows, max(_LEAST_ROWS, size // (box_heads * columns)))
    return [
        _Tile(box, (start, stop), min(stop, columns) if is_causal else columns)
        for box in product(*spans)
        for start, stop in cuts
    ]


def _cut(length: int, limit: int) -> list[tuple[int, int]]:
    """Cut a length into equal parts, but for the last, of at most ``limit`` (or of 1)."""
    parts = math.ceil(length / max(limit, 1))
    step = math.ceil(length / parts)
    return [(start, min(start + step, length)) for start in range(0, length, step)]


class _Tiled(torch.autograd.Function):
    """Attention tile by tile; saves its inputs alone."""

    @staticmethod
    def forward(
        ctx: Any, call: DroppedAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        ctx.call = call
        ctx.save_for_backward(query, key, value, mask)
        out = query.new_empty(*query.shape[:-1], value.shape[-1])
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles_of(call, query, key):
                shares = _shares(call, query, key, mask, tile)
                dropout_mask = _draw(call, query, key, tile, shares)
                dropped = shares.mul_(dropout_mask).mul_(call.scale).to(value.dtype)
                tile.of_queries(out).copy_(dropped @ tile.of_keys(value))
                del dropped
                del shares, dropout_mask  # before the next tile's are made
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask = ctx.saved_tensors
        call: DroppedAttention = ctx.call
        if torch.is_grad_enabled():  # the gradient is itself to be differentiated
            inputs = (query, key, value)
            sources = [tensor for tensor in inputs if tensor.requires_grad]
            gradients = iter(torch.autograd.grad(call.attend_whole(*inputs, mask), sources, grads, create_graph=True))
            return None, *(next(gradients) if tensor.requires_grad else None for tensor in inputs), None
        # 16-bit gradients of keys are summed over tiles in 32 bits.
        dtype = torch.float32 if query.dtype.itemsize == 2 else query.dtype
        of_query = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        of_key, of_value = (torch.zeros(x.shape, dtype=dtype, device=x.device) for x in (key, value))
        with torch.autocast(query.device.type, enabled=False):
            for tile in _tiles_of(call, query, key):
                shares = _shares(call, query, key, mask, tile)
                dropout_mask = _draw(call, query, key, tile, shares)
                grad = tile.of_queries(grads[0])
                dropped = (shares * dropout_mask).mul_(call.scale).to(value.dtype)
                tile.of_keys(of_value).add_(dropped.transpose(-2, -1) @ grad)
                del dropped
                of_dropped = (grad @ tile.of_keys(value).transpose(-2, -1)).to(shares.dtype)
                of_shares = of_dropped.mul_(dropout_mask).mul_(call.scale)
                del dropout_mask, of_dropped
                of_scores = torch._softmax_backward_data(of_shares, shares, -1, shares.dtype).to(query.dtype)
                del of_shares, shares
                tile.of_queries(of_query).copy_((of_scores @ tile.of_keys(key)).mul_(call.factor))
                tile.of_keys(of_key).add_(of_scores.transpose(-2, -1) @ (tile.of_queries(query) * call.factor))
                del of_scores
        return None, of_query, of_key.to(key.dtype), of_value.to(value.dtype), None


def _tiles_of(call: DroppedAttention, query: Tensor, key: Tensor) -> Iterator[_Tile]:
    size = call.tile or (_TILE if query.device.type == "cpu" else TILE_ELSEWHERE)
    tiles = _tiles((*query.shape[:-1], key.shape[-2]), call.is_causal, size)
    # Fake tensors: one tile shows the operators of all, and the last one has the most keys.
    yield from tiles[-1:] if is_without_data(query) else tiles


def _shares(call: DroppedAttention, query: Tensor, key: Tensor, mask: Tensor | None, tile: _Tile) -> Tensor:
    """Return the softmax of a tile's scores."""
    scores = (tile.of_queries(query) * call.factor) @ tile.of_keys(key).transpose(-2, -1)
    scores = scores.to(call.softmax_dtype or scores.dtype)
    start, stop = tile.rows
    if call.is_causal and start < tile.keys:
        later = torch.ones(stop - start, tile.keys - start, dtype=torch.bool, device=scores.device).triu_(1)
        scores[..., start:].masked_fill_(later, -math.inf)
    if mask is None:
        return scores.softmax(-1)
    own_mask = tile.of_queries(mask)[..., : tile.keys]
    scores = scores.masked_fill_(~own_mask, -math.inf) if own_mask.dtype == torch.bool else scores + own_mask
    # A row whose keys are all masked gives zeros, as torch's own operator does.
    return torch._safe_softmax(scores, -1)


def _draw(call: DroppedAttention, query: Tensor, key: Tensor, tile: _Tile, shares: Tensor) -> Tensor:
    """Return the mask of a tile's shares that are kept."""
    shape = (*query.shape[:-1], key.shape[-2])
    bounds = dict(enumerate((*tile.lead, tile.rows, (0, tile.keys))))
    part = call.part.narrow(shape, bounds)
    return keep_mask(part, call.salt, call.dropout_p, shares.shape, call.batch_dim, shares.device)
