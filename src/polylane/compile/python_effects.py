"""Python side effects: refuses plans under which the user's own Python would run more often, or on several stages.

One device calls a forward once a step. Python that counts its calls, or keeps other state, is right on every worker
that calls it once a step as well: with any number of replicas, but not once for each of several microbatches.
"""

from __future__ import annotations

from polylane.errors import PolylaneError
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.python_state.own_objects import is_shared_memory
from polylane.plan.plan import AnyPlan, Plan
from polylane.samples.leaf_effects import collect_effects, effects_by_module


def refuse_effects(partition: Partition, plan: Plan) -> None:
    """Refuse a plan under which state in the user's own Python would differ from one device's.

    Raises:
        PolylaneError: state or a clock is used once for each microbatch, or state is kept on several stages; or a
            forward writes a weight that is sharded.
    """
    refuse_repeated_effects(partition.graph, plan, plan.microbatches)
    _refuse_lost_writes(partition.graph, plan)
    _refuse_shared_memory(partition.graph, plan)
    effects_by_name = collect_effects(partition.graph)
    for who, effect in effects_by_module(partition.graph):
        # Equal effects name the same state: of a module that is called twice, or of several that write the same.
        at = {name for name, effects in effects_by_name.items() if effect in effects}
        stages = sorted(
            {plan.first_chunk(s) for s in range(partition.stages) for node in partition.nodes(s) if node.name in at}
        )
        if effect.kind == "state" and len(stages) > 1:
            raise PolylaneError(
                f"{who} {effect.describe}, in calls on stages {', '.join(map(str, stages))}, each of which would keep "
                "its own: cut so that they are on one stage"
            )


def _refuse_shared_memory(graph: Graph, plan: Plan) -> None:
    """Refuse several workers that write memory which processes share: each would write in every step."""
    written = () if graph.code.effects is None else graph.code.effects.written_names
    python_name = next((python_name for python_name in written if is_shared_memory(python_name.get())), None)
    if python_name is not None and plan.processes > 1:
        raise PolylaneError(
            f"the forward or the loss writes {python_name.label}, memory that processes share, and each of "
            f"{plan.processes} workers would write it in every step: keep a plain value there"
        )


def _refuse_lost_writes(graph: Graph, plan: Plan) -> None:
    """Refuse plans under which a forward writes a copy of weights (a bound on them), and the write is lost."""
    written = () if graph.code.effects is None else sorted(graph.code.effects.written_parameters)
    name = next((name for name in written if name in graph.parameters and graph.parameters[name].trainable), None)
    if name is not None and plan.sync.shard == "parameters":
        raise PolylaneError(
            f"shard=parameters: the loss writes the parameter {name} in place, and would write a copy that is gathered "
            "for the pass: use shard=gradients, or write it outside of the forward and the loss"
        )
    effects = graph.code.effects
    moved = () if effects is None else sorted(name for name in effects.moved_parameters if name in graph.parameters)
    moved = [name for name in moved if graph.parameters[name].trainable]
    if moved and plan.sync.shard != "none":
        raise PolylaneError(
            f"shard={plan.sync.shard}: the loss gives the parameter {moved[0]} other memory ({moved[0]}.data = ...), "
            "and replicas update theirs in one piece of memory: write it in place, as .data.copy_(...) does, or leave "
            "shard out"
        )
    if name is not None and plan.sync.has_servers:
        raise PolylaneError(
            f"servers: the loss writes the parameter {name} in place, and would write a worker's copy of what a server "
            "has: leave servers out, or write it outside of the forward and the loss"
        )


def refuse_repeated_effects(graph: Graph, plan: AnyPlan, microbatches: int) -> None:
    """Refuse microbatches or workers that would run the user's stateful Python more often than one device.

    Raises:
        PolylaneError: state with several microbatches, or a clock with several workers on a stage.
    """
    for who, effect in effects_by_module(graph):
        if effect.kind == "state" and microbatches > 1:
            raise PolylaneError(
                f"microbatches={microbatches}: {who} {effect.describe} in every call, of which one device makes one a "
                "step and not one for each microbatch: use microbatches=1, or count outside of the forward and the loss"
            )
        if effect.kind == "clock" and (microbatches > 1 or plan.workers > len(plan.group_meshes)):
            raise PolylaneError(
                f"plan: {who} {effect.describe}, which shows another time to every worker and in every microbatch: "
                "read it outside of the forward and the loss, or leave out data, tensor, sequence and microbatches"
            )
