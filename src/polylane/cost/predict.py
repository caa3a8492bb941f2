"""Step-time prediction: lower a plan to the workers' programs and simulate them with predicted durations."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from polylane.cost.parameter_servers import ServerCosts
from polylane.cost.plan_cost import CostModel, PlanCost, StagePrediction
from polylane.cost.simulator.server_queue import ServedSteps
from polylane.cost.simulator.shared_cores import SharedCores
from polylane.cost.simulator.simulate import simulate_tasks
from polylane.cost.simulator.task import Task
from polylane.cost.task_lanes import TaskBuilder
from polylane.graph.partition import Partition
from polylane.observe.stretches import TimeState
from polylane.observe.time_account import account_time
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.program.lower import lower, without_replica_sync
from polylane.program.program import Program
from polylane.program.unroll import unroll
from polylane.schedule.action import ActionKind

__all__ = ["CostModel", "Prediction", "StagePrediction", "predict"]

# Steps that are played one behind the other; the distance of the last two is that of all further ones.
STEPS = 3
# Up to this many workers each gets a lane of its own, if requested.
LANES = 64

# Steps of an asynchronous pipeline that are played beyond those in which it fills, to find how long one takes.
STEADY_STEPS = 4


@dataclass(frozen=True)
class Prediction:
    """A predicted step of a plan on a cluster.

    Attributes:
        plan: the plan whose step is predicted.
        timeline: a lane for every worker, or for one worker of each stage (``lanes`` gives the ranks); a step of the
            steady state where the pipeline is asynchronous.
        stages: costs of each stage's busiest rank, by stage; of several stages on the same workers one, of all.
        batch: samples of a step over all replicas.
        lanes: rank of the worker that each lane shows.
        period: steps between two averagings over replicas (local SGD); ``timeline`` is the step that ends with one.
        local_step_timeline: timeline of the steps without averaging; None if all steps are equal.
        served: how replicas advance that synchronize through parameter servers, over many steps; else None.
        overlap: seconds by which a step begins before the last worker is done with the one before it.
    """

    plan: Plan
    timeline: Timeline
    stages: tuple[StagePrediction, ...]
    batch: int
    lanes: tuple[int, ...]
    period: int = 1
    local_step_timeline: Timeline | None = None
    served: ServedSteps | None = None
    overlap: float = 0.0

    def mean_over_period(self, of: Callable[[Timeline], float]) -> float:
        """Return the mean over a period of a figure of a step's timeline."""
        if self.local_step_timeline is None:
            return of(self.timeline)
        return (of(self.timeline) + (self.period - 1) * of(self.local_step_timeline)) / self.period

    @cached_property
    def seconds(self) -> float:
        """Seconds of a step, on average over a period and over steps that overlap; with servers, of all replicas."""
        return self.served.seconds if self.served else self.mean_over_period(Timeline.makespan) - self.overlap

    @cached_property
    def utilization(self) -> float:
        """Fraction (0 to 1) of all workers' time in which they compute or communicate."""
        # A lane stands for all workers of its stage, shared evenly if a stage has several lanes.
        of = [self.plan.stage_and_replica(rank)[0] for rank in self.lanes]
        workers = [len(self.plan.stages[stage].devices) / of.count(stage) for stage in of]
        area = self.seconds * self.plan.workers

        def worked(timeline: Timeline) -> float:
            return sum(b * n for b, n in zip(timeline.busy(), workers, strict=True))

        return self.mean_over_period(worked) / area if area else 0.0

    @cached_property
    def time_shares(self) -> dict[str, float]:
        """Fractions (0 to 1) of the lanes' time, by the names of time accounts: they add up to 1.

        On lanes that stand for unequal numbers of workers, ``computing`` is not :attr:`utilization`.
        """
        accounts = {id(t): account_time(t) for t in (self.timeline, self.local_step_timeline) if t is not None}
        area = len(self.lanes) * self.seconds

        def share(name: str) -> float:
            def seconds(timeline: Timeline) -> float:
                account = accounts[id(timeline)]
                return account.shares()[name] * account.makespan * len(account.ranks)

            return self.mean_over_period(seconds) / area

        if not area:
            return {str(state): 0.0 for state in TimeState}
        shares = {str(state): share(state) for state in TimeState}
        # Steps that overlap do so where lanes would idle: in bubbles, then where they would wait.
        overlap = self.overlap / self.seconds
        for state in (TimeState.BUBBLE, TimeState.WAITING):
            overlapped = min(overlap, shares[state])
            shares[state], overlap = shares[state] - overlapped, overlap - overlapped
        return shares

    @property
    def bubble(self) -> float:
        """Fraction (0 to 1) of the lanes' time that the order of the passes leaves empty: the pipeline bubble."""
        return self.time_shares[TimeState.BUBBLE]

    @property
    def waiting(self) -> float:
        """Fraction (0 to 1) of the lanes' time in which they wait for a slower worker."""
        return self.time_shares[TimeState.WAITING]

    @property
    def moving(self) -> float:
        """Fraction (0 to 1) of the lanes' time in which bytes move and nothing is computed."""
        return self.time_shares[TimeState.MOVING]

    @property
    def samples_per_second(self) -> float:
        """Samples of all replicas per second."""
        return self.batch / self.seconds if self.seconds else 0.0


def predict(
    basis: CostModel,
    partition: Partition,
    plan: Plan,
    batch: int,
    every: bool = False,
    exact: bool = True,
) -> Prediction:
    """Predict one step of a plan, see :func:`predict_step`.

    Args:
        basis: cluster, prices, precision and recomputation.
        partition: the graph cut into the plan's stages.
        plan: meshes, devices and schedule of the stages, and how their replicas synchronize: with ``every`` above 1
            they reduce no gradients, and average their parameters in the last of so many steps (Stich, 2019).
        batch: samples of a step, over all replicas.
        every: whether every worker has a lane (up to :data:`LANES`), even where they are equal.
        exact: whether memory is traced at the local samples; else it is scaled from those of the capture.
    """
    return predict_step(PlanCost(basis, partition, plan, batch, exact), every)


def predict_step(scene: PlanCost, per_worker: bool = False) -> Prediction:
    """Predict one step of a plan whose stages are priced.

    Equal workers are simulated once: one of each stage, unless workers share cores or their devices differ.

    Args:
        scene: costs of the plan's stages.
        per_worker: whether every worker has a lane (up to :data:`LANES`), even where they are equal.
    """
    basis, partition, plan, batch = scene.basis, scene.partition, scene.plan, scene.batch
    alone, served = plan.sync.every > 1 and plan.data > 1, plan.sync.has_servers
    ranks = range(plan.workers)
    # One lane per stage is exact only if workers are interchangeable: same devices, no shared cores.
    unlike = len(basis.cluster.devices(ranks)) > 1 or basis.cluster.cores(0) is not None
    single = (per_worker or unlike) and plan.workers <= LANES
    lanes = tuple(ranks) if single else _distinct_ranks(plan)
    doing = TaskBuilder(scene, lanes)
    by_rank = _lower_programs(scene, partition, None if single else lanes)
    programs = [without_replica_sync(by_rank[rank], plan) if alone or served else by_rank[rank] for rank in lanes]
    if plan.is_asynchronous:
        programs = list(unroll(programs, plan, STEADY_STEPS))
    tasks = [doing.build_tasks(program) for program in programs]
    hosts = doing.build_hosts() if single else ()
    timeline, between = simulate_tasks(tasks, hosts), None
    # The step with averaging is the local step plus the all-reduce of parameters; both timelines are kept.
    if alone:
        sums = map(doing.build_averaging_tasks, programs)
        timeline, between = simulate_tasks([[*a, *b] for a, b in zip(tasks, sums, strict=True)], hosts), timeline
    if plan.is_asynchronous:
        timeline = _cut_steady_step(timeline, plan.microbatches)
    # One step behind the other: those without averaging, sums at servers or batches of several steps in each.
    overlap = 0.0
    if plan.pipeline > 1 and not (alone or served or plan.is_asynchronous):
        overlap = overlap_seconds(tasks, timeline, hosts)
    steps = None
    if served:
        served_timeline = ServerCosts(scene).advance(timeline, lanes)
        timeline, steps = served_timeline.timeline, served_timeline.steps
    stages = tuple(scene.predict_stage(chunk) for chunk in plan.first_chunks)
    return Prediction(plan, timeline, stages, batch, lanes, plan.sync.every if alone else 1, between, steps, overlap)


def _distinct_ranks(plan: Plan) -> tuple[int, ...]:
    """Return a rank of every stage; of replicas in turn one of each, unless they are equal pipelines side by side."""
    are_equal = not plan.takes_turns or (not plan.has_uneven_replicas and plan.microbatches % plan.data == 0)
    ranks = list[int]()
    for chunk in plan.first_chunks:
        devices = plan.stages[chunk].devices
        ranks += devices[:1] if are_equal else devices[:: len(devices) // plan.degree("data", chunk)]
    return tuple(ranks if are_equal else sorted(ranks))  # where that is every rank, the n-th lane is that of rank n


def _cut_steady_step(timeline: Timeline, microbatches: int) -> Timeline:
    """Cut one step out of a run without a flush: from where the first lane begins a batch to where it begins the next.

    Args:
        timeline: of a run, whose microbatches are numbered through.
        microbatches: number of microbatches of a batch.
    """
    passes = [s for s in timeline.spans if s.rank == 0 and s.action.kind is ActionKind.FORWARD]
    begins = [s.start for s in passes if s.action.microbatch is not None and s.action.microbatch % microbatches == 0]
    start, end = begins[-2:]
    # A message may take its lane no time: it belongs to the step in which it begins.
    step_spans = (s for s in timeline.spans if (s.end > start and s.start < end) or start <= s.start == s.end < end)
    spans = tuple(replace(s, start=max(s.start, start), end=min(s.end, end)) for s in step_spans)
    return replace(timeline, spans=spans).from_zero()


def _lower_programs(scene: PlanCost, partition: Partition, only: Collection[int] | None) -> dict[int, Program]:
    """Lower the plan to the programs of the ranks in ``only`` (None: all), by rank."""
    plan = scene.plan
    partials = tuple(scene.basis.stages.partial_gradient_axes(mesh) for mesh in plan.meshes)
    return {program.rank: program for program in lower(partition, plan, None, partials, only)}


def overlap_seconds(lanes: Sequence[Sequence[Task]], step: Timeline, hosts: Sequence[SharedCores] = ()) -> float:
    """Return the seconds by which equal steps, one behind the other, take less than one step from its start to its end.

    No worker waits for the others between two steps, except in sums that all of them take part in: one whose last pass
    ends early begins the next step early. A step lasts from where it begins until the last lane is done; many of them
    take its seconds less these.

    Args:
        lanes: the tasks of every lane in one step, first to last.
        step: the timeline of that step alone.
        hosts: hosts whose lanes share cores, as of :func:`polylane.cost.simulator.simulate.simulate_tasks`.
    """
    end = step.makespan()
    lane_ends = dict.fromkeys(range(len(lanes)), 0.0)
    for span in step.spans:
        lane_ends[span.rank] = max(lane_ends[span.rank], span.end)
    # A step begins in the lanes that receive nothing first. Where these end last, the next one cannot begin earlier.
    begin = [number for number, lane in enumerate(lanes) if lane and lane[0].action.kind is not ActionKind.RECEIVE]
    if all(math.isclose(lane_ends[number], end, rel_tol=1e-9) for number in begin):
        return 0.0
    long_run = simulate_tasks([[*lane] * STEPS for lane in lanes], hosts)
    if hosts:  # a later step may slow those before it
        short_makespan = simulate_tasks([[*lane] * (STEPS - 1) for lane in lanes], hosts).makespan()
    else:
        short_makespan = _last_end(long_run, [len(lane) * (STEPS - 1) for lane in lanes]) - long_run.start()
    return max(0.0, end - (long_run.makespan() - short_makespan))


def _last_end(timeline: Timeline, counts: Sequence[int]) -> float:
    """Return when the first tasks of all lanes are done, so many of each; a lane's spans are in the order of tasks."""
    end = 0.0
    for _, lane_spans in groupby(timeline.spans, key=attrgetter("rank")):
        of_lane = list(lane_spans)
        end = max([end, *(span.end for span in of_lane[: counts[of_lane[0].rank]])])
    return end
