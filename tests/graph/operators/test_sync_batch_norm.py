"""Batch normalization over replicas moves running statistics as torch does, also where replicas share the values."""

from __future__ import annotations

import pytest
import torch

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.sync_batch_norm import batch_norm


@pytest.mark.parametrize("is_common", [False, True])
def test_running_statistics_are_those_of_all_values_once(is_common: bool) -> None:
    x = torch.randn(6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    values = x if is_common else torch.cat([x, x])
    expected = torch.batch_norm(values, None, None, mean, variance, True, 0.1, 1e-5, False)
    part = SampleSlice(6, batch=12, sum_replicas=lambda sums: sums.mul_(2))  # the other replica has the same numbers
    moved = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    result = batch_norm(part, x, None, None, *moved, True, 0.1, 1e-5, False, is_common)
    torch.testing.assert_close(result, expected[:6], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(moved, (mean, variance), rtol=1e-12, atol=1e-12)
