"""Functions of the user's that draw from Python's or numpy's generator inside of a forward: one node each.

A masking that is drawn by numpy, of sizes alone (SpecAugment, say), need not make a leaf of the module that calls it:

    mask = draw_mask((samples, length), 0.05)      one node: the user's function, called with numbers
    mask = torch.tensor(mask)                      its result, a value of the graph

It is called for the whole batch on every worker, from a seed that is the step's and the node's own, and each worker
takes its own samples' part: so the numbers are the same however the batch is divided. One that is given tensors is
called on a worker's own part of them, and nothing is proven of its samples. What is done with such an array before it
is a tensor cannot be followed; then the module that calls the function is a leaf.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polylane.graph.batch import Rebuild, flatten_nested
from polylane.graph.capture.python.leaf_outputs import LeafOutput, infer_output
from polylane.graph.capture.python.python_operators import emit_call, with_tensors
from polylane.graph.capture.questions.capture_run import CaptureRun
from polylane.graph.operators.counter_rng import python_seed_of, salt_of
from polylane.graph.python_state.compiler import compiler_off
from polylane.graph.python_state.random_generators import python_seeded
from polylane.graph.symbolic_sizes import size_function


@dataclass(frozen=True)
class ObservedResult:
    """What a function returned in a dry run.

    Attributes:
        values: flat results, tensors in the place of numpy's arrays and of numbers.
        are_arrays: for each tensor among them, whether it stands for an array of numpy's.
        rebuild: turns flat results into what the function returns.
    """

    values: list[Any]
    are_arrays: list[bool]
    rebuild: Rebuild

    @classmethod
    def of(cls, result: Any) -> ObservedResult:
        """Take down what a function has returned."""
        flat, rebuild = flatten_nested(result)
        values = [_as_tensor(value) for value in flat]
        pairs = zip(flat, values, strict=True)
        return cls(values, [_is_array(item) for item, value in pairs if isinstance(value, Tensor)], rebuild)


ObservedResults = dict[str, list[ObservedResult]]  # of each function in a dry run, in order


@dataclass(eq=False)
class DrawnFunction:
    """One call of a function that draws.

    Attributes:
        function: the user's own, which is called.
        arguments: flat arguments, with None in place of a tensor, and a function of the samples in place of a size.
        tensor_positions: indices of tensors among the flat arguments.
        size_positions: indices of symbolic sizes among the flat arguments.
        rebuild_arguments: turns flat arguments into (args, kwargs).
        outputs: shapes of what the function returns.
        output_positions: indices of these among the function's flat results.
    """

    function: FunctionType
    arguments: list[Any]
    tensor_positions: list[int]
    size_positions: list[int]
    rebuild_arguments: Rebuild
    outputs: list[LeafOutput]
    output_positions: list[int]

    __name__ = "draw"
    __module__ = "polylane"
    normalizes = False  # as of a leaf, for which it varies
    samples: Any = None  # the symbolic batch size, while capturing

    @property
    def source(self) -> str:
        """Where the function is defined, "file:line"."""
        code = self.function.__code__
        return f"{code.co_filename}:{code.co_firstlineno}"

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [torch.empty(output.shape_for(self.samples), dtype=output.dtype) for output in self.outputs]

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the function for the whole batch, or on the local part of tensors; return what is the local samples'."""
        count = part.batch if part.batch and not self.tensor_positions else part.samples
        flat = with_tensors(self.arguments, self.tensor_positions, tensors)
        for position in self.size_positions:
            flat[position] = flat[position](count)
        args, kwargs = self.rebuild_arguments(flat)
        with compiler_off(), torch.no_grad():
            results = [_as_tensor(value) for value in flatten_nested(self.function(*args, **kwargs))[0]]
        values = [results[position] for position in self.output_positions]
        if count == part.samples:
            return values
        return [self._take(*pair, part) for pair in zip(values, self.outputs, strict=True)]

    @staticmethod
    def _take(value: Tensor, output: LeafOutput, part: Any) -> Tensor:
        for dim, rows in enumerate(output.per_sample):
            value = value.narrow(dim, rows * part.first, rows * part.samples) if rows else value
        return value


class KeyedDraw:
    """A drawing function with a seed that is the step's and the node's own, the same on every worker."""

    __name__ = "draw"
    __module__ = "polylane"

    def __init__(self, function: DrawnFunction, name: str) -> None:
        self.own, self.salt = function, salt_of(name)

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        number = python_seed_of(dataclasses.replace(part, microbatch=0), self.salt)
        with python_seeded(number), torch.random.fork_rng(devices=[]):
            torch.manual_seed(number)
            return self.own(part, tensors)


class DrawnArray:
    """An array under export: it can become a tensor, and nothing else."""

    def __init__(self, tensor: Tensor) -> None:
        self.__dict__["tensor"] = tensor

    def __getattr__(self, name: str) -> Any:
        raise TypeError(f"an array that is drawn inside cannot be followed (.{name})")


_CONVERSIONS = (torch.tensor, torch.as_tensor, torch.asarray)


def tensor_of_drawn(function: Any, args: Any, kwargs: Any) -> Tensor | None:
    """Return the tensor that a drawn array is converted to; None for any other call."""
    array = args[0] if args and function in _CONVERSIONS else None
    if not isinstance(array, DrawnArray):
        return None
    tensor: Tensor = array.__dict__["tensor"]
    return tensor.to(kwargs.get("device") or tensor.device, kwargs.get("dtype") or tensor.dtype)


def _as_tensor(value: Any) -> Any:
    """Return a tensor in the place of an array or a number, both of which may be drawn; any other value as it is."""
    if _is_array(value):
        return torch.tensor(value)
    for kind, dtype in ((bool, torch.bool), (int, torch.int64), (float, torch.float64)):
        if isinstance(value, kind):
            return torch.tensor(value, dtype=dtype)
    return value


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, (numpy.ndarray, numpy.generic))


def _key_of(function: FunctionType) -> str:
    return f"{function.__module__}.{function.__qualname__}()"


def observe_functions(functions: Sequence[FunctionType], run: Callable[[], Any]) -> ObservedResults:
    """Run ``run()`` and return the results of every call of some functions, in order."""
    results: ObservedResults = {_key_of(function): [] for function in functions}

    def noting(function: FunctionType) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            results[_key_of(function)].append(ObservedResult.of(result))
            return result

        return noted

    with _functions_replaced(functions, noting):
        run()
    return results


@contextmanager
def functions_drawn(
    functions: Sequence[FunctionType], observed: Sequence[tuple[int, ObservedResults]], tracing: CaptureRun
) -> Iterator[None]:
    """Context manager: during export, let every call of some functions become one node.

    Args:
        functions: the ones that draw, each of which stands in a namespace by its name.
        observed: the numbers of samples of two dry runs, each with the functions' results in it.
        tracing: state of the export that is running.
    """

    def stand_in(function: FunctionType) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            key = _key_of(function)
            k = tracing.calls[key]
            tracing.calls[key] += 1
            return _emit(function, (args, kwargs), [(count, results[key][k]) for count, results in observed], tracing)

        return called

    original = torch.from_numpy

    def from_numpy(array: Any) -> Tensor:
        return array.__dict__["tensor"] if isinstance(array, DrawnArray) else original(array)

    with _functions_replaced(functions, stand_in), patch.object(torch, "from_numpy", from_numpy):
        yield


def _emit(function: FunctionType, inputs: Any, runs: Sequence[tuple[int, ObservedResult]], tracing: CaptureRun) -> Any:
    """Write a call into the graph, and return what the function would."""
    (few, first), (many, second) = runs
    flat, rebuild = flatten_nested(inputs)
    tensor_at = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
    size_at = [i for i, value in enumerate(flat) if isinstance(value, torch.SymInt)]
    arguments = [None if i in tensor_at else size_function(v) if i in size_at else v for i, v in enumerate(flat)]
    output_at = [i for i, value in enumerate(first.values) if isinstance(value, Tensor)]
    pairs = [(first.values[i], second.values[i]) for i in output_at]
    outputs = [infer_output(*pair, (few, many), function.__qualname__) for pair in pairs]
    site = DrawnFunction(function, arguments, tensor_at, size_at, rebuild, outputs, output_at)
    site.samples = tracing.samples
    tensors = emit_call(site, [flat[i] for i in tensor_at])
    site.samples = None  # a symbol of this export, no longer needed
    values: list[Any] = [
        DrawnArray(tensor) if array else tensor for tensor, array in zip(tensors, first.are_arrays, strict=True)
    ]
    return first.rebuild(with_tensors(first.values, output_at, values))


@contextmanager
def _functions_replaced(functions: Sequence[FunctionType], build: Callable[[FunctionType], Any]) -> Iterator[None]:
    """Context manager: put others in the places of functions, in every namespace that has them by a name."""
    undo: list[tuple[dict[str, Any], str, FunctionType]] = []
    loaded = [vars(module) for module in list(sys.modules.values()) if isinstance(module, ModuleType)]
    try:
        for function in functions:
            replacement = build(function)
            named = [namespace for namespace in loaded if namespace is not function.__globals__]
            for namespace in (function.__globals__, *named):
                names = [name for name, value in list(namespace.items()) if value is function]
                undo += [(namespace, name, function) for name in names]
                namespace.update(dict.fromkeys(names, replacement))
        yield
    finally:
        for namespace, name, function in undo:
            namespace[name] = function
