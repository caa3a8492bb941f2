"""Backend kernels: substitutes that, run on CPU tensors, save for backward what another backend's kernels would."""

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
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.nodes.facts import UnderSetting, unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.keyed_random import attention as dropped_attention
from polylane.graph.operators.sync_batch_norm import SyncStatistics, batch_norm
from polylane.graph.operators.tiled_attention import TILE_ELSEWHERE
from polylane.graph.python_state.module_copies import copy_module

_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention
_HALF = (torch.float16, torch.bfloat16)
_WIDEST_FLASH = 256  # features of a head: flash attention supports no more


# Operators whose CPU kernels save more than their fake-tensor versions show: oneDNN's workspace.
_HIDING = ("aten.lstm.", "aten.gru.", "aten.rnn_tanh.", "aten.rnn_relu.")


def hides_saved_tensors(node: fx.Node) -> bool:
    """Return whether a node saves more than a run on fake tensors shows."""
    return str(node.meta.get("op", "")).startswith(_HIDING)


def unwrap_target(target: Any) -> Any:
    """Return the innermost function of a node's target, without precision settings and random key."""
    target = unwrap_settings(target)
    return target.own if isinstance(target, PythonOnSlice) else target


def call_identity(target: Any) -> Hashable:
    """Return a hashable identity of a target: the operator or function itself, or an object's type and attributes."""
    if isinstance(target, (LeafCall, FunctionCall, FunctionType, BuiltinFunctionType, torch._ops.OpOverload)):
        return target
    attributes = {
        key: call_identity(value) if callable(value) else value
        for key, value in getattr(target, "__dict__", {}).items()
    }
    identity = (type(target), tuple(sorted(attributes.items())))
    # A module or list among the attributes is unhashable: such a target is only equal to itself.
    try:
        hash(identity)
    except TypeError:
        return id(target)
    return identity


def without_key(args: Any) -> tuple[Any, ...]:
    """Return a node's arguments without sample slice and random key, which do not change what is saved."""
    keyed = len(args) > 3 and isinstance(args[0], SampleSlice) and isinstance(args[1], int)
    return tuple(args[2:]) if keyed else tuple(a for a in args if not isinstance(a, SampleSlice))


def make_runnable(target: Any, device: str, fused: bool, shared: bool) -> Callable[..., Any]:
    """Return a callable that saves for backward what the kernels of ``device`` would save.

    Args:
        target: callable of the graph's node.
        device: backend to imitate, "cpu" or "cuda".
        fused: whether attention may use a fused kernel that does not save the scores.
        shared: whether batch normalization sums its statistics over replicas.
    """
    runnable: Callable[..., Any] = target
    # Wrappers are copied, not changed: the graph's own nodes must keep running the real thing.
    if isinstance(target, (UnderSetting, PythonOnSlice)):
        wrapper: Any = copy.copy(target)
        wrapper.target = make_runnable(target.target, device, fused, shared)
        runnable = wrapper
    elif isinstance(target, LeafCall):
        runnable = _copy_leaf_call(target)
    elif target is batch_norm:
        runnable = functools.partial(_batch_norm, shared)
    elif callable(getattr(target, "function", None)) and hasattr(target, "__dict__"):
        wrapper = copy.copy(target)
        wrapper.function = make_runnable(target.function, device, fused, shared)
        runnable = wrapper
    elif target is torch.ops.aten.scaled_dot_product_attention.default and (device == "cuda" or not fused):
        runnable = functools.partial(_attention, fused)
    elif target is dropped_attention and device == "cuda":
        runnable = functools.partial(dropped_attention, tile=TILE_ELSEWHERE)
    return runnable


def _copy_leaf_call(call: LeafCall) -> LeafCall:
    """Return a call of a copy of the module that shares parameters and buffers: a trial must not change its state."""
    shared: list[Any] = [*call.module.parameters(), *call.module.buffers()]
    shared += [layer.tracing for layer in call.module.modules() if isinstance(layer, ModelWithLoss)]  # of the capture
    module = copy_module(call.module, {id(value): value for value in shared})
    flags = [flag for _, flag in call.training]
    return dataclasses.replace(call, module=module, training=list(zip(module.modules(), flags, strict=True)))


def _batch_norm(shared: bool, part: SampleSlice, x: Tensor, weight: Any, bias: Any, *args: Any) -> Tensor:
    """Batch normalization in training, without the check of the values per channel, which fake tensors cannot pass."""
    # The identity as all-reduce: one replica's memory is what counts.
    if shared and part.sum_replicas is None:
        part = dataclasses.replace(part, sum_replicas=lambda tensor: tensor)
    if part.sum_replicas is None:
        return torch.batch_norm(x, weight, bias, *args)
    output: Tensor = SyncStatistics.apply(x, weight, bias, part, args[4])[0]  # type: ignore[no-untyped-call]
    return output


def _attention(
    fused: bool,
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
    """Attention by a fused kernel of CUDA, or else by two products and a softmax, which save the scores.

    Torch chooses among flash, efficient and unfused kernels (aten/native/transformers/cuda/sdp_utils.cpp).
    """
    features = query.shape[-1]
    factor = features**-0.5 if scale is None else scale
    if enable_gqa:  # the heads of keys and values are repeated for those of the queries
        repeats = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(repeats, -3), value.repeat_interleave(repeats, -3)
    if not fused or query.dim() != 4 or query.dtype not in (*_HALF, torch.float32):
        return _attention_with_scores(query, key, value, attn_mask, is_causal, factor)
    if query.dtype in _HALF and attn_mask is None and max(features, value.shape[-1]) <= _WIDEST_FLASH:
        # Flash kernels need head sizes that are multiples of 8: torch pads, and saves the padded copies.
        query, key, value = (F.pad(t, (0, -t.shape[-1] % 8)) if t.shape[-1] % 8 else t for t in (query, key, value))
        padded: Tensor = _FLASH(query, key, value, dropout_p, is_causal, False, scale=factor)[0]
        return padded[..., :features]
    # The memory-efficient kernel takes an additive bias of full shape; the conversion's result is saved too.
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill(~attn_mask, float("-inf"))
    if attn_mask is not None:
        attn_mask = attn_mask.expand(*query.shape[:-1], key.shape[-2])
    output: Tensor = _EFFICIENT(query, key, value, attn_mask, True, dropout_p, is_causal, scale=factor)[0]
    return output


def _attention_with_scores(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, factor: float
) -> Tensor:
    scores = query @ key.transpose(-2, -1) * factor
    if is_causal:
        allowed = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~allowed, float("-inf"))
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return scores.softmax(-1) @ value
