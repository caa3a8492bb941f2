"""Symbolic sizes that follow the number of samples: as functions, as nodes, and the batch sizes that a graph allows."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext, free_unbacked_symbols

from polylane.graph.batch import is_sampled, sample_count
from polylane.graph.flops import size_hint, tensors_of
from polylane.graph.open_sizes import SizeFunction
from polylane.graph.traced_sizes import TracedSize


def size_function(expression: Any, ragged: bool = False) -> Callable[[int], Any]:
    """Return a size of the graph (an expression of the batch's symbols) as a function of the number of samples.

    Args:
        expression: torch's symbolic size, or a number.
        ragged: let a size that depends on data (rows that a mask selects) be as many rows as samples.

    Raises:
        ValueError: the size depends on data, and ``ragged`` is False.
    """
    if isinstance(expression, (int, float)):
        return lambda samples: expression
    node = getattr(expression, "node", None)
    expr = sympy.sympify(node.expr if node is not None else expression)
    if expr.is_number:
        fixed = int(expr)
        return lambda samples: fixed
    if free_unbacked_symbols(expr) and not ragged:
        raise ValueError(f"{expr} is known at run time only")
    # Free symbols are lengths of the batch dimension, or with ``ragged`` rows of data: all become the samples.
    single = expr.subs(dict.fromkeys(expr.free_symbols, _SAMPLES))
    if single == _SAMPLES:
        return lambda n: n
    function: Callable[[int], Any] = sympy.lambdify([_SAMPLES], single, modules=[_FUNCTIONS, "math"])
    return function


def open_size_function(expression: Any, opened: Sequence[Any]) -> SizeFunction:
    """Return a size of the graph as a function of the number of samples and of the open sizes.

    Args:
        expression: torch's symbolic size or condition, a sympy expression, or a number.
        opened: symbols of the open sizes, in the order of the function's arguments after the number of samples.

    Raises:
        ValueError: the size depends on data.
    """
    if isinstance(expression, (int, float)):
        return lambda samples, *sizes: expression
    node = getattr(expression, "node", None)
    expr = sympy.sympify(node.expr if node is not None else expression)
    if free_unbacked_symbols(expr):
        raise ValueError(f"{expr} is known at run time only")
    single = expr.subs(dict.fromkeys(expr.free_symbols - set(opened), _SAMPLES))
    function: SizeFunction = sympy.lambdify([_SAMPLES, *opened], single, modules=[_FUNCTIONS, "math"])
    return function


def number_function(expression: Any, symbols: Sequence[Any]) -> Callable[..., Any]:
    """Return a sympy expression as a function of the values of its symbols, in their order."""
    function: Callable[..., Any] = sympy.lambdify(list(symbols), expression, modules=[_FUNCTIONS, "math"])
    return function


def bind_symbols(symbols: Sequence[Any], sizes: Sequence[int]) -> dict[Any, Any]:
    """Return numbers for the symbols of open sizes, as sympy takes them."""
    return {symbol: sympy.Integer(size) for symbol, size in zip(symbols, sizes, strict=True)}


_SAMPLES = sympy.Symbol("samples", integer=True)


# torch's symbolic functions, in the form that lambdify needs.
_FUNCTIONS: dict[str, Any] = {
    "FloorDiv": operator.floordiv,
    "CleanDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "IntTrueDiv": operator.truediv,
    "FloatTrueDiv": operator.truediv,
    "ToFloat": float,
    "TruncToInt": int,
    "FloatPow": operator.pow,
    "PowByNatural": operator.pow,
    "Max": max,
    "Min": min,
}


class SymbolicSize:
    """A size as a node of the graph: computed from the number of local samples, and from the batch's open sizes.

    Args:
        function: the size as a function of the number of samples and of the open sizes.
        like: a number of the size's type: int, float or bool, or torch's symbolic one.
        nominal: the open sizes at which the graph is looked at ahead; see :mod:`polylane.graph.open_sizes`.
    """

    __name__ = "size"
    __module__ = "polylane"

    def __init__(self, function: SizeFunction, like: Any, nominal: tuple[int, ...] = ()) -> None:
        # A symbolic comparison or ratio keeps its type: sympy would return its own numbers.
        self.function, self.nominal = function, nominal
        truth, real = (bool, torch.SymBool), (float, torch.SymFloat)
        self.convert = bool if isinstance(like, truth) else float if isinstance(like, real) else int

    def of(self, samples: int) -> Any:
        """Return the size for a number of samples, at the nominal open sizes."""
        return self.function(samples, *self.nominal)

    def at(self, samples: int, open_sizes: tuple[int, ...]) -> Any:
        """Return the size for a number of samples, at given open sizes."""
        size = self.function(samples, *open_sizes)
        # A traced size stays one; of a condition the result is needed, which is recorded.
        if isinstance(size, TracedSize) and self.convert is not bool:
            return size if self.convert is int else size.trace.convert(self.convert, size)
        return self.convert(size)

    def bound_to(self, nominal: tuple[int, ...]) -> SymbolicSize:
        """Return this size with other nominal open sizes."""
        bound = copy.copy(self)
        bound.nominal = nominal if self.nominal else ()
        return bound

    def __call__(self, part: Any) -> Any:
        return self.convert(self.function(part.samples, *part.open_sizes))


_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float, bool)


def compute_sizes_locally(
    graph: fx.Graph, part: fx.Node, opened: Sequence[Any] = (), nominal: tuple[int, ...] = ()
) -> None:
    """Replace sizes that follow from the batch by nodes computed from the sample slice, so that no stage sends them.

    Args:
        graph: captured code, changed in place.
        part: its placeholder of the sample slice.
        opened: symbols of the open sizes.
        nominal: their values in the batch that the code was captured from.
    """
    for node in list(graph.nodes):
        val = node.meta.get("val")
        if node.op != "call_function" or not isinstance(val, _NUMBERS):
            continue
        try:
            of = open_size_function(val, opened) if opened else size_function(val)
        except ValueError:  # depends on data: stays an operator
            continue
        node.target, node.args, node.kwargs = SymbolicSize(of, val, nominal), (part,), {}


def symbolic_inputs(leaves: Sequence[Any]) -> list[Any]:
    """Return fake tensors like a batch's leaves, whose first size is symbolic where they are divided by samples."""
    samples, mode = sample_count(leaves), FakeTensorMode(shape_env=ShapeEnv())

    def opened(leaf: Tensor) -> Tensor:
        sizes = [DimDynamic.STATIC] * leaf.dim()
        if is_sampled(leaf, samples):
            sizes[0] = DimDynamic.DYNAMIC
        form: Any = StatelessSymbolicContext(dynamic_sizes=sizes)
        return mode.from_tensor(leaf.as_subclass(Tensor).detach().to("meta"), symbolic_context=form)

    return [opened(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def batch_dimension(val: Any) -> int | None:
    """Return the first dimension that grows with the samples, or None."""
    if not isinstance(val, Tensor):
        return None
    return next((i for i, size in enumerate(val.shape) if is_dynamic(size)), None)


def is_dynamic(size: Any) -> bool:
    """Return whether a size is not fixed: it follows the samples, or the data."""
    return isinstance(size, torch.SymInt) and not size.node.expr.is_number


def data_dependent_symbols(val: Any) -> Iterator[Any]:
    """Yield the data-dependent (unbacked) size symbols of a tensor or of several."""
    for size in (size for tensor in tensors_of(val) for size in tensor.shape):
        if isinstance(size, torch.SymInt):
            yield from free_unbacked_symbols(size.node.expr)


def is_data_dependent(size: Any) -> bool:
    """Return whether a size is only known once the data are."""
    return isinstance(size, torch.SymInt) and bool(free_unbacked_symbols(size.node.expr))


def is_ragged(val: Any) -> bool:
    """Return whether a size of a tensor depends on data."""
    return next(data_dependent_symbols(val), None) is not None


# Largest number of samples for which anything is tried.
MOST = 1024


def allowed_sizes(program: torch.export.ExportedProgram, opened: Collection[Any] = ()) -> tuple[int, int]:
    """Return the fewest and the most samples that an exported program allows, as export found; at most MOST.

    Args:
        program: a capture by torch.export; its range constraints are what it assumed.
        opened: symbols of its open sizes, which are no numbers of samples.
    """
    symbols = {
        symbol
        for node in program.graph.nodes
        if node.op == "placeholder" and isinstance(val := node.meta.get("val"), Tensor)
        for size in val.shape
        if isinstance(size, torch.SymInt)
        for symbol in cast(Any, size).node.expr.free_symbols
    }.difference(opened)
    ranges = [span for symbol, span in program.range_constraints.items() if symbol in symbols]
    lowest = max((int(span.lower) for span in ranges), default=1)
    highest = min((int(span.upper) for span in ranges if span.upper <= MOST), default=MOST)
    return max(lowest, 1), highest


def refused_sizes(
    graph: fx.Graph, lowest: int, highest: int, top: int, nominal: Mapping[Any, Any] = MappingProxyType({})
) -> list[int]:
    """Return numbers of samples for which captured code does not hold: from 1 to ``top``, and the first too large one.

    Args:
        graph: the code, with the checks that export inserted.
        lowest, highest: the range that :func:`allowed_sizes` returned.
        top: largest number of samples to try.
        nominal: the open sizes of the batch that was exported, by symbol.
    """
    refused = {n for n in range(1, top + 1) if not lowest <= n <= highest}
    if highest < MOST:
        refused.add(highest + 1)
    for node in graph.nodes:
        if node.op != "call_function" or not str(node.target).startswith("aten._assert_scalar"):
            continue
        condition = node.args[0]
        val = condition.meta.get("val") if isinstance(condition, fx.Node) else condition
        try:
            symbolic = getattr(val, "node", None)
            holds = size_function(val if symbolic is None else symbolic.expr.xreplace(nominal))
        except ValueError:  # a condition on sizes that depend on data
            continue
        refused |= {samples for samples in range(1, top + 1) if not holds(samples)}
    return sorted(refused)


class ConcreteSizes:
    """Sizes of a graph as numbers, at one number of samples; one that depends on data as in the example.

    Args:
        samples: number of samples per worker.
        ragged: let a size that depends on data be as many rows as samples.
        opened: numbers for open sizes, by their symbols in ``meta["open"]``; ``meta["val"]`` has none.
    """

    def __init__(self, samples: int, ragged: bool = False, opened: Mapping[Any, Any] = MappingProxyType({})) -> None:
        self.samples, self.ragged, self.opened = samples, ragged, opened
        self._known: dict[object, int] = {}

    def __call__(self, size: Any) -> int:
        """Return a size as a number."""
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression not in self._known:
            try:
                closed = expression.xreplace(self.opened) if self.opened else expression
                self._known[expression] = int(size_function(closed, self.ragged)(self.samples))
            except ValueError:  # a size that the data decide is no function of the number of samples
                self._known[expression] = size_hint(size)
        return self._known[expression]
