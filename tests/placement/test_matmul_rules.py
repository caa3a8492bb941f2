"""Matrix products, split in every way, give what they give whole."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from split_checks import check

aten = torch.ops.aten


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_(grad)


@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 7), st.integers(1, 7), st.booleans(), st.sampled_from([2, 3]))
def test_linear(batch: int, length: int, k: int, n: int, bias: bool, degree: int) -> None:
    args = [tensor(batch, length, k), tensor(n, k, seed=1), tensor(n, seed=2) if bias else None]
    names = {s.name for s in check(aten.linear.default, args, degree=degree)}
    assert ("columns" in names) == (n > 1)
    assert ("rows" in names) == (k > 1)
