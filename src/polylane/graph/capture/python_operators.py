"""What runs the user's own Python inside a graph: one custom operator during capture, the callable itself afterwards.

During capture each call stands in the graph as one custom operator whose output shapes are known beforehand; afterwards
the operator's place is taken by the callable itself, which runs the user's code under ordinary autograd.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

# Operators receive plain numbers only, so a capture under way keeps its sites here until its graph is finished.
_SITES: dict[int, Any] = {}
_NUMBERS = itertools.count()
_LIBRARY = torch.library.Library("polylane", "DEF")
_LIBRARY.define("opaque(int site, Tensor[] tensors) -> Tensor[]")


@torch.library.register_fake("polylane::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(site: int, tensors: list[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = _SITES[site].fake(tensors)
    return outputs


def emit_call(site: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Put a call of ``site`` into the graph under capture."""
    number = next(_NUMBERS)
    _SITES[number] = site
    return list(torch.ops.polylane.opaque(number, tensors))


def call_of_site(number: int) -> Any:
    """The callable behind operator number ``number``."""
    return _SITES[number]


def forget_sites() -> None:
    """A capture is over: its graph holds the callables from now on."""
    _SITES.clear()


@dataclass(eq=False)
class FunctionCall:
    """One call of a custom autograd.Function, kept whole so that its own backward is the one that runs.

    Attributes:
        apply: the function's own ``apply``.
        arguments: all of them, with None where a tensor goes.
        tensor_positions: where tensors go.
        result: what it returned, with None where a tensor was; None by itself for a single tensor.
        output_positions: where tensors were.
        random: whether it draws random numbers.
    """

    apply: Callable[..., Any]
    arguments: list[Any]
    tensor_positions: list[int]
    result: list[Any] | None = None
    output_positions: list[int] = field(default_factory=list)
    random: bool = False

    __name__ = "function"
    __module__ = "polylane"

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """What the function itself returns."""
        flat = list(self.arguments)
        for position, tensor in zip(self.tensor_positions, tensors, strict=True):
            flat[position] = tensor
        return self.apply(*flat)

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            result = self.run(tensors)
        if isinstance(result, Tensor):
            return [result.clone()]
        self.output_positions = [i for i, value in enumerate(result) if isinstance(value, Tensor)]
        self.result = [None if i in self.output_positions else value for i, value in enumerate(result)]
        return [result[i].clone() for i in self.output_positions]

    def rebuild_result(self, outputs: Sequence[Tensor]) -> Any:
        """Outputs of the operator in the form in which the function itself returns them."""
        if self.result is None:
            return outputs[0]
        result = list(self.result)
        for position, output in zip(self.output_positions, outputs, strict=True):
            result[position] = output
        return tuple(result)

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        result = self.run(tensors)
        return [result] if isinstance(result, Tensor) else [result[i] for i in self.output_positions]


@contextmanager
def functions_kept() -> Iterator[None]:
    """While capturing, let every custom autograd.Function become one opaque operator."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
        direct = original.__get__(None, cls)
        tensor_at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        # torch's own functions close over state that a graph cannot see: traced through instead.
        if cls.__module__.startswith("torch.") or not tensor_at or any(callable(a) for a in args):
            return direct(*args)
        site = FunctionCall(direct, [None if i in tensor_at else arg for i, arg in enumerate(args)], tensor_at)
        return site.rebuild_result(emit_call(site, [args[i] for i in tensor_at]))

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = original  # type: ignore[method-assign]
