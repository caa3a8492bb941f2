"""The self-check before first use: two steps on two different batches, eager against captured, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.graph.batch import is_sampled, sample_count
from polylane.graph.export import Whole, snapshot
from polylane.graph.part import Part


@dataclass(frozen=True)
class Difference:
    """What a captured graph computed differently from the model itself."""

    what: str  # "the loss", "the gradient of fc.weight", "the buffer bn.running_mean"
    parameter: str | None = None
    buffer: str | None = None


def run_code(code: Callable[..., Any], graph: fx.Graph, whole: Whole, constants: dict[str, Tensor], leaves: Sequence[Any], part: Part) -> Any:
    """Run captured code on a model's own parameters and buffers."""
    parameters = dict(whole.model.named_parameters(remove_duplicate=False))
    buffers = dict(whole.model.named_buffers(remove_duplicate=False))
    if isinstance(whole._call, nn.Module):
        parameters |= {f"loss.{name}": p for name, p in whole._call.named_parameters()}
        buffers |= {f"loss.{name}": b for name, b in whole._call.named_buffers()}
    tables: dict[str, Any] = {"parameter": parameters, "buffer": buffers, "constant": constants, "input": leaves, "part": [part]}
    roles = [node.meta["role"] for node in graph.nodes if node.op == "placeholder"]
    return code(*[tables[kind][key] for kind, key in roles])


def other_batch(leaves: Sequence[Any]) -> list[Any]:
    """A different batch of another size: the samples turned by one, the last one left out where three or more are."""
    samples = sample_count(leaves)
    keep = samples - 1 if samples > 2 else samples
    return [leaf.roll(1, 0)[:keep] if is_sampled(leaf, samples) else leaf for leaf in leaves]


def first_difference(whole: Whole, graph: fx.Graph, constants: dict[str, Tensor], leaves: Sequence[Any]) -> Difference | None:
    """Two consecutive steps of the model itself and of its captured code; the first thing that is not the same, or None."""
    code = fx.GraphModule(nn.Module(), graph)
    restore = snapshot(whole)
    batches = [list(leaves), other_batch(leaves)]

    def captured(batch: Sequence[Any]) -> Any:
        return run_code(code, graph, whole, constants, batch, Part(sample_count(batch), batch=sample_count(batch)))

    try:
        expected = _two_steps(whole, lambda batch: whole(*batch), batches)
        restore()
        got = _two_steps(whole, captured, batches)
    finally:
        restore()
    for (difference, a), (_, b) in zip(expected, got, strict=True):
        if not _same(a, b):
            return difference
    return None


def _two_steps(whole: Whole, run: Callable[[Sequence[Any]], Any], batches: Sequence[Sequence[Any]]) -> list[tuple[Difference, Any]]:
    seen: list[tuple[Difference, Any]] = []
    for batch in batches:
        whole.zero_grad(set_to_none=True)
        result = run([leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in batch])
        seen += [(Difference("the loss"), value.detach().clone()) for value in result]
        if result[0].requires_grad:
            result[0].backward()
        for name, parameter in whole.named_parameters():
            plain = name.removeprefix("model.")
            grad = None if parameter.grad is None else parameter.grad.clone()
            seen.append((Difference(f"the gradient of {plain}", parameter=plain), grad))
        for name, buffer in whole.named_buffers():
            plain = name.removeprefix("model.")
            seen.append((Difference(f"the buffer {plain}", buffer=plain), buffer.detach().clone()))
    return seen


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        # A parameter that the loss does not reach: eager leaves no gradient, captured code may leave zeros.
        other = a if b is None else b
        return other is None or not bool(other.any())
    if a.device.type == "cpu":
        return torch.equal(a, b) or bool(((a == b) | (a.isnan() & b.isnan())).all() if a.shape == b.shape else False)
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)  # atomics on accelerators reorder sums
