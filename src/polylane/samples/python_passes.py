"""Passes of the user's own Python: one call forward and backward, in float64, on a copy of its module.

By this a call on a whole batch is compared with the calls on its parts: their results, the gradients of their inputs,
and the gradients of their weights, which add up.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polylane.graph.capture.assign_keys import copy_python_call
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.precision import PROMOTED, Promoted
from polylane.graph.rounding_noise import MARGIN, TRIES, max_magnitude, nudge_fractions, nudge_values, rounding_floor
from polylane.graph.sample_lists import SampleList
from polylane.graph.sparse_gradients import densify
from polylane.samples.autograd.function_trace import compute_gradients
from polylane.samples.split_runs import TOLERANCE, WithoutRandomness, equal_within


@dataclass(frozen=True)
class PythonCall:
    """What one call of the user's own Python is given, on the whole batch or on a part of it.

    Attributes:
        target: the leaf or function, with the settings that it runs under; a copy of its module is run.
        part: the samples that it computes on.
        tensors: its arguments: parameters, buffers, then inputs.
        differentiable: indices of the arguments whose gradients are wanted.
        leaves: indices of those among them that begin autograd's graph in the training: parameters.
        cotangents: gradients of the loss with respect to its results, by index; others get none.
    """

    target: Any
    part: SampleSlice
    tensors: Sequence[Tensor]
    differentiable: Collection[int] = ()
    leaves: Collection[int] = ()
    cotangents: Mapping[int, Tensor] | None = None


@dataclass(frozen=True)
class PythonPasses:
    """What a call has computed.

    Attributes:
        outputs: its results, without a graph.
        gradients: gradients of the arguments that are differentiable, by index; zeros where none came.
    """

    outputs: list[Tensor]
    gradients: dict[int, Tensor]


def promote_tensors(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors, in double precision where they have fractions."""

    def promote(tensor: Tensor) -> Tensor:
        return tensor.detach().to(PROMOTED.get(tensor.dtype, tensor.dtype), copy=True)

    return [t.cast(promote) if isinstance(t, SampleList) else promote(t) for t in tensors]


def run_passes(call: PythonCall) -> PythonPasses:
    """Run a copy of the module forward and backward, so that neither its buffers nor its Python state are changed."""
    tensors = promote_tensors(call.tensors)
    inputs = {i: tensors[i].requires_grad_() for i in call.differentiable}
    # What others compute is no leaf in the training either: it may be written in place.
    passed = [t.clone() if i in inputs and i not in call.leaves else t for i, t in enumerate(tensors)]
    with torch.set_grad_enabled(bool(inputs)), Promoted(), WithoutRandomness():
        result = copy_python_call(call.target)(call.part, passed)
        outputs = [result] if isinstance(result, Tensor) else list(result)
        cotangents = (call.cotangents or {}).items()
        roots = [(outputs[i], c.to(outputs[i].dtype)) for i, c in cotangents if outputs[i].requires_grad]
        input_gradients = (
            compute_gradients([o for o, _ in roots], list(inputs.values()), [c for _, c in roots]) if roots else ()
        )
    gradient_by_index = dict.fromkeys(inputs) | dict(zip(inputs, input_gradients, strict=False))
    gradients = {
        i: torch.zeros_like(tensors[i]) if g is None else densify(g).detach() for i, g in gradient_by_index.items()
    }
    return PythonPasses([output.detach() for output in outputs], gradients)


def find_unequal_gradient(
    call: PythonCall, whole_passes: PythonPasses, part_gradients: Mapping[int, Tensor]
) -> int | None:
    """Return the index of an argument whose gradient is not what the parts' gradients make up; None if all are.

    Rounding does not count: its size is measured on the whole batch, with inputs and weights that are moved by one unit
    in the last place.

    Args:
        call: the call on the whole batch.
        whole_passes: what it has computed.
        part_gradients: the gradients that the parts make up, by index of the argument.
    """
    unequal = [i for i, gradient in part_gradients.items() if not equal_within(whole_passes.gradients[i], gradient)]
    if not unequal:
        return None
    sizes = [*whole_passes.gradients.values(), *(call.cotangents or {}).values()]
    limit = max(map(max_magnitude, sizes), default=0.0) * TOLERANCE / MARGIN
    nudged_passes = [run_passes(_nudge_call(call, attempt)) for attempt in range(TRIES)]
    for i in unequal:
        floor = rounding_floor(whole_passes.gradients[i], [passes.gradients[i] for passes in nudged_passes])
        if not equal_within(whole_passes.gradients[i], part_gradients[i], min(floor, limit)):
            return i
    return None


def _nudge_call(call: PythonCall, attempt: int) -> PythonCall:
    tensors, cotangents = promote_tensors(call.tensors), dict(call.cotangents or {})
    nudge_fractions(tensors, attempt)
    for i, moved in zip(cotangents, promote_tensors(list(cotangents.values())), strict=True):
        nudge_values([moved], attempt)
        cotangents[i] = moved
    return PythonCall(call.target, call.part, tensors, call.differentiable, call.leaves, cotangents)
