"""Predict a step: the programs that the workers would run, played over what everything takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from polylane.cost.lanes import Lanes
from polylane.cost.play import play
from polylane.cost.scene import Basis, Scene, StagePrediction
from polylane.cost.table import Table
from polylane.graph.partition import Partition
from polylane.observe.timeline import Timeline
from polylane.plan.plan import Plan
from polylane.program.lower import lower

__all__ = ["Basis", "Prediction", "StagePrediction", "predict", "table_of"]

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
    """

    plan: Plan
    timeline: Timeline
    stages: tuple[StagePrediction, ...]
    batch: int
    lanes: tuple[int, ...]

    @cached_property
    def seconds(self) -> float:
        """Of a step."""
        return self.timeline.makespan()

    @cached_property
    def utilization(self) -> float:
        """Of all workers' time, how much is work: from 0 to 1."""
        busy, of = self.timeline.busy(), [self.plan.place(rank)[0] for rank in self.lanes]
        workers = [len(self.plan.stages[stage].devices) / of.count(stage) for stage in of]
        area = self.seconds * self.plan.workers
        return sum(b * n for b, n in zip(busy, workers, strict=True)) / area if area else 0.0

    @property
    def samples_per_second(self) -> float:
        """Of all workers together."""
        return self.batch / self.seconds if self.seconds else 0.0


def predict(
    basis: Basis, partition: Partition, plan: Plan, batch: int, every: bool = False, exact: bool = True
) -> Prediction:
    """The time of one step.

    Workers that are alike are played once: one of each stage, unless they share cores, or their devices differ.

    Args:
        basis: what the prediction rests on.
        partition: the graph and its cuts.
        plan: what runs where.
        batch: samples of a step, over all replicas.
        every: a lane for every worker (up to :data:`LANES`), whether they are alike or not.
        exact: memory is that of the samples in hand; else in proportion to those that the graph was captured with.
    """
    scene = Scene(basis, partition, plan, batch, exact)
    ranks = range(plan.workers)
    unlike = len(basis.cluster.devices(ranks)) > 1 or basis.cluster.cores(0) is not None
    single = (every or unlike) and plan.workers <= LANES
    lanes = tuple(ranks) if single else tuple(stage.devices[0] for stage in plan.stages)
    partials = tuple(scene.partial(stage) for stage in range(plan.pipeline))
    programs = lower(partition, plan, None, partials, only=None if single else lanes)
    by_rank = {program.rank: program for program in programs}
    doing = Lanes(scene)
    tasks = [doing.tasks(by_rank[rank], lanes) for rank in lanes]
    timeline = play(tasks, doing.hosts(lanes) if single else ())
    return Prediction(plan, timeline, tuple(scene.stage(s) for s in range(plan.pipeline)), batch, lanes)


def table_of(basis: Basis, partition: Partition, plan: Plan, batch: int, stage: int) -> Table:
    """What every node of the graph takes on a rank of one of a plan's stages."""
    return Scene(basis, partition, plan, batch).table(stage)
