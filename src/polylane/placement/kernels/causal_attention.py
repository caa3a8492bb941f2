"""Causal attention of some queries on one rank: calls of torch's own operator, each on the keys that it sees."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from polylane.placement.kernels.block_attention import Span, narrow_mask, span_positions


class CausalAttention:
    """Causal attention of some of the queries with all keys, as calls of torch's own operator.

    Args:
        function: torch's scaled_dot_product_attention, possibly under settings.
        queries: positions of the local queries in the sequence.
    """

    __module__, __name__ = "polylane", "causal_attention"
    PIECES = 8  # calls per rank: an eighth of the scores along the diagonal is computed and masked
    LEAST = 64  # least number of queries in a call

    def __init__(self, function: Callable[..., Tensor], queries: Span) -> None:
        self.function, self.queries = function, queries

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = True, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        at, parts = 0, list[Tensor]()
        # A rank without queries makes one empty call, so that gradients flow.
        for start, stop in self._pieces(query.shape[-2], attn_mask is None) or [(0, 0)]:
            keys, size = min(stop, key.shape[-2]), stop - start
            mask = None if attn_mask is None else narrow_mask(narrow_mask(attn_mask, -2, at, size), -1, 0, keys)
            is_plain = start == 0 and mask is None  # queries from the start: torch's own causal kernel applies
            parts.append(
                self.function(
                    query.narrow(-2, at, size), key.narrow(-2, 0, keys), value.narrow(-2, 0, keys),
                    None if is_plain else _causal_mask(start, stop, keys, mask, query.device), 0.0, is_plain,
                    scale=scale, enable_gqa=enable_gqa,
                )
            )  # fmt: skip
            at += size
        return torch.cat(parts, -2) if len(parts) > 1 else parts[0]

    def _pieces(self, size: int, plain: bool) -> list[tuple[int, int]]:
        """Return the (start, stop) positions of each call's queries."""
        rows = max(self.LEAST, -(-size // self.PIECES))
        pieces = []
        for start, stop in self.queries:
            # Torch's kernel handles a range from 0 in one call without computing masked scores.
            step = max(stop - start, 1) if plain and start == 0 else rows
            pieces += [(position, min(position + step, stop)) for position in range(start, stop, step)]
        return pieces


def _causal_mask(start: int, stop: int, keys: int, mask: Tensor | None, device: torch.device) -> Tensor | None:
    """Return the mask of causal queries, combined with the user's mask; None where all keys are seen."""
    # keys <= start + 1: even the first query sees all of them.
    return mask if keys <= start + 1 else _allowed_scores(torch.arange(start, stop, device=device), keys, mask)


def _allowed_scores(rows: Tensor, keys: int, mask: Tensor | None) -> Tensor:
    allowed = torch.arange(keys, device=rows.device) <= rows.unsqueeze(-1)
    if mask is None:
        return allowed
    return allowed & mask if mask.dtype == torch.bool else mask.masked_fill(~allowed, -math.inf)


def causal_mask(queries: Span, query: Tensor, key: Tensor, attn_mask: Tensor | None) -> Tensor:
    """Return the causal mask of queries at these positions of the sequence, combined with the user's mask."""
    return _allowed_scores(span_positions(queries, query.device), key.shape[-2], attn_mask)


def select_heads(heads: tuple[int, ...], x: Tensor) -> Tensor:
    """Return some heads of keys or values, in the order of the query heads that use them."""
    return x.index_select(-3, torch.tensor(heads, dtype=torch.int64, device=x.device))
