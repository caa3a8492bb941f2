"""Random operators with a key: every number is a function of (seed, step, node, sample, element), never of the rank.

A counter-based generator in the manner of Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (SC'11), here with
the 32-bit integer mixer "lowbias32" (Wellons, hash prospector), keyed twice. A worker draws just the numbers of its own
samples, and two workers that hold the same value draw the same ones.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

_CHUNK = 1 << 16  # elements mixed at a time: stays in a core's cache


def salt_of(name: str) -> int:
    """A node's own 62-bit number, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def _signed(value: int) -> int:
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _keys(part: Any, salt: int) -> tuple[int, int]:
    """Two 32-bit keys from seed, step and node, spread by splitmix64 (Steele et al., OOPSLA'14)."""
    state = (part.seed * 0x9E3779B97F4A7C15 + part.step * 0xD1B54A32D192ED03 + salt) & 0xFFFFFFFFFFFFFFFF
    keys = []
    for _ in range(2):
        state = (state + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        mixed = state
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        keys.append(_signed((mixed ^ (mixed >> 31)) & 0xFFFFFFFF))
    return keys[0], keys[1]


def _mix(x: Tensor, scratch: Tensor) -> None:
    """lowbias32 in place; int32 arithmetic wraps, and the mask makes the arithmetic shift a logical one."""
    for shift, mask, factor in ((16, 0xFFFF, 0x7FEB352D), (15, 0x1FFFF, _signed(0x846CA68B)), (16, 0xFFFF, 0)):
        torch.bitwise_right_shift(x, shift, out=scratch)
        scratch.bitwise_and_(mask)
        x.bitwise_xor_(scratch)
        if factor:
            x.mul_(factor)


def bits(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """32 random bits (int32) for every element of a value whose samples are ``part``'s.

    ``batch_dim`` is the dimension that holds the samples (possibly several rows a sample); None when the value does not
    depend on the samples and is the same on every worker.
    """
    # What does not belong to samples is drawn once a microbatch, by all who hold it alike.
    keys = _keys(part, salt if batch_dim is not None else salt ^ (part.microbatch + 1) << 32)
    order = list(shape)
    if batch_dim:
        order.insert(0, order.pop(batch_dim))
    count = math.prod(order)
    per_sample = count // part.samples if batch_dim is not None and part.samples else 0
    first = part.first * per_sample
    out = torch.empty(count, dtype=torch.int32, device=device)
    scratch = torch.empty(min(count, _CHUNK), dtype=torch.int32, device=device)
    for start in range(0, count, _CHUNK):
        x = out[start : start + _CHUNK]
        small = scratch[: x.numel()]
        begin = _signed(first + start)
        torch.arange(begin, begin + x.numel(), out=x) if begin + x.numel() < 1 << 31 else x.copy_(
            torch.arange(begin, begin + x.numel(), device=device)
        )
        x.add_(keys[0])
        _mix(x, small)
        x.bitwise_xor_(keys[1])
        _mix(x, small)
    drawn = out.view(order)
    return drawn.movedim(0, batch_dim) if batch_dim else drawn


def uniform(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Numbers in (0, 1), float64, of 32 random bits each."""
    return bits(part, salt, shape, batch_dim, device).to(torch.float64).add_(2147483648.5).div_(4294967296.0)


def normal(part: Any, salt: int, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """Standard normal numbers, float64 (Box-Muller)."""
    radius = uniform(part, salt, shape, batch_dim, device).log_().mul_(-2.0).sqrt_()
    angle = uniform(part, salt ^ 0x5DEECE66D, shape, batch_dim, device).mul_(2.0 * math.pi)
    return radius.mul_(angle.cos_())


def keep_mask(part: Any, salt: int, p: float, shape: Sequence[int], batch_dim: int | None, device: torch.device) -> Tensor:
    """True with probability 1 - p."""
    threshold = min(int(p * (1 << 32)) - (1 << 31), (1 << 31) - 1)
    return bits(part, salt, shape, batch_dim, device) >= threshold


class _Masked(torch.autograd.Function):
    """x * mask * scale, remembering only the mask."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        ctx.save_for_backward(mask)
        ctx.scale = scale
        return (x * mask).mul_(scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (mask,) = ctx.saved_tensors
        return (grads[0] * mask).mul_(ctx.scale), None, None


def dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout."""
    if not train or p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    return _Masked.apply(x, keep_mask(part, salt, p, x.shape, batch_dim, x.device), 1.0 / (1.0 - p))  # type: ignore[no-any-return, no-untyped-call]


def feature_dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.feature_dropout: whole channels (dimensions 0 and 1) at a time."""
    if not train or p == 0.0:
        return x
    shape = [*x.shape[:2], *([1] * (x.dim() - 2))]
    return x * (keep_mask(part, salt, p, shape, batch_dim, x.device).to(x.dtype) / (1.0 - p))


def alpha_dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.alpha_dropout (Klambauer et al., Self-Normalizing Neural Networks, section 3)."""
    if not train or p == 0.0:
        return x
    alpha = 1.7580993408473766
    mask = keep_mask(part, salt, p, x.shape, batch_dim, x.device).to(x.dtype)
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p))
    return x * mask * a + ((mask - 1.0) * (alpha * a) + alpha * a * p)


def attention(
    part: Any,
    salt: int,
    batch_dim: int | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """aten.scaled_dot_product_attention with its dropout drawn by key: softmax(Q K^T scale + mask), dropped, times V."""
    if dropout_p == 0.0:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor) @ key.transpose(-2, -1)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, -math.inf)
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -math.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    weights = dropout(part, salt, batch_dim, scores.softmax(-1), dropout_p, True)
    return weights @ value


def _filled(numbers: Tensor, dtype: torch.dtype | None) -> Tensor:
    return numbers.to(dtype or torch.get_default_dtype())


def rand(part: Any, salt: int, batch_dim: int | None, size: Sequence[int], *, dtype: torch.dtype | None = None,
         device: Any = "cpu", **_: Any) -> Tensor:
    """aten.rand."""
    return _filled(uniform(part, salt, size, batch_dim, torch.device(device)), dtype)


def randn(part: Any, salt: int, batch_dim: int | None, size: Sequence[int], *, dtype: torch.dtype | None = None,
          device: Any = "cpu", **_: Any) -> Tensor:
    """aten.randn."""
    return _filled(normal(part, salt, size, batch_dim, torch.device(device)), dtype)


def rand_like(part: Any, salt: int, batch_dim: int | None, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """aten.rand_like."""
    return uniform(part, salt, x.shape, batch_dim, x.device).to(dtype or x.dtype)


def randn_like(part: Any, salt: int, batch_dim: int | None, x: Tensor, *, dtype: torch.dtype | None = None, **_: Any) -> Tensor:
    """aten.randn_like."""
    return normal(part, salt, x.shape, batch_dim, x.device).to(dtype or x.dtype)


def bernoulli(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float | None = None) -> Tensor:
    """aten.bernoulli: probabilities from ``x``, or ``p`` for all."""
    drawn = uniform(part, salt, x.shape, batch_dim, x.device)
    return (drawn < (x if p is None else p)).to(x.dtype)


def randint(part: Any, salt: int, batch_dim: int | None, low: int, high: int, size: Sequence[int], *,
            dtype: torch.dtype | None = None, device: Any = "cpu", **_: Any) -> Tensor:
    """aten.randint.low."""
    drawn = uniform(part, salt, size, batch_dim, torch.device(device))
    return drawn.mul_(high - low).floor_().add_(low).to(dtype or torch.int64)


def randint_from_zero(part: Any, salt: int, batch_dim: int | None, high: int, size: Sequence[int], **kwargs: Any) -> Tensor:
    """aten.randint."""
    return randint(part, salt, batch_dim, 0, high, size, **kwargs)


def exponential(part: Any, salt: int, batch_dim: int | None, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    """aten.exponential."""
    return uniform(part, salt, x.shape, batch_dim, x.device).log_().div_(-lambd).to(x.dtype)


def uniform_like(part: Any, salt: int, batch_dim: int | None, x: Tensor, start: float = 0.0, end: float = 1.0, **_: Any) -> Tensor:
    """aten.uniform."""
    return uniform(part, salt, x.shape, batch_dim, x.device).mul_(end - start).add_(start).to(x.dtype)


def normal_like(part: Any, salt: int, batch_dim: int | None, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any) -> Tensor:
    """aten.normal_functional."""
    return normal(part, salt, x.shape, batch_dim, x.device).mul_(std).add_(mean).to(x.dtype)


KEYED = {
    "aten.alpha_dropout.default": alpha_dropout,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli,
    "aten.dropout.default": dropout,
    "aten.exponential.default": exponential,
    "aten.feature_dropout.default": feature_dropout,
    "aten.normal_functional.default": normal_like,
    "aten.rand.default": rand,
    "aten.rand_like.default": rand_like,
    "aten.randint.default": randint_from_zero,
    "aten.randint.low": randint,
    "aten.randn.default": randn,
    "aten.randn_like.default": randn_like,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.uniform.default": uniform_like,
}
