"""Custom autograd functions (torch.autograd.Function): traced, forward and backward, to prove how samples go through.

Such a function is one opaque operator of the captured graph. Its forward and backward pass are traced to ATen on
tensors without data whose number of samples is a symbol, with a tangent for every output, and the traced graph is
walked by the same rules as any other. A function is proven where its outputs are made up of the parts' outputs, and
the gradient of each input is made up of the parts' gradients as that input's must be. Of any other (values looked at,
numpy, random numbers, a branch on the number of samples, a backward pass that joins samples) nothing is known.

What the parts of a batch bring about, by how a value v is made up. Every part's backward pass begins with its share of
the whole's, so that the parts' gradients of a parameter add up to the whole's.

    v                 gradient of v
    rows              rows
    alike             additive(0): each part has a summand
    additive(q)       proportional(q): v = sum of share^q v_i, so the gradient of v_i is share^q times that of v
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx

from polylane.graph.capture.assign_keys import PythonOnSlice
from polylane.graph.capture.describe_nodes import describe_nodes
from polylane.graph.capture.python_operators import FunctionCall
from polylane.graph.graph import Code, Graph
from polylane.graph.precision import InAutocast, UnderSetting
from polylane.graph.symbolic_sizes import size_function
from polylane.placement.operator_view import OperatorNode, TensorKey
from polylane.placement.placement import REPLICATE, Shard
from polylane.samples.autograd.function_trace import FunctionArgument, FunctionTrace, trace_function
from polylane.samples.autograd.side_effects_undone import undo_side_effects
from polylane.samples.interpretation.abstract_interpreter import AbstractInterpreter, interpret
from polylane.samples.interpretation.additivity import (
    WHOLE,
    Additive,
    Proportional,
    State,
    power_of_additive,
    power_of_proportional,
    proportional,
)

# Outputs that may have a gradient or none, each on its own: a backward pass is traced for every choice of them.
MOST_OUTPUTS = 3


_KnownSettings = dict[tuple[Any, ...], tuple[State, ...] | None]
_KNOWN: WeakKeyDictionary[FunctionCall, _KnownSettings] = WeakKeyDictionary()


def prove_function(node: fx.Node, step: OperatorNode, states: Sequence[State]) -> tuple[State, ...] | None:
    """How the parts of a batch make up what a custom autograd function gives; None where that is not proven.

    Args:
        node: the call.
        step: the same with concrete shapes.
        states: how the parts make up the tensors that it reads.
    """
    function, settings = _unwrap_call(node.target)
    tensors: Any = node.args[1]
    if function is None or function.random or not _is_constant(function.arguments):
        return None
    arguments = tuple(
        FunctionArgument(
            _shape_of_one_sample(tensor.meta["val"]), value.dtype, state, value.gradient, _device_of(tensor.meta["val"])
        )
        for tensor, value, state in zip(tensors, step.call.inputs, states, strict=True)
    )
    key = (arguments, *(_describe_setting(each) for each in settings))
    known = _KNOWN.setdefault(function, {})
    if key not in known:
        # What a first call alone sets up (an import, a cache) is there for the second.
        known[key] = _prove_states(function, settings, arguments) or _prove_states(function, settings, arguments)
    return known[key]


def _unwrap_call(target: Any) -> tuple[FunctionCall | None, list[UnderSetting]]:
    """A call without what stands around it, and the settings that it runs under, the outermost first."""
    settings = []
    while isinstance(target, (UnderSetting, PythonOnSlice)):
        settings += [target] if isinstance(target, UnderSetting) else []
        target = target.target
    return target if isinstance(target, FunctionCall) else None, settings


def _describe_setting(setting: UnderSetting) -> tuple[Any, ...]:
    autocast = isinstance(setting, InAutocast)
    return type(setting), *((setting.device_type, setting.dtype, setting.enabled) if autocast else ())  # type: ignore[attr-defined]


def _is_constant(value: Any) -> bool:
    """Whether an argument is what it is for good: no size that follows the samples, no object that may change."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_constant, value.values() if isinstance(value, dict) else value))
    kinds = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or isinstance(value, kinds)


def _shape_of_one_sample(val: Tensor) -> tuple[int, ...]:
    return tuple(int(size_function(size)(1)) for size in val.shape)


def _device_of(val: Tensor) -> torch.device:
    """Where a tensor is; the host for one that is nowhere yet."""
    return torch.device("cpu") if val.device.type == "meta" else val.device


# ---- proof -----------------------------------------------------------------------------------------------------------


def _prove_states(
    function: FunctionCall, settings: Sequence[UnderSetting], arguments: Sequence[FunctionArgument]
) -> tuple[State, ...] | None:
    with undo_side_effects(function.apply) as touched:
        try:
            first = trace_function(function, settings, arguments, ())
            states = _output_states(first, arguments)
            if states is None:
                return None
            for chosen in _tangent_choices(first.differentiable):
                if not _gradients_match(function, settings, arguments, states, chosen):
                    return None
        except Exception:  # the user's own Python, in circumstances that it was not written for: anything may happen
            return None
    return None if touched() else states


def _tangent_choices(differentiable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Which outputs a gradient may come to: those that are not used later have none."""
    if len(differentiable) > MOST_OUTPUTS:
        raise ValueError("too many outputs")
    for count in range(1, len(differentiable) + 1):
        yield from itertools.combinations(differentiable, count)


def _gradients_match(
    function: FunctionCall,
    settings: Sequence[UnderSetting],
    arguments: Sequence[FunctionArgument],
    states: Sequence[State],
    chosen: tuple[int, ...],
) -> bool:
    """Whether the gradients are made up as they must be, if tangents come to some of the outputs."""
    trace = trace_function(function, settings, arguments, chosen)
    given = [_state_of_gradient(states[output]) for output in trace.tangents]
    walk = None if None in given else _interpret_trace(trace, arguments, given)
    if walk is None or _interpret_outputs(walk, trace) != list(states):
        return False
    results: Any = trace.graph.output_node().args[0]
    for argument, result in zip(trace.gradients, results[trace.outputs :], strict=True):
        if not _is_gradient_of(arguments[argument].state, walk, walk.key_of(result)):
            return False
    return True


def _output_states(trace: FunctionTrace, arguments: Sequence[FunctionArgument]) -> tuple[State, ...] | None:
    """How the parts make up the outputs; None where that is not known of each."""
    walk = _interpret_trace(trace, arguments, ())
    states = None if walk is None else _interpret_outputs(walk, trace)
    return None if states is None or None in states else tuple(state for state in states if state is not None)


def _interpret_outputs(walk: AbstractInterpreter, trace: FunctionTrace) -> list[State | None]:
    results: Any = trace.graph.output_node().args[0]
    return [_state_in_order(walk, walk.key_of(result)) for result in results[: trace.outputs]]


def _state_in_order(walk: AbstractInterpreter, key: TensorKey) -> State | None:
    """How a value is made up; rows only where they are all samples' in their order."""
    state = walk.states.get(key)
    ordered = isinstance(state, (Additive, Proportional)) or state == walk.placements.get(key)
    return state if ordered and key not in walk.size_cuts else None


def _state_of_gradient(state: State) -> State | None:
    """How the parts make up the gradient of a value; see the head of this file."""
    if isinstance(state, Shard):
        return state
    if state == REPLICATE:
        return Additive(0)
    return proportional(state.power) if isinstance(state, Additive) else None


def _is_gradient_of(state: State, walk: AbstractInterpreter, key: TensorKey) -> bool:
    found, wanted = _state_in_order(walk, key), _state_of_gradient(state)
    if found is None or wanted is None:
        return False
    if state == REPLICATE:
        return power_of_additive(found) == 0
    return (
        found == wanted if isinstance(state, Shard) else power_of_proportional(found) == power_of_proportional(wanted)
    )


def _interpret_trace(
    trace: FunctionTrace, arguments: Sequence[FunctionArgument], tangents: Sequence[State | None]
) -> AbstractInterpreter | None:
    nodes = describe_nodes(trace.graph, dict.fromkeys(trace.graph.nodes, False), set())
    inputs = len(arguments) + len(trace.tangents)
    code = Code(trace.graph, {}, inputs, random=False, has_batch_statistics=False)
    graph = Graph(nodes, {}, {}, {}, WHOLE, (), (), loss_is_mean=True, is_opaque=False, code=code)
    states = [*(argument.state for argument in arguments), *tangents]
    return interpret(graph, given={(f"input:{number}", 0): state for number, state in enumerate(states)})
