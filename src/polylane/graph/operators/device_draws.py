"""Draws on a device: random bits, masks and dropout of counters, by one kernel where there is one, else by operators.

By operators, bits are some 28 launches on a GPU. The kernel is used on a device where it has drawn their bits.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from polylane.graph.operators.counter_mixer import Counters, is_without_data, mix_counters

KERNEL = "polylane.graph.operators.counter_kernel"


def draw_bits(counters: Counters, device: torch.device) -> Tensor:
    """Return 32 random bits (int32) for every element of the counters' local part."""
    kernel = find_kernel(device)
    bits: Tensor = mix_counters(counters, device) if kernel is None else kernel.draw_bits(counters, device)
    return bits


def draw_mask(counters: Counters, threshold: int, device: torch.device) -> Tensor:
    """Return a mask that is True where the bits, as a signed number, are at least ``threshold``."""
    kernel = find_kernel(device)
    if kernel is None:
        return mix_counters(counters, device) >= threshold
    mask: Tensor = kernel.draw_mask(counters, threshold, device)
    return mask


def drop_counted(
    x: Tensor, batch_dim: int | None, counters: Counters, threshold: int, scale: float
) -> tuple[Tensor, Tensor]:
    """Return ``x`` times its mask times ``scale``, and the mask, as of :func:`draw_mask`, in the shape of ``x``."""
    kernel = None if is_without_data(x) else find_kernel(x.device)
    ordered = x.movedim(batch_dim, 0) if batch_dim else x
    # The kernel goes through memory in the order of the counters.
    if kernel is not None and ordered.is_contiguous() and len(counters.split_spans()[1]) == 1:
        dropped = torch.empty_like(x)
        written = dropped.movedim(batch_dim, 0) if batch_dim else dropped
        mask = kernel.drop(ordered, written, counters, threshold, scale)
        return dropped, move_samples(mask, batch_dim)
    mask = move_samples(draw_mask(counters, threshold, x.device), batch_dim)
    return apply_mask(x, mask, scale), mask


def move_samples(drawn: Tensor, batch_dim: int | None) -> Tensor:
    """Return a value with its samples, which come first among counters, where they are in the model."""
    return drawn.movedim(0, batch_dim) if batch_dim else drawn


def apply_mask(x: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Return ``x`` times a mask times ``scale``."""
    if x.is_cuda and x.is_contiguous():  # one kernel, whose result is contiguous
        product: Tensor = torch.ops.aten.native_dropout_backward(x, mask, scale)
        return product
    return (x * mask).mul_(scale)


def find_kernel(device: torch.device) -> Any:
    """Return the module of the kernel for a device; None where there is none, and where operators are traced."""
    if device.type != "cuda" or torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None:
        return None
    return _tried_kernel(device)


@functools.cache
def _tried_kernel(device: torch.device) -> Any:
    """Return the module of the kernel if it draws the operators' bits on this device; else None, and say why."""
    if importlib.util.find_spec("triton") is None:
        return None
    try:
        kernel = importlib.import_module(KERNEL)
        reason = "" if _draws_alike(kernel, device) else "its bits differ"
    # Whatever a compiler or a driver raises: the numbers are there without the kernel, too.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
    if not reason:
        return kernel
    warnings.warn(
        f"On {device} random numbers are drawn by many kernels in place of one, which takes longer and gives the same "
        f"numbers; the one kernel does not work here: {reason}",
        stacklevel=2,
    )
    return None


def _draws_alike(kernel: Any, device: torch.device) -> bool:
    """Return whether the kernel draws the operators' bits: of a region in three dimensions, on both sides of 2^32."""
    region = Counters((5, 7, 300), (((1, 4),), ((0, 2), (4, 7)), ((3, 290),)), (1 << 32) - 4000, (0x9E3779B9, 12345))
    box = region.split_spans()[1][0]
    bits, scale = mix_counters(region, device), 1.0 / 0.7
    are_equal = torch.equal(kernel.draw_bits(region, device), bits)
    are_equal &= torch.equal(kernel.draw_mask(region, -5, device), bits >= -5)
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        x = torch.linspace(-2, 2, bits[:, :2].numel(), device=device).to(dtype).view(box.shape)
        dropped = torch.empty_like(x)
        mask = kernel.drop(x, dropped, box, -5, scale)
        are_equal &= torch.equal(mask, bits[:, :2] >= -5)
        are_equal &= torch.equal(dropped, (x * mask).mul_(scale))
    return are_equal
