"""Open dimensions of an exported program: which sizes export left open, its guards, and the graph at given sizes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from polylane.graph.batch import is_sampled, sample_count
from polylane.graph.flops import tensors_of
from polylane.graph.graph import Graph
from polylane.graph.open_sizes import OpenSizes, SizeFunction
from polylane.graph.symbolic_sizes import SymbolicSize, bind_symbols, open_size_function

# No size is larger; what export knows no bound of has a larger one.
_UNBOUNDED = 1 << 62


class NotOpened(Exception):
    """A graph cannot be captured with other sizes than the number of samples left open; the message says why.

    Args:
        reason: why, as a part of a sentence.
        is_final: whether batches of further sizes would change nothing.
    """

    def __init__(self, reason: str, is_final: bool = True) -> None:
        super().__init__(reason)
        self.is_final = is_final


@dataclass(frozen=True)
class Opening:
    """The sizes that a capture should leave open.

    Attributes:
        dims: dimensions of leaves whose sizes vary from batch to batch, as (leaf, dimension).
        others: flat leaves of a few samples of other forms that have come, on which the captured code is checked.
    """

    dims: frozenset[tuple[int, int]]
    others: tuple[Sequence[Any], ...]


@dataclass(frozen=True)
class OpenedProgram:
    """What one export left open.

    Attributes:
        symbols: torch's symbols of the open sizes, in the order of ``sizes.places``.
        sizes: the open sizes as functions, without torch's symbols.
    """

    symbols: tuple[Any, ...]
    sizes: OpenSizes

    @property
    def nominal(self) -> dict[Any, Any]:
        """The open sizes of the batch that was exported, by symbol."""
        return bind_symbols(self.symbols, self.sizes.nominal)


def find_open_sizes(program: torch.export.ExportedProgram, graph: fx.Graph, leaves: Sequence[Any]) -> OpenedProgram:
    """Return what an export left open, with everything that it assumed.

    Args:
        program: the exported program, as torch.export returned it.
        graph: its flat code, whose placeholders have roles.
        leaves: flat leaves of the batch that was exported.

    Raises:
        NotOpened: no size is open, or one cannot be distinguished from the number of samples.
    """
    inputs = {n.meta["role"][1]: n.meta.get("val") for n in graph.nodes if _is_input(n)}
    samples, batch, places = sample_count(leaves), set[Any](), dict[Any, tuple[int, int]]()
    split = [is_sampled(leaf, samples) for leaf in leaves]
    for i in [i for i, is_split in enumerate(split) if is_split]:
        batch |= _symbols_of(inputs[i].shape[0])
        if not _symbols_of(inputs[i].shape[0]):
            raise NotOpened("it holds for one number of samples alone")
    for i, leaf in enumerate(leaves):
        for dim in range(int(split[i]), leaf.dim() if isinstance(leaf, Tensor) else 0):
            size = inputs[i].shape[dim]
            if isinstance(size, torch.SymInt) and isinstance(_expression(size), sympy.Symbol):
                places.setdefault(_expression(size), (i, dim))
    opened = tuple(symbol for symbol in places if symbol not in batch)
    symbols = batch | set(opened)
    if not opened or any(symbol in batch for symbol in places):
        raise NotOpened("its sizes are fixed, or are as many as the samples")
    for node in graph.nodes:
        if any(s not in symbols and not free_unbacked_symbols(s) for s in _symbols_of_value(node.meta.get("val"))):
            raise NotOpened("a size follows from no size of the batch alone")
    shapes = tuple(
        tuple(
            None if dim == 0 and split[i] else open_size_function(size, opened)
            for dim, size in enumerate(inputs[i].shape)
        )
        if isinstance(leaf, Tensor)
        else ()
        for i, leaf in enumerate(leaves)
    )
    at = tuple(places[symbol] for symbol in opened)
    nominal = tuple(leaves[i].shape[dim] for i, dim in at)
    sizes = OpenSizes(at, nominal, shapes, tuple(_guards(program, graph, opened)))
    if sizes.find(leaves) is None:
        raise NotOpened("what export assumed is not true of the batch itself")
    return OpenedProgram(opened, sizes)


def _is_input(node: fx.Node) -> bool:
    return node.op == "placeholder" and bool(node.meta["role"][0] == "input")


def _expression(size: Any) -> Any:
    return sympy.sympify(size.node.expr if hasattr(size, "node") else size)


def _symbols_of(size: Any) -> set[Any]:
    return set(_expression(size).free_symbols)


def _symbols_of_value(val: Any) -> set[Any]:
    """Return the symbols of all sizes of a node's value, a tensor or several or a number."""
    if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return _symbols_of(val)
    return {symbol for tensor in tensors_of(val) for size in tensor.shape for symbol in _symbols_of(size)}


def _guards(program: torch.export.ExportedProgram, graph: fx.Graph, opened: Sequence[Any]) -> Iterator[SizeFunction]:
    """Yield all conditions on open sizes that export assumed.

    Raises:
        NotOpened: a condition cannot be computed.
    """
    env: Any = next(
        size.node.shape_env
        for node in graph.nodes
        if _is_input(node) and isinstance(node.meta.get("val"), Tensor)
        for size in node.meta["val"].shape
        if isinstance(size, torch.SymInt)
    )
    # Conditions that export wrote into the code, those that it only noted, and the ranges that it narrowed.
    written = [_expression(n.args[0].meta["val"]) for n in graph.nodes if _asserts_symbol(n)]
    noted = [assertion.expr for asserts in env.deferred_runtime_asserts.values() for assertion in asserts]
    spans = [*env.var_to_range.items(), *program.range_constraints.items()]
    bounds = [(env.replace(of), span) for of, span in spans]
    ranges = [of >= int(span.lower) for of, span in bounds if span.lower > -_UNBOUNDED]
    ranges += [of <= int(span.upper) for of, span in bounds if span.upper < _UNBOUNDED]
    conditions = {env.replace(expr) for expr in (*written, *noted, *(guard.expr for guard in env.guards), *ranges)}
    for condition in sorted(conditions, key=str):
        if condition.free_symbols & set(opened) and not free_unbacked_symbols(condition):
            yield open_size_function(condition, opened)


def _asserts_symbol(node: fx.Node) -> bool:
    """Return whether a node is export's check of a condition on sizes."""
    asserts = node.op == "call_function" and str(node.target).startswith("aten._assert_scalar")
    condition = node.args[0] if asserts else None
    return isinstance(condition, fx.Node) and hasattr(condition.meta.get("val"), "node")


# ---- the graph at given sizes ----------------------------------------------------------------------------------------


def close_sizes(graph: fx.Graph, sizes: Mapping[Any, Any]) -> None:
    """Give every value of captured code numbers for its open sizes; ``meta["open"]`` keeps the symbolic ones.

    Args:
        graph: the code, changed in place.
        sizes: the open sizes, by symbol.
    """
    for node in graph.nodes:
        val = node.meta.get("open", node.meta.get("val"))
        if not sizes.keys().isdisjoint(_symbols_of_value(val)):
            node.meta["open"], node.meta["val"] = val, _value_at(val, sizes)


def _value_at(val: Any, sizes: Mapping[Any, Any]) -> Any:
    """Return a node's value with numbers for some symbols."""
    if isinstance(val, (list, tuple)):
        return type(val)(_value_at(item, sizes) for item in val)
    if not isinstance(val, Tensor):
        return _size_at(val, sizes)
    shape, strides = ([_size_at(size, sizes) for size in numbers] for numbers in (val.shape, val.stride()))
    mode: Any = val.fake_mode  # type: ignore[attr-defined]
    with mode:
        return torch.empty_strided(shape, strides, dtype=val.dtype, device=val.device)


def _size_at(size: Any, sizes: Mapping[Any, Any]) -> Any:
    if not isinstance(size, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return size
    expr, env = _expression(size).xreplace(sizes), size.node.shape_env
    hint = expr.xreplace(env.backed_var_to_val)  # at the example's number of samples
    if isinstance(size, torch.SymBool):
        return bool(expr) if not expr.free_symbols else env.create_symboolnode(expr)
    number, make = (int, env.create_symintnode) if isinstance(size, torch.SymInt) else (float, env.create_symfloatnode)
    return number(expr) if expr.is_number else make(expr, hint=number(hint) if hint.is_number else None)


def bind_sizes(graph: Graph, sizes: Sequence[int]) -> Graph:
    """Return a graph as it is at other open sizes: what is proven of that graph is proven at those sizes.

    Only the values of its code are others; its nodes are described as before.
    """
    opened = graph.code.open
    assert opened is not None
    code, values = fx.Graph(), dict[fx.Node, fx.Node]()
    code.output(code.graph_copy(graph.code.fx, values))
    for old, new in values.items():
        new.meta = dict(old.meta)
    close_sizes(code, bind_symbols(graph.code.open_symbols, sizes))
    for node in code.nodes:
        if isinstance(node.target, SymbolicSize):
            node.target = node.target.bound_to(tuple(sizes))
    return replace(graph, code=replace(graph.code, fx=code, open=replace(opened, nominal=tuple(sizes))))


def sizes_to_try(opened: OpenSizes, observed_sizes: Iterable[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return open sizes at which to look at a graph: some that have come, and the least and largest that it admits.

    Sizes that have been equal in all batches stay equal. Primes are tried, so that a size is no multiple of a number
    of the model by chance, and multiples of powers of two, where the model asks for these.
    """
    came = [tuple(sizes) for sizes in observed_sizes]
    columns = list(zip(*came, strict=True))
    first_like = [columns.index(column) for column in columns]
    numbers = sorted({n for prime in _PRIMES for twos in range(7) if (n := prime << twos) <= _PRIMES[-1]})
    candidates = [tuple(number + shift * position for position in first_like) for number in numbers for shift in (0, 2)]
    admitted = [sizes for sizes in candidates if opened.admit(sizes)]
    return list(dict.fromkeys((*came[:2], *admitted[:2], *admitted[-2:])))


# Odd factors of the sizes that are tried, and the last one is the largest size.
_PRIMES = (1, 3, 5, 7, 11, 13, 17, 31, 61, 127, 251, 509, 1009)
