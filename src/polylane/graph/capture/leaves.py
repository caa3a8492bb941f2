"""Leaves: modules that export cannot trace stay whole, one node each, and run the user's own Python."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import stateless
from torch.overrides import TorchFunctionMode

from polylane.errors import PolylaneError
from polylane.graph.batch import Rebuild, flatten_nested, sample_count
from polylane.graph.capture.python.leaf_outputs import LeafOutput, infer_output
from polylane.graph.capture.python.python_operators import emit_call, with_tensors
from polylane.graph.capture.python.replaced_parameters import parameters_replaced
from polylane.graph.capture.python.stray_tensors import references_replaced
from polylane.graph.capture.questions.capture_run import CaptureRun
from polylane.graph.operators.sync_batch_norm import VALUES, batch_norm_arguments
from polylane.graph.python_state.compiler import compiler_off
from polylane.graph.python_state.module_copies import copy_module
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.graph.python_state.run_watch import SideEffect
from polylane.graph.python_state.saved_tensor_hooks import torch_func_allowed
from polylane.graph.symbolic_sizes import size_function


@dataclass(eq=False)
class LeafCall:
    """One call of a module that stays whole.

    Attributes:
        module: the user's module, which is called.
        path: the module's path in the model.
        parameters: names of the module's parameters, the first tensors of the call.
        buffers: names of the module's buffers, the next tensors of the call.
        training: all modules inside, each with its mode at capture.
        arguments: flat arguments, with None in place of a tensor, and a function of the samples in place of a size.
        tensor_positions: indices of tensors among the flat arguments.
        size_positions: indices of symbolic sizes among the flat arguments.
        rebuild_arguments: turns flat arguments into (args, kwargs).
        outputs: shapes of the tensors that the module returns.
        output_positions: indices of tensors in the module's flat result.
        random: whether the module draws random numbers.
        normalizes: whether the module normalizes by statistics of the batch.
        source: the user's line where forward is defined, "file:line".
        fewest: number of samples that batch statistics need in training.
        effects: what the module does besides computing.
        takes_gradients: whether it differentiates something itself: it then runs with gradients also where none are
            wanted (evaluation), which autograd.grad needs.
    """

    module: nn.Module
    path: str
    parameters: list[str]
    buffers: list[str]
    training: list[tuple[nn.Module, bool]]
    arguments: list[Any]
    tensor_positions: list[int]
    size_positions: list[int]
    rebuild_arguments: Rebuild
    outputs: list[LeafOutput]
    output_positions: list[int]
    random: bool
    normalizes: bool
    source: str
    fewest: int = 1
    effects: tuple[SideEffect, ...] = ()
    takes_gradients: bool = False

    __name__ = "leaf"
    __module__ = "polylane"
    samples: Any = None  # the symbolic batch size, while capturing

    @property
    def is_batch_norm(self) -> bool:
        """Whether the module is torch's own batch normalization, whose samples share nothing but statistics.

        With ``momentum=None`` export cannot trace it: how far its running statistics move depends on a counter's value.
        """
        module = self.module
        hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
        plain = "forward" not in module.__dict__ and not any(hooks) and not self.effects
        return plain and type(module).forward is nn.BatchNorm1d.forward

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        like = tensors[0] if tensors else torch.empty(0)
        return [like.new_empty(out.shape_for(self.samples), dtype=out.dtype) for out in self.outputs]

    def copy_call(self) -> LeafCall:
        """Return the same call of a copy of the module: one module cannot run on two sets of tensors at once."""
        module = copy_module(self.module)
        flags = [flag for _, flag in self.training]
        return dataclasses.replace(self, module=module, training=list(zip(module.modules(), flags, strict=True)))

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the user's module on its parameters and buffers, then the tensors among its arguments."""
        names = self.parameters + self.buffers
        state = dict(zip(names, tensors, strict=False))
        flat = with_tensors(self.arguments, self.tensor_positions, tensors[len(names) :])
        for position in self.size_positions:
            flat[position] = flat[position](part.samples)
        args, kwargs = self.rebuild_arguments(flat)
        grad_enabled = torch.is_grad_enabled()
        needs = grad_enabled or self.takes_gradients
        with in_training_modes(self.training), compiler_off(), torch_func_allowed(), torch.set_grad_enabled(needs):
            result = self._run(state, args, kwargs)
        leaves, _ = flatten_nested(result)
        outputs: list[Tensor] = [leaves[position] for position in self.output_positions]
        return outputs if grad_enabled or not self.takes_gradients else [output.detach() for output in outputs]

    def choose_written(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """Return those of a call's tensors that it may write: all buffers of the module."""
        return tensors[len(self.parameters) : len(self.parameters) + len(self.buffers)]

    @property
    def own_tensors(self) -> int:
        """Number of the module's own tensors, which come first among those of a call."""
        return len(self.parameters) + len(self.buffers)

    @contextmanager
    def tensors_in_place(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context manager: the module has the tensors of a call in the places of its own.

        For the backward pass of that call, in which the user's Python may run the module again: an adjoint method, a
        checkpoint, a hook on a gradient.

        Args:
            tensors: the call's tensors, of which the first are the module's.
        """
        state = dict(zip(self.parameters + self.buffers, tensors, strict=False))
        current = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        stand_ins = {id(current[name]): tensor for name, tensor in state.items() if current[name] is not tensor}
        placed: Any = stateless._reparametrize_module
        named = _every_name(self.module, stand_ins)
        with references_replaced(self.module, stand_ins), placed(self.module, named) if named else nullcontext():
            yield

    def _run(self, state: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        current = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        named, memory = dict(state), {name: state[name].data for name in self.parameters}
        # The given tensors are the module's own: it can be called as it is, without functional_call.
        if all(current[name] is tensor for name, tensor in state.items()):
            result = self.module(*args, **kwargs)
            named |= {name: self.module.get_buffer(name) for name in self.buffers}
        else:
            stand_ins = {id(current[name]): tensor for name, tensor in state.items()}
            named = _every_name(self.module, stand_ins)
            replaced = references_replaced(self.module, stand_ins), parameters_replaced(self.path)
            with replaced[0], replaced[1], _freezing_refused(self.path, state):
                result = torch.func.functional_call(self.module, named, args, kwargs, tie_weights=False)
        for name, old_data in memory.items():
            if _address(state[name]) != _address(old_data):  # parameter.data = new: the module's own gets it too
                _take_data(name, current[name], state[name], old_data)
        for name in self.buffers:
            if named[name] is not state[name]:  # self.buffer = new: the old buffer takes the value
                state[name].copy_(named[name].detach())
                if current[name] is state[name]:
                    owner, _, key = name.rpartition(".")
                    self.module.get_submodule(owner)._buffers[key] = state[name]
        return result


def _address(tensor: Tensor) -> int:
    # A value of an export, or of torch.func, has no memory.
    return tensor.data_ptr() if type(tensor) in (Tensor, nn.Parameter) else 0


def _take_data(name: str, parameter: Tensor, written: Tensor, old_data: Tensor) -> None:
    """Give a module's parameter the data that its forward has given to what stands in its place.

    Raises:
        PolylaneError: what stands there is no other face of the parameter's own memory, which would keep old values.
    """
    if parameter is not written and _address(parameter) != _address(old_data):
        raise PolylaneError(
            f"the forward writes the parameter {name} through .data, and under this plan would write a copy of it: "
            "write it outside of the forward and the loss"
        )
    parameter.data = written.data


def _every_name(module: nn.Module, stand_ins: Mapping[int, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that take the place of others, by every name of these; a module of two names has one of them.

    torch.func.functional_call would write both names of a module that is there twice, and not put back what was there.
    """
    return {
        f"{path}.{name}" if path else name: stand_ins[id(tensor)]
        for path, inner in module.named_modules()
        for name, tensor in (*inner._parameters.items(), *inner._buffers.items())
        if tensor is not None and id(tensor) in stand_ins
    }


@contextmanager
def _freezing_refused(path: str, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Context manager: refuse a forward that freezes or unfreezes tensors which stand for the module's parameters.

    Raises:
        PolylaneError: one that required a gradient before does not now, or the other way round.
    """
    flags, culprit = {name: tensor.requires_grad for name, tensor in tensors.items()}, ""
    try:
        yield
        culprit = next((name for name, tensor in tensors.items() if tensor.requires_grad is not flags[name]), "")
    except RuntimeError as error:
        # The call's tensors are no leaves of autograd where other stages or ZeRO make them: torch refuses by this text.
        if "change requires_grad flags of leaf" not in str(error):
            raise
        culprit = "a parameter"
    if culprit:
        raise PolylaneError(
            f"{path or 'the model'}'s own forward sets requires_grad of {culprit}, and on several workers what a step "
            "trains is decided before its passes: set it between steps, or in the optimizer's step()"
        )


@contextmanager
def in_training_modes(training: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    """Context manager: modules are in training mode or not, and afterwards as they were.

    Args:
        training: the modules, with whether each is training inside.
    """
    changed = [(module, flag) for module, flag in training if module.training != flag]
    for module, flag in changed:
        module.training = flag
    try:
        yield
    finally:
        for module, flag in changed:
            module.training = not flag


@dataclass
class ObservedCall:
    """One call of a leaf in a dry run: its result, whether it was random, and its batch statistics' values."""

    result: list[Any]
    rebuild_result: Rebuild
    random: bool
    values: int | None  # least number of values per channel; None without batch statistics


class NormalizationWatch(TorchFunctionMode):
    """Records whether batch statistics are used, and their least number of values per channel."""

    values: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm:
            arguments = batch_norm_arguments(args, kwargs)
            if arguments["training"]:
                values = arguments["input"].numel() // max(arguments["input"].shape[1], 1)
                self.values = values if self.values is None else min(self.values, values)
        return func(*args, **(kwargs or {}))


ObservedCalls = dict[str, list[ObservedCall]]  # all calls of each module in a dry run, by path


def observe_calls(modules: dict[str, nn.Module], run: Callable[[], Any], with_gradients: bool = False) -> ObservedCalls:
    """Run ``run()`` eagerly and return every call of ``modules``, in order, by path."""
    calls: ObservedCalls = {path: [] for path in modules}

    def noting(path: str, module: nn.Module) -> Callable[..., Any]:
        call: Any = module._call_impl

        def noted(*args: Any, **kwargs: Any) -> Any:
            old_states = generator_states()
            with NormalizationWatch() as normalizing:
                result = call(*args, **kwargs)
            drawn = not states_equal(old_states, generator_states())
            calls[path].append(ObservedCall(*flatten_nested(result), drawn, normalizing.values))
            return result

        return noted

    with torch.set_grad_enabled(with_gradients), _calls_replaced(modules, noting):
        run()
    return calls


@contextmanager
def _calls_replaced(modules: dict[str, nn.Module], build: Callable[[str, nn.Module], Any]) -> Iterator[None]:
    # The whole call, hooks and all, and not only ``forward``: hooks belong to what the leaf runs itself.
    for path, module in modules.items():
        module.__dict__["_call_impl"] = build(path, module)
    try:
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("_call_impl", None)


@contextmanager
def leaves_kept(
    modules: dict[str, nn.Module], observed: Sequence[tuple[int, ObservedCalls]], tracing: CaptureRun
) -> Iterator[None]:
    """Context manager: during export, let every call of ``modules`` become one opaque operator.

    Args:
        modules: the modules to keep whole, by path.
        observed: the numbers of samples of two dry runs, each with the modules' calls in it.
        tracing: state of the export that is running.
    """

    def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            # The k-th call under export corresponds to the k-th call of the dry runs.
            k = tracing.calls[path]
            tracing.calls[path] += 1
            first, second = (calls[path][k] for _, calls in observed)
            output_at = [i for i, value in enumerate(first.result) if isinstance(value, Tensor)]
            shapes = [infer_output(first.result[i], second.result[i], samples, path) for i in output_at]
            call, tensors = _leaf_call(module, path, (args, kwargs), shapes, output_at, first, samples[0])
            call.samples = tracing.samples
            outputs = emit_call(call, tensors)
            call.samples = None  # a symbol of this export, no longer needed
            return first.rebuild_result(with_tensors(first.result, output_at, outputs))

        return called

    samples = [count for count, _ in observed]
    with _calls_replaced(modules, stand_in):
        yield


def _leaf_call(
    module: nn.Module, path: str, inputs: Any, outputs: list[LeafOutput], output_at: list[int], run: Any, samples: int
) -> tuple[LeafCall, list[Tensor]]:
    flat, rebuild = flatten_nested(inputs)
    tensor_at = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    size_at = [i for i, value in enumerate(flat) if isinstance(value, torch.SymInt)]
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    arguments = [None if i in tensor_at else size_function(v) if i in size_at else v for i, v in enumerate(flat)]
    call = LeafCall(
        module=module,
        path=path,
        parameters=list(parameters),
        buffers=list(buffers),
        training=[(inner, inner.training) for inner in module.modules()],
        arguments=arguments,
        tensor_positions=tensor_at,
        size_positions=size_at,
        rebuild_arguments=rebuild,
        outputs=outputs,
        output_positions=output_at,
        random=run.random,
        normalizes=run.values is not None,
        source=source_line_of(type(module).forward),
        # Samples needed for VALUES per channel, from the values seen at ``samples``, rounded up.
        fewest=-(-VALUES * samples // run.values) if run.values else 1,
    )
    return call, [*parameters.values(), *buffers.values(), *(flat[i] for i in tensor_at)]


def opaque_call(model_with_loss: nn.Module, leaves: Sequence[Any], results: Sequence[Tensor], run: Any) -> LeafCall:
    """Return model and loss together as one leaf: the user's Python runs on every worker."""
    outputs = [LeafOutput((), (), value.dtype) for value in results]
    positions = list(range(len(results)))
    call, _ = _leaf_call(model_with_loss, "", (tuple(leaves), {}), outputs, positions, run, sample_count(leaves))
    return call


def source_line_of(function: Any) -> str:
    """Return where a function is defined, "file:line", or ""."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
