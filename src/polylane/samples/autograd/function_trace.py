"""Function traces: forward and backward of a custom autograd function as one flat ATen graph, for any samples.

Tensors are fake and their number of samples is symbolic: a function that depends on data or samples has no trace.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.overrides import TorchFunctionMode

from polylane.graph.capture.describe_nodes import label_nodes
from polylane.graph.capture.inline import add_slice_input, drop_assertions, drop_dead_nodes
from polylane.graph.capture.python.python_operators import FunctionCall
from polylane.graph.interpreter import map_nested
from polylane.graph.nodes.facts import UnderSetting
from polylane.graph.nodes.memory import alias_groups, written_arguments
from polylane.graph.operators.functionalize import functionalize_writes
from polylane.graph.precision import InAutocast, InFloat64, Promoted
from polylane.graph.symbolic_sizes import compute_sizes_locally, size_function
from polylane.placement.placement import Shard
from polylane.samples.interpretation.additivity import State

# Most nodes of a trace: longer ones are not interpreted, which bounds the time of a proof.
LONGEST = 2000
HINT = 7  # example value of the symbol; a branch on it leaves a guard, and is refused


@dataclass(frozen=True)
class FunctionArgument:
    """A tensor argument of a function.

    Attributes:
        shape: shape of the tensor at one sample.
        dtype: dtype of its elements.
        state: how the parts of a batch make it up; a sharded one grows along its dimension.
        requires_grad: whether a gradient may flow back to it.
        device: device of the fake tensors.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    state: State
    requires_grad: bool
    device: torch.device

    def made(self, samples: Any) -> Tensor:
        """Return an empty tensor of this form with ``samples`` samples."""
        grown = self.state.dim if isinstance(self.state, Shard) else None
        sizes = [size * samples if dim == grown else size for dim, size in enumerate(self.shape)]
        return torch.empty(sizes, dtype=self.dtype, device=self.device, requires_grad=self.requires_grad)


@dataclass(frozen=True)
class TracedFunction:
    """A custom autograd function as a graph calls it.

    Attributes:
        call: the function, and its arguments besides tensors.
        settings: settings that it runs under, the outermost first.
        arguments: its tensor arguments, in order.
    """

    call: FunctionCall
    settings: Sequence[UnderSetting]
    arguments: Sequence[FunctionArgument]


@dataclass(frozen=True)
class FunctionTrace:
    """Forward and backward pass of a function as one flat graph.

    Attributes:
        function: the function that was traced.
        graph: placeholders are the arguments, then the tangents; results are the outputs, then the gradients.
        outputs: number of outputs of the function.
        differentiable: indices of the outputs that may have a gradient.
        tangents: indices of the outputs with a tangent, in the order of the placeholders.
        gradients: indices of the arguments with a gradient, in the order of the results.
    """

    function: TracedFunction
    graph: fx.Graph
    outputs: int
    differentiable: tuple[int, ...]
    tangents: tuple[int, ...]
    gradients: tuple[int, ...]


def trace_function(function: TracedFunction, chosen: tuple[int, ...]) -> FunctionTrace:
    """Trace a function's passes for any number of samples; outputs at the indices ``chosen`` get a tangent.

    Raises:
        ValueError: the passes differ between numbers of samples, are too long, draw random numbers or have side
            effects.
    """
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    trace = _trace_with_samples(function, chosen, mode, _sample_symbol(mode))
    alone = _trace_with_samples(function, chosen, FakeTensorMode(), 1)
    if env.guards or env.deferred_runtime_asserts:
        raise ValueError("it depends on the number of samples")
    # Symbolic sizes are assumed to be at least two: one sample is traced separately.
    if _graph_structure(trace.graph) != _graph_structure(alone.graph):
        raise ValueError("it computes otherwise on one sample")
    if len(trace.graph.nodes) > LONGEST:
        raise ValueError("too long")
    _prepare_graph(trace.graph)
    return trace


def _sample_symbol(mode: FakeTensorMode) -> torch.SymInt:
    """Return a symbolic number of samples, without guards yet."""
    form: Any = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC])
    size: Any = mode.from_tensor(torch.empty(HINT, device="meta"), symbolic_context=form).shape[0]
    return size  # type: ignore[no-any-return]


def _trace_with_samples(
    function: TracedFunction, chosen: tuple[int, ...], mode: FakeTensorMode, samples: Any
) -> FunctionTrace:
    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        # Arguments are copied: the function may change them.
        call = function.call
        result = FunctionCall(call.apply, copy.deepcopy(call.arguments), call.tensor_positions).run(inputs)
        return [result] if isinstance(result, Tensor) else [output for output in result if isinstance(output, Tensor)]

    indices: dict[str, tuple[int, ...]] = {"gradients": ()}
    argument_indices = [i for i, argument in enumerate(function.arguments) if argument.requires_grad]

    def passes(*tensors: Tensor) -> list[Tensor]:
        inputs, tangents = tensors[: len(function.arguments)], tensors[len(function.arguments) :]
        outputs = run(inputs)
        if not tangents:
            return outputs
        gradients = compute_gradients([outputs[i] for i in chosen], [inputs[i] for i in argument_indices], tangents)
        indices["gradients"] = tuple(
            i for i, gradient in zip(argument_indices, gradients, strict=True) if gradient is not None
        )
        return [*outputs, *(gradient for gradient in gradients if gradient is not None)]

    with ExitStack() as stack:
        stack.enter_context(mode)
        stack.enter_context(torch.enable_grad())
        failures = stack.enter_context(_FailureWatch())
        for setting in function.settings:
            stack.enter_context(_enter_setting(setting))
        inputs = [argument.made(samples) for argument in function.arguments]
        outputs = run(inputs)
        differentiable = tuple(i for i, output in enumerate(outputs) if output.requires_grad)
        tangents = [torch.empty_like(outputs[i], requires_grad=False) for i in chosen]
        traced = make_fx(passes, tracing_mode="real", pre_dispatch=True)(*inputs, *tangents)
    if failures.any:
        raise ValueError("it caught an error that tensors with data do not raise")
    graph = _inline_constants(traced)
    return FunctionTrace(function, graph, len(outputs), differentiable, chosen, indices["gradients"])


def compute_gradients(
    outputs: Sequence[Tensor], inputs: Sequence[Tensor], tangents: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Compute gradients as torch.autograd.grad does, but visibly to function modes, which it disables."""
    engine: Any = torch.autograd.Variable._execution_engine
    options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": False}
    return tuple(engine.run_backward(tuple(outputs), tuple(tangents), inputs=tuple(inputs), **options))


class _FailureWatch(TorchFunctionMode):
    """Records whether any torch call raised, even if caught: on fake tensors, reading values does."""

    any = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except Exception:
            self.any = True
            raise


def _enter_setting(setting: UnderSetting) -> Any:
    if isinstance(setting, InAutocast):
        device, dtype, enabled = setting.device_type, setting.dtype, setting.enabled
        return torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
    if isinstance(setting, InFloat64):
        return Promoted()
    raise ValueError("a setting that a trace does not know")


def _inline_constants(traced: fx.GraphModule) -> fx.Graph:
    """Return the traced graph with constants as placeholders and without switches of the gradient mode."""
    graph = traced.graph
    first_node = next(iter(graph.nodes))
    for node in list(graph.nodes):
        if node.op == "get_attr":
            with graph.inserting_before(first_node):
                constant = graph.placeholder(str(node.target))
            constant.meta = {"val": torch.empty_like(getattr(traced, str(node.target)), device="meta")}
            constant.meta["role"] = ("constant", str(node.target))
            node.replace_all_uses_with(constant)
            graph.erase_node(node)
        elif node.target is torch._C._set_grad_enabled:
            graph.erase_node(node)
    return graph


def _graph_structure(graph: fx.Graph) -> list[Any]:
    """Return a graph's operators and arguments at one sample, for comparison with another trace."""
    numbers: dict[fx.Node, int] = {}

    def settled(value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        return ("node", numbers[value]) if value in numbers else size_function(value.meta.get("val"))(1)

    result: list[Any] = []
    for node in graph.nodes:
        val = node.meta.get("val")
        # Size arithmetic appears in the symbolic trace only; its results are compared as numbers in the
        # arguments.
        if node.op == "call_function" and not isinstance(val, (Tensor, list, tuple)):
            continue
        numbers[node] = len(numbers)
        target = "" if node.op == "placeholder" else node.target
        result.append((node.op, target, map_nested(settled, node.args), map_nested(settled, node.kwargs)))
    return result


def _prepare_graph(graph: fx.Graph) -> None:
    """Prepare a traced graph as captures are: roles, sizes and names.

    Raises:
        ValueError: the function writes its arguments in place, or draws random numbers.
    """
    part, leaf = add_slice_input(graph), 0
    for node in graph.nodes:
        if node.op == "placeholder" and "role" not in node.meta:
            node.meta["role"], leaf = ("input", leaf), leaf + 1
    memory = alias_groups(graph)
    for node in graph.nodes:
        if any(memory[argument].op == "placeholder" for argument in written_arguments(node)):
            raise ValueError("it writes what it is given")
        drawn = isinstance(node.target, torch._ops.OpOverload) and node.target.tags
        if drawn and torch.Tag.nondeterministic_seeded in drawn:
            raise ValueError("it draws random numbers")
    compute_sizes_locally(graph, part)
    functionalize_writes(graph)
    drop_assertions(graph)
    drop_dead_nodes(graph)
    label_nodes(graph)
    graph.lint()
