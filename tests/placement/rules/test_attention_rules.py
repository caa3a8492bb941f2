"""Attention, split in every way, gives what it gives whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators import tiled_attention
from polylane.graph.operators.keyed_random import attention as keyed
from polylane.placement.kernels.block_attention import (
    AttentionQueries,
    KeyValueBlock,
    OnlineSoftmax,
    count_scores,
    tiles,
)
from polylane.placement.kernels.causal_attention import CausalAttention
from polylane.placement.kernels.ring_attention import RingAttention, RingOverKeys, RingSchedule
from polylane.placement.placement import (
    PARTIAL,
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Cuts,
    Placement,
    Shard,
    even_cuts,
    join_cuts,
)
from polylane.placement.redistribute import local_shard
from polylane.placement.rewrite import AxisSplit
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import Ring as Shared
from tests.placement.split_checks import ThreadAxis, call_for, check, graph_of, on_rank, on_threads, tensor, uneven
from tests.support import subsets

OP = "aten.scaled_dot_product_attention.default"
sdpa = torch.ops.aten.scaled_dot_product_attention.default
degrees = st.sampled_from([2, 3])
few = settings(max_examples=subsets.examples(10), deadline=None)


def mask_of(kind: str, *shape: int) -> torch.Tensor | None:
    """None, "bool" (some rows see nothing), "float" or "slope" (with a gradient)."""
    if kind == "none":
        return None
    x = tensor(*shape, seed=9, grad=kind == "slope")
    return x > -0.4 if kind == "bool" else x


def names(found: list[Strategy]) -> set[str]:
    return {s.name for s in found}


def is_taken(kind: str) -> bool:
    """Return whether torch takes such a mask in a causal call: 2.13 refuses one with a gradient, later ones any."""
    x = tensor(1, 1, 2, 2)
    try:
        sdpa(x, x, x, mask_of(kind, 2, 2), 0.0, True)
    except RuntimeError:
        return False
    return True


MASKS = ["none", "bool", "float", "slope"]
CAUSAL_MASKS = [kind for kind in MASKS if is_taken(kind)]
masks, causal_masks = st.sampled_from(MASKS), st.sampled_from(CAUSAL_MASKS)
lengths = st.integers(1, 7)


@few
@given(st.integers(1, 3), st.integers(1, 4), lengths, lengths, masks, st.integers(0, 15), st.booleans(), degrees)
def test_all(batch: int, heads: int, q: int, k: int, kind: str, broad: int, scaled_: bool, degree: int) -> None:
    whole = (batch, heads, q, k)
    mask = mask_of(kind, *(1 if broad >> d & 1 else n for d, n in enumerate(whole)))
    args = [tensor(batch, heads, q, 3), tensor(batch, heads, k, 3), tensor(batch, heads, k, 5, seed=2), mask]
    found = names(check(sdpa, args, {"scale": 0.3 if scaled_ else None}, degree=degree))
    assert ("batch" in found) == (batch > 1)
    assert ("heads" in found) == (heads > 1)
    assert ("query positions" in found) == (q > 1)
    assert ("keys" in found) == (k > 1)
    assert ("ring" in found) == (q > 1 and k > 1)


@few
@given(st.integers(1, 2), st.integers(1, 2), st.integers(2, 13), st.integers(2, 13), causal_masks, degrees)
def test_causal(batch: int, heads: int, q: int, k: int, kind: str, degree: int) -> None:
    args = [tensor(batch, heads, n, 4, seed=i) for i, n in enumerate((q, k, k))]
    found = check(sdpa, [*args, mask_of(kind, q, k), 0.0, True], degree=degree)
    assert {"query positions", "keys", "ring"} <= names(found)
    assert ("striped ring" in names(found)) == (q >= 2 * degree)


def test_causal_in_several_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CausalAttention, "LEAST", 2)
    args = [tensor(1, 2, 21, 4, seed=i) for i in range(3)]
    for kind in CAUSAL_MASKS:
        check(sdpa, [*args, mask_of(kind, 21, 21), 0.0, True], degree=3, only=lambda s: s.name == "query positions")


@few
@given(
    st.sampled_from([(1, 4), (2, 4), (2, 6), (3, 6), (4, 4), (4, 8)]),
    causal_masks,
    st.booleans(),
    st.booleans(),
    degrees,
)
def test_grouped_queries(sizes: tuple[int, int], kind: str, causal: bool, batched: bool, degree: int) -> None:
    few_heads, heads = sizes
    front = (2,) if batched else ()
    args = [
        tensor(*front, heads, 4, 3),
        tensor(*front, few_heads, 4, 3, seed=1),
        tensor(*front, few_heads, 4, 2, seed=2),
    ]
    mask = None if causal else mask_of(kind, heads, 4, 4)
    found = check(sdpa, [*args, mask, 0.0, causal], {"enable_gqa": True}, degree=degree)
    by_heads = [s for s in found if s.name == "heads"]
    assert by_heads
    if few_heads > 1:
        assert any(isinstance(s.inputs[1], Shard) and isinstance(s.inputs[2], Shard) for s in by_heads)
    if few_heads < degree:
        assert any(s.inputs[1] == s.inputs[2] == REPLICATE_PARTIAL_GRAD for s in by_heads)
        assert any(s.share < 1 for s in by_heads)


@few
@given(degrees)
def test_groups_of_keys_and_values_differ(degree: int) -> None:
    args = [tensor(2, 8, 3, 3), tensor(2, 4, 3, 3), tensor(2, 2, 3, 3)]
    cuts = {("in", 0, 1): [uneven(8, degree)], ("in", 1, 1): [uneven(4, degree)]}
    assert "heads" in names(check(sdpa, args, {"enable_gqa": True}, degree=degree, cuts=cuts))


SHAPES = [
    ((5, 3), (4, 3), (4, 2), None),  # no batch at all
    ((3, 5, 2), (3, 4, 2), (3, 4, 3), (5, 4)),
    ((2, 3, 5, 2), (3, 4, 2), (3, 4, 2), (3, 1, 4)),  # keys without a batch
    ((4, 5, 2), (2, 1, 4, 2), (2, 4, 4, 2), (5, 1)),  # one head of keys, queries without a batch
    ((2, 1, 5, 2), (2, 1, 4, 2), (2, 3, 4, 2), (1, 1, 5, 4)),  # only the values have heads
    ((2, 2, 3, 5, 2), (2, 2, 3, 4, 2), (2, 1, 3, 4, 2), (2, 1, 1, 5, 4)),
]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("kind", ["bool", "slope"])
def test_dimensions(shapes: Any, kind: str) -> None:
    *values, mask = shapes
    args = [tensor(*shape, seed=i) for i, shape in enumerate(values)]
    found = names(check(sdpa, [*args, None if mask is None else mask_of(kind, *mask)], degree=2))
    assert {"query positions", "keys", "ring"} <= found
    assert len(values[0]) < 3 or found & {"batch", "heads"}


def odd(size: int, degree: int) -> list[Cuts]:
    """Uneven, with an empty part, in two segments."""
    first = size // 2
    return [
        uneven(size, degree),
        ((0, *[0] * (degree - 1), size),),
        ((0, *[size] * degree),),
        join_cuts([uneven(first, degree), even_cuts(size - first, degree)]),
    ]


@pytest.mark.parametrize("degree", [2, 3])
@pytest.mark.parametrize(("causal", "kind"), [*((True, kind) for kind in CAUSAL_MASKS), (False, "slope")])
def test_odd_cuts(degree: int, causal: bool, kind: str) -> None:
    args = [tensor(2, 4, 7, 3, seed=i) for i in range(3)]
    cuts = {("in", 0, 2): odd(7, degree), ("in", 1, 2): odd(7, degree), ("in", 0, 1): odd(4, degree)}
    found = check(sdpa, [*args, mask_of(kind, 1, 4, 7, 7), 0.0, causal], degree=degree, cuts=cuts)
    assert sum("ring" in s.name for s in found) >= 5
    assert sum(s.name == "keys" for s in found) >= 4


@pytest.mark.parametrize("degree", [2, 3])
def test_odd_cuts_of_two_sequences(degree: int) -> None:
    args = [tensor(2, 5, 3), tensor(2, 7, 3), tensor(2, 7, 3, seed=1)]
    for causal in (False, True):
        cuts = {("in", 0, 1): odd(5, degree), ("in", 1, 1): odd(7, degree)}
        check(sdpa, [*args, None, 0.0, causal], degree=degree, cuts=cuts, only=lambda s: "ring" in s.name)


@few
@given(st.sampled_from([4, 2]), st.booleans(), masks, degrees, st.booleans())
def test_dropped(few_heads: int, causal: bool, kind: str, degree: int, in_tiles: bool) -> None:
    args = [tensor(2, 4, 5, 3), tensor(2, few_heads, 5, 3), tensor(2, few_heads, 5, 3, seed=1)]
    part = SampleSlice(2, first=2, batch=4, step=3, seed=5)
    call = [part, 77, 0, *args, mask_of(kind, 4, 5, 5), 0.4, causal]
    cuts = {("in", 0, 1): [uneven(4, degree)], ("in", 0, 2): [odd(5, degree)[-1]]}
    options = {"enable_gqa": few_heads < 4}
    with pytest.MonkeyPatch.context() as patch:
        if in_tiles:  # of two rows
            for name, value in (("LEAST_SCORES", 0), ("_TILE", 8), ("_LEAST_ROWS", 2)):
                patch.setattr(tiled_attention, name, value)
        found = names(check(keyed, call, options, degree=degree, op=OP, part=part, cuts=cuts))
    assert found >= {"batch", "heads", "query positions"}
    assert not any("ring" in name or "keys" in name for name in found)


def test_dropped_where_only_values_have_heads() -> None:
    part = SampleSlice(2, seed=5)
    call = [part, 7, 0, tensor(2, 1, 5, 3), tensor(2, 1, 4, 3), tensor(2, 4, 4, 3), None, 0.4]
    assert "heads" in names(check(keyed, call, degree=2, op=OP, part=part))


# ---- in a mesh -------------------------------------------------------------------------------------------------------


class Line:
    """The ranks along one axis."""

    def __init__(self, degree: int) -> None:
        self.shared = Shared(degree)

    def rank(self, index: int) -> ThreadAxis:
        return ThreadAxis(self.shared, index)


def on_a_mesh(
    args: list[Any], kwargs: dict[str, Any], chosen: dict[str, Strategy], degree: int, source: Placement = REPLICATE
) -> list[list[str]]:
    """A strategy on each of one or two axes, against the operator whole; ``source``: how the inputs lie at first.

    Returns:
        The operators that every rank runs.
    """
    leaves = [a.detach().clone().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    expected = sdpa(*leaves, **kwargs)
    seed = tensor(*expected.shape, grad=False)
    expected.backward(seed)
    graph, tensors = graph_of(sdpa, args, kwargs, expected)
    call = call_for(graph, degree, True)
    sources = {(f"input:{i}", 0): source for i in range(len(tensors))}
    splits = {axis: AxisSplit(degree, {"op": s}, sources) for axis, s in chosen.items()}
    lines = [[Line(degree) for _ in range(degree)] for _ in range(2)]

    def own_part(x: torch.Tensor, index: int) -> torch.Tensor:
        return local_shard(x, source, index) if isinstance(source, Shard) else x

    def work(axis: ThreadAxis) -> tuple[torch.Tensor, list[torch.Tensor], list[str]]:
        x, y = axis.index % degree, axis.index // degree
        axes = {"x": lines[0][y].rank(x), "y": lines[1][x].rank(y)}
        own = on_rank(graph, {"op": call}, splits, 1, {a: axes[a].index for a in splits})
        given_ = [own_part(t.detach(), x).clone().requires_grad_(t.requires_grad) for t in tensors]
        values: dict[Any, Any] = {}
        for node in own.nodes:
            if node.op == "placeholder":
                kind, key = node.meta["role"]
                values[node] = axes[key] if kind == "axis" else None if kind == "part" else given_[key]
            elif node.op == "output":
                (result,) = torch.fx.map_arg(node.args[0], values.__getitem__)
            else:
                a, k = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*a, **k)
        result.backward(seed)
        ran = [getattr(n.target, "__name__", "") for n in own.nodes if n.op == "call_function"]
        return result.detach(), [t.grad for t in given_], ran

    whole = [x for x in leaves if isinstance(x, torch.Tensor)]
    ranks = on_threads(degree ** len(chosen), work)
    for index, (value, grads, _) in enumerate(ranks):
        torch.testing.assert_close(value, expected.detach(), rtol=1e-9, atol=1e-9)
        for grad, leaf in zip(grads, whole, strict=True):
            torch.testing.assert_close(grad, own_part(leaf.grad, index % degree), rtol=1e-9, atol=1e-9)
    return [ran for _, _, ran in ranks]


PAIRS = [
    ("ring", "heads"), ("heads", "striped ring"), ("query positions", "keys"), ("keys", "query positions"),
    ("keys", "heads"), ("query positions", "heads"), ("batch", "ring"),
]  # fmt: skip


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("few_heads", [1, 4])
def test_two_axes(pair: tuple[str, str], few_heads: int) -> None:
    args = [tensor(2, 4, 9, 3), tensor(2, few_heads, 9, 3), tensor(2, few_heads, 9, 3, seed=1), None, 0.0, True]
    options = {"enable_gqa": few_heads < 4}
    graph, _ = graph_of(sdpa, args, options, sdpa(*args, **options))
    found = {s.name: s for s in strategies(call_for(graph, 2, True))}
    on_a_mesh(args, options, {"x": found[pair[0]], "y": found[pair[1]]}, 2)


@pytest.mark.parametrize("degree", [2, 3])
def test_sequences_become_heads(degree: int) -> None:
    """All-to-all from parts of the sequence to heads (Jacobs et al., DeepSpeed-Ulysses, 2023)."""
    args = [*(tensor(2, 5, 7, 3, seed=i) for i in range(3)), None, 0.0, True]
    graph, _ = graph_of(sdpa, args, {}, sdpa(*args))
    (heads,) = (s for s in strategies(call_for(graph, degree, True)) if s.name == "heads")
    assert heads.inputs == (Shard(1, even_cuts(5, degree)),) * 3
    for ran in on_a_mesh(args, {}, {"x": heads}, degree, source=Shard(2, even_cuts(7, degree))):
        assert ran.count("all_to_all") == 3


# ---- what a plan may believe -----------------------------------------------------------------------------------------


def offered(size: int, degree: int, causal: bool) -> dict[str, Strategy]:
    args = [tensor(1, 4, size, 8, seed=i) for i in range(3)]
    graph, _ = graph_of(sdpa, [*args, None, 0.0, causal], {}, args[0])
    return {s.name: s for s in strategies(call_for(graph, degree, True))}


def test_stripes_balance_what_a_causal_ring_leaves_to_the_last_rank() -> None:
    causal, plain = offered(256, 4, True), offered(256, 4, False)
    assert plain["ring"].work == 0.25
    assert causal["ring"].work == pytest.approx(7 / 16, abs=0.01)  # (2n - 1) / n^2
    assert causal["striped ring"].work is not None and causal["striped ring"].work < 0.3
    assert causal["ring"].sent < causal["striped ring"].sent  # later keys need not go round
    bytes_of_keys = 2 * 4 * 64 * 8 * 8
    assert plain["ring"].sent == 3 * 3 * bytes_of_keys  # three steps: forward, backward, gradients home
    assert plain["ring"].messages == 3 + 4
    assert plain["keys"].outputs == (PARTIAL,)


class Counted(ThreadAxis):
    """Counts what it sends."""

    sent = 0
    messages = 0

    def exchange(self, pieces: Any, shapes: Any) -> Any:
        moved = [p for i, p in enumerate(pieces) if p is not None and i != self.index]
        self.sent += sum(p.numel() * p.element_size() for p in moved)
        self.messages += 1
        return super().exchange(pieces, shapes)


@few
@given(st.booleans(), st.sampled_from([2, 3, 4]), st.integers(4, 12), st.booleans())
def test_traffic_is_what_is_announced(causal: bool, degree: int, size: int, striped: bool) -> None:
    found = offered(size, degree, causal)
    strategy = found.get("striped ring" if striped else "ring", found["ring"])
    query = strategy.inputs[0]
    assert isinstance(query, Shard)
    spans = tuple(query.ranges(i) for i in range(degree))

    def work(axis: ThreadAxis) -> tuple[int, int]:
        counted = Counted(axis.ring, axis.index)
        q, k, v = (tensor(1, 4, query.local_length(axis.index), 8, seed=i) for i in range(3))
        RingAttention(RingSchedule(spans, spans, causal))(counted, q, k, v).sum().backward()
        return counted.sent, counted.messages

    ranks = on_threads(degree, work)
    assert max(sent for sent, _ in ranks) == strategy.sent
    assert {messages for _, messages in ranks} == {strategy.messages}


@few
@given(st.lists(st.integers(0, 30), min_size=4, max_size=4).map(sorted), st.integers(1, 9), st.booleans())
def test_tiles_hold_all_scores_there_are(ends: list[int], rows: int, causal: bool) -> None:
    queries, keys = ((ends[0], ends[1]), (ends[2], ends[3])), ((ends[0], ends[2]), (ends[3], 31))
    rows_at = [p for a, b in queries for p in range(a, b)]
    keys_at = [p for a, b in keys for p in range(a, b)]
    wanted = {(i, j) for i, p in enumerate(rows_at) for j, s in enumerate(keys_at) if s <= p or not causal}
    assert count_scores(queries, keys, causal) == len(wanted)
    covered = set()
    for tile in tiles(queries, keys, causal, rows):
        assert tile.stop - tile.start <= rows
        pairs = {(i, j) for i in range(tile.start, tile.stop) for j in range(tile.keys)}
        assert tile.first == rows_at[tile.start]
        assert tile.is_masked == bool(pairs - wanted)
        assert any(j == tile.keys - 1 for _, j in pairs & wanted)
        covered |= pairs & wanted
    assert covered == wanted


def test_long_blocks_go_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polylane.placement.kernels.block_attention.tiles.__defaults__", (3,))
    args = [tensor(1, 2, 11, 4, seed=i) for i in range(3)]
    for kind, form in [("none", (1, 1)), ("float", (11, 1)), ("float", (1, 11))]:
        if kind in CAUSAL_MASKS:
            call = [*args, mask_of(kind, *form), 0.0, True]
            check(sdpa, call, degree=2, only=lambda s: "ring" in s.name or s.name == "keys")


def test_autocast_and_half_precision() -> None:
    args = [tensor(1, 2, 6, 4, seed=i).detach().float().requires_grad_() for i in range(3)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = sdpa(*args)
    spans = (((0, 3),), ((3, 6),))

    def work(axis: ThreadAxis) -> tuple[torch.Tensor, torch.Tensor]:
        own = [a.detach()[..., 3 * axis.index : 3 * axis.index + 3, :].requires_grad_() for a in args]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            ring = RingAttention(RingSchedule(spans, spans, False))(axis, *own)
            keys = RingOverKeys(spans[axis.index])(axis, args[0].detach(), *own[1:])
        assert ring.dtype == keys.dtype == torch.bfloat16
        ring.float().sum().backward()
        assert own[0].grad is not None and own[0].grad.dtype == torch.float32
        return ring, keys

    (first, a), (second, b) = on_threads(2, work)
    torch.testing.assert_close(torch.cat([first, second], -2), expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(a + b, expected, rtol=0.02, atol=0.03)


def test_online_softmax_of_no_keys_is_zero() -> None:
    q, k = tensor(1, 3, 2, grad=False), tensor(1, 0, 2, grad=False)
    queries = AttentionQueries(q, None, ((0, 3),), False, 1.0, False)
    sums = OnlineSoftmax(queries, k, k)
    sums.add_block(queries, KeyValueBlock(k, k, ()))
    assert not sums.result()[0].any()
