"""Ranked plans: candidates as full plans, with their exact predictions."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.plan_cost import PlanCost
from polylane.cost.predict import CostModel, Prediction, predict_step
from polylane.graph.partition import Partition
from polylane.plan import fit_to_graph as fit
from polylane.plan.fixed_keys import ScheduleOption
from polylane.plan.options import PRECISIONS, ROUND_ROBIN, SPLIT
from polylane.plan.plan import Plan
from polylane.plan.spec import Spec
from polylane.planner.problem import fit_to_meshes
from polylane.planner.schedule_options import penalize
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan

# Relative speed-up that twice the workers must bring; that replicas which share something out must bring, for what that
# takes beyond its messages (flat copies, hooks) is not priced; and that replicas in turn must, so that of equally fast
# plans the plainer one comes first.
FRUGAL, PLAIN, TURNING = 0.01, 0.03, 0.01


@dataclass(frozen=True)
class ScheduleTrial:
    """Another schedule of a plan's stages and microbatches.

    Attributes:
        option: the schedule, and the stages of every worker.
        seconds: of a step; simulated, or estimated from the passes alone.
        is_simulated: which of the two.
        priced: the plan with this schedule; None where it is known to fit.
    """

    option: ScheduleOption
    seconds: float
    is_simulated: bool
    priced: PricedPlan | None = field(default=None, compare=False)

    @cached_property
    def missing_bytes(self) -> float:
        """Memory that the worker with the most would need beyond what it may have; 0 where it fits."""
        if self.priced is None:
            return 0.0
        return max(0.0, self.priced.peak_bytes - self.priced.candidate.memory_limit)


@dataclass(frozen=True)
class RankedPlan:
    """A plan with its exact prediction.

    Attributes:
        candidate: the plan as it was estimated.
        plan: the candidate as a full plan.
        partition: the graph cut into the plan's stages.
        prediction: simulated step of the plan.
        trials: the other schedules that were compared for it, the fastest first.
    """

    candidate: RatedPlan
    plan: Plan
    partition: Partition
    prediction: Prediction
    trials: tuple[ScheduleTrial, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """Predicted bytes of the worker that needs the most memory."""
        return max(stage.memory.total for stage in self.prediction.stages)


@dataclass(frozen=True)
class PricedPlan:
    """A candidate as a full plan with its prices, before it is simulated.

    Attributes:
        candidate: the plan as it was estimated, whose schedule it has.
        plan, partition: the full plan, and the graph cut into all its stages.
        basis: the cost model with the placements of the plan's meshes.
        costs: seconds, bytes and memory of every stage.
    """

    candidate: RatedPlan
    plan: Plan
    partition: Partition
    basis: CostModel
    costs: PlanCost

    @property
    def peak_bytes(self) -> int:
        """Bytes of the worker that needs the most memory."""
        return max(self.costs.peak_memory(stage).total for stage in self.plan.first_chunks)

    def simulate(self) -> RankedPlan:
        """Return the plan with its exact prediction."""
        prediction = predict_step(self.costs)
        return RankedPlan(self.candidate, self.plan, self.partition, prediction)


def price_plan(estimates: CurveCache, candidate: RatedPlan) -> PricedPlan:
    """Return a candidate as a full plan with the prices of its stages."""
    partition = Partition(estimates.basis.stages.graph, candidate.cuts, candidate.stage_of_piece)
    plan = make_plan(partition, candidate, estimates.basis.method)
    # Placements that unequal meshes allow: looser ones would flatter these plans beside uniform ones.
    basis = fit_to_meshes(estimates.basis, partition, plan)
    return PricedPlan(candidate, plan, partition, basis, PlanCost(basis, partition, plan, estimates.batch, exact=False))


def make_plan(partition: Partition, candidate: RatedPlan, method: TrainingOptions) -> Plan:
    """Return a candidate's plan, with ranks ordered so that those that communicate most share a host."""
    precision = method.dtype if method.dtype in PRECISIONS else PRECISIONS[0]
    schedule, chunks = candidate.option
    spec = Spec(
        schedule=schedule,
        chunks=chunks,
        replicas=ROUND_ROBIN if candidate.takes_turns else SPLIT,
        precision=precision,
        stages=candidate.meshes,
        sync=candidate.sync,
        compile=method.compiled,
    )
    return fit.plan_from_partition(partition, spec, candidate.microbatches)


def weighted_seconds(seconds: float, workers: int, sharded: bool = False, takes_turns: bool = False) -> float:
    """Return seconds with a penalty per doubling of workers: of equally fast plans the one with fewer comes first.

    So does one whose replicas share nothing out before one whose replicas do, and one that splits every microbatch
    before one whose replicas take turns.
    """
    return seconds * (1 + FRUGAL * math.log2(workers) + PLAIN * sharded + TURNING * takes_turns)


def weigh(candidate: RatedPlan, seconds: float) -> float:
    """Return a candidate's seconds, estimated or simulated, with what it must be faster by than plainer plans."""
    shares = candidate.sync.shard != "none"
    return penalize(weighted_seconds(seconds, candidate.workers, shares, candidate.takes_turns), candidate.option)
