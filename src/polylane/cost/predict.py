"""Predict a step: the programs that the workers would run, played over what everything takes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import cached_property

from polylane.cost.cost_table import CostTable
from polylane.cost.interleave import InterleavedTaskBuilder, InterleavedWorkers
from polylane.cost.plan_cost import CostModel, PlanCost, StagePrediction
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.task_lanes import TaskBuilder
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.program.interleave import lower_interleaved
from polylane.program.lower import lower
from polylane.program.program import Program
from polylane.program.replica_local import without_replica_sync

__all__ = ["CostModel", "Prediction", "StagePrediction", "predict", "table_of"]

# Up to so many workers each has a lane of its own where that is asked for.
LANES = 64


@dataclass(frozen=True)
class Prediction:
    """A step of a plan on a cluster.

    Attributes:
        plan: what runs.
        timeline: a lane for every worker, or for one of each stage where they are many (``lanes`` says which ranks).
        stages: what each stage's busiest rank does.
        batch: samples of a step.
        lanes: the ranks that have a lane.
        period: steps from one sum over replicas to the next; the timeline is that of the step which ends with it.
        local_step_timeline: the timeline of every other step; None where all are alike.
    """

    plan: Plan
    timeline: Timeline
    stages: tuple[StagePrediction, ...]
    batch: int
    lanes: tuple[int, ...]
    period: int = 1
    local_step_timeline: Timeline | None = None

    def mean_over_period(self, of: Callable[[Timeline], float]) -> float:
        """What is to be said of a step's timeline, on average over a period."""
        if self.local_step_timeline is None:
            return of(self.timeline)
        return (of(self.timeline) + (self.period - 1) * of(self.local_step_timeline)) / self.period

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.mean_over_period(Timeline.makespan)

    @cached_property
    def utilization(self) -> float:
        """Of all workers' time, how much is work: from 0 to 1."""
        of = [self.plan.stage_and_replica(rank)[0] for rank in self.lanes]
        workers = [len(self.plan.stages[stage].devices) / of.count(stage) for stage in of]
        area = self.seconds * self.plan.workers

        def worked(timeline: Timeline) -> float:
            return sum(b * n for b, n in zip(timeline.busy(), workers, strict=True))

        return self.mean_over_period(worked) / area if area else 0.0

    @property
    def bubble(self) -> float:
        """Of the lanes' time, in how much nothing happens: from 0 to 1."""
        return self._share_of_lane_time(lambda timeline: sum(timeline.idle()))

    @property
    def exposed_communication(self) -> float:
        """Of the lanes' time, in how much they communicate and compute nothing: from 0 to 1."""
        return self._share_of_lane_time(lambda timeline: sum(timeline.exposed_communication()))

    def _share_of_lane_time(self, of: Callable[[Timeline], float]) -> float:
        return self.mean_over_period(of) / (len(self.lanes) * self.seconds) if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Of all workers together."""
        return self.batch / self.seconds if self.seconds else 0.0


def predict(
    basis: CostModel,
    partition: Partition,
    plan: Plan,
    batch: int,
    every: bool = False,
    exact: bool = True,
    period: int = 1,
) -> Prediction:
    """The time of one step.

    Workers that are alike are played once: one of each stage, unless they share cores, or their devices differ.

    Args:
        basis: what the prediction rests on.
        partition: the graph and its cuts: into the plan's stages; or into a multiple of them, virtual stages that the
            workers have in turn and interleave (:func:`polylane.schedule.interleaved.interleaved`).
        plan: what runs where.
        batch: samples of a step, over all replicas.
        every: a lane for every worker (up to :data:`LANES`), whether they are alike or not.
        exact: memory is that of the samples in hand; else in proportion to those that the graph was captured with.
        period: after so many steps replicas sum their parameters, and nothing before (local SGD: Stich, 2019); 1: they
            sum gradients in every step.

    Raises:
        PolylaneError: the plan cannot be interleaved, or its replicas cannot go so many steps alone.
    """
    alone = _is_replica_local(basis, plan, period)
    scene: PlanCost
    if partition.stages > plan.pipeline:
        scene = InterleavedWorkers(basis, partition, plan, batch, exact)
        doing: TaskBuilder = InterleavedTaskBuilder(scene)
    else:
        scene = PlanCost(basis, partition, plan, batch, exact)
        doing = TaskBuilder(scene)
    ranks = range(plan.workers)
    unlike = len(basis.cluster.devices(ranks)) > 1 or basis.cluster.cores(0) is not None
    single = (every or unlike) and plan.workers <= LANES
    lanes = tuple(ranks) if single else tuple(stage.devices[0] for stage in plan.stages)
    by_rank = _lower_programs(scene, partition, None if single else lanes)
    programs = [without_replica_sync(by_rank[rank], plan) if alone else by_rank[rank] for rank in lanes]
    tasks, hosts = (
        [doing.build_tasks(program, lanes) for program in programs],
        doing.build_hosts(lanes) if single else (),
    )
    timeline, between = simulate_tasks(tasks, hosts), None
    if alone:
        sums = [doing.build_averaging_tasks(program, lanes) for program in programs]
        timeline, between = simulate_tasks([[*a, *b] for a, b in zip(tasks, sums, strict=True)], hosts), timeline
    stages = tuple(scene.predict_stage(s) for s in range(plan.pipeline))
    return Prediction(plan, timeline, stages, batch, lanes, period if alone else 1, between)


def _is_replica_local(basis: CostModel, plan: Plan, period: int) -> bool:
    """Whether replicas go steps alone."""
    if period < 1:
        raise PolylaneError(f"replicas must sum every so many steps, at least 1, not {period}")
    if period == 1 or plan.data == 1:
        return False
    if basis.method.shard != "none":
        raise PolylaneError(
            f"shard {basis.method.shard!r} needs replicas that are alike; those that sum every {period} steps are not"
        )
    if plan.resplits_batch:
        raise PolylaneError(f"replicas can sum every {period} steps only where all stages have as many of them")
    return True


def _lower_programs(scene: PlanCost, partition: Partition, only: Collection[int] | None) -> dict[int, Program]:
    """What the workers run, by rank."""
    plan = scene.plan
    partials = tuple(scene.partial_gradient_axes(stage) for stage in range(plan.pipeline))
    if partition.stages > plan.pipeline:
        found = lower_interleaved(partition, plan, partials, only)
    else:
        found = lower(partition, plan, None, partials, only)
    return {program.rank: program for program in found}


def table_of(basis: CostModel, partition: Partition, plan: Plan, batch: int, stage: int) -> CostTable:
    """What every node of the graph takes on a rank of one of a plan's stages."""
    return PlanCost(basis, partition, plan, batch).table(stage)
