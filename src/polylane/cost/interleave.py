"""Interleaved 1F1B (Narayanan et al., 2021): costs and tasks of workers that each run several virtual stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from polylane.cost.memory.live_ranges import PeakMemory
from polylane.cost.plan_cost import CostModel, PlanCost
from polylane.cost.simulator.task import Task
from polylane.cost.task_lanes import TaskBuilder
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.program.lower import deal_stages
from polylane.program.program import GradientBucket, Program
from polylane.schedule.action import Action, ActionKind
from polylane.schedule.interleaved import interleaved


class InterleavedWorkers(PlanCost):
    """Costs of workers that run several virtual stages: summed over a worker's stages here, per stage in ``chunks``.

    Args:
        basis, plan, batch, exact: see :class:`polylane.cost.plan_cost.PlanCost`.
        partition: the graph cut into virtual stages; their number is a multiple of the plan's stages.

    Raises:
        PolylaneError: a plan that cannot be interleaved.
    """

    def __init__(self, basis: CostModel, partition: Partition, plan: Plan, batch: int, exact: bool = True) -> None:
        check_interleaved(plan)
        super().__init__(basis, deal_stages(partition, plan.pipeline), plan, batch, exact)
        virtual = tuple(plan.stages[stage % plan.pipeline] for stage in range(partition.stages))
        # This plan is for pricing only: its stages share devices, so it could not be run.
        self.chunks = PlanCost(basis, partition, plan.model_copy(update={"stages": virtual}), batch, exact)

    def stages_of_worker(self, stage: int) -> range:
        """Return the virtual stages of a worker: every ``pipeline``-th, from its own stage on."""
        return range(stage, self.chunks.partition.stages, self.plan.pipeline)

    def _passes_in_memory(self, stage: int) -> tuple[Sequence[Action], dict[int, PeakMemory], dict[int, float]]:
        own, plan = self.stages_of_worker(stage), self.plan
        needs = {each: self.chunks.microbatch_memory(each) for each in own}
        trained = {each: self.chunks.trained_bytes(each).trained for each in own}
        return interleaved(plan.pipeline, len(own), plan.microbatches)[stage], needs, trained


class InterleavedTaskBuilder(TaskBuilder):
    """Builds the tasks of workers with several virtual stages."""

    def __init__(self, workers: InterleavedWorkers, lanes: Sequence[int]) -> None:
        super().__init__(workers, lanes)
        self._workers, self._chunks = workers, TaskBuilder(workers.chunks, lanes)

    def _compute_task(self, program: Program, action: Action) -> Task:
        # The optimizer steps once for all stages of a worker; passes are priced by virtual stage.
        if action.kind is ActionKind.STEP:
            return super()._compute_task(program, action)
        return self._chunks._compute_task(replace(program, stage=action.stage), action)

    def _completing_stage(self, program: Program, bucket: GradientBucket) -> int:
        overlap = self._workers.basis.method.overlap
        return (
            self._first_reader(program.stage, bucket) if overlap else self._workers.stages_of_worker(program.stage)[0]
        )

    def _ready_fraction(self, stage: int, bucket: GradientBucket, kind: ActionKind) -> float:
        return self._chunks._ready_fraction(self._first_reader(stage, bucket), bucket, kind)

    def _first_reader(self, worker: int, bucket: GradientBucket) -> int:
        """Return a worker's first stage that reads a parameter of the bucket: the last to run its backward pass."""
        own = self._workers.stages_of_worker(worker)
        return next((s for s in own if not self._parameters_read[s].isdisjoint(bucket.parameters)), own[0])

    @cached_property
    def _parameters_read(self) -> list[set[str]]:
        """Names of the parameters that each virtual stage reads."""
        partition = self._workers.chunks.partition
        return [set(partition.parameters(stage)) for stage in range(partition.stages)]


def check_interleaved(plan: Spec | Plan) -> None:
    """Check that a plan can be interleaved.

    Raises:
        PolylaneError: the plan has one stage, another schedule, or stages with unlike meshes.
    """
    if len(plan.meshes) == 1:
        raise PolylaneError("chunks are of a pipeline's stages, and the plan has one stage: add pipeline=")
    if len(set(plan.meshes)) > 1:
        raise PolylaneError("chunks need stages that all have the same mesh")
    if plan.schedule != "1f1b":
        raise PolylaneError(f"chunks interleave the schedule 1f1b, not {plan.schedule}")
