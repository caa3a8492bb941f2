"""What to run, on tensors of the CPU, to see what an operator of a graph keeps on another device or with replicas."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Hashable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from polylane.graph.capture.assign_keys import PythonOnSlice
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.capture.python_operators import FunctionCall
from polylane.graph.operators.sync_batch_norm import SyncStatistics, batch_norm
from polylane.graph.precision import UnderSetting, unwrap_settings
from polylane.graph.sample_slice import SampleSlice

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH = 256  # features of a head


# Operators whose kernels on the CPU keep more than their versions without data show: oneDNN's work space.
_HIDING = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")


def hides_saved_tensors(node: fx.Node) -> bool:
    """Whether a node keeps more than can be seen without data."""
    return str(node.meta.get("op", "")).startswith(_HIDING)


def unwrap_target(target: Any) -> Any:
    """What runs in the end, without the settings around it and the key."""
    target = unwrap_settings(target)
    return unwrap_settings(target.target) if isinstance(target, PythonOnSlice) else target


def call_identity(target: Any) -> Hashable:
    """What makes two calls calls of the same thing: an operator or function itself, an object's kind and all it has."""
    if isinstance(target, (LeafCall, FunctionCall, FunctionType, BuiltinFunctionType, torch._ops.OpOverload)):
        return target
    own = {
        key: call_identity(value) if callable(value) else value
        for key, value in getattr(target, "__dict__", {}).items()
    }
    found = (type(target), tuple(sorted(own.items())))
    try:
        hash(found)
    except TypeError:
        return id(target)
    return found


def without_key(args: Any) -> tuple[Any, ...]:
    """Arguments without what only tells one node's random numbers from another's."""
    keyed = len(args) > 3 and isinstance(args[0], SampleSlice) and isinstance(args[1], int)
    return tuple(args[2:]) if keyed else tuple(a for a in args if not isinstance(a, SampleSlice))


def make_runnable(target: Any, device: str, fused: bool, shared: bool) -> Callable[..., Any]:
    """What to run so that what is kept is what ``device`` would keep.

    Args:
        target: of a node.
        device: "cpu" or "cuda".
        fused: whether attention may run as one kernel that does not keep its scores.
        shared: whether batch normalization sums over replicas.
    """
    found: Callable[..., Any] = target
    if isinstance(target, (UnderSetting, PythonOnSlice)):
        around: Any = copy.copy(target)
        around.target = make_runnable(target.target, device, fused, shared)
        found = around
    elif isinstance(target, LeafCall):
        found = _copy_leaf_call(target)
    elif target is batch_norm:
        found = functools.partial(_batch_norm, shared)
    elif callable(getattr(target, "function", None)) and hasattr(target, "__dict__"):
        around = copy.copy(target)
        around.function = make_runnable(target.function, device, fused, shared)
        found = around
    elif target is torch.ops.aten.scaled_dot_product_attention.default and not fused:
        found = _attention_with_scores
    elif target is torch.ops.aten.scaled_dot_product_attention.default and device == "cuda":
        found = _attention_on_cuda
    return found


def _copy_leaf_call(call: LeafCall) -> LeafCall:
    """The same call of a copy of the module that shares its parameters: a trial gives it others."""
    shared: list[Any] = [*call.module.parameters(), *call.module.buffers()]
    shared += [each.tracing for each in call.module.modules() if isinstance(each, ModelWithLoss)]  # of the capture
    module = copy.deepcopy(call.module, {id(each): each for each in shared})
    flags = [flag for _, flag in call.training]
    return dataclasses.replace(call, module=module, training=list(zip(module.modules(), flags, strict=True)))


def _batch_norm(shared: bool, part: SampleSlice, x: Tensor, weight: Any, bias: Any, *args: Any) -> Tensor:
    """Batch normalization in training, without the look at how many values there are, of which there are none."""
    if shared and part.sum_replicas is None:
        part = dataclasses.replace(part, sum_replicas=lambda tensor: tensor)
    if part.sum_replicas is None:
        return torch.batch_norm(x, weight, bias, *args)
    found: Tensor = SyncStatistics.apply(x, weight, bias, part, args[4])[0]  # type: ignore[no-untyped-call]
    return found


def _attention_with_scores(
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
    """Attention as one writes it by hand: two products and a softmax."""
    if enable_gqa:
        key, value = _repeat_heads(query, key, value)
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if attn_mask is not None:
        is_bool = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(~attn_mask, float("-inf")) if is_bool else scores + attn_mask
    return scores.softmax(-1) @ value


def _repeat_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values of as many heads as there are queries."""
    repeats = query.shape[-3] // key.shape[-3]
    return key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)


def _attention_on_cuda(
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
    """torch's own order (aten/native/transformers/cuda/sdp_utils.cpp): flash, memory-efficient, then with scores."""
    if query.dim() != 4 or query.dtype not in (*_HALF, torch.float32):
        return _attention_with_scores(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        key, value = _repeat_heads(query, key, value)
    features = query.shape[-1]
    factor = features**-0.5 if scale is None else scale
    if query.dtype in _HALF and attn_mask is None and max(features, value.shape[-1]) <= _WIDEST_FLASH:
        query, key, value = (F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in (query, key, value))
        padded: Tensor = _FLASH(query, key, value, dropout_p, is_causal, False, scale=factor)[0]
        return padded[..., :features]
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    found: Tensor = _EFFICIENT(query, key, value, attn_mask, True, dropout_p, is_causal, scale=factor)[0]
    return found
