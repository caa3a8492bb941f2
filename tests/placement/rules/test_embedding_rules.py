"""Embeddings, split in every way, give what they give whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polylane.placement.placement import PARTIAL, Shard
from polylane.placement.rules.vocabulary import lookup
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import check, even_cuts, join_cuts, uneven
from tests.support import subsets

aten = torch.ops.aten
brief = settings(max_examples=subsets.examples(25), deadline=None)
degrees = st.sampled_from([2, 3])


def table(rows: int, features: int, seed: int = 0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(rows, features, generator=random, dtype=torch.float64).requires_grad_()


def indices(rows: int, shape: list[int], dtype: torch.dtype = torch.long) -> torch.Tensor:
    return torch.randint(rows, shape, generator=torch.Generator().manual_seed(3), dtype=dtype)


@brief
@given(
    st.integers(1, 9),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(-1, 8),
    st.sampled_from([torch.long, torch.int32]),
    degrees,
)
def test_embedding(rows: int, features: int, shape: list[int], padding: int, dtype: torch.dtype, degree: int) -> None:
    padding = min(padding, rows - 1)
    args = [table(rows, features), indices(rows, shape, dtype), padding]
    found = {s.name: s for s in check(aten.embedding.default, args, degree=degree)}
    assert ("features" in found) == (features > 1)
    assert ("vocabulary" in found) == (rows > 1)
    assert rows < 2 or found["vocabulary"].outputs == (PARTIAL,)
    assert {f"dim {d}" for d, n in enumerate(shape) if n > 1} <= set(found)


@pytest.mark.parametrize("padding", [-1, 0, 4, 8])
def test_parts_of_a_vocabulary(padding: int) -> None:
    several = [join_cuts([even_cuts(5, 2), even_cuts(4, 2)]), uneven(9, 2, 3), ((0, 0, 9),), ((0, 9, 9),)]
    cuts = {("in", 0, 0): several, ("in", 0, 1): [((0, 0, 3),)], ("out", 0, 2): [((0, 1, 1), (1, 1, 3))]}
    found = check(aten.embedding.default, [table(9, 3), indices(9, [4, 3]), padding], cuts=cuts)
    assert {s.inputs[0] for s in found} >= {Shard(0, each) for each in several} | {Shard(1, ((0, 1, 1), (1, 1, 3)))}


def test_gradients_by_frequency_are_split_by_features_only() -> None:
    found = check(aten.embedding.default, [table(7, 4), indices(7, [3, 5]), 2, True])
    assert {s.name for s in found if any(isinstance(p, Shard) for p in s.outputs)} == {"features"}


def test_a_table_with_sparse_gradients_stays_whole() -> None:
    """Indices are split, each rank has the rows of its own; a part of a table would be touched where nobody looked."""
    args: list[Any] = [table(7, 4), indices(7, [3, 5]), -1, False, True]
    found: list[Strategy] = []

    def listed(strategy: Strategy) -> bool:  # not run: the sum of rows is the runtime's, not the rule's
        found.append(strategy)
        return False

    check(aten.embedding.default, args, only=listed)
    assert {"dim 0", "dim 1"} <= {s.name for s in found} and not any(isinstance(s.inputs[0], Shard) for s in found)
    frozen = [args[0].detach(), *args[1:]]
    assert {"features", "vocabulary"} <= {s.name for s in check(aten.embedding.default, frozen)}


def test_an_index_that_no_rank_has_is_refused() -> None:
    for index in (-1, 7):
        with pytest.raises(RuntimeError, match="out of range"):
            lookup(((0, 3),), 7, -1, table(3, 2), torch.tensor([0, index]))


@brief
@given(st.integers(0, 2), st.integers(2, 6), st.booleans(), st.booleans(), st.booleans(), degrees)
def test_bags(mode: int, features: int, last: bool, weighted: bool, frequency: bool, degree: int) -> None:
    index = torch.tensor([1, 4, 4, 0, 2, 3])
    offsets = torch.tensor([0, 2, 2, 6] if last else [0, 2, 2])
    weights = table(6, 1)[:, 0].detach().requires_grad_() if weighted and mode == 0 else None
    args = [table(5, features), index, offsets, frequency and mode != 2, mode, False, weights, last]
    found = check(aten.embedding_bag.default, args, degree=degree)
    assert any(s.name == "features" for s in found)
