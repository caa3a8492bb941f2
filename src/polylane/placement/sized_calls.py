"""Sized calls: a rank's graph in which formulas of the open sizes are computed from the batch that runs."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import fx

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.sized_values import SizedValue
from polylane.graph.symbolic_sizes import SymbolicSize
from polylane.graph.traced_sizes import TracedSize

SIZES_KEPT = 64  # sizes for which one call keeps its function


class SizedCall:
    """A call whose function depends on the open sizes: where values are cut, which positions a rank has.

    Args:
        function: the function, with traced sizes in it.
    """

    __module__ = "polylane"

    def __init__(self, function: SizedValue) -> None:
        self._function = function
        self.__name__ = str(getattr(function.value, "__name__", "sized"))
        self._known: OrderedDict[tuple[int, ...], Any] = OrderedDict()

    def at(self, part: SampleSlice) -> Any:
        """Return the function at a part's number of samples and the open sizes of its batch."""
        sizes = part.samples, *part.open_sizes
        if sizes not in self._known:
            self._known[sizes] = self._function.at(sizes)
            if len(self._known) > SIZES_KEPT:
                self._known.popitem(last=False)  # the oldest
        return self._known[sizes]

    def __call__(self, *args: Any, sized_by: SampleSlice, **kwargs: Any) -> Any:
        return self.at(sized_by)(*args, **kwargs)


class SizedArgument(SizedCall):
    """An argument that depends on the open sizes and is no number."""

    def __call__(self, *args: Any, sized_by: SampleSlice, **kwargs: Any) -> Any:
        return self.at(sized_by)


def write_sizes(graph: fx.Graph) -> None:
    """Write formulas of the open sizes into a rank's graph, in place, as what is computed from the sample slice.

    Args:
        graph: a rank's graph, with traced sizes among its arguments and in the functions that it calls.
    """
    nodes = list(graph.nodes)
    parts = [node for node in nodes if node.op == "placeholder" and node.meta["role"][0] == "part"]
    first_node = next(node for node in nodes if node.op != "placeholder")
    with graph.inserting_before(first_node):
        part = parts[0] if parts else graph.placeholder("part")
    part.meta.setdefault("role", ("part", 0))
    written: dict[int, fx.Node] = {}

    def write(value: Any) -> Any:
        if isinstance(value, (fx.Node, int, float, str)) or value is None:
            return value
        sized = SizedValue(value)
        if not sized.sizes:
            return value
        if id(value) not in written:
            with graph.inserting_before(first_node):
                if isinstance(value, TracedSize):
                    new_node = graph.call_function(SymbolicSize(_function_of(sized), value.value), (part,))
                else:
                    new_node = graph.call_function(SizedArgument(sized), (), {"sized_by": part})
            new_node.meta = {"name": "", "stands": False}
            written[id(value)] = new_node
        return written[id(value)]

    for node in nodes:
        if node.op != "call_function":
            continue
        node.args, node.kwargs = fx.node.map_aggregate(node.args, write), fx.node.map_aggregate(node.kwargs, write)
        target = SizedValue(node.target)
        if target.sizes:
            node.target, node.kwargs = SizedCall(target), {**node.kwargs, "sized_by": part}


def _function_of(sized: SizedValue) -> Any:
    return lambda samples, *sizes: sized.at((samples, *sizes))
