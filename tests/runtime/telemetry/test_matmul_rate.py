"""The measured rate of a device is that of its fastest product: operations over seconds, of any dtype."""

from __future__ import annotations

import itertools

import pytest
import torch

from polylane.runtime.telemetry import matmul_rate


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which products take 9, 4, 2, 3 and 5 s; the first one loads the kernel and is as any other."""
    moments = itertools.accumulate([0, 9, 1, 4, 1, 2, 1, 3, 1, 5])
    monkeypatch.setattr(matmul_rate.time, "perf_counter", lambda: next(moments))
    assert matmul_rate.measure_matmul_rate(torch.device("cpu")) == 2 * matmul_rate.SIZE**3 / 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_it_is_a_rate_that_a_product_reaches(dtype: torch.dtype) -> None:
    """Between a million and a quadrillion operations a second, on whatever the tests run."""
    assert 1e6 < matmul_rate.measure_matmul_rate(torch.device("cpu"), dtype) < 1e15
