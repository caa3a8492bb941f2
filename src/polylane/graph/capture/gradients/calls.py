"""Calls of torch.autograd.grad inside a loss: one operator each during export, replaced by its operators afterwards.

Autograd's own backward pass cannot be recorded while export runs: it reads values that autograd saved, of which export
knows nothing. So the call is written into the graph as it is; once the graph is finished and free of writes in place,
:mod:`.expand` writes the vector-Jacobian products of the operators on the way from its inputs to its outputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

from polylane.graph.nodes.user_lines import NoGradientCall

_LIBRARY = torch.library.Library("polylane", "FRAGMENT")
_LIBRARY.define("gradient(Tensor[] outputs, Tensor?[] cotangents, Tensor[] inputs, bool differentiable) -> Tensor[]")

# Operators whose value has no gradient to their arguments: they read nothing but a shape, or cut the gradient.
_WITHOUT_GRADIENT = ("aten.detach", "aten.zeros", "aten.ones", "aten.full", "aten.empty", "aten.new_", "aten.rand")

_TRANSFORMED = "it takes gradients inside itself by torch.func, or for a batch of vectors, which no graph can hold"


@torch.library.register_fake("polylane::gradient", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(
    outputs: list[Tensor], cotangents: list[Tensor | None], inputs: list[Tensor], differentiable: bool
) -> list[Tensor]:
    return [torch.empty_like(tensor, requires_grad=False) for tensor in inputs]


@dataclass(frozen=True)
class GradientCall:
    """One call of torch.autograd.grad in a graph.

    Attributes:
        outputs: nodes of the differentiated values.
        cotangents: the vectors that their Jacobians are multiplied by; None: no gradient comes from that output.
        inputs: nodes of the values to which the gradients are taken.
        differentiable: whether the gradients may be differentiated themselves (``create_graph``).
    """

    outputs: Sequence[fx.Node]
    cotangents: Sequence[fx.Node | None]
    inputs: Sequence[fx.Node]
    differentiable: bool

    @classmethod
    def of(cls, node: fx.Node) -> GradientCall | None:
        """Return the call that a node stands for; None if it is another operator."""
        if node.op != "call_function" or str(node.target) != "polylane.gradient.default":
            return None
        arguments: Any = node.args
        return cls(*arguments)


def passes_gradient(node: fx.Node) -> bool:
    """Return whether a value may have a gradient to what it is computed from."""
    val = node.meta.get("val")
    values = val if isinstance(val, (list, tuple)) else [val]
    floating = any(isinstance(v, Tensor) and (v.is_floating_point() or v.is_complex()) for v in values)
    return floating and not str(node.target).startswith(_WITHOUT_GRADIENT)


@contextmanager
def gradient_calls_kept() -> Iterator[None]:
    """Context manager: during export, let every call of torch.autograd.grad become one operator."""
    autograd: Any = torch.autograd
    backward = autograd._engine_run_backward

    def run(
        outputs: Sequence[Any], cotangents: Sequence[Any], retain: Any, differentiable: bool, inputs: Sequence[Any],
        allow_unused: bool = False, accumulate_grad: bool = False, **options: Any,
    ) -> tuple[Tensor | None, ...]:  # fmt: skip
        mode: Any = get_proxy_mode()
        tensors = [tensor for tensor in (*outputs, *cotangents, *inputs) if tensor is not None]
        if mode is None or accumulate_grad or not all(isinstance(tensor, Tensor) for tensor in tensors):
            eager_gradients: tuple[Tensor | None, ...] = backward(
                outputs, cotangents, retain, differentiable, inputs, allow_unused, accumulate_grad, **options
            )
            return eager_gradients
        if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
            raise NoGradientCall(_TRANSFORMED)
        used = [_is_used(mode.tracer, outputs, tensor) for tensor in inputs] if allow_unused else [True] * len(inputs)
        targets = [tensor for tensor, is_used in zip(inputs, used, strict=True) if is_used]
        gradients: Any = (
            torch.ops.polylane.gradient(list(outputs), list(cotangents), targets, differentiable) if targets else []
        )
        results = iter([gradient.requires_grad_() if differentiable else gradient.detach() for gradient in gradients])
        return tuple(next(results) if is_used else None for is_used in used)

    with patch.object(autograd, "_engine_run_backward", run):
        yield


def _is_used(tracer: Any, outputs: Sequence[Tensor], value: Tensor) -> bool:
    """Return whether any of the outputs is computed from a value, as far as export has written the graph."""
    (target,) = _nodes_of(tracer, [value]) or (None,)
    pending, visited = _nodes_of(tracer, outputs), set[fx.Node]()
    while pending:
        node = pending.pop()
        if node is target:
            return True
        if node not in visited and passes_gradient(node):
            visited.add(node)
            pending += node.all_input_nodes
    return False


def _nodes_of(tracer: Any, tensors: Sequence[Tensor]) -> list[fx.Node]:
    slots = [get_proxy_slot(tensor, tracer, None) for tensor in tensors]
    return [slot.proxy.node for slot in slots if slot is not None]
