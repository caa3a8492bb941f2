"""Order trials: the best plan with an order of passes that is found for its own stages, where that is faster."""

from __future__ import annotations

from dataclasses import replace

from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import FixedKeys, ScheduleOption
from polylane.planner.find_order import find_order
from polylane.planner.ranked_plan import RankedPlan, ScheduleTrial, price_plan
from polylane.planner.schedule_options import PLAIN_SCHEDULE, penalize
from polylane.planner.schedule_trials import with_schedule
from polylane.planner.stage_curves import CurveCache
from polylane.schedule.schedules import ASYNCHRONOUS, FOUND

# Orders are searched for steps of at most so many passes: longer ones take longer to search than the rest of a plan.
MOST_PASSES = 1024
# Tasks that each search of an order plays: a thirtieth of what it takes for a plan that says `schedule: auto`.
EFFORT = 20_000
# Named schedules that place a worker's stages: each worker one, its two in a V, its two in the workers' order.
_PLACED: tuple[ScheduleOption, ...] = (PLAIN_SCHEDULE, ("zb-v", 2), ("interleaved", 2))


def try_found_orders(estimates: CurveCache, best: RankedPlan, fixed: FixedKeys) -> RankedPlan:
    """Return a plan with the order of passes that is found for its stages, if it is faster than its named schedule.

    The stages are those of the plan, and two on every worker, where its graph can be cut so and nothing else is fixed.

    Args:
        estimates: cost curves of the graph on the cluster.
        best: the plan with the fastest of the named schedules.
        fixed: the keys that the plan must have: with ``schedule=auto`` the best found order is taken, whether it is
            faster or not; with another schedule none is searched.
    """
    wanted = fixed.schedule == FOUND
    if len(best.candidate.meshes) == 1 or best.candidate.takes_turns or not (wanted or fixed.schedule is None):
        return best
    tried = [found for option in _PLACED if (found := _find(estimates, best, option, fixed)) is not None]
    if not tried:
        return best
    found = min(tried, key=_weigh)
    if not wanted and _weigh(found) >= _weigh(best):
        return best
    trial = ScheduleTrial(best.candidate.option, best.prediction.seconds, True)
    trials = sorted([*best.trials, trial], key=lambda each: each.seconds)
    seconds = best.candidate.seconds * found.prediction.seconds / best.prediction.seconds
    candidate = replace(found.candidate, seconds=seconds, peak_bytes=float(found.peak_bytes))
    return replace(found, candidate=candidate, trials=tuple(trials))


def _find(estimates: CurveCache, best: RankedPlan, option: ScheduleOption, fixed: FixedKeys) -> RankedPlan | None:
    """Return the plan with an order found for stages placed as a named schedule has them; None where there is none."""
    candidate, chunks = best.candidate, option[1]
    passes = 2 * len(candidate.meshes) * chunks * candidate.microbatches
    if fixed.chunks not in (None, chunks) or passes > MOST_PASSES or candidate.option[0] in ASYNCHRONOUS:
        return None
    if len(candidate.meshes) * chunks > estimates.max_stages:
        return None
    placed = with_schedule(estimates, candidate, option)
    if placed is None:
        return None
    priced = price_plan(estimates, placed)
    plan = priced.plan.model_copy(update={"schedule": FOUND})
    try:
        plan = find_order(priced.basis, priced.partition, plan, estimates.batch, candidate.memory_limit, EFFORT)
    except PolylaneError:  # no order fits into the memory
        return None
    prediction = predict(priced.basis, priced.partition, plan, estimates.batch, exact=False)
    return RankedPlan(replace(placed, option=(FOUND, chunks)), plan, priced.partition, prediction)


def _weigh(found: RankedPlan) -> float:
    return penalize(found.prediction.seconds, found.candidate.option)
