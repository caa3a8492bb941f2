"""Interleaved pipeline: subdivide the stages of a plan into chunks (virtual stages), dealt round-robin to workers."""

from __future__ import annotations

from dataclasses import replace

from polylane.cost.interleave import check
from polylane.cost.predict import CostModel
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition, cut_positions
from polylane.plan import fit_to_graph as fit
from polylane.plan.plan import Plan, default_microbatches
from polylane.plan.spec import Spec
from polylane.planner.problem import fit_plan
from polylane.program.lower import deal_stages


def subdivide_plan(found: CostModel, plan: Spec | Plan, batch: int, chunks: int) -> tuple[Partition, Plan]:
    """Cut the graph into ``chunks`` balanced virtual stages per worker.

    Returns:
        The graph cut into virtual stages, and the plan of the workers; the plan unchanged for one chunk.

    Raises:
        PolylaneError: as of :func:`polylane.planner.problem.fit_plan`; or the plan cannot be interleaved, has fixed
            cuts, or has more virtual stages than the graph can be cut into.
    """
    if chunks < 1:
        raise PolylaneError(f"chunks of a stage must be at least 1, not {chunks}")
    if chunks == 1:
        return fit_plan(found, plan, batch)
    check(plan)
    if isinstance(plan, Plan):
        raise PolylaneError(
            f"{plan.title} says where its stages begin, which {chunks} chunks of each would change: give it in one line"
        )
    graph, stages = found.stages.graph, plan.pipeline * chunks
    most = len(cut_positions(graph)) + 1
    if stages > most and not graph.is_opaque:
        raise PolylaneError(
            f"{plan.pipeline} stages of {chunks} chunks are {stages}, and the graph can be cut into at most {most}"
        )
    microbatches = default_microbatches(plan, batch)
    # Balanced as a pipeline of ``stages * chunks`` stages, then dealt out to the workers.
    partition, _ = fit_plan(found, replace(plan, pipeline=stages, microbatches=microbatches), batch)
    return partition, fit.plan_from_partition(deal_stages(partition, plan.pipeline), plan, microbatches)
