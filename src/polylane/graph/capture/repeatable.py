"""Repeatable operators: those that may run a second time on the same inputs, with the same result and no effect.

Only they can be recomputed in a backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from polylane.graph.capture.assign_keys import DrawnPerSlice, is_random
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.memory import alias_groups, written_arguments
from polylane.graph.operators.keyed_random import KEYED
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.symbolic_sizes import SymbolicSize

_RUNNING = slice(4, 6)  # running mean and variance among the arguments of our batch_norm
_KEYED = frozenset(KEYED.values())


@dataclass(frozen=True)
class DroppedTensors:
    """What a forward pass drops, to be recomputed in the backward pass, by the names of the graph's nodes.

    Attributes:
        values: nodes whose results are dropped: they run again, or are views of what such a node makes.
        again: nodes that run again. What they save besides inputs and results (masks, statistics) is dropped as well.
    """

    values: frozenset[str] = frozenset()
    again: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.again)


NOTHING_DROPPED = DroppedTensors()


def repeatable_nodes(code: fx.Graph, sums_statistics: bool = False) -> set[fx.Node]:
    """Return the nodes of a captured graph that the backward pass may run again.

    Not the user's own Python, which is called as often as one device calls it; not numbers that torch's own generators
    draw; not messages to other ranks; and nothing that reads or writes memory that an operator writes in place. Batch
    normalization is repeatable in the form of :func:`without_effect`.

    Args:
        code: the captured graph, or its rewritten form for one rank.
        sums_statistics: whether batch normalization sums its statistics over replicas, which is a message.
    """
    memory = alias_groups(code)
    written = {memory[value] for node in code.nodes for value in written_arguments(node)}
    moving = {memory[statistic] for node in code.nodes for statistic in _running_statistics(node)}
    nodes = set()
    for node in code.nodes:
        if node.op != "call_function" or not _is_repeatable(node, sums_statistics):
            continue
        changed = written if unwrap_settings(node.target) is batch_norm else written | moving
        if memory[node] not in changed and not any(memory[argument] in changed for argument in node.all_input_nodes):
            nodes.add(node)
    return nodes


def without_effect(node: fx.Node) -> tuple[Any, ...]:
    """Return a node's arguments for its second run: batch normalization without the running statistics it moves.

    In training they take no part in what it returns. Other calls with an effect tell by a method of the same name.
    """
    method = getattr(unwrap_settings(node.target), "without_effect", None)
    if method is not None:
        return tuple(method(tuple(node.args)))
    if not _running_statistics(node):
        return tuple(node.args)
    return (*node.args[: _RUNNING.start], None, None, *node.args[_RUNNING.stop :])


def _running_statistics(node: fx.Node) -> list[fx.Node]:
    """Return the running statistics that a batch normalization in training moves."""
    if node.op != "call_function" or unwrap_settings(node.target) is not batch_norm:
        return []
    return [argument for argument in node.args[_RUNNING] if isinstance(argument, fx.Node)]


def _is_repeatable(node: fx.Node, sums_statistics: bool) -> bool:
    # A rewritten node that communicates has the axis of the mesh among its arguments.
    if any(argument.op == "placeholder" and argument.meta["role"][0] == "axis" for argument in node.all_input_nodes):
        return False
    target: Any = unwrap_settings(node.target)
    if isinstance(target, torch._ops.OpOverload):
        return not is_random(node) and not target._schema.is_mutable
    if target is batch_norm:
        return not sums_statistics
    if isinstance(target, (SymbolicSize, DrawnPerSlice)) or target in _KEYED or hasattr(target, "without_effect"):
        return True
    is_ours = str(getattr(target, "__module__", "")).startswith("polylane")
    return not is_ours and not callable(getattr(target, "fake", None))  # operator.getitem, torch.sym_not and their like
