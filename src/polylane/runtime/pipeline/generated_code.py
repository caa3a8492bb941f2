"""Generated code: an fx graph compiled to a Python function, under a file name that an error's traceback shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import fx

_NUMBERS = itertools.count()


@dataclass(frozen=True)
class GeneratedCode:
    """A graph as a Python function.

    Attributes:
        run: the function of the graph's placeholders, in order; it returns the graph's output.
        nodes_by_line: line of the source -> fx node that it calls.
        file: file name under which the source is compiled, unique in the process.
    """

    run: Callable[..., Any]
    nodes_by_line: dict[int, fx.Node]
    file: str


def generate_code(graph: fx.Graph, label: str) -> GeneratedCode:
    """Compile a graph's Python source; values are freed after their last use.

    Args:
        graph: the graph, whose targets may be any callables with a ``__name__``.
        label: what the file name begins with.
    """
    code = graph.python_code("self")
    file = f"<{label} ({next(_NUMBERS)})>"
    scope: dict[str, Any] = dict(code.globals)
    exec(compile(code.src, file, "exec"), scope)
    forward = scope["forward"]
    # fx writes one assignment for each call, "name = ...": its line in a traceback identifies the node.
    starts = {f"{n.name} = ": n for n in graph.nodes if n.op == "call_function"}
    lines = {}
    for number, text in enumerate(code.src.splitlines(), start=1):
        node = starts.get(text.strip().partition(" = ")[0] + " = ")
        if node is not None:
            lines[number] = node
    return GeneratedCode(partial(forward, None), lines, file)
