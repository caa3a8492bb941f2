"""A step at best: a plan's schedule by the times of its operators, were there nothing to wait for but other stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polylane.cost.profile import Both
from polylane.cost.steps import simulate_schedule
from polylane.graph.partition import Partition
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.schedule.stage_graph import StageGraph
from polylane.schedule.synchronous import schedule_lanes


def lanes(partition: Partition, plan: Plan, seconds: Sequence[Both], samples: int) -> Timeline:
    """The step, a lane for every rank.

    Args:
        partition: the graph and its cuts.
        plan: what runs where.
        seconds: of every node, forward and backward, for as many samples as the graph is shown for.
        samples: of a microbatch.
    """
    order = StageGraph.of_partition(partition)
    each = [pass_seconds(partition, plan, seconds, samples, stage) for stage in range(plan.pipeline)]
    played = simulate_schedule(
        schedule_lanes(plan.schedule, order, plan.microbatches),
        [forward for forward, _ in each],
        [backward for _, backward in each],
        graph=order,
    )
    return replace(
        by_rank(played, plan), unit="seconds", title=f"{plan.spec} · at best", notes={"stages": str(plan.pipeline)}
    )


def pass_seconds(
    partition: Partition, plan: Plan, seconds: Sequence[Both], samples: int, stage: int
) -> tuple[float, float]:
    """Forward and backward of a microbatch on a rank of a stage: the work divided evenly over its mesh."""
    mesh, graph = plan.degrees(stage), partition.graph
    own = [seconds[graph.positions[node.name]] for node in partition.nodes(stage)]
    share = -(-samples // mesh.data) / graph.samples / (mesh.sequence * mesh.tensor)
    return sum(forward for forward, _ in own) * share, sum(backward for _, backward in own) * share


def by_rank(timeline: Timeline, plan: Plan) -> Timeline:
    """A lane for every rank from a lane for every stage, whose ranks all do the same."""
    spans = tuple(
        replace(span, rank=rank) for span in timeline.spans for rank in plan.stages[span.action.stage].devices
    )
    return replace(timeline, spans=spans, ranks=plan.workers)
