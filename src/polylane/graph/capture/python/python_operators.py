"""The user's own Python in a graph: one custom operator per call during export, the callable itself afterwards.

During export a call is a custom operator with known output shapes; afterwards the node's target becomes the callable,
which runs the user's code under ordinary autograd.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from polylane.graph.python_state.compiler import compiler_off

# Custom operators take plain numbers only: a running export keeps its callables here until its graph is finished.
_SITES: dict[int, Any] = {}
_LIBRARY = torch.library.Library("polylane", "DEF")
_LIBRARY.define("opaque(int site, Tensor[] tensors) -> Tensor[]")
_LIBRARY.define("check(int site, Tensor[] tensors) -> ()")
torch.fx.node.has_side_effect(torch.ops.polylane.check.default)
SITES = frozenset(("polylane.opaque.default", "polylane.check.default"))


@torch.library.register_fake("polylane::opaque", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake(site: int, tensors: list[Tensor]) -> list[Tensor]:
    outputs: list[Tensor] = _SITES[site].fake(tensors)
    return outputs


@torch.library.register_fake("polylane::check", lib=_LIBRARY)  # type: ignore[untyped-decorator]
def _fake_check(site: int, tensors: list[Tensor]) -> None:
    return None


def emit_check(site: Any, tensors: list[Tensor]) -> None:
    """Write a call of ``site`` into the graph that is being exported which gives nothing, and may raise."""
    number = len(_SITES)
    _SITES[number] = site
    torch.ops.polylane.check(number, [tensor.detach() if tensor.requires_grad else tensor for tensor in tensors])


def emit_call(site: Any, tensors: list[Tensor]) -> list[Tensor]:
    """Write a call of ``site`` into the graph that is being exported."""
    number = len(_SITES)
    _SITES[number] = site
    return list(torch.ops.polylane.opaque(number, tensors))


def call_of_site(number: int) -> Any:
    """Return the callable behind operator number ``number``."""
    return _SITES[number]


def with_tensors(values: Sequence[Any], positions: Sequence[int], tensors: Sequence[Tensor]) -> list[Any]:
    """Return flat arguments or results, ``values``, with tensors at the positions that are theirs."""
    filled = list(values)
    for position, tensor in zip(positions, tensors, strict=True):
        filled[position] = tensor
    return filled


def forget_sites() -> None:
    """Forget the callables of a finished export: its graph holds them from now on."""
    _SITES.clear()


@dataclass(eq=False)
class FunctionCall:
    """One call of a custom autograd.Function, kept whole so that its own backward runs.

    Attributes:
        apply: the function's own bound ``apply``.
        arguments: all arguments, with None in place of a tensor.
        tensor_positions: indices of tensors among the arguments.
        result: the returned sequence with None in place of a tensor; None itself for a single tensor.
        output_positions: indices of tensors in the returned sequence.
        random: whether the function draws random numbers.
    """

    apply: Callable[..., Any]
    arguments: list[Any]
    tensor_positions: list[int]
    result: list[Any] | None = None
    output_positions: list[int] = field(default_factory=list)
    random: bool = False

    __name__ = "function"
    __module__ = "polylane"
    # As of a leaf, for which they vary.
    normalizes, fewest, effects = False, 1, ()

    def run(self, tensors: Sequence[Tensor]) -> Any:
        """Return what the function itself returns."""
        with compiler_off():
            return self.apply(*with_tensors(self.arguments, self.tensor_positions, tensors))

    def fake(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.no_grad():
            result = self.run(tensors)
        if isinstance(result, Tensor):
            return [result.clone()]  # a custom operator must not return its input
        self.output_positions = [i for i, value in enumerate(result) if isinstance(value, Tensor)]
        self.result = [None if i in self.output_positions else value for i, value in enumerate(result)]
        return [result[i].clone() for i in self.output_positions]

    def rebuild_result(self, outputs: Sequence[Tensor]) -> Any:
        """Return the operator's outputs in the structure that the function itself returns."""
        if self.result is None:
            return outputs[0]
        return tuple(with_tensors(self.result, self.output_positions, outputs))

    def __call__(self, part: Any, tensors: Sequence[Tensor]) -> list[Tensor]:
        result = self.run(tensors)
        return [result] if isinstance(result, Tensor) else [result[i] for i in self.output_positions]


@contextmanager
def functions_kept() -> Iterator[None]:
    """Context manager: during export, let every custom autograd.Function become one opaque operator."""
    original = torch.autograd.Function.__dict__["apply"]

    def apply(cls: type[torch.autograd.Function], *args: Any) -> Any:
        direct = original.__get__(None, cls)
        tensor_at = [i for i, arg in enumerate(args) if isinstance(arg, Tensor)]
        # torch's own functions close over state that a graph cannot hold: export traces through them instead.
        if cls.__module__.startswith("torch.") or not tensor_at or any(callable(a) for a in args):
            return direct(*args)
        site = FunctionCall(direct, [None if i in tensor_at else arg for i, arg in enumerate(args)], tensor_at)
        return site.rebuild_result(emit_call(site, [args[i] for i in tensor_at]))

    with patch.object(torch.autograd.Function, "apply", classmethod(apply)):
        yield
