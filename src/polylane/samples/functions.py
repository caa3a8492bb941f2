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

import copy
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from polylane.graph.describe import describe, label_nodes
from polylane.graph.graph import Code, Graph
from polylane.graph.inplace import alias_groups, values_not_places, writes
from polylane.graph.keying import AsPart
from polylane.graph.opaque import FunctionCall
from polylane.graph.precision import InAutocast, InFloat64, Promoted, Within
from polylane.graph.rewrite import add_part, drop_assertions, drop_dead
from polylane.graph.sizes import free_the_sizes, size_function
from polylane.placement.placement import REPLICATE, Shard
from polylane.placement.view import Key, Step
from polylane.samples.additivity import (
    WHOLE,
    Additive,
    Proportional,
    State,
    power_of_additive,
    power_of_proportional,
    proportional,
)
from polylane.samples.untouched import untouched
from polylane.samples.walk import Walk, walked

# Of a longer trace nothing is known: a walk must end soon.
LONGEST = 2000
# Outputs that may have a gradient or none, each on its own: a backward pass is traced for every choice of them.
MOST_OUTPUTS = 3
HINT = 7  # what sizes are called with; a branch on it is seen, and is no proof


@dataclass(frozen=True)
class _Argument:
    """A tensor that a function is called with.

    Attributes:
        shape: at one sample.
        dtype: of its elements.
        state: how the parts of a batch make it up; rows grow along its dimension.
        requires_grad: whether a gradient may flow back through it.
        device: where it is.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    state: State
    requires_grad: bool
    device: torch.device

    def made(self, samples: Any) -> Tensor:
        """One without data, with so many samples."""
        grown = self.state.dim if isinstance(self.state, Shard) else None
        sizes = [size * samples if dim == grown else size for dim, size in enumerate(self.shape)]
        return torch.empty(sizes, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class _Trace:
    """A function's passes, flat.

    Attributes:
        graph: its placeholders are the arguments and the tangents; it gives the outputs and the gradients.
        outputs: how many outputs it gives.
        differentiable: the outputs that a gradient may come to.
        tangents: the outputs that have a tangent, in the order of the placeholders.
        gradients: the arguments of which there is a gradient.
    """

    graph: fx.Graph
    outputs: int
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]


_Known = dict[tuple[Any, ...], tuple[State, ...] | None]
_KNOWN: WeakKeyDictionary[FunctionCall, _Known] = WeakKeyDictionary()


def proven_function(node: fx.Node, step: Step, states: Sequence[State]) -> tuple[State, ...] | None:
    """How the parts of a batch make up what a custom autograd function gives; None where that is not proven.

    Args:
        node: the call.
        step: the same with concrete shapes.
        states: how the parts make up the tensors that it reads.
    """
    function, settings = _unwrapped(node.target)
    tensors: Any = node.args[1]
    if function is None or function.random or not _plain(function.arguments):
        return None
    arguments = tuple(
        _Argument(_at_one(tensor.meta["val"]), value.dtype, state, value.gradient, _device(tensor.meta["val"]))
        for tensor, value, state in zip(tensors, step.call.inputs, states, strict=True)
    )
    key = (arguments, *(_described(each) for each in settings))
    known = _KNOWN.setdefault(function, {})
    if key not in known:
        # What a first call alone sets up (an import, a cache) is there for the second.
        known[key] = _prove(function, settings, arguments) or _prove(function, settings, arguments)
    return known[key]


def _unwrapped(target: Any) -> tuple[FunctionCall | None, list[Within]]:
    """A call without what stands around it, and the settings that it runs under, the outermost first."""
    settings = []
    while isinstance(target, (Within, AsPart)):
        settings += [target] if isinstance(target, Within) else []
        target = target.target
    return target if isinstance(target, FunctionCall) else None, settings


def _described(setting: Within) -> tuple[Any, ...]:
    autocast = isinstance(setting, InAutocast)
    return type(setting), *((setting.device_type, setting.dtype, setting.enabled) if autocast else ())  # type: ignore[attr-defined]


def _plain(value: Any) -> bool:
    """Whether an argument is what it is for good: no size that follows the samples, no object that may change."""
    if isinstance(value, (list, tuple, dict)):
        return all(map(_plain, value.values() if isinstance(value, dict) else value))
    kinds = (bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, torch.memory_format, torch.layout)
    return value is None or isinstance(value, kinds)


def _at_one(val: Tensor) -> tuple[int, ...]:
    return tuple(int(size_function(size)(1)) for size in val.shape)


def _device(val: Tensor) -> torch.device:
    """Where a tensor is; the host for one that is nowhere yet."""
    return torch.device("cpu") if val.device.type == "meta" else val.device


# ---- proof -----------------------------------------------------------------------------------------------------------


def _prove(
    function: FunctionCall, settings: Sequence[Within], arguments: Sequence[_Argument]
) -> tuple[State, ...] | None:
    with untouched(function.apply) as touched:
        try:
            first = _traced(function, settings, arguments, ())
            states = _states_of(first, arguments)
            if states is None:
                return None
            for chosen in _choices(first.differentiable):
                if not _holds(function, settings, arguments, states, chosen):
                    return None
        except Exception:  # the user's own Python, in circumstances that it was not written for: anything may happen
            return None
    return None if touched() else states


def _choices(differentiable: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Which outputs a gradient may come to: those that are not used later have none."""
    if len(differentiable) > MOST_OUTPUTS:
        raise ValueError("too many outputs")
    for count in range(1, len(differentiable) + 1):
        yield from itertools.combinations(differentiable, count)


def _holds(
    function: FunctionCall,
    settings: Sequence[Within],
    arguments: Sequence[_Argument],
    states: Sequence[State],
    chosen: tuple[int, ...],
) -> bool:
    """Whether the gradients are made up as they must be, if tangents come to some of the outputs."""
    trace = _traced(function, settings, arguments, chosen)
    given = [_gradient_state(states[output]) for output in trace.tangents]
    walk = None if None in given else _walk(trace, arguments, given)
    if walk is None or _outputs(walk, trace) != list(states):
        return False
    results: Any = trace.graph.output_node().args[0]
    for argument, result in zip(trace.gradients, results[trace.outputs :], strict=True):
        if not _is_gradient_of(arguments[argument].state, walk, walk.key(result)):
            return False
    return True


def _states_of(trace: _Trace, arguments: Sequence[_Argument]) -> tuple[State, ...] | None:
    """How the parts make up the outputs; None where that is not known of each."""
    walk = _walk(trace, arguments, ())
    states = None if walk is None else _outputs(walk, trace)
    return None if states is None or None in states else tuple(state for state in states if state is not None)


def _outputs(walk: Walk, trace: _Trace) -> list[State | None]:
    results: Any = trace.graph.output_node().args[0]
    return [_in_order(walk, walk.key(result)) for result in results[: trace.outputs]]


def _in_order(walk: Walk, key: Key) -> State | None:
    """How a value is made up; rows only where they are all samples' in their order."""
    state = walk.states.get(key)
    ordered = isinstance(state, (Additive, Proportional)) or state == walk.lies.get(key)
    return state if ordered and key not in walk.numbers else None


def _gradient_state(state: State) -> State | None:
    """How the parts make up the gradient of a value; see the head of this file."""
    if isinstance(state, Shard):
        return state
    if state == REPLICATE:
        return Additive(0)
    return proportional(state.power) if isinstance(state, Additive) else None


def _is_gradient_of(state: State, walk: Walk, key: Key) -> bool:
    found, wanted = _in_order(walk, key), _gradient_state(state)
    if found is None or wanted is None:
        return False
    if state == REPLICATE:
        return power_of_additive(found) == 0
    return (
        found == wanted if isinstance(state, Shard) else power_of_proportional(found) == power_of_proportional(wanted)
    )


# ---- trace -----------------------------------------------------------------------------------------------------------


def _traced(
    function: FunctionCall, settings: Sequence[Within], arguments: Sequence[_Argument], chosen: tuple[int, ...]
) -> _Trace:
    """A function's passes, for any number of samples.

    Raises:
        ValueError: they are not the same for all.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    trace = _trace_at(function, settings, arguments, chosen, mode, _symbol(mode))
    alone = _trace_at(function, settings, arguments, chosen, FakeTensorMode(), 1)
    if env.guards or env.deferred_runtime_asserts:
        raise ValueError("it depends on the number of samples")
    # Sizes are taken to be two at least: one is tried by itself.
    if _shape_of(trace.graph) != _shape_of(alone.graph):
        raise ValueError("it computes otherwise on one sample")
    if len(trace.graph.nodes) > LONGEST:
        raise ValueError("too long")
    _prepare(trace.graph)
    return trace


def _symbol(mode: FakeTensorMode) -> torch.SymInt:
    """The number of samples."""
    form: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size: Any = mode.from_tensor(torch.empty(HINT, device="meta"), symbolic_context=form).shape[0]
    return size  # type: ignore[no-any-return]


def _trace_at(
    function: FunctionCall,
    settings: Sequence[Within],
    arguments: Sequence[_Argument],
    chosen: tuple[int, ...],
    mode: FakeTensorMode,
    samples: Any,
) -> _Trace:
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        call = FunctionCall(function.apply, copy.deepcopy(function.arguments), function.tensor_at)
        result = call.run(inputs)
        return [result] if isinstance(result, Tensor) else [each for each in result if isinstance(each, Tensor)]

    found: dict[str, tuple[int, ...]] = {"gradients": ()}
    wanted = [i for i, argument in enumerate(arguments) if argument.requires_grad]

    def passes(*tensors: Tensor) -> list[Tensor]:
        inputs, tangents = tensors[: len(arguments)], tensors[len(arguments) :]
        outputs = run(inputs)
        if not tangents:
            return outputs
        gradients = _gradients([outputs[i] for i in chosen], [inputs[i] for i in wanted], tangents)
        found["gradients"] = tuple(i for i, gradient in zip(wanted, gradients, strict=True) if gradient is not None)
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)]

    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        failures = stack.enter_context(_Failures())
        for setting in settings:
            stack.enter_context(_entered(setting))
        inputs = [argument.made(samples) for argument in arguments]
        outputs = run(inputs)
        differentiable = tuple(i for i, output in enumerate(outputs) if output.requires_grad)
        tangents = [torch.empty_like(outputs[i], requires_grad=False) for i in chosen]
        traced = make_fx(passes, tracing_mode="real", pre_dispatch=True)(*inputs, *tangents)
    if failures.any:
        raise ValueError("it caught an error that tensors with data do not raise")
    graph = _without_attributes(traced)
    return _Trace(graph, len(outputs), differentiable, chosen, found["gradients"])


def _gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """As torch.autograd.grad, inside of which no function mode would see what a backward pass calls."""
    engine: Any = torch.autograd.Variable._execution_engine
    keep, create, unused, accumulate = False, False, True, False
    found: tuple[Tensor | None, ...] = engine.run_backward(
        tuple(outputs),
        tuple(tangents),
        keep,
        create,
        tuple(inputs),
        allow_unreachable=unused,
        accumulate_grad=accumulate,
    )
    return found


class _Failures(TorchFunctionMode):
    """Whether any call of torch's failed, be the error caught or not: without data, values cannot be looked at."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.any = True
            raise


def _entered(setting: Within) -> Any:
    if isinstance(setting, InAutocast):
        device, dtype, enabled = setting.device_type, setting.dtype, setting.enabled
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
    if isinstance(setting, InFloat64):
        return Promoted()
    raise ValueError("a setting that a trace does not know")


def _without_attributes(traced: fx.GraphModule) -> fx.Graph:
    """The traced graph, with its constants as placeholders and without switches of the gradient mode."""
    graph = traced.graph
    first = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            with graph.inserting_before(first):
                constant = graph.placeholder(str(node.target))
            constant.meta = {"val": torch.empty_like(getattr(traced, str(node.target)), device="meta")}
            constant.meta["role"] = ("constant", str(node.target))
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
        elif node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
    return graph


def _shape_of(graph: fx.Graph) -> list[Any]:
    """What a graph computes on one sample: each operator, and its arguments."""
    numbers: dict[fx.Node, int] = {}

    def settled(node: fx.Node) -> Any:
        val = node.meta.get("val")
        return ("node", numbers[node]) if node in numbers else size_function(val)(1)

    result: list[Any] = []
    for node in graph.nodes:
        val = node.meta.get("val")
        if node.op == "call_function" and not isinstance(val, (Tensor, list, tuple)):
            continue
        numbers[node] = len(numbers)
        result.append((node.op, node.target, _settled(node.args, settled), _settled(node.kwargs, settled)))
    return [(op, "" if op == "placeholder" else target, args, kwargs) for op, target, args, kwargs in result]


def _settled(value: Any, settled: Callable[[fx.Node], Any]) -> Any:
    if isinstance(value, fx.Node):
        return settled(value)
    if isinstance(value, Mapping):
        return {key: _settled(each, settled) for key, each in value.items()}
    return [_settled(each, settled) for each in value] if isinstance(value, (list, tuple)) else value


def _prepare(graph: fx.Graph) -> None:
    """Let a traced graph be like a captured one: roles, sizes and names.

    Raises:
        ValueError: it writes what it was given, or draws random numbers.
    """
    part, leaf = add_part(graph), 0
    for node in graph.nodes:
        if node.op == "placeholder" and "role" not in node.meta:
            node.meta["role"], leaf = ("input", leaf), leaf + 1
    memory = alias_groups(graph)
    for node in graph.nodes:
        if any(memory[each].op == "placeholder" for each in writes(node)):
            raise ValueError("it writes what it is given")
        drawn = isinstance(node.target, torch._ops.OpOverload) and node.target.tags
        if drawn and torch.Tag.nondeterministic_seeded in drawn:
            raise ValueError("it draws random numbers")
    free_the_sizes(graph, part)
    values_not_places(graph)
    drop_assertions(graph)
    drop_dead(graph)
    label_nodes(graph)
    graph.lint()


def _walk(trace: _Trace, arguments: Sequence[_Argument], tangents: Sequence[State | None]) -> Walk | None:
    nodes = describe(trace.graph, dict.fromkeys(trace.graph.nodes, False), set())
    inputs = len(arguments) + len(trace.tangents)
    code = Code(trace.graph, {}, inputs, random=False, batch_statistics=False)
    graph = Graph(nodes, {}, {}, {}, WHOLE, (), (), mean=True, opaque=False, code=code)
    states = [*(argument.state for argument in arguments), *tangents]
    return walked(graph, given={(f"input:{number}", 0): state for number, state in enumerate(states)})
