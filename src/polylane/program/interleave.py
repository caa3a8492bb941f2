"""Interleaved programs: workers with several virtual stages each, for predictions; the runtime runs one stage each."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from polylane.graph.partition import Partition, StageCrossing
from polylane.plan.plan import Plan
from polylane.program.lower import Partials, assemble_program, build_buckets, with_communication
from polylane.program.program import Program
from polylane.schedule.action import Action
from polylane.schedule.interleaved import interleaved


def deal_stages(partition: Partition, workers: int) -> Partition:
    """Return the same cuts with the stages assigned round-robin: worker w has those numbered c * workers + w."""
    return Partition(partition.graph, partition.cuts, tuple(s % workers for s in range(partition.stages)))


def lower_interleaved(
    partition: Partition, plan: Plan, partial: Partials = (), only: Collection[int] | None = None
) -> tuple[Program, ...]:
    """Lower a partition to the programs, by rank, of workers that have several virtual stages each.

    Actions name the virtual stage; the gradient sums and the optimizer step are once for all stages of a worker. A
    value is sent once to every other worker that needs it, to the first of its stages that does, and its gradient comes
    back from there; what stays on a worker is not sent.

    Args:
        partition: the graph cut into virtual stages, a multiple of the plan's stages.
        plan: the plan of the workers, whose stages all have the same mesh.
        partial, only: the same arguments as of :func:`polylane.program.lower.lower`.
    """
    workers = plan.pipeline
    chunks = partition.stages // workers
    lanes = interleaved(workers, chunks, plan.microbatches)
    # Buckets are per worker, not per virtual stage: a worker's parameters are those of all its chunks.
    wanted = frozenset(range(plan.workers) if only is None else only)
    summed = build_buckets(deal_stages(partition, workers), plan, {}, partial or ({},) * workers, wanted)
    crossings = [each for c in partition.crossings if (each := _crossing_of_workers(c, workers)) is not None]
    programs = []
    for rank in sorted(wanted):
        stage = plan.stage_and_replica(rank)[0]
        peers = [plan.peers(rank, other % workers) for other in range(partition.stages)]
        passes = list[Action]()
        for action in lanes[stage]:
            receives = [c for c in crossings if action.stage in c.consumers]
            sends = [c for c in crossings if c.producer == action.stage]
            passes += with_communication(action, peers, receives, sends)
        coming = tuple(c for c in crossings if any(each % workers == stage for each in c.consumers))
        going = tuple(c for c in crossings if c.producer % workers == stage)
        programs.append(assemble_program(passes, rank, partition, plan, coming, going, summed))
    return tuple(programs)


def _crossing_of_workers(crossing: StageCrossing, workers: int) -> StageCrossing | None:
    """Return a crossing with, of every other worker, the first stage that needs it; None if no other worker does."""
    first: dict[int, int] = {}
    for stage in crossing.consumers:
        first.setdefault(stage % workers, stage)
    first.pop(crossing.producer % workers, None)
    return replace(crossing, consumers=tuple(first.values())) if first else None
