"""Leaves: modules that export cannot read stay whole, one node each, and run the user's own Python."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polylane.graph.batch import Rebuild, flatten, sample_count
from polylane.graph.capture.python_operators import emit_call
from polylane.graph.operators.sync_batch_norm import VALUES
from polylane.graph.python_state.random_generators import generator_states, states_equal
from polylane.graph.python_state.side_effects import SideEffect
from polylane.graph.symbolic_sizes import size_function


@dataclass(frozen=True)
class LeafOutput:
    """Shape of one output of a leaf, as observed in dry runs at two batch sizes."""

    shape: tuple[int, ...]
    per_sample: tuple[int, ...]  # how much each dimension grows with one more sample; 0 = fixed
    dtype: torch.dtype


@dataclass
class CaptureRun:
    """The run under way: its (symbolic) batch size, how often each leaf was called so far, and lines that recompute."""

    samples: Any = None
    calls: Counter[str] = field(default_factory=Counter)
    recomputed_lines: set[str] = field(default_factory=set)


@dataclass(eq=False)
class LeafCall:
    """One call of a module that stays whole.

    Attributes:
        module: the user's module; path: where it is in the model.
        parameters: names of its own parameters, and buffers those of its buffers: the first tensors of the call.
        training: the mode of all modules inside at capture.
        arguments: flat, with None where a tensor goes; sizes that follow the batch as functions of the samples.
        tensor_positions: where tensors go.
        rebuild_arguments: from flat to (args, kwargs).
        outputs: shapes of the tensors it returns; output_at: where in its flat result they are.
        random: whether it draws random numbers; normalizes: whether it normalizes by statistics of the batch.
        source: the user's own line.
        fewest: samples that it needs in training, for statistics of the batch.
        effects: what it does besides computing.
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

    __name__ = "leaf"
    __module__ = "polylane"
    samples: Any = None  # the symbolic batch size, while capturing

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        like = tensors[0] if tensors else torch.empty(0)
        shapes = [
            [grow * self.samples if grow else size for size, grow in zip(out.shape, out.per_sample, strict=True)]
            for out in self.outputs
        ]
        return [like.new_empty(shape, dtype=out.dtype) for shape, out in zip(shapes, self.outputs, strict=True)]

    def copy_call(self) -> LeafCall:
        """The same call of a copy of the module: one module cannot run on two sets of tensors at once."""
        module = copy.deepcopy(self.module)
        flags = [flag for _, flag in self.training]
        return dataclasses.replace(self, module=module, training=list(zip(module.modules(), flags, strict=True)))

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the user's module: ``tensors`` are its parameters and buffers, then the tensors among its arguments."""
        names = self.parameters + self.buffers
        own, given = dict(zip(names, tensors, strict=False)), tensors[len(names) :]
        flat = list(self.arguments)
        for position, tensor in zip(self.tensor_positions, given, strict=True):
            flat[position] = tensor
        for position in self.size_positions:
            flat[position] = flat[position](part.samples)
        args, kwargs = self.rebuild_arguments(flat)
        with _training_modes(self.training):
            result = self._run(own, args, kwargs)
        leaves, _ = flatten(result)
        return [leaves[position] for position in self.output_positions]

    def _run(self, own: dict[str, Tensor], args: Any, kwargs: Any) -> Any:
        current = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        named = dict(own)
        if all(current[name] is tensor for name, tensor in own.items()):
            result = self.module(*args, **kwargs)
            named |= {name: self.module.get_buffer(name) for name in self.buffers}
        else:
            result = torch.func.functional_call(self.module, named, args, kwargs)
        for name in self.buffers:
            if named[name] is not own[name]:  # self.buffer = new: the buffer keeps its place and takes the value
                own[name].copy_(named[name].detach())
                if current[name] is own[name]:
                    owner, _, key = name.rpartition(".")
                    self.module.get_submodule(owner)._buffers[key] = own[name]
        return result


@contextmanager
def _training_modes(training: Sequence[tuple[nn.Module, bool]]) -> Iterator[None]:
    changed = [(module, module.training) for module, flag in training if module.training != flag]
    for module, flag in training:
        module.training = flag
    try:
        yield
    finally:
        for module, flag in changed:
            module.training = flag


@dataclass
class ObservedCall:
    """Result of a leaf in a dry run, whether it drew random numbers, and how many values its batch statistics had."""

    result: list[Any]
    rebuild_result: Rebuild
    random: bool
    values: int | None  # the fewest values per channel; None without statistics of the batch


class NormalizationWatch(TorchFunctionMode):
    """Notices whether batch statistics are used, and of how many values per channel at least."""

    values: int | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.batch_norm:
            given = inspect.signature(functional.batch_norm).bind(*args, **(kwargs or {})).arguments
            if given.get("training", False):
                values = given["input"].numel() // max(given["input"].shape[1], 1)
                self.values = values if self.values is None else min(self.values, values)
        return func(*args, **(kwargs or {}))


def observe_calls(modules: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, list[ObservedCall]]:
    """Run ``run()`` eagerly and note every call of ``modules``, in order, by path."""
    calls: dict[str, list[ObservedCall]] = {path: [] for path in modules}

    def noting(path: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            before = generator_states()
            with NormalizationWatch() as normalizing:
                result = call(*args, **kwargs)
            drawn = not states_equal(before, generator_states())
            calls[path].append(ObservedCall(*flatten(result), drawn, normalizing.values))
            return result

        return noted

    with torch.no_grad(), _calls_replaced({path: noting(path, m._call_impl) for path, m in modules.items()}, modules):
        run()
    return calls


@contextmanager
def _calls_replaced(calls: dict[str, Callable[..., Any]], modules: dict[str, nn.Module]) -> Iterator[None]:
    # The whole call, hooks and all, and not only ``forward``: hooks belong to what the leaf runs itself.
    for path, module in modules.items():
        module.__dict__["_call_impl"] = calls[path]
    try:
        yield
    finally:
        for module in modules.values():
            module.__dict__.pop("_call_impl", None)


def _infer_output(one: Tensor, two: Tensor, samples: tuple[int, int], path: str) -> LeafOutput:
    growth = []
    for a, b in zip(one.shape, two.shape, strict=True):
        if a == b:
            growth.append(0)
        elif a * samples[1] == b * samples[0] and a % samples[0] == 0:
            growth.append(a // samples[0])
        else:
            raise ValueError(f"the size of an output of {path or 'the model'} depends on the data: {a} and then {b}")
    return LeafOutput(tuple(one.shape), tuple(growth), one.dtype)


@contextmanager
def leaves_kept(
    modules: dict[str, nn.Module],
    observed: tuple[dict[str, list[ObservedCall]], dict[str, list[ObservedCall]]],
    samples: tuple[int, int],
    tracing: CaptureRun,
) -> Iterator[None]:
    """While capturing, let every call of ``modules`` become one opaque operator.

    Args:
        modules: the leaves, by path.
        observed: their calls in dry runs at the two batch sizes ``samples``.
        samples: those sizes.
        tracing: the capture under way.
    """

    def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            k = tracing.calls[path]
            tracing.calls[path] += 1
            first, second = observed[0][path][k], observed[1][path][k]
            output_at = [i for i, value in enumerate(first.result) if isinstance(value, Tensor)]
            shapes = [_infer_output(first.result[i], second.result[i], samples, path) for i in output_at]
            call, tensors = _leaf_call(module, path, args, kwargs, shapes, output_at, first, samples[0])
            call.samples = tracing.samples
            outputs = emit_call(call, tensors)
            call.samples = None  # a symbol of the capture: the graph has it now
            result = list(first.result)
            for position, output in zip(output_at, outputs, strict=True):
                result[position] = output
            return first.rebuild_result(result)

        return called

    with _calls_replaced({path: stand_in(path, module) for path, module in modules.items()}, modules):
        yield


def _leaf_call(
    module: nn.Module,
    path: str,
    args: Any,
    kwargs: Any,
    outputs: list[LeafOutput],
    output_at: list[int],
    seen: Any,
    samples: int,
) -> tuple[LeafCall, list[Tensor]]:
    flat, rebuild = flatten((args, kwargs))
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
        random=seen.random,
        normalizes=seen.values is not None,
        source=source_line_of(type(module).forward),
        fewest=-(-VALUES * samples // seen.values) if seen.values else 1,
    )
    return call, [*parameters.values(), *buffers.values(), *(flat[i] for i in tensor_at)]


def opaque_call(whole: nn.Module, leaves: Sequence[Any], results: Sequence[Tensor], seen: Any) -> LeafCall:
    """Model and loss together as one leaf: the user's Python runs on every worker."""
    outputs = [LeafOutput((), (), value.dtype) for value in results]
    call, _ = _leaf_call(whole, "", tuple(leaves), {}, outputs, list(range(len(results))), seen, sample_count(leaves))
    return call


def source_line_of(function: Any) -> str:
    """Where a function is written, "file:line", or ""."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""
