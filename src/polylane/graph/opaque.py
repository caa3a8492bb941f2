"""What runs the user's own Python inside a graph: leaves (modules export cannot read) and custom autograd functions.

During capture each call stands in the graph as one custom operator whose output shapes are known beforehand; afterwards
the operator's place is taken by the callable itself, which runs the user's code under ordinary autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from polylane.graph.batch import Rebuild, flatten

Site = Callable[[Sequence[Tensor]], list[Tensor]]

# Operators receive plain numbers only, so a capture under way keeps its sites here until its graph is finished.
_SITES: dict[int, Any] = {}
_NUMBERS = itertools.count()
_LIBRARY = torch.library.Library("polylane", "DEF")
_LIBRARY.define("opaque(int site, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("polylane::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(site: int, tensors: list[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = _SITES[site].fake(tensors)
    return outputs


def _emit(site: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Put a call of ``site`` into the graph under capture."""
    number = next(_NUMBERS)
    _SITES[number] = site
    return list(torch.ops.polylane.opaque(number, tensors))


def site_of(number: int) -> Any:
    """The callable behind operator number ``number``; it is forgotten here, the graph keeps it from now on."""
    return _SITES.pop(number)


@dataclass(frozen=True)
class Output:
    """Shape of one output of a leaf, as observed in dry runs at two batch sizes."""

    shape: tuple[int, ...]
    per_sample: tuple[int, ...]  # how much each dimension grows with one more sample; 0 = fixed
    dtype: torch.dtype


@dataclass(eq=False)
class LeafCall:
    """One call of a module that stays opaque."""

    module: nn.Module
    path: str
    names: list[str]  # of its own parameters, the first tensors of the call
    arguments: list[Any]  # flat, with None where a tensor of the call goes
    tensor_at: list[int]
    rebuild_arguments: Rebuild
    outputs: list[Output]
    result: list[Any]  # flat result with None where an output goes
    output_at: list[int]
    rebuild_result: Rebuild
    samples: Any = None  # the batch size under capture
    original: Callable[..., Any] | None = None

    __name__ = "leaf"
    __module__ = "polylane"

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        like = tensors[0]
        shapes = [
            [grow * self.samples if grow else size for size, grow in zip(out.shape, out.per_sample, strict=True)]
            for out in self.outputs
        ]
        return [like.new_empty(shape, dtype=out.dtype) for shape, out in zip(shapes, self.outputs, strict=True)]

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the user's module: ``tensors`` are its parameters, then the tensors among its arguments."""
        own, given = tensors[: len(self.names)], tensors[len(self.names) :]
        flat = list(self.arguments)
        for position, tensor in zip(self.tensor_at, given, strict=True):
            flat[position] = tensor
        args, kwargs = self.rebuild_arguments(flat)
        current = dict(self.module.named_parameters())
        if all(current[name] is tensor for name, tensor in zip(self.names, own, strict=True)):
            result = self.module(*args, **kwargs)
        else:
            named = dict(zip(self.names, own, strict=True))
            result = torch.func.functional_call(self.module, named, args, kwargs)
        leaves, _ = flatten(result)
        return [leaves[position] for position in self.output_at]


@dataclass(eq=False)
class FunctionCall:
    """One call of a custom autograd.Function, kept whole so that its own backward is the one that runs."""

    function: type[torch.autograd.Function]
    apply: Callable[..., Any]
    arguments: list[Any]
    tensor_at: list[int]
    single: bool = False

    __name__ = "function"
    __module__ = "polylane"

    def _results(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        flat = list(self.arguments)
        for position, tensor in zip(self.tensor_at, tensors, strict=True):
            flat[position] = tensor
        result = self.apply(*flat)
        self.single = isinstance(result, Tensor)
        return [result] if isinstance(result, Tensor) else list(result)

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            return [out.clone() for out in self._results(tensors)]

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        return self._results(tensors)


@contextmanager
def functions_kept() -> Iterator[None]:
    """While capturing, let every custom autograd.Function become one opaque operator."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
        direct = original.__get__(None, cls)
        tensor_at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        # torch's own functions (checkpointing, say) close over state that a graph cannot see: traced through instead.
        if cls.__module__.startswith("torch.") or not tensor_at or any(callable(a) for a in args):
            return direct(*args)
        plain = [None if i in tensor_at else arg for i, arg in enumerate(args)]
        site = FunctionCall(cls, direct, plain, tensor_at)
        outputs = _emit(site, [args[i] for i in tensor_at])
        return outputs[0] if site.single else tuple(outputs)

    torch.autograd.Function.apply = classmethod(apply)
    try:
        yield
    finally:
        torch.autograd.Function.apply = original


@dataclass
class Observed:
    """Flat arguments and result of one call of a leaf in a dry run."""

    args: list[Any]
    rebuild: Rebuild
    result: list[Any]
    rebuild_result: Rebuild


def observe(modules: dict[str, nn.Module], run: Callable[[], Any]) -> dict[str, list[Observed]]:
    """Run ``run()`` eagerly and note every call of ``modules``, in order, by path."""
    calls: dict[str, list[Observed]] = {path: [] for path in modules}
    handles = []
    for path, module in modules.items():

        def note(_: nn.Module, args: Any, kwargs: Any, result: Any, path: str = path) -> None:
            calls[path].append(Observed(*flatten((args, kwargs)), *flatten(result)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            run()
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _output(one: Tensor, two: Tensor, samples: tuple[int, int], path: str) -> Output:
    growth = []
    for a, b in zip(one.shape, two.shape, strict=True):
        if a == b:
            growth.append(0)
        elif a * samples[1] == b * samples[0] and a % samples[0] == 0:
            growth.append(a // samples[0])
        else:
            raise ValueError(f"the size of an output of {path or 'the model'} depends on the data: {a} and then {b}")
    return Output(tuple(one.shape), tuple(growth), one.dtype)


@contextmanager
def leaves_kept(
    modules: dict[str, nn.Module],
    observed: tuple[dict[str, list[Observed]], dict[str, list[Observed]]],
    samples: tuple[int, int],
    samples_under_capture: Callable[[], Any],
) -> Iterator[None]:
    """While capturing, let every call of ``modules`` become one opaque operator.

    Args:
        modules: the leaves, by path.
        observed: their calls in dry runs at the two batch sizes ``samples``.
        samples_under_capture: the symbolic batch size of the capture under way.
    """
    originals = {path: module.forward for path, module in modules.items()}
    counters = {path: itertools.count() for path in modules}

    def stand_in(path: str, module: nn.Module) -> Callable[..., Any]:
        def forward(*args: Any, **kwargs: Any) -> Any:
            k = next(counters[path])
            first, second = observed[0][path][k], observed[1][path][k]
            flat, rebuild = flatten((args, kwargs))
            tensor_at = [i for i, value in enumerate(flat) if isinstance(value, Tensor)]
            output_at = [i for i, value in enumerate(first.result) if isinstance(value, Tensor)]
            names = [name for name, _ in module.named_parameters()]
            call = LeafCall(
                module=module,
                path=path,
                names=names,
                arguments=[None if isinstance(value, Tensor) else value for value in flat],
                tensor_at=tensor_at,
                rebuild_arguments=rebuild,
                outputs=[_output(first.result[i], second.result[i], samples, path) for i in output_at],
                result=[None if isinstance(value, Tensor) else value for value in first.result],
                output_at=output_at,
                rebuild_result=first.rebuild_result,
                samples=samples_under_capture(),
            )
            own = [parameter for _, parameter in module.named_parameters()]
            outputs = _emit(call, own + [flat[i] for i in tensor_at])
            call.samples = None  # a symbol of the capture: the graph has it now
            result = list(call.result)
            for position, output in zip(output_at, outputs, strict=True):
                result[position] = output
            return call.rebuild_result(result)

        return forward

    for path, module in modules.items():
        module.forward = stand_in(path, module)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for path, module in modules.items():
            # Removing the instance attribute uncovers the class's own method again.
            if getattr(originals[path], "__self__", None) is module and "forward" in module.__dict__:
                del module.__dict__["forward"]
            else:
                module.forward = originals[path]  # type: ignore[method-assign]
