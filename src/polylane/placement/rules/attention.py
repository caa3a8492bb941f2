"""Sharding rules of attention: by samples, heads, queries, keys, or queries and keys together (ring attention)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import pairwise, product
from string import ascii_letters

import torch

from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.traced_sizes import traced_max
from polylane.placement.kernels.accumulation_dtype import accumulation_dtype
from polylane.placement.kernels.block_attention import count_scores
from polylane.placement.kernels.causal_attention import CausalAttention, causal_mask, select_heads
from polylane.placement.kernels.joint_gradients import joint_gradients, wrap_like
from polylane.placement.kernels.random_region import RandomInRegion
from polylane.placement.kernels.ring_attention import RingAttention, RingOverKeys, RingSchedule
from polylane.placement.placement import PARTIAL, Cuts, Placement, Shard, divide_cuts, even_cuts, join_cuts, scale_cuts
from polylane.placement.rules.by_dimension import DimLabels, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Place, RankCall, Strategy

# Cuts of the queries, and of the keys, that are combined for a ring where the two are different sequences.
MOST_RING_CUTS = 3


@rule("scaled_dot_product_attention", composes=True)
def attention(call: OperatorCall) -> Iterator[Strategy]:
    """query (..., H, L, E), key (..., Hk, S, E), value (..., Hv, S, Ev) -> (..., H, L, Ev); the mask broadcasts.

    Attention with dropout draws the random numbers of its part of the scores; it offers neither rings nor split keys.
    """
    # Dropout without a key would draw other numbers on every rank.
    if call["dropout_p"] > 0 and not call.prefix:
        return
    yield from _samples_and_heads(call)
    if call["enable_gqa"]:
        yield from _group_strategies(call)
    yield from _query_strategies(call)
    if not call["dropout_p"] > 0:
        yield from _ring_strategies(call)
        yield from _key_strategies(call)


def _samples_and_heads(call: OperatorCall) -> Iterator[Strategy]:
    """Yield shards of every dimension before the last two; of heads only where all tensors have equally many."""
    out = call.outputs[0]
    # Dimensions of size 1 broadcast: they have no label and stay whole.
    dim_labels = [None if n == 1 else ascii_letters[d] for d, n in enumerate(out.shape[:-2])]
    if call["enable_gqa"]:
        dim_labels[-1] = None
    inputs: list[DimLabels] = []
    for value in call.inputs:
        labels = dim_labels[len(dim_labels) - (value.dim - 2) :] if value.dim > 2 else []
        inputs.append([*(None if n == 1 else k for n, k in zip(value.shape, labels, strict=False)), None, None])
    names = {ascii_letters[d]: "batch" if d == 0 else f"dim {d}" for d in range(out.dim - 2)}
    if out.dim > 3:
        names[ascii_letters[out.dim - 3]] = "heads"
    yield from strategies_by_dimension(call, inputs, [[*dim_labels, None, None]], names=names, local=_attend_locally)


def _attend_locally(edit: RankCall) -> None:
    """Run torch's own attention on a part; with dropout, draw the random numbers of the local part of the scores."""
    # Query, key and value may each need a collective for their gradient: start these in one order on all ranks.
    edit.target = joint_gradients(edit.target)
    if not edit.call.prefix:
        return
    cut, query, key = edit.output_shard(), edit.call["query"], edit.call["key"]
    # The random value has the scores' shape; a dimension along which only values (not scores) vary draws nothing.
    dims = max(query.dim, key.dim)
    back = cut.dim - edit.call.outputs[0].dim  # from the last dimension
    if back == -2 or any(x.dim >= -back and x.shape[back] > 1 for x in (query, key)):
        edit.target = RandomInRegion(edit.target, dims + back, cut.ranges(edit.index), cut.size)


# ---- grouped queries -------------------------------------------------------------------------------------------------


def _group_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield shards of heads where several share keys and values (Ainslie et al., GQA, 2023).

    Keys and values are sharded in the same groups where the cuts fall between groups; otherwise they are whole, and
    each rank takes the heads that its queries use.
    """
    out, query, sharing = call.outputs[0], call["query"], (call["key"], call["value"])
    heads = out.shape[-3]
    places = [query.at(-3), out.at(-3), *_mask_dimension(call, -3)]
    offered_cuts: dict[Cuts, None] = dict.fromkeys(call.common_cuts(*places))
    for value in sharing:
        # What neighbours of keys and values ask for counts in groups: scale it to query heads.
        for cuts in call.common_cuts(value.at(-3)):
            offered_cuts[scale_cuts(cuts, heads // value.shape[-3])] = None
    for cuts in offered_cuts:
        placed: dict[int, Placement] = {query.index: Shard(query.dim - 3, cuts), **_mask_placement(call, -3, cuts)}
        for value in sharing:
            group_cuts = divide_cuts(cuts, heads // value.shape[-3])
            if group_cuts is not None and value.shape[-3] > 1:
                placed[value.index] = Shard(value.dim - 3, group_cuts)
        yield call.strategy("heads", placed, Shard(out.dim - 3, cuts), local=_attend_groups)


def _attend_groups(edit: RankCall) -> None:
    cut = edit.output_shard()
    if cut.local_length(edit.index) == 0:
        edit["enable_gqa"] = False  # torch refuses grouped heads if there are none
    for name in ("key", "value"):
        value = edit.call[name]
        if isinstance(edit.strategy.inputs[value.index], Shard):
            continue
        group = cut.size // value.shape[-3]
        # The key head of each local query head; if every key head serves equally many in a row, torch's own grouping
        # does it.
        used = [head // group for start, stop in cut.ranges(edit.index) for head in range(start, stop)]
        key_heads = list(dict.fromkeys(used))
        times = len(used) // max(len(key_heads), 1)
        if used != [head for head in key_heads for _ in range(times)]:
            key_heads = used
        if key_heads != list(range(value.shape[-3])):
            edit[name] = edit.insert(select_heads, tuple(key_heads), edit[name])
    _attend_locally(edit)


# ---- sequences -------------------------------------------------------------------------------------------------------


def _query_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield shards of queries, which are independent of each other; keys and values are whole."""
    query, out = call["query"], call.outputs[0]
    keys = ((0, call["key"].shape[-2]),)
    for cuts in _sequence_cuts(call, query.at(-2), out.at(-2), *_mask_dimension(call, -2)):
        placed = {query.index: Shard(query.dim - 2, cuts), **_mask_placement(call, -2, cuts)}
        target = Shard(out.dim - 2, cuts)
        # Causal queries see more keys the later they are: the busiest rank need not have most queries.
        scores = [count_scores(span, keys, call["is_causal"]) for span in target.ranges_by_rank]
        share = traced_max(*scores) / traced_max(sum(scores), 1)
        yield call.strategy("query positions", placed, target, local=_attend_local_queries, work=share)


def _attend_local_queries(edit: RankCall) -> None:
    _attend_locally(edit)
    if not edit.call["is_causal"]:
        return
    # Local queries are not at the start of the sequence: torch's is_causal would mask by local positions.
    queries, function = edit.output_shard().ranges(edit.index), unwrap_settings(edit.target)
    if edit.call.prefix:
        mask = edit.insert(causal_mask, queries, edit["query"], edit["key"], edit["attn_mask"])
        edit["attn_mask"], edit["is_causal"] = mask, False
    elif isinstance(function, RingOverKeys):
        edit.target = wrap_like(edit.target, RingOverKeys(function.keys, queries))
    else:
        edit.target = wrap_like(edit.target, CausalAttention(function, queries))


def _ring_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield shards of queries and keys (Liu et al., 2023).

    Where the two are one sequence they are cut alike; a causal one also in stripes, so that every rank has early and
    late positions (Brandon et al., Striped Attention, 2023).
    """
    query, key, value, out = call["query"], call["key"], call["value"], call.outputs[0]
    of_queries = [query.at(-2), out.at(-2), *_mask_dimension(call, -2)]
    of_keys = [key.at(-2), value.at(-2)]
    if query.shape[-2] == key.shape[-2]:
        pairs = [(cuts, cuts) for cuts in _sequence_cuts(call, *of_queries, *of_keys)]
    else:
        pairs = list(
            product(_sequence_cuts(call, *of_queries)[:MOST_RING_CUTS], call.common_cuts(*of_keys)[:MOST_RING_CUTS])
        )
    # Bytes of one key position and its value, over all samples and heads.
    sizes = (math.prod(x.shape) // max(x.shape[-2], 1) for x in (key, value))
    per_key = sum(sizes) * key.dtype.itemsize
    for rows, columns in pairs:
        target = Shard(out.dim - 2, rows)
        placed: dict[int, Placement] = {query.index: Shard(query.dim - 2, rows), **_mask_placement(call, -2, rows)}
        placed |= {x.index: Shard(x.dim - 2, columns) for x in (key, value)}
        circle = RingSchedule(Shard(0, rows).ranges_by_rank, Shard(0, columns).ranges_by_rank, call["is_causal"])
        sent, messages = circle.max_traffic(per_key, out.gradient)
        name = "ring" if len(rows) == 1 else "striped ring"
        local = partial(_attend_ring, circle)
        yield call.strategy(name, placed, target, local=local, work=circle.busiest_share, sent=sent, messages=messages)


def _attend_ring(circle: RingSchedule, edit: RankCall) -> None:
    edit.target = wrap_like(edit.target, RingAttention(circle))
    edit.prefix = [*edit.prefix, edit.axis]


def _key_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield shards of keys and values, with a partial sum of the output on every rank."""
    key, value, out = call["key"], call["value"], call.outputs[0]
    queries = ((0, call["query"].shape[-2]),)
    rows = math.prod(_score_shape(call)[:-1])
    for cuts in call.common_cuts(key.at(-2), value.at(-2), *_mask_dimension(call, -1)):
        placed: dict[int, Placement] = {x.index: Shard(x.dim - 2, cuts) for x in (key, value)}
        placed |= _mask_placement(call, -1, cuts)
        scores = [count_scores(queries, span, call["is_causal"]) for span in Shard(0, cuts).ranges_by_rank]
        reductions = 3 if out.gradient else 2  # of the row maximum and the row sum; backward of one number per row
        sent = reductions * (call.degree - 1) * rows * accumulation_dtype(key.dtype).itemsize
        share = traced_max(*scores) / traced_max(sum(scores), 1)
        yield call.strategy(
            "keys", placed, PARTIAL, local=_attend_local_keys, work=share, sent=sent, messages=reductions
        )  # fmt: skip


def _score_shape(call: OperatorCall) -> tuple[int, ...]:
    """Return the shape of the scores, (..., queries, keys)."""
    query, key = call["query"].shape, call["key"].shape
    heads = (*key[:-3], query[-3]) if call["enable_gqa"] else key[:-2]
    return *torch.broadcast_shapes(query[:-2], heads), query[-2], key[-2]


def _attend_local_keys(edit: RankCall) -> None:
    cut = edit.input_shard(edit.call["key"].index)
    # Another axis may have sharded causal queries already: keep their positions for the mask.
    function = unwrap_settings(edit.target)
    queries = function.queries if isinstance(function, CausalAttention) else None
    edit.target = wrap_like(edit.target, RingOverKeys(cut.ranges(edit.index), queries))
    edit.prefix = [*edit.prefix, edit.axis]


def _sequence_cuts(call: OperatorCall, *places: Place) -> list[Cuts]:
    """Return the cuts to offer for a sequence; for a causal one also stripes."""
    cuts = call.common_cuts(*places)
    if cuts and call["is_causal"]:
        striped = _striped_cuts(cuts[0][-1][-1], call.degree)
        if striped not in cuts:
            cuts.append(striped)
    return cuts


def _striped_cuts(size: int, degree: int) -> Cuts:
    """Return cuts in up to two segments per rank, each cut evenly."""
    segments = max(1, min(2 * degree, size // degree))
    ends = even_cuts(size, segments)[0]
    return join_cuts([even_cuts(b - a, degree) for a, b in pairwise(ends)])


# ---- masks -----------------------------------------------------------------------------------------------------------


def _mask_dimension(call: OperatorCall, back: int) -> list[Place]:
    """Return a dimension of the mask as a list of at most one place; empty where it broadcasts."""
    mask = call["attn_mask"]
    return [mask.at(back)] if mask is not None and mask.dim >= -back and mask.shape[back] > 1 else []


def _mask_placement(call: OperatorCall, back: int, cuts: Cuts) -> dict[int, Placement]:
    """Return the mask's placement if the scores are sharded along this dimension, counted from the last."""
    return {index: Shard(dim, cuts) for _, index, dim in _mask_dimension(call, back)}
