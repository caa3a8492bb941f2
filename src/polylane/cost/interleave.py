"""Interleaved 1F1B: workers that have several stages each, and what their passes, sums and steps take."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property

from polylane.cost.lanes import Lanes
from polylane.cost.memory import Memory, memory
from polylane.cost.scene import Basis, Scene
from polylane.cost.task import Task
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.program.interleave import dealt
from polylane.program.program import Bucket, Program
from polylane.schedule.action import Action, Kind
from polylane.schedule.interleaved import interleaved


class Workers(Scene):
    """Prices of workers that have several virtual stages each: all of a worker's together; of each in ``chunks``.

    Args:
        basis, plan, batch, exact: as of :class:`polylane.cost.scene.Scene`.
        partition: the graph cut into virtual stages, a multiple of the plan's stages.

    Raises:
        PolylaneError: a plan that cannot be interleaved.
    """

    def __init__(self, basis: Basis, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        check(plan)
        super().__init__(basis, dealt(partition, plan.pipeline), plan, batch, exact)
        virtual = tuple(plan.stages[stage % plan.pipeline] for stage in range(partition.stages))
        # Not a plan that anybody could run: stages share their devices. But as prices go they are stages as any other.
        self.chunks = Scene(basis, partition, plan.model_copy(update={"stages": virtual}), batch, exact)

    def own(self, stage: int) -> range:
        """The virtual stages of a worker."""
        return range(stage, self.chunks.partition.stages, self.plan.pipeline)

    def memory(self, stage: int) -> Memory:
        """What a worker holds at most, by the order in which it runs its stages."""
        plan, own = self.plan, self.own(stage)
        return memory(
            interleaved(plan.pipeline, len(own), plan.microbatches)[stage],
            {each: self.chunks.need(each) for each in own},
            {each: self.chunks.load(each).trained for each in own},
            self.load(stage),
            self.basis.method,
            plan.degree("data", stage),
            self.basis.margin,
        )


class InterleavedLanes(Lanes):
    """The tasks of such workers."""

    def __init__(self, workers: Workers) -> None:
        super().__init__(workers)
        self._workers, self._chunks = workers, Lanes(workers.chunks)

    def _computes(self, program: Program, action: Action) -> Task:
        if action.kind is Kind.STEP:
            return super()._computes(program, action)
        return self._chunks._computes(replace(program, stage=action.stage), action)

    def _completing(self, program: Program, bucket: Bucket) -> int:
        overlap = self._workers.basis.method.overlap
        return self._first(program.stage, bucket) if overlap else self._workers.own(program.stage)[0]

    def _ready(self, stage: int, bucket: Bucket) -> float:
        return self._chunks._ready(self._first(stage, bucket), bucket)

    def _first(self, worker: int, bucket: Bucket) -> int:
        """The first of a worker's stages that reads a parameter of a bucket: the last one to go backward."""
        own = self._workers.own(worker)
        return next((s for s in own if not self._read[s].isdisjoint(bucket.parameters)), own[0])

    @cached_property
    def _read(self) -> list[set[str]]:
        """The parameters that each virtual stage reads."""
        partition = self._workers.chunks.partition
        return [set(partition.parameters(stage)) for stage in range(partition.stages)]


def check(plan: Spec | Plan) -> None:
    """Refuse plans that cannot be interleaved.

    Raises:
        PolylaneError: the plan has one stage, another schedule, or stages with unlike meshes.
    """
    if len(plan.meshes) == 1:
        raise PolylaneError("chunks are of a pipeline's stages, and the plan has one stage: add pipeline=")
    if len(set(plan.meshes)) > 1:
        raise PolylaneError("chunks need stages that all have the same mesh")
    if plan.schedule != "1f1b":
        raise PolylaneError(f"chunks interleave the schedule 1f1b, not {plan.schedule}")
