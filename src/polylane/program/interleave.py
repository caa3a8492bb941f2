"""Programs of workers that have several stages each, interleaved: for predictions; the runtime runs one stage each."""

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
    """The same cuts with the stages dealt out in turn: worker w has those numbered c * workers + w."""
    return Partition(partition.graph, partition.cuts, tuple(s % workers for s in range(partition.stages)))


def lower_interleaved(
    partition: Partition, plan: Plan, partial: Partials = (), only: Collection[int] | None = None
) -> tuple[Program, ...]:
    """Programs, by rank, of workers that have several virtual stages each.

    Their actions name the virtual stage; gradients are summed, and the step is taken, for all stages of a worker
    together. A value goes once to every other worker that needs it, to the first of its stages that does, and its
    gradient comes back from there; what stays on a worker does not travel.

    Args:
        partition: the graph cut into virtual stages, a multiple of the plan's stages.
        plan: of the workers, whose stages have the same mesh.
        partial, only: as of :func:`polylane.program.lower.lower`.
    """
    workers = plan.pipeline
    chunks = partition.stages // workers
    lanes = interleaved(workers, chunks, plan.microbatches)
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
    """What travels of a value: to the first stage that needs it of every other worker; None if nobody else does."""
    first: dict[int, int] = {}
    for stage in crossing.consumers:
        first.setdefault(stage % workers, stage)
    first.pop(crossing.producer % workers, None)
    return replace(crossing, consumers=tuple(first.values())) if first else None
