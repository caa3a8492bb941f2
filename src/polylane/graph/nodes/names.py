"""Node names: the user's module, source line and name of an operator."""

from __future__ import annotations

import re

from torch import fx

from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.python_state.own_objects import innermost_line

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')


def module_of(node: fx.Node) -> str:
    """Return the user's module path: "" for the model itself, "loss" for the loss function outside of the model."""
    stack = [
        path for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items() if not key.startswith("_empty")
    ]
    path = stack[-1] if stack else ""
    if path == "model" or path.startswith("model."):
        return str(path.removeprefix("model").removeprefix("."))
    return "loss"


def source_of(node: fx.Node) -> str:
    """Return the innermost source line of the user's that made a node, see :func:`innermost_line`."""
    target = unwrap_settings(node.target)
    target = getattr(target, "own", target)  # of the user's own Python, keyed
    if isinstance(source := getattr(target, "source", None), str):  # of the user's own Python, which has no frames
        return source
    frames = [(m["file"], m["line"]) for m in _FRAME.finditer(node.meta.get("stack_trace") or "")]
    return innermost_line(frames)


def name_without_number(node: fx.Node) -> str:
    """Return the beginning of a node's user-facing name: module path and operator."""
    operation = str(node.meta["op"]).removeprefix("aten.").split(".")[0]
    return f"{node.meta['module']}/{operation}" if node.meta["module"] else operation
