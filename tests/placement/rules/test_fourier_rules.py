"""Fourier transforms, split in every way, give what they give whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from polylane.placement.placement import Partial, Shard
from tests.placement.split_checks import check

aten = torch.ops.aten


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()


@pytest.mark.parametrize(
    ("operator", "x", "arguments", "dims"),
    [
        (aten.fft_rfft.default, numbers(3, 4, 5), (), {0, 1}),
        (aten.fft_irfft.default, numbers(3, 4, 5, dtype=torch.complex128), (7, 1), {0, 2}),
        (aten.fft_fft.default, numbers(3, 4, dtype=torch.complex128), (None, -2, "ortho"), {1}),
        (aten.fft_rfft2.default, numbers(2, 3, 4, 5), (), {0, 1}),
        (aten.fft_irfft2.default, numbers(3, 4, 3, dtype=torch.complex128), ([4, 4],), {0}),
        (aten.fft_fftn.default, numbers(3, 4, 5), ([2, 3],), {0}),
        (aten.fft_fftn.default, numbers(3, 4), (), set()),
        (aten.fft_fftshift.default, numbers(3, 4), ([1],), {0}),
        (aten.stft.default, numbers(3, 16), (8, 4, 8, torch.ones(8, dtype=torch.float64), False, True, True), {0}),
    ],
)
def test_transforms(operator: Callable[..., Any], x: Tensor, arguments: tuple[Any, ...], dims: set[int]) -> None:
    checked = check(operator, [x, *arguments])
    assert {s.inputs[0].dim for s in checked if isinstance(s.inputs[0], Shard)} == dims
    assert any(isinstance(s.inputs[0], Partial) for s in checked)
