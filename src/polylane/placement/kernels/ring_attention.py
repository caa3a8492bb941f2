"""Ring attention and split-key attention: attention whose keys and values are sharded over ranks.

Liu et al., Ring Attention with Blockwise Transformers, 2023; Dao et al., Flash-Decoding, 2023. In step s of a ring of n
ranks, rank r computes with the keys of rank (r - s) mod n, and passes them on to rank r + 1:

    n = 3    rank 0      rank 1      rank 2
    step 0   keys of 0   keys of 1   keys of 2
    step 1   keys of 2   keys of 0   keys of 1
    step 2   keys of 1   keys of 2   keys of 0

Blocks that no query further on sees (causal attention) are not passed on. Backward, the same ring runs again, and each
step's gradients of keys and values go straight to the rank that owns them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from polylane.graph.traced_sizes import traced_max
from polylane.placement.kernels.accumulation_dtype import accumulation_dtype
from polylane.placement.kernels.block_attention import (
    AttentionGradients,
    AttentionQueries,
    KeyValueBlock,
    OnlineSoftmax,
    Span,
    count_scores,
    span_length,
)
from polylane.placement.redistribute import Axis


@dataclass(frozen=True)
class RingSchedule:
    """Which rank needs which keys, and how far they travel.

    Attributes:
        queries: positions of every rank's queries, by rank.
        keys: positions of every rank's keys, by rank.
        causal: whether a query sees only the keys up to its own position.
    """

    queries: tuple[Span, ...]
    keys: tuple[Span, ...]
    causal: bool

    @property
    def degree(self) -> int:
        """Number of ranks in the ring."""
        return len(self.keys)

    @cached_property
    def scores(self) -> tuple[tuple[int, ...], ...]:
        """Number of scores of every rank's queries (rows) with every rank's keys (columns)."""
        return tuple(tuple(count_scores(q, k, self.causal) for k in self.keys) for q in self.queries)

    def wanted(self, rank: int, block: int) -> bool:
        """Return whether any query of ``rank`` sees any key of ``block``."""
        return self.scores[rank % self.degree][block % self.degree] > 0

    def passes_on(self, step: int, rank: int) -> bool:
        """Return whether a rank sends the block that it has in a step to the next rank: if any later one needs it."""
        # The block has reached ``rank``; ranks rank + 1 to block + degree - 1 (mod degree) have not had it yet.
        block = rank - step
        return any(self.wanted(later_rank, block) for later_rank in range(rank + 1, block + self.degree))

    @property
    def busiest_share(self) -> float:
        """Time of all steps, each as long as its busiest rank, as a share of the time of all scores on one rank."""
        ranks = range(self.degree)
        steps = (traced_max(*(self.scores[r][(r - step) % self.degree] for r in ranks)) for step in ranks)
        return sum(steps) / traced_max(sum(map(sum, self.scores)), 1)

    def max_traffic(self, per_key: int, backward: bool) -> tuple[int, int]:
        """Return (bytes of the rank that sends most, number of messages), from the bytes of one key and its value."""
        n, sent = self.degree, [0] * self.degree
        messages = 0
        for step in range(n):
            forward = [span_length(self.keys[(r - step) % n]) if self.passes_on(step, r) else 0 for r in range(n)]
            back = [
                span_length(self.keys[(r - step) % n]) if step and self.wanted(r, r - step) else 0 for r in range(n)
            ]
            # A step is one exchange: forward hands keys on; backward hands keys on and gradients home in one.
            messages += any(forward) + (backward and (any(forward) or any(back)))
            for r in range(n):
                sent[r] += (1 + backward) * forward[r] + backward * back[r]
        return traced_max(*sent) * per_key, messages


class RingAttention:
    """Attention whose queries, keys and values are sharded along the sequence: ``ring(axis, query, key, ...)``.

    Keys and values travel around the ring while every rank accumulates what its queries see of them. The mask has all
    columns, and the rows of the local queries.
    """

    __module__, __name__ = "polylane", "ring_attention"

    def __init__(self, schedule: RingSchedule) -> None:
        self.schedule = schedule

    def __call__(
        self, axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        queries = self.schedule.queries[axis.index]
        rank = _RingRank(axis, queries, self.schedule.causal, scale, enable_gqa, self.schedule)
        return rank.attend(query, key, value, attn_mask)


class RingOverKeys:
    """Attention with sharded keys and values, and queries that this axis does not shard: ``keys(axis, query, ...)``.

    Every rank returns a partial sum of the output: the contribution of its own keys. The mask has the local columns.

    Args:
        keys: positions of this rank's keys in the sequence.
        queries: positions of the queries where another axis shards them; None: all positions.
    """

    __module__, __name__ = "polylane", "split_key_attention"

    def __init__(self, keys: Span, queries: Span | None = None) -> None:
        self.keys, self.queries = keys, queries

    def __call__(
        self, axis: Axis, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None,
        dropout_p: float = 0.0, is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        queries = ((0, query.shape[-2]),) if self.queries is None else self.queries
        return _KeysRank(axis, queries, is_causal, scale, enable_gqa, self.keys).attend(query, key, value, attn_mask)


@dataclass(frozen=True)
class _AttentionRank:
    """One rank's share of an attention whose keys and values are sharded over an axis.

    Attributes:
        axis: collectives of the ranks that have the keys.
        queries: positions of this rank's queries in the sequence.
        causal: whether a query sees only the keys up to its own position.
        scale: factor of the scores before softmax; None: torch's.
        shares_heads: whether several heads of the query share one head of keys and values.
    """

    axis: Axis
    queries: Span
    causal: bool
    scale: float | None
    shares_heads: bool

    def add_blocks(self, sums: OnlineSoftmax, queries: AttentionQueries, key: Tensor, value: Tensor) -> None:
        """Add what the local queries see, until row maxima and sums of weights are those of all keys."""
        raise NotImplementedError

    def add_gradients(self, gradients: AttentionGradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Accumulate the gradients of the local queries, and return those of the local keys and values."""
        raise NotImplementedError

    def sum_row_dot(self, row_dot: Tensor) -> Tensor:
        """Return the row products of the whole output from those of this rank's output."""
        return row_dot

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        """Return the attention with the dtypes that autocast gives it, and without autocast inside."""
        device = query.device.type

        def lowered(x: Tensor) -> Tensor:
            eligible = x.is_floating_point() and x.dtype != torch.float64
            return x.to(torch.get_autocast_dtype(device)) if eligible else x

        if torch.is_autocast_enabled(device):
            query, key, value = lowered(query), lowered(key), lowered(value)
            mask = None if mask is None else lowered(mask)
        with torch.autocast(device, enabled=False):
            return _AttentionFunction.apply(query, key, value, mask, self)  # type: ignore[no-any-return, no-untyped-call]

    def attention_queries(self, query: Tensor, mask: Tensor | None) -> AttentionQueries:
        """Return the local queries with all that their scores depend on besides the keys."""
        scale = 1.0 / math.sqrt(max(query.shape[-1], 1)) if self.scale is None else self.scale
        return AttentionQueries(query, mask, self.queries, self.causal, scale, self.shares_heads)


class _AttentionFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, rank: _AttentionRank
    ) -> Tensor:
        queries = rank.attention_queries(query, mask)
        sums = OnlineSoftmax(queries, key, value)
        rank.add_blocks(sums, queries, key, value)
        out, logsum = sums.result()
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, mask, out, logsum)
        ctx.rank = rank
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, mask, out, logsum = ctx.saved_tensors
        dtype = logsum.dtype
        row_dot = (grads[0].to(dtype) * out.to(dtype)).sum(-1, keepdim=True).sum_to_size(logsum.shape)
        gradients = AttentionGradients(
            ctx.rank.attention_queries(query, mask),
            grads[0],
            logsum,
            ctx.rank.sum_row_dot(row_dot),
            torch.zeros_like(query, dtype=accumulation_dtype(query.dtype)),
            torch.zeros_like(mask, dtype=accumulation_dtype(query.dtype)) if ctx.needs_input_grad[3] else None,
        )
        of_key, of_value = ctx.rank.add_gradients(gradients, key, value)
        of_mask = None if gradients.mask_gradient is None else gradients.mask_gradient.to(mask.dtype)
        return gradients.query_gradient.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), of_mask, None


@dataclass(frozen=True)
class _RingRank(_AttentionRank):
    schedule: RingSchedule

    def add_blocks(self, sums: OnlineSoftmax, queries: AttentionQueries, key: Tensor, value: Tensor) -> None:
        ring, me = self.schedule, self.axis.index
        # Keys and values travel as one message; ``message`` is None once no later rank needs the block.
        message: Tensor | None = _pack(key, value)
        for step in range(ring.degree):
            block = (me - step) % ring.degree
            if message is not None and ring.wanted(me, block):
                sums.add_block(queries, _unpack(message, key, value, ring.keys[block]))
            message, _ = self._pass_on(step, message, key, value)

    def add_gradients(self, gradients: AttentionGradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        ring, me = self.schedule, self.axis.index
        of_key, of_value = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (key, value))
        message: Tensor | None = _pack(key, value)
        for step in range(ring.degree):
            block, homeward = (me - step) % ring.degree, None
            if message is not None and ring.wanted(me, block):
                pair = gradients.add_block(_unpack(message, key, value, ring.keys[block]))
                if step:
                    # Gradients of another rank's keys go home in this step's exchange; those of the own keys (step 0)
                    # stay.
                    homeward = _pack(pair[0].to(key.dtype), pair[1].to(value.dtype))
                else:
                    of_key, of_value = pair
            message, home = self._pass_on(step, message, key, value, homeward, backward=True)
            if home is not None:
                part = _unpack(home, key, value, ring.keys[me])
                of_key, of_value = of_key + part.key, of_value + part.value
        return of_key, of_value

    def _pass_on(
        self, step: int, message: Tensor | None, key: Tensor, value: Tensor,
        homeward: Tensor | None = None, backward: bool = False,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """Pass a block on around the ring; return the block received, and (backward) gradients of the own keys."""
        ring, n, me = self.schedule, self.schedule.degree, self.axis.index
        # Neighbours in the ring; ``asking`` has computed with this rank's keys in this step, ``home`` owns the block
        # just used.
        next_rank, previous_rank, asking, home = (me + 1) % n, (me - 1) % n, (me + step) % n, (me - step) % n
        returns = backward and step > 0
        # All ranks evaluate the same condition, so that either all or none call the exchange.
        if not any(ring.passes_on(step, r) or (returns and ring.wanted(r, r - step)) for r in range(n)):
            return None, None
        pieces: list[Tensor | None] = [None] * n
        shapes: list[tuple[int] | None] = [None] * n
        pieces[me] = key.new_empty(0)  # gives the dtype, also on a rank that sends nothing
        if ring.passes_on(step, me):
            pieces[next_rank] = message
        if ring.passes_on(step, previous_rank):
            shapes[previous_rank] = (_packed_elements(key, value, ring.keys[(previous_rank - step) % n]),)
        if returns and ring.wanted(me, home):
            pieces[home] = homeward
        if returns and ring.wanted(
            asking, me
        ):  # asking == previous_rank only in the last step, which passes nothing on
            shapes[asking] = (_packed_elements(key, value, ring.keys[me]),)
        parts = self.axis.exchange(pieces, shapes)
        handed = parts[previous_rank] if ring.passes_on(step, previous_rank) else None
        return handed, parts[asking] if returns and ring.wanted(asking, me) else None


def _packed_elements(key: Tensor, value: Tensor, span: Span) -> int:
    """Return the number of elements of the keys and values at ``span``."""
    return sum(math.prod(x.shape[:-2]) * x.shape[-1] for x in (key, value)) * span_length(span)


def _pack(key: Tensor, value: Tensor) -> Tensor:
    """Return keys and values as one flat message."""
    return torch.cat([key.reshape(-1), value.reshape(-1)])


def _unpack(message: Tensor, key: Tensor, value: Tensor, span: Span) -> KeyValueBlock:
    """Return the keys and values at ``span`` from a flat message, shaped like the local ones."""
    shapes = [(*x.shape[:-2], span_length(span), x.shape[-1]) for x in (key, value)]
    keys, values = message.split([math.prod(shape) for shape in shapes])
    return KeyValueBlock(keys.view(shapes[0]), values.view(shapes[1]), span, span)


@dataclass(frozen=True)
class _KeysRank(_AttentionRank):
    keys: Span

    def add_blocks(self, sums: OnlineSoftmax, queries: AttentionQueries, key: Tensor, value: Tensor) -> None:
        sums.add_block(queries, KeyValueBlock(key, value, self.keys))
        # A common maximum makes the ranks' partial numerators comparable; only the sum of weights is all-reduced, the
        # output stays a partial sum.
        sums.raise_max(self.axis.maximum(sums.row_max.clone()))
        sums.weight_sum = self.axis.all_reduce(sums.weight_sum)

    def sum_row_dot(self, row_dot: Tensor) -> Tensor:
        # The output is a partial sum here: its row products must be summed before the gradient of softmax.
        return self.axis.all_reduce(row_dot.contiguous())

    def add_gradients(self, gradients: AttentionGradients, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return gradients.add_block(KeyValueBlock(key, value, self.keys))
