"""Effects under a plan: where the user's own Python keeps state or reads a clock, and would run more often, or apart.

One device calls a forward once a step. What counts its calls is right on every worker that calls it once a step as
well: on any number of replicas, not for each of several microbatches.
"""

from __future__ import annotations

from collections.abc import Iterable

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.python_state.side_effects import SideEffect
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec


def collect_effects(graph: Graph) -> dict[str, tuple[SideEffect, ...]]:
    """What the leaves of a graph do besides computing, by the name of their node."""
    nodes = [node for node in graph.code.fx.nodes if node.op == "call_function"]
    found = {str(node.meta["name"]): tuple(getattr(node.target, "effects", ())) for node in nodes}
    return {name: effects for name, effects in found.items() if effects}


def leaf_paths(graph: Graph) -> set[str]:
    """Paths of the modules that run the user's own Python; "": model and loss."""
    return {node.module for node in graph.nodes if node.op == "leaf"}


def keeps_python_state(graphs: Iterable[Graph]) -> bool:
    """Whether anything in graphs keeps state in Python."""
    return any(e.kind == "state" for graph in graphs for effects in collect_effects(graph).values() for e in effects)


def refuse_effects(partition: Partition, plan: Plan) -> None:
    """See that the user's own Python runs as often, and where, it can be right.

    Raises:
        PolylaneError: it would not.
    """
    refuse_repeated_effects(partition.graph, plan, plan.microbatches)
    every = collect_effects(partition.graph)
    for who, effect in _effects_by_module(partition.graph):
        if effect.kind == "state":
            _refuse_across_stages(partition, every, effect, f"{who} {effect.describe}")


def refuse_repeated_effects(graph: Graph, plan: Spec | Plan, microbatches: int) -> None:
    """See that the user's own Python runs as often as on one device.

    Raises:
        PolylaneError: it would not.
    """
    for who, effect in _effects_by_module(graph):
        if effect.kind == "state" and microbatches > 1:
            raise PolylaneError(
                f"microbatches={microbatches}: {who} {effect.describe} in every call, of which one device "
                "makes one a step "
                "and not one for each microbatch: use microbatches=1, or count outside of the forward and the loss"
            )
        if effect.kind == "clock" and (microbatches > 1 or plan.workers > plan.pipeline):
            raise PolylaneError(
                f"plan: {who} {effect.describe}, which shows another time to every worker and in every "
                "microbatch: read it "
                "outside of the forward and the loss, or leave out data, tensor, sequence and microbatches"
            )


def _effects_by_module(graph: Graph) -> list[tuple[str, SideEffect]]:
    """Every effect, with the module that has it, as a user calls it."""
    modules = {node.name: node.module or "the model's loss" for node in graph.nodes}
    return [(modules[name], effect) for name, effects in collect_effects(graph).items() for effect in effects]


def _refuse_across_stages(
    partition: Partition, every: dict[str, tuple[SideEffect, ...]], effect: SideEffect, what: str
) -> None:
    """Calls of one module, or of several that write the same, on stages of their own."""
    at = {other for other, effects in every.items() if effect in effects}
    stages = sorted({s for s in range(partition.stages) for node in partition.nodes(s) if node.name in at})
    if len(stages) > 1:
        raise PolylaneError(
            f"{what}, in calls on stages {', '.join(map(str, stages))}, each of which would keep its own: cut so that "
            "they are on one stage"
        )
