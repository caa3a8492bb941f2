"""Graph interpreter (torch.fx.Interpreter): runs the code of a captured graph node by node.

Subclasses that observe, time or replace single operators override :meth:`GraphInterpreter.call_operator`. The reference
of ``polylane verify`` has a loop of its own on purpose: it shares no code with what it verifies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx, nn


class GraphInterpreter(fx.Interpreter):
    """Runs captured code node by node; ``env`` holds the values that are still needed, by node.

    Errors of operators reach the caller as they were raised.

    Args:
        code: placeholders, function calls, and one output node.
        bind: returns the value of a placeholder.
        keep_values: whether all values stay in ``env`` to the end; else each is freed after its last use.
    """

    def __init__(self, code: fx.Graph, bind: Callable[[fx.Node], Any], keep_values: bool = False) -> None:
        super().__init__(nn.Module(), garbage_collect_values=not keep_values, graph=code)
        self.extra_traceback = False  # fx would append the node's traceback to an error's message
        self._bind = bind

    def run_node(self, node: fx.Node) -> Any:
        if node.op == "placeholder":
            return self._bind(node)
        if node.op == "output":
            return self.map_nodes_to_values(node.args[0], node)
        return self.call_operator(node)

    def call_operator(self, node: fx.Node) -> Any:
        """Return the value of a node that calls a function."""
        args, kwargs = self.fetch_args_kwargs_from_env(node)
        return node.target(*args, **kwargs)  # type: ignore[operator]


class ObservingInterpreter(GraphInterpreter):
    """Passes every operator's value to an observer at once, before another operator may write to it.

    Args:
        code, bind: with the same meaning as for :class:`GraphInterpreter`.
        observe: called with the node and its value.
    """

    def __init__(self, code: fx.Graph, bind: Callable[[fx.Node], Any], observe: Callable[[fx.Node, Any], None]) -> None:
        super().__init__(code, bind)
        self._observe = observe

    def call_operator(self, node: fx.Node) -> Any:
        value = super().call_operator(node)
        self._observe(node, value)
        return value


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a node's arguments with a function applied inside of lists, tuples (which become lists) and dicts."""
    if isinstance(value, (list, tuple)):
        return [map_nested(function, item) for item in value]
    if isinstance(value, dict):
        return {key: map_nested(function, item) for key, item in value.items()}
    return function(value)


def find_ancestors(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Return nodes and all their ancestors."""
    ancestors, pending = set[fx.Node](), list(nodes)
    while pending:
        node = pending.pop()
        if node not in ancestors:
            ancestors.add(node)
            pending += node.all_input_nodes
    return ancestors
