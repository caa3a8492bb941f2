"""Side effects of leaves: what the user's own Python in a graph does in every call, besides computing."""

from __future__ import annotations

from polylane.graph.capture.assign_keys import PythonOnSlice
from polylane.graph.graph import Graph
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.python_state.run_watch import SideEffect


def collect_effects(graph: Graph) -> dict[str, tuple[SideEffect, ...]]:
    """Collect the side effects of a graph's leaves (modules that run the user's own Python), by node name."""
    nodes = [node for node in graph.code.fx.nodes if node.op == "call_function"]
    calls = [(str(node.meta["name"]), unwrap_settings(node.target)) for node in nodes]
    return {name: call.own.effects for name, call in calls if isinstance(call, PythonOnSlice) and call.own.effects}


def effects_by_module(graph: Graph) -> list[tuple[str, SideEffect]]:
    """Return every effect with the module that has it, by the name that a user knows."""
    modules = {node.name: node.module or "the model's loss" for node in graph.nodes}
    return [(modules[name], effect) for name, effects in collect_effects(graph).items() for effect in effects]
