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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("is_affine", [False, True])
def test_numbers_of_16_bits_are_normalized_in_32_and_stay_16(dtype: torch.dtype, is_affine: bool) -> None:
    """As under autocast, with weights of float32; means are large beside the variance."""
    random = torch.Generator().manual_seed(0)
    x, grad = ((torch.randn(16, 3, generator=random) + shift).to(dtype) for shift in (20.0, 0.0))
    factors = [torch.randn(3, generator=random) for _ in range(2)] if is_affine else [None, None]
    part = SampleSlice(16, batch=32, sum_replicas=lambda sums: sums.mul_(2))  # the other replica has the same numbers
    numbers = []
    for is_exact in (True, False):  # on one worker in float64, and over replicas
        inputs = [
            None if value is None else value.to(torch.float64 if is_exact else value.dtype, copy=True).requires_grad_()
            for value in (x, *factors)
        ]
        head = () if is_exact else (part,)
        result = (torch.batch_norm if is_exact else batch_norm)(*head, *inputs, None, None, True, 0.1, 1e-5, False)
        result.backward(grad.to(result.dtype))
        numbers.append([result.detach(), *(value.grad for value in inputs if value is not None)])
    assert numbers[1][0].dtype == dtype
    rounding = torch.finfo(dtype).eps
    for expected, seen in zip(*numbers, strict=True):
        torch.testing.assert_close(seen.double(), expected, rtol=rounding, atol=rounding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_no_channels_are_normalized(dtype: torch.dtype) -> None:
    part = SampleSlice(4, batch=8, sum_replicas=lambda sums: sums.add_(4))
    x = torch.zeros(4, 0, dtype=dtype, requires_grad=True)
    result = batch_norm(part, x, torch.ones(0), torch.zeros(0), None, None, True, 0.1, 1e-5, False)
    result.sum().backward()
    assert result.shape == (4, 0) and result.dtype == dtype and x.grad is not None and x.grad.shape == (4, 0)


@pytest.mark.parametrize("shape", [(0, 3), (0, 3, 4), (2, 3, 0), (0, 3, 2, 2)])
def test_a_replica_without_values_takes_part_and_counts_for_nothing(shape: tuple[int, ...]) -> None:
    """torch's own kernels refuse such tensors, or divide by their number of values."""
    others = torch.tensor([3.0, 0.0, -2.0, 5.0, 2.0, 4.0, 2.0], dtype=torch.float64)  # sums, of squares, and the count
    part = SampleSlice(0, batch=2, sum_replicas=lambda sums: sums.add_(others[: sums.numel()].view_as(sums)))
    x = torch.zeros(shape, requires_grad=True)
    weight, moved = torch.ones(3, requires_grad=True), (torch.zeros(3), torch.ones(3))
    result = batch_norm(part, x, weight, torch.zeros(3), *moved, True, 0.5, 1e-5, False)
    result.sum().backward()
    assert result.shape == shape and x.grad is not None and x.grad.shape == shape
    assert weight.grad is not None and not weight.grad.any()
    torch.testing.assert_close(moved[0], torch.tensor([0.75, 0.0, -0.5]))  # half of the others' means
