"""Custom autograd functions (torch.autograd.Function): prove from forward and backward traces how they treat samples.

Such a function is one opaque operator of the captured graph. Its forward and backward pass are traced to ATen on fake
tensors with a symbolic number of samples and a tangent for every output, and the traced graph is interpreted by the
same rules as any other. A function is proven if its outputs follow from the parts' outputs, and the gradient of each
input from the parts' gradients as the table demands. Nothing is known of any other function (one that reads values,
calls numpy, draws random numbers, branches on the number of samples, or joins samples in its backward pass).

State of the gradient of a value v, by the state of v. Every part's backward pass begins with its share of the whole
batch's, so that the parts' gradients of a parameter add up to the whole's.

    v                 gradient of v
    rows              rows
    replicated        additive(0): each part has a partial sum
    additive(q)       proportional(q): v = sum of share^q v_i, so the gradient of v_i is share^q times that of v
"""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import Tensor, fx

from polylane.graph.capture.assign_keys import PythonOnSlice
from polylane.graph.capture.describe_nodes import describe_nodes
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.graph import Code, Graph
from polylane.graph.nodes.facts import UnderSetting
from polylane.graph.precision import InAutocast
from polylane.graph.python_state.random_generators import generator_states, restore_generators, states_equal
from polylane.graph.python_state.state import PythonName, find_python_names
from polylane.graph.python_state.state_snapshots import StateDigests, snapshot_names
from polylane.graph.symbolic_sizes import size_function
from polylane.placement.operator_view import OperatorNode, TensorKey
from polylane.placement.placement import REPLICATE, Shard
from polylane.placement.rules.registry import rule_of
from polylane.samples.autograd.function_trace import FunctionArgument, FunctionTrace, TracedFunction, trace_function
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

# Most differentiable outputs: a backward pass is traced for every non-empty subset of them that gets a tangent.
MOST_OUTPUTS = 3


_KnownSettings = dict[tuple[Any, ...], tuple[State, ...] | None]
# Proofs by function and arguments: a model calls the same function in every layer.
_KNOWN: WeakKeyDictionary[FunctionCall, _KnownSettings] = WeakKeyDictionary()

# Functions whose trace shows an operator with a known rule that combines samples.
_JOINING: WeakSet[FunctionCall] = WeakSet()


def prove_function(node: fx.Node, step: OperatorNode, states: Sequence[State]) -> tuple[State, ...] | None:
    """Return how the parts of a batch make up the outputs of a custom autograd function; None if not proven.

    Args:
        node: FX node that calls the function.
        step: the same call with concrete shapes.
        states: states of the tensors that it reads, in order.
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
    key = (arguments, *(_describe_setting(setting) for setting in settings))
    proofs = _KNOWN.setdefault(function, {})
    if key not in proofs:
        # A first call may fail for its own setup (an import, a cache): try once more.
        traced = TracedFunction(function, settings, arguments)
        proofs[key] = _prove_states(traced) or _prove_states(traced)
    return proofs[key]


def trace_joins_samples(node: fx.Node) -> bool:
    """Return whether the trace of a custom autograd function has shown an operator that combines its samples.

    Args:
        node: FX node of the user's own Python, for which :func:`prove_function` has proven nothing.
    """
    function, _ = _unwrap_call(node.target)
    return function is not None and function in _JOINING


def _unwrap_call(target: Any) -> tuple[FunctionCall | None, list[UnderSetting]]:
    """Return the call inside all wrappers, and the settings that it runs under, the outermost first."""
    settings = []
    while isinstance(target, (UnderSetting, PythonOnSlice)):
        settings += [target] if isinstance(target, UnderSetting) else []
        target = target.target
    return target if isinstance(target, FunctionCall) else None, settings


def _describe_setting(setting: UnderSetting) -> tuple[Any, ...]:
    autocast = isinstance(setting, InAutocast)
    return type(setting), *((setting.device_type, setting.dtype, setting.enabled) if autocast else ())  # type: ignore[attr-defined]


def _is_constant(value: Any) -> bool:
    """Return whether an argument is constant: no size that depends on the samples, no mutable object."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_is_constant, value.values() if isinstance(value, dict) else value))
    kinds = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or isinstance(value, kinds)


def _shape_of_one_sample(val: Tensor) -> tuple[int, ...]:
    return tuple(int(size_function(size)(1)) for size in val.shape)


def _device_of(val: Tensor) -> torch.device:
    """Return the device of a tensor; the CPU for a meta tensor."""
    return torch.device("cpu") if val.device.type == "meta" else val.device


# ---- proof -----------------------------------------------------------------------------------------------------------


def _prove_states(function: TracedFunction) -> tuple[State, ...] | None:
    with undo_side_effects(function.call.apply) as touched:
        try:
            first_trace = trace_function(function, ())
            states = _output_states(first_trace)
            if states is None:
                return None
            for chosen in _tangent_choices(first_trace.differentiable):
                if not _gradients_match(trace_function(function, chosen), states):
                    return None
        except Exception:  # user code on fake tensors may raise anything
            return None
    return None if touched() else states


def _tangent_choices(differentiable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield every non-empty subset of outputs that may get a tangent: unused outputs get none."""
    if len(differentiable) > MOST_OUTPUTS:
        raise ValueError("too many outputs")
    for count in range(1, len(differentiable) + 1):
        yield from itertools.combinations(differentiable, count)


def _gradients_match(trace: FunctionTrace, states: Sequence[State]) -> bool:
    """Return whether all input gradients have the states that the table demands, given tangents of some outputs."""
    tangent_states = [_state_of_gradient(states[output]) for output in trace.tangents]
    walk = None if None in tangent_states else _interpret_trace(trace, tangent_states)
    if walk is None or _interpret_outputs(walk, trace) != list(states):
        return False
    results: Any = trace.graph.output_node().args[0]
    for argument, result in zip(trace.gradients, results[trace.outputs :], strict=True):
        if not _is_gradient_of(trace.function.arguments[argument].state, walk, walk.key_of(result)):
            _note_joining(trace, walk)
            return False
    return True


def _note_joining(trace: FunctionTrace, walk: AbstractInterpreter) -> None:
    """Note a function whose first operator without a state has a rule: what the rule does not allow joins samples."""
    calls = [node for node in trace.graph.nodes if node.op == "call_function" and "op" in node.meta]
    unknown = [n for n in calls if isinstance(n.meta.get("val"), Tensor) and walk.key_of(n) not in walk.states]
    if unknown and rule_of(str(unknown[0].meta["op"])) is not None:
        _JOINING.add(trace.function.call)


def _output_states(trace: FunctionTrace) -> tuple[State, ...] | None:
    """Return the states of all outputs; None if one is unknown."""
    walk = _interpret_trace(trace, ())
    states = None if walk is None else _interpret_outputs(walk, trace)
    return None if states is None or None in states else tuple(state for state in states if state is not None)


def _interpret_outputs(walk: AbstractInterpreter, trace: FunctionTrace) -> list[State | None]:
    results: Any = trace.graph.output_node().args[0]
    return [_state_in_order(walk, walk.key_of(result)) for result in results[: trace.outputs]]


def _state_in_order(walk: AbstractInterpreter, key: TensorKey) -> State | None:
    """Return the state of a value; a sharded one only if it has the rows of all samples in order."""
    state = walk.states.get(key)
    ordered = isinstance(state, (Additive, Proportional)) or state == walk.placements.get(key)
    return state if ordered and key not in walk.size_cuts else None


def _state_of_gradient(state: State) -> State | None:
    """Return the state of a value's gradient by the table at the head of this file; None if undefined."""
    if isinstance(state, Shard):
        return state
    if state == REPLICATE:
        return Additive(0)
    return proportional(state.power) if isinstance(state, Additive) else None


def _is_gradient_of(state: State, walk: AbstractInterpreter, key: TensorKey) -> bool:
    gradient_state, expected_state = _state_in_order(walk, key), _state_of_gradient(state)
    if gradient_state is None or expected_state is None:
        return False
    if state == REPLICATE:
        return power_of_additive(gradient_state) == 0
    return (
        gradient_state == expected_state
        if isinstance(state, Shard)
        else power_of_proportional(gradient_state) == power_of_proportional(expected_state)
    )


def _interpret_trace(trace: FunctionTrace, tangents: Sequence[State | None]) -> AbstractInterpreter | None:
    arguments = trace.function.arguments
    nodes = describe_nodes(trace.graph, dict.fromkeys(trace.graph.nodes, False), set())
    inputs = len(arguments) + len(trace.tangents)
    # The trace poses as a captured graph whose inputs are the arguments and tangents, with given states.
    code = Code(trace.graph, {}, inputs, random=False, has_batch_statistics=False)
    graph = Graph(nodes, {}, {}, {}, WHOLE, (), (), loss_is_mean=True, is_opaque=False, code=code)
    states = [*(argument.state for argument in arguments), *tangents]
    return interpret(graph, given={(f"input:{number}", 0): state for number, state in enumerate(states)})


# ---- side effects of calls that are only traced ----------------------------------------------------------------------


@contextmanager
def undo_side_effects(apply: Callable[..., Any]) -> Iterator[Callable[[], bool]]:
    """Context manager: restore random generators and all state that a custom autograd function's code can change.

    A call that is only traced must not change a counter, a list or a random generator. What such a function can change
    is what its code names: attributes of its class, globals, closure variables and their contents, also through the
    functions that it calls, those of libraries included.

    Args:
        apply: the bound ``apply`` of the autograd function's class.

    Yields:
        Function that tells, after the context, whether anything was changed.
    """
    changed = False
    reached = find_python_names((), [getattr(apply, "__self__", apply)], everything=True)
    random, old_digests, put_back = generator_states(), _digests(reached), snapshot_names(reached, ())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield lambda: changed
        finally:
            # A function that changes state is not proven, even though the change is undone: it may depend
            # on it.
            changed = not states_equal(random, generator_states()) or _digests(reached) != old_digests
            put_back()
            restore_generators(random)


def _digests(reached: Sequence[PythonName]) -> list[Any]:
    digests = StateDigests(())
    return [digests.of(name.get()) for name in reached]
