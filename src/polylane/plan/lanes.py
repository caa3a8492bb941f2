"""Lanes of a plan: the passes of every group of workers in a step, in the order of its schedule."""

from __future__ import annotations

from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.order import parse_order
from polylane.plan.plan import Plan
from polylane.schedule.round_robin import replica_lanes
from polylane.schedule.schedules import FOUND, schedule_lanes
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import Lanes


def stage_graph_of(partition: Partition, plan: Plan) -> StageGraph:
    """Return which stages of a plan wait for which: for those whose values they read, and for who hands a value on.

    A value of another worker that several stages of one worker read comes in one message: the first of them receives
    it, and hands it on in its forward pass. Gradients go the other way.

    Raises:
        CyclicStages: stages wait for each other.
    """
    # A worker receives a value once for all of its stages: those after the first reader get it from that one, and so
    # come after it.
    edges = set(partition.edges)
    for crossing in partition.crossings:
        first_readers = dict[int, int]()  # reader by group of workers; the consumers are ascending
        for reader in crossing.consumers:
            group = plan.first_chunk(reader)
            if group != plan.first_chunk(crossing.producer) and first_readers.setdefault(group, reader) != reader:
                edges.add((first_readers[group], reader))
    return StageGraph.of_edges(partition.stages, edges)


def lanes_of(plan: Plan, graph: StageGraph) -> Lanes:
    """Return the passes of every group of workers in a step, in order.

    Of replicas in turn it is those of the first one: no other has more microbatches. Of an asynchronous plan, whose
    passes never pause, it is those of as many batches as are under way at once.

    Args:
        plan: what runs, with the order of its passes where the schedule is ``auto``.
        graph: which of the plan's stages feed which.

    Raises:
        PolylaneError: the plan's order has not been found yet.
    """
    if plan.takes_turns:
        return tuple(lanes[0] for lanes in replica_lanes_of(plan, graph))
    # An order that was found is written in the plan; any other follows from the schedule's name.
    if plan.schedule != FOUND:
        return schedule_lanes(plan.schedule, graph, plan.microbatches, workers=plan.stage_groups)
    if not plan.order:
        raise PolylaneError(f"{plan.title}: schedule: auto has no order of passes yet: it is found for measured times")
    return parse_order(plan.order)


def replica_lanes_of(plan: Plan, graph: StageGraph) -> tuple[Lanes, ...]:
    """Return for every group of workers the passes of each of its replicas; one lane where all do the same.

    Args:
        plan: what runs, as of :func:`lanes_of`.
        graph: which of the plan's stages feed which.

    Raises:
        PolylaneError: the plan's order has not been found yet.
    """
    if not plan.takes_turns:
        return tuple((lane,) for lane in lanes_of(plan, graph))
    replicas = [degrees.data for degrees in plan.meshes]
    return replica_lanes(plan.schedule, graph, plan.microbatches, replicas, plan.stage_groups)
