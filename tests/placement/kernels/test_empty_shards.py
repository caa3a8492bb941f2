"""More ranks than there is to share out: who has nothing takes part in all that travels, in the same order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.keyed_random import KEYED
from polylane.placement.placement import Shard
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import check, tensor
from tests.support import subsets

SDPA = "aten.scaled_dot_product_attention.default"
degrees = st.integers(2, 4)
few = settings(max_examples=subsets.examples(25), deadline=None)


def leaves_somebody_nothing(strategy: Strategy, degree: int) -> bool:
    shards = [p for p in (*strategy.inputs, *strategy.outputs) if isinstance(p, Shard)]
    return any(shard.local_length(i) == 0 for shard in shards for i in range(degree))


def kinds(found: list[Strategy], degree: int) -> set[str]:
    """The strategies in which some rank has nothing."""
    return {s.name for s in found if leaves_somebody_nothing(s, degree)}


@few
@given(
    sizes=st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 3), (3, 3)]),
    batch=st.integers(1, 3),
    queries=st.integers(2, 6),
    kind=st.sampled_from(["none", "bool", "float", "slope"]),
    causal=st.booleans(),
    dropped=st.booleans(),
    degree=degrees,
)
def test_attention(
    sizes: tuple[int, int], batch: int, queries: int, kind: str, causal: bool, dropped: bool, degree: int
) -> None:
    few_heads, heads = sizes
    args: list[Any] = [
        tensor(batch, heads, queries, 4),
        tensor(batch, few_heads, queries, 4, seed=1),
        tensor(batch, few_heads, queries, 3, seed=2),
    ]
    mask = None
    if kind != "none" and not causal:
        mask = tensor(heads, queries, queries, seed=9, grad=kind == "slope")
        mask = mask > -0.4 if kind == "bool" else mask
    args += [mask, 0.4 if dropped else 0.0, causal]
    options = {"enable_gqa": few_heads < heads}
    part = SampleSlice(batch, first=2, batch=batch + 2, step=3, seed=5)
    if dropped:
        found = check(KEYED[SDPA], [part, 77, 0, *args], options, degree=degree, op=SDPA, part=part)
    else:
        found = check(torch.ops.aten.scaled_dot_product_attention.default, args, options, degree=degree)
    assert ("heads" in kinds(found, degree)) == (1 < heads < degree)
    assert ("batch" in kinds(found, degree)) == (1 < batch < degree)
    assert ("query positions" in kinds(found, degree)) == (queries < degree)


RANDOM = {
    "aten.dropout.default": [0.4, True],
    "aten.feature_dropout.default": [0.4, True],
    "aten.alpha_dropout.default": [0.4, True],
    "aten.feature_alpha_dropout.default": [0.4, True],
    "aten.rrelu.default": [0.1, 0.3, True],
    "aten.bernoulli.p": [0.3],
    "aten.rand_like.default": [],
    "aten.randint_like.default": [7],
}


@pytest.mark.parametrize("op", RANDOM)
@pytest.mark.parametrize("batch_dim", [None, 0, 1])
def test_random_operators(op: str, batch_dim: int | None) -> None:
    samples = 1 if batch_dim is None else (2, 3)[batch_dim]
    part = SampleSlice(samples, first=1, batch=5, seed=5)
    x = tensor(2, 3, 2, grad="dropout" in op or "rrelu" in op)
    found = check(KEYED[op], [part, 5, batch_dim, x, *RANDOM[op]], degree=4, op=op, part=part)
    assert kinds(found, 4) == {"dim 0", "dim 1", "dim 2"}


def test_multinomial() -> None:
    part, op = SampleSlice(3, first=1, batch=5, seed=2), "aten.multinomial.default"
    for replacement in (False, True):
        args = [part, 3, 0, tensor(3, 4, grad=False).abs(), 2, replacement]
        assert kinds(check(KEYED[op], args, degree=4, op=op, part=part), 4) == {"rows"}


@pytest.mark.parametrize("op", subsets.one_in(2, ["lstm", "gru", "rnn_tanh", "rnn_relu"]))
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("drops", [False, True])
@pytest.mark.parametrize("batch", [2, 3])
def test_recurrent(op: str, bidirectional: bool, drops: bool, batch: int) -> None:
    torch.manual_seed(0)
    layers, directions, gates = 2, 1 + bidirectional, {"lstm": 4, "gru": 3}.get(op, 1)
    x = tensor(5, batch, 3)
    states = [tensor(layers * directions, batch, 4, seed=i) for i in range(2)]
    weights = [
        tensor(*shape, seed=10 * layer + way)
        for layer in range(layers)
        for way in range(directions)
        for shape in ((gates * 4, 4 * directions if layer else 3), (gates * 4, 4), (gates * 4,), (gates * 4,))
    ]
    args = [x, states if op == "lstm" else states[0], weights, True, layers, 0.3 * drops, True, bidirectional, False]
    name, part = f"aten.{op}.input", SampleSlice(batch, first=2, batch=6, seed=5)
    if drops:
        found = check(KEYED[name], [part, 5, 1, *args], degree=4, op=name, part=part)
    else:
        found = check(getattr(torch.ops.aten, op).input, args, degree=4)
    assert kinds(found, 4) == {"batch"}
