"""Recurrent layers, split by sequences, give what they give whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.packed_recurrent import PackedRecurrent
from polylane.placement.placement import REPLICATE_PARTIAL_GRAD, Shard
from tests.placement.split_checks import check, uneven
from tests.support import subsets

aten = torch.ops.aten
KINDS = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}


def tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=random, dtype=torch.float64) * 0.3).requires_grad_()


def arguments(
    kind: str, batch: int, layers: int, directions: int, biases: bool, first: bool, dropout: float, projection: int = 0
) -> list[Any]:
    steps, features, hidden = 3, 2, 4
    given_ = projection or hidden
    params = []
    for layer in range(layers):
        for direction in range(directions):
            wide = features if layer == 0 else given_ * directions
            seed, gates = 10 * layer + direction, KINDS[kind] * hidden
            params += [tensor(gates, wide, seed=seed), tensor(gates, given_, seed=seed + 1)]
            params += [tensor(gates, seed=seed + 2), tensor(gates, seed=seed + 3)] if biases else []
            params += [tensor(projection, hidden, seed=seed + 4)] if projection else []
    states = [tensor(layers * directions, batch, given_)]
    states += [tensor(layers * directions, batch, hidden, seed=1)] if kind == "lstm" else []
    x = tensor(batch, steps, features) if first else tensor(steps, batch, features)
    hx = states if kind == "lstm" else states[0]
    return [x, hx, params, biases, layers, dropout, True, directions == 2, first]


@settings(max_examples=subsets.examples(15), deadline=None)
@given(
    st.sampled_from(sorted(KINDS)), st.integers(1, 4), st.integers(1, 2), st.integers(1, 2), st.booleans(),
    st.booleans(), st.sampled_from([2, 3]),
)  # fmt: skip
def test_batch(kind: str, batch: int, layers: int, directions: int, biases: bool, first: bool, degree: int) -> None:
    args = arguments(kind, batch, layers, directions, biases, first, 0.0)
    cuts = {("in", 0, 0 if first else 1): [uneven(batch, degree)]} if batch > 1 else {}
    found = check(getattr(aten, kind).input, args, degree=degree, cuts=cuts)
    by_batch = [s for s in found if s.name == "batch"]
    assert bool(by_batch) == (batch > 1)
    for strategy in by_batch:
        assert [type(p) for p in strategy.outputs] == [Shard] * len(strategy.outputs)
        states = 2 if kind == "lstm" else 1
        assert set(strategy.inputs[1 + states :]) == {REPLICATE_PARTIAL_GRAD}


def test_projection() -> None:
    args = arguments("lstm", 3, 2, 2, True, False, 0.0, projection=2)
    assert any(s.name == "batch" for s in check(aten.lstm.input, args, degree=2))


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("layers", [1, 2])
def test_dropout_between_layers(kind: str, first: bool, layers: int) -> None:
    args = arguments(kind, 5, layers, 2, True, first, 0.4)
    part = SampleSlice(5, first=5, batch=10, seed=3)
    op, along = f"aten.{kind}.input", 0 if first else 1
    found = check(KEYED[op], [part, 7, along, *args], degree=3, op=op, part=part)
    assert any(s.name == "batch" for s in found)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_sequences_of_several_lengths(kind: str, dropout: float) -> None:
    args = arguments(kind, 5, 2, 2, True, True, dropout)
    part = SampleSlice(5, first=5, batch=10, seed=3)
    of = {"lengths": torch.tensor([2, 1, 3, 3, 1]), "in_order": False}
    op = f"aten.{kind}.input"
    found = check(PackedRecurrent(kind), [part, 7, 0, *args], of, degree=3, op=op, part=part)
    (by_batch,) = (s for s in found if s.name == "batch")
    assert isinstance(by_batch.inputs[-1], Shard)


def test_packed_sequences_stay_whole() -> None:
    x = torch.nn.utils.rnn.pack_sequence([torch.zeros(3, 2), torch.zeros(2, 2)])
    args = arguments("gru", 2, 1, 1, True, False, 0.0)
    data = [tensor(5, 2), x.batch_sizes, args[1], args[2], True, 1, 0.0, True, False]
    assert not any(s.name == "batch" for s in check(aten.gru.data, data, degree=2))


@pytest.mark.parametrize("kind", sorted(KINDS))
@pytest.mark.parametrize("biases", [False, True])
def test_a_cell_is_split_by_samples(kind: str, biases: bool) -> None:
    wide = KINDS[kind] * 3
    states = [tensor(5, 3), tensor(5, 3, seed=1)] if kind == "lstm" else tensor(5, 3)
    weights = [tensor(wide, 2), tensor(wide, 3), *([tensor(wide), tensor(wide, seed=2)] if biases else [])]
    found = check(getattr(aten, f"{kind}_cell").default, [tensor(5, 2), states, *weights], degree=2)
    assert any(s.name == "batch" and isinstance(s.outputs[0], Shard) for s in found)
