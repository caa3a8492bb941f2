"""Autocast over a captured graph: the dtypes that it gives, and which weights it casts, found without any data.

The graph is run once more on fake tensors. Below autocast a mode sees each operator with the tensors that it gets: a
weight that no operator gets but the cast itself is read in autocast's dtype alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from polylane.graph.flops import shape_of
from polylane.graph.graph import Graph
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.nodes.memory import storage_id
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.device_arguments import replace_devices


def dtypes_under_autocast(graph: Graph, device_type: str, dtype: torch.dtype) -> dict[str, torch.dtype]:
    """Return the dtype of every tensor value, by node name, when the graph runs under autocast to ``dtype``.

    A node that cannot run without data (the user's own Python) keeps the dtype that capture saw.

    Args:
        graph: the captured graph, which is not changed.
        device_type: torch's name of the device that autocast is for, "cpu" or "cuda".
        dtype: the lower-precision dtype of the autocast region.
    """
    return _run_under_autocast(graph, device_type, dtype).dtypes


class WeightReads(NamedTuple):
    """How a graph reads its parameters under autocast.

    Attributes:
        cast: names of parameters that autocast casts, and that nothing reads but by that cast.
        otherwise: names of parameters that something reads as they are: an operator that autocast leaves alone, one
            that it has compute in float32, or the user's own Python.
    """

    cast: frozenset[str]
    otherwise: frozenset[str]


AUTOCAST_DEVICES = ("cpu", "cuda")
_known_reads = WeakKeyDictionary[fx.Graph, dict[torch.dtype, WeightReads]]()


def find_weight_reads(graph: Graph, dtype: torch.dtype) -> WeightReads:
    """Return which parameters autocast to ``dtype`` casts in a graph.

    Autocast's own lists decide, those for CPUs and for CUDA both: what one of them leaves alone is not cast. So all
    workers find the same, whatever devices they have.
    """
    reads_by_dtype = _known_reads.setdefault(graph.code.fx, {})
    if dtype not in reads_by_dtype:
        reads = _Reads(dtype)
        for device_type in AUTOCAST_DEVICES:
            _run_under_autocast(graph, device_type, dtype, reads)
        reads_by_dtype[dtype] = WeightReads(frozenset(reads.cast - reads.otherwise), frozenset(reads.otherwise))
    return reads_by_dtype[dtype]


def find_cast_weights(graphs: Iterable[Graph], dtype: torch.dtype | None) -> frozenset[str]:
    """Return the names of parameters that some of a training's graphs cast, and that none reads otherwise.

    Args:
        graphs: the graph of every objective.
        dtype: dtype of autocast; None: there is none, and nothing is cast.
    """
    reads = [] if dtype is None else [find_weight_reads(graph, dtype) for graph in graphs]
    return frozenset().union(*(read.cast for read in reads)).difference(*(read.otherwise for read in reads))


def _run_under_autocast(
    graph: Graph, device_type: str, dtype: torch.dtype, reads: _Reads | None = None
) -> _DtypeInterpreter:
    """Run a graph on tensors without data, of any type of device, under autocast; note what it reads, if asked to."""
    part = SampleSlice(graph.samples, batch=graph.samples, open_sizes=graph.code.nominal_sizes)
    device = torch.device(device_type)

    def bind(node: fx.Node) -> Any:
        kind, name = node.meta["role"]
        if kind == "part":
            return part
        value = _without_data(node.meta["val"], device)
        if kind == "parameter" and reads is not None:
            reads.watch(name, value)
        return value

    interpreter = _DtypeInterpreter(graph.code.fx, bind, device, reads)
    watching = nullcontext() if reads is None else reads
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), _autocast_anywhere(device_type, dtype), watching:
        outputs = interpreter.run()
    if reads is not None:
        reads.note_unknown(outputs)
    return interpreter


@contextmanager
def _autocast_anywhere(device_type: str, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: autocast for a type of device that this machine need not have, which ``torch.autocast`` asks."""
    is_enabled, old_dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    torch.set_autocast_enabled(device_type, True)
    torch.set_autocast_dtype(device_type, dtype)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device_type, is_enabled)
        torch.set_autocast_dtype(device_type, old_dtype)


class _Reads(TorchDispatchMode):
    """Mode that notes, below autocast, by which operators parameters are read; their views are the parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._low_dtype, self._weights = dtype, dict[int, tuple[str, Tensor]]()
        self.cast, self.otherwise = set[str](), set[str]()

    def watch(self, name: str, weight: Tensor) -> None:
        """Note from now on by what a parameter, a tensor with memory of its own, is read."""
        self._weights[storage_id(weight)] = name, weight  # kept, so that no other tensor gets its memory

    def note_unknown(self, values: Any) -> None:
        """Note that something unknown reads nested values."""
        self.otherwise |= self._names(values)

    def _names(self, values: Any) -> set[str]:
        tensors = (value for value in tree_leaves(values) if isinstance(value, Tensor))
        return {self._weights[key][0] for tensor in tensors if (key := storage_id(tensor)) in self._weights}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        names = set() if func.namespace == "prim" else self._names((args, kwargs))
        if func is torch.ops.aten._to_copy.default and result.dtype == self._low_dtype:
            self.cast |= names
        else:  # a view reads nothing
            self.otherwise |= names if func._schema.is_mutable else names - self._names(result)
        return result


class _DtypeInterpreter(GraphInterpreter):
    """Records the dtype of every tensor; a node that cannot run without data gets the one that capture saw."""

    def __init__(
        self, code: fx.Graph, bind: Callable[[fx.Node], Any], device: torch.device, reads: _Reads | None
    ) -> None:
        super().__init__(code, bind)
        self._device, self._reads = device, reads
        self.dtypes: dict[str, torch.dtype] = {}

    def call_operator(self, node: fx.Node) -> Any:
        value = self._value(node)
        if isinstance(value, Tensor):
            self.dtypes[node.meta["name"]] = value.dtype
        return value

    def _value(self, node: fx.Node) -> Any:
        arguments = self.fetch_args_kwargs_from_env(node)
        try:
            if node.meta["op"] not in ("leaf", "function"):  # the user's own Python might keep fake tensors
                args, kwargs = replace_devices(arguments, self._device)
                return node.target(*args, **kwargs)  # type: ignore[operator]
        # Some operators have no fake implementation.
        except Exception:
            pass
        if self._reads is not None:
            self._reads.note_unknown(arguments)
        return _without_data(node.meta.get("val"), self._device)


def _without_data(val: Any, device: torch.device) -> Any:
    """Return a node's value as empty tensors of the example's sizes."""
    if isinstance(val, (list, tuple)):
        return [_without_data(v, device) for v in val]
    return torch.empty(shape_of(val), dtype=val.dtype, device=device) if isinstance(val, Tensor) else val
