"""Keyed random operators: torch's, with a key in place of the global generator; counter_rng.py draws the numbers.

Only operators that draw are keyed: what has no dropout, or is not in training, stays torch's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from polylane.graph.operators.counter_rng import drop, keep_mask, normal, uniform
from polylane.graph.operators.device_draws import apply_mask
from polylane.graph.operators.tiled_attention import DroppedAttention, attend_in_tiles


class _Dropped(torch.autograd.Function):
    """Dropout; saves only the mask for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: Any, salt: int, batch_dim: int | None, p: float) -> Tensor:
        dropped, mask = drop(part, salt, p, x, batch_dim)
        ctx.save_for_backward(mask)
        ctx.scale = 1.0 / (1.0 - p)
        return dropped

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return apply_mask(grads[0], mask, ctx.scale), None, None, None, None


def dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.dropout."""
    if not train or p == 0.0:
        return x
    if p == 1.0:  # the scale 1 / (1 - p) would be infinite
        return x * 0.0
    return _Dropped.apply(x, part, salt, batch_dim, p)  # type: ignore[no-any-return, no-untyped-call]


def feature_dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.feature_dropout: drops whole channels (dimensions 0 and 1) at a time."""
    return x * (_channels_kept(part, salt, batch_dim, x, p) / (1.0 - p))


def _channels_kept(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float) -> Tensor:
    shape = [*x.shape[:2], *([1] * (x.dim() - 2))]
    along = batch_dim if batch_dim in (0, 1) else None
    return keep_mask(part, salt, p, shape, along, x.device).to(x.dtype)


def alpha_dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.alpha_dropout (Klambauer et al., Self-Normalizing Neural Networks, section 3)."""
    return _self_normalized(x, keep_mask(part, salt, p, x.shape, batch_dim, x.device).to(x.dtype), p)


def feature_alpha_dropout(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: float, train: bool) -> Tensor:
    """aten.feature_alpha_dropout: drops whole channels at a time."""
    return _self_normalized(x, _channels_kept(part, salt, batch_dim, x, p), p)


def _self_normalized(x: Tensor, mask: Tensor, p: float) -> Tensor:
    # Dropped elements become -alpha (SELU's negative limit); a and b restore mean 0 and variance 1.
    alpha = 1.7580993408473766
    a = 1.0 / math.sqrt((alpha * alpha * p + 1.0) * (1.0 - p)) if p < 1.0 else 0.0
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
    tile: int | None = None,
) -> Tensor:
    """aten.scaled_dot_product_attention with keyed dropout: softmax(Q K^T scale + mask), dropped, times V.

    Args:
        tile: number of scores that are in memory at a time, where there are many; None: what suits the device.
    """
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    factor = 1.0 / math.sqrt(query.shape[-1]) if scale is None else scale

    def attend_whole(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        scores = (query * factor) @ key.transpose(-2, -1)
        if is_causal:
            allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
            scores = scores.masked_fill(~allowed, -math.inf)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask
        # A row whose keys are all masked gives zeros, as torch's own operator does.
        shares = scores.softmax(-1) if mask is None else torch._safe_softmax(scores, -1)
        return dropout(part, salt, batch_dim, shares, dropout_p, True) @ value

    call = DroppedAttention(part, salt, batch_dim, dropout_p, is_causal, factor, attend_whole, tile)
    tiled = attend_in_tiles(call, query, key, value, attn_mask)
    return attend_whole(query, key, value, attn_mask) if tiled is None else tiled


def _recurrent(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return aten.lstm, gru, rnn_tanh or rnn_relu, run layer by layer with keyed dropout between layers."""

    def run(
        part: Any, salt: int, batch_dim: int | None, x: Tensor, hx: Any, weights: Sequence[Tensor], biases: bool,
        layers: int, p: float, train: bool, bidirectional: bool, batch_first: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        directions = 2 if bidirectional else 1
        weight_count = len(weights) // layers
        single = isinstance(hx, Tensor)
        states: list[tuple[Tensor, ...]] = []
        for layer in range(layers):
            rows = slice(layer * directions, (layer + 1) * directions)
            state = hx[rows] if single else tuple(h[rows] for h in hx)
            layer_weights = weights[layer * weight_count : (layer + 1) * weight_count]
            x, *new_state = function(x, state, layer_weights, biases, 1, 0.0, train, bidirectional, batch_first)
            states.append(tuple(new_state))
            if layer < layers - 1:
                x = dropout(part, salt + layer, batch_dim, x, p, train)
        return (x, *(torch.cat(s) for s in zip(*states, strict=True)))

    return run


def _below_one(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """Return uniform numbers in a narrower dtype, where the largest would round up to 1."""
    return numbers.to(dtype).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)


def rand(
    part: Any, salt: int, batch_dim: int | None, size: Sequence[int], *, dtype: torch.dtype | None = None,
    device: Any = "cpu", **_: Any,
) -> Tensor:  # fmt: skip
    """aten.rand."""
    return _below_one(uniform(part, salt, size, batch_dim, torch.device(device)), dtype or torch.get_default_dtype())


def randn(
    part: Any, salt: int, batch_dim: int | None, size: Sequence[int], *, dtype: torch.dtype | None = None,
    device: Any = "cpu", **_: Any,
) -> Tensor:  # fmt: skip
    """aten.randn."""
    return normal(part, salt, size, batch_dim, torch.device(device)).to(dtype or torch.get_default_dtype())


def _like(draw: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return the version of an operator that takes its size, dtype and device from a tensor: rand_like of rand."""

    def draw_like(
        part: Any, salt: int, batch_dim: int | None, x: Tensor, *args: Any, dtype: torch.dtype | None = None, **_: Any
    ) -> Tensor:
        return draw(part, salt, batch_dim, *args, x.shape, dtype=dtype or x.dtype, device=x.device)

    return draw_like


def bernoulli(part: Any, salt: int, batch_dim: int | None, x: Tensor, p: Any = None, **_: Any) -> Tensor:
    """aten.bernoulli: probabilities from ``x``, or one probability ``p``."""
    drawn = uniform(part, salt, x.shape, batch_dim, x.device)
    return (drawn < (x if p is None else p)).to(x.dtype)


def randint(
    part: Any, salt: int, batch_dim: int | None, low: int, high: int, size: Sequence[int], *,
    dtype: torch.dtype | None = None, device: Any = "cpu", **_: Any,
) -> Tensor:  # fmt: skip
    """aten.randint.low."""
    drawn = uniform(part, salt, size, batch_dim, torch.device(device))
    return drawn.mul_(high - low).floor_().add_(low).to(dtype or torch.int64)


def randint_from_zero(
    part: Any, salt: int, batch_dim: int | None, high: int, size: Sequence[int], **kwargs: Any
) -> Tensor:
    """aten.randint."""
    return randint(part, salt, batch_dim, 0, high, size, **kwargs)


def exponential(part: Any, salt: int, batch_dim: int | None, x: Tensor, lambd: float = 1.0, **_: Any) -> Tensor:
    """aten.exponential."""
    return uniform(part, salt, x.shape, batch_dim, x.device).log_().div_(-lambd).to(x.dtype)


def uniform_like(
    part: Any, salt: int, batch_dim: int | None, x: Tensor, start: float = 0.0, end: float = 1.0, **_: Any
) -> Tensor:
    """aten.uniform."""
    return _below_one(uniform(part, salt, x.shape, batch_dim, x.device), x.dtype).mul_(end - start).add_(start)


def normal_like(
    part: Any, salt: int, batch_dim: int | None, x: Tensor, mean: float = 0.0, std: float = 1.0, **_: Any
) -> Tensor:
    """aten.normal_functional."""
    return normal(part, salt, x.shape, batch_dim, x.device).mul_(std).add_(mean).to(x.dtype)


def normal_from(part: Any, salt: int, batch_dim: int | None, mean: Any, std: Any = 1.0, **_: Any) -> Tensor:
    """aten.normal of tensors of means or standard deviations (or both)."""
    like = torch.broadcast_tensors(*(t for t in (mean, std) if isinstance(t, Tensor)))[0]
    drawn: Tensor = normal(part, salt, like.shape, batch_dim, like.device) * std + mean
    return drawn.to(like.dtype)


def multinomial(
    part: Any, salt: int, batch_dim: int | None, x: Tensor, num_samples: int, replacement: bool = False, **_: Any
) -> Tensor:
    """aten.multinomial by exponential races: the category whose time divided by its probability is least wins."""
    if replacement:
        races = [*x.shape[:-1], num_samples, x.shape[-1]]
        times = uniform(part, salt, races, batch_dim, x.device).log_().neg_()
        return (x.unsqueeze(-2) / times).argmax(-1)
    times = uniform(part, salt, x.shape, batch_dim, x.device).log_().neg_()
    return (x / times).topk(num_samples, -1).indices


def randperm(
    part: Any, salt: int, batch_dim: int | None, n: int, *, dtype: Any = None, device: Any = "cpu", **_: Any
) -> Tensor:
    """aten.randperm: the same on every slice, because permutations of slices do not make one of the whole."""
    return uniform(part, salt, [n], None, torch.device(device)).argsort().to(dtype or torch.int64)


def rrelu(
    part: Any, salt: int, batch_dim: int | None, x: Tensor, lower: float = 1 / 8, upper: float = 1 / 3,
    training: bool = False, **_: Any,
) -> Tensor:  # fmt: skip
    """aten.rrelu in training: a separate slope for every negative element."""
    slopes = uniform_like(part, salt, batch_dim, x.detach(), lower, upper)
    return torch.where(x <= 0, x * slopes, x)


KEYED: dict[str, Callable[..., Any]] = {
    "aten.alpha_dropout.default": alpha_dropout,
    "aten.bernoulli.Tensor": bernoulli,
    "aten.bernoulli.default": bernoulli,
    "aten.bernoulli.p": bernoulli,
    "aten.dropout.default": dropout,
    "aten.exponential.default": exponential,
    "aten.feature_alpha_dropout.default": feature_alpha_dropout,
    "aten.feature_dropout.default": feature_dropout,
    "aten.gru.input": _recurrent(torch.gru),
    "aten.lstm.input": _recurrent(torch.lstm),
    "aten.multinomial.default": multinomial,
    "aten.normal.Tensor_Tensor": normal_from,
    "aten.normal.Tensor_float": normal_from,
    "aten.normal.float_Tensor": normal_from,
    "aten.normal_functional.default": normal_like,
    "aten.rand.default": rand,
    "aten.rand_like.default": _like(rand),
    "aten.randint.default": randint_from_zero,
    "aten.randint.low": randint,
    "aten.randint_like.default": _like(randint_from_zero),
    "aten.randint_like.low_dtype": _like(randint),
    "aten.randn.default": randn,
    "aten.randn_like.default": _like(randn),
    "aten.randperm.default": randperm,
    "aten.rnn_relu.input": _recurrent(torch.rnn_relu),
    "aten.rnn_tanh.input": _recurrent(torch.rnn_tanh),
    "aten.rrelu.default": rrelu,
    "aten.scaled_dot_product_attention.default": attention,
    "aten.uniform.default": uniform_like,
}
