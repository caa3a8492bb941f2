"""Python side effects: refuses plans under which the user's own Python would run more often, or on several stages.

One device calls a forward once a step. Python that counts its calls, or keeps other state, is right on every worker
that calls it once a step as well: with any number of replicas, but not once for each of several microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable

from polylane.errors import PolylaneError
from polylane.graph.capture.assign_keys import PythonOnSlice
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.precision import unwrap_settings
from polylane.graph.python_state.run_watch import SideEffect
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec


def collect_effects(graph: Graph) -> dict[str, tuple[SideEffect, ...]]:
    """Collect the side effects of a graph's leaves (modules that run the user's own Python), by node name."""
    nodes = [node for node in graph.code.fx.nodes if node.op == "call_function"]
    calls = [(str(node.meta["name"]), unwrap_settings(node.target)) for node in nodes]
    return {name: call.own.effects for name, call in calls if isinstance(call, PythonOnSlice) and call.own.effects}


def keeps_python_state(graphs: Iterable[Graph]) -> bool:
    """Return whether anything in the graphs keeps state in Python."""
    return any(e.kind == "state" for graph in graphs for effects in collect_effects(graph).values() for e in effects)


def refuse_effects(partition: Partition, plan: Plan) -> None:
    """Refuse a plan under which state in the user's own Python would differ from one device's.

    Raises:
        PolylaneError: state or a clock is used once for each microbatch, or state is kept on several stages.
    """
    refuse_repeated_effects(partition.graph, plan, plan.microbatches)
    every = collect_effects(partition.graph)
    for who, effect in _effects_by_module(partition.graph):
        # Equal effects name the same state: of a module that is called twice, or of several that write the same.
        at = {name for name, effects in every.items() if effect in effects}
        stages = sorted(
            {plan.first_chunk(s) for s in range(partition.stages) for node in partition.nodes(s) if node.name in at}
        )
        if effect.kind == "state" and len(stages) > 1:
            raise PolylaneError(
                f"{who} {effect.describe}, in calls on stages {', '.join(map(str, stages))}, each of which would keep "
                "its own: cut so that they are on one stage"
            )


def refuse_repeated_effects(graph: Graph, plan: Spec | Plan, microbatches: int) -> None:
    """Refuse microbatches or workers that would run the user's stateful Python more often than one device.

    Raises:
        PolylaneError: state with several microbatches, or a clock with several workers on a stage.
    """
    for who, effect in _effects_by_module(graph):
        if effect.kind == "state" and microbatches > 1:
            raise PolylaneError(
                f"microbatches={microbatches}: {who} {effect.describe} in every call, of which one device "
                "makes one a step "
                "and not one for each microbatch: use microbatches=1, or count outside of the forward and the loss"
            )
        if effect.kind == "clock" and (microbatches > 1 or plan.workers > len(plan.group_meshes)):
            raise PolylaneError(
                f"plan: {who} {effect.describe}, which shows another time to every worker and in every "
                "microbatch: read it "
                "outside of the forward and the loss, or leave out data, tensor, sequence and microbatches"
            )


def _effects_by_module(graph: Graph) -> list[tuple[str, SideEffect]]:
    """Return every effect with the module that has it, by the name that a user knows."""
    modules = {node.name: node.module or "the model's loss" for node in graph.nodes}
    return [(modules[name], effect) for name, effects in collect_effects(graph).items() for effect in effects]
