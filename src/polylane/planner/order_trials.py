"""Order trials: the best plan with an order of passes that is found for its own stages, where that is faster."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.graph.partition import Partition
from polylane.plan.fixed_keys import ScheduleOption
from polylane.plan.plan import Plan
from polylane.planner.find_order import find_order
from polylane.planner.problem import fit_to_meshes
from polylane.planner.ranked_plan import RankedPlan, ScheduleTrial, price_plan, weigh
from polylane.planner.schedule_options import PLAIN_SCHEDULE
from polylane.planner.schedule_trials import with_schedule
from polylane.planner.search import SearchResult
from polylane.planner.uniform_plans import RatedPlan
from polylane.schedule.schedules import ASYNCHRONOUS, FOUND

# Orders are searched for steps of at most so many passes: longer ones take longer to search than the rest of a plan.
MOST_PASSES = 1024
# Tasks that each search of an order plays: a thirtieth of what it takes for a plan that says `schedule: auto`.
EFFORT = 20_000
# Named schedules that cut the graph into one stage for every worker, and into two: the order's search places these.
_CUT: tuple[ScheduleOption, ...] = (PLAIN_SCHEDULE, ("interleaved", 2))


def try_found_orders(answer: SearchResult) -> SearchResult:
    """Return the result of a search with its best plan in an order of its own, if that beats the named schedules.

    Where the user asks for ``schedule=auto``, every plan that is wanted gets the best order found, faster or not; where
    the user asks for another schedule none does. The stages are those of the plan, and two on every worker, as far as
    its graph can be cut so and the user has not fixed the chunks.
    """
    is_wanted = answer.wish.fixed.schedule == FOUND
    if not (is_wanted or answer.wish.fixed.schedule is None):
        return answer
    count = answer.wish.plan_count if is_wanted else 1
    ordered = [_order(answer, best, is_wanted) for best in answer.ranked_plans[:count]]
    return replace(answer, ranked_plans=(*sorted(ordered, key=_weighted), *answer.ranked_plans[count:]))


def _order(answer: SearchResult, best: RankedPlan, is_wanted: bool) -> RankedPlan:
    """Return a plan in the best order that is found; as it is where there is none, or none better and none wanted."""
    candidate = best.candidate
    if len(candidate.meshes) == 1 or candidate.takes_turns or candidate.option[0] in ASYNCHRONOUS:
        return best
    tried = [ranked_plan for cut in _cut_stages(answer, best) if (ranked_plan := _find(answer, *cut)) is not None]
    ranked_plan = min(tried, key=_weighted, default=best)
    if ranked_plan is best or not (is_wanted or _weighted(ranked_plan) < _weighted(best)):
        return best
    trial = ScheduleTrial(candidate.option, best.prediction.seconds, True)
    trials = sorted([*best.trials, trial], key=lambda trial: trial.seconds)
    # Estimates are compared with estimates: the order changes it as it changes the simulated time.
    seconds = candidate.seconds * ranked_plan.prediction.seconds / best.prediction.seconds
    rated = replace(ranked_plan.candidate, seconds=seconds, peak_bytes=float(ranked_plan.peak_bytes))
    return replace(ranked_plan, candidate=rated, trials=tuple(trials))


def _cut_stages(answer: SearchResult, best: RankedPlan) -> Iterator[tuple[RatedPlan, Plan, Partition]]:
    """Yield the plan with its own stages, and with two on every worker."""
    candidate, fixed = best.candidate, answer.wish.fixed.chunks
    for option in _CUT:
        chunks = option[1]
        passes = 2 * len(candidate.meshes) * chunks * candidate.microbatches
        if fixed not in (None, chunks) or passes > MOST_PASSES:
            continue
        if candidate.option[1] == chunks:
            yield candidate, best.plan, best.partition
            continue
        # Budgets are those of the stages as they are.
        if len(candidate.meshes) * chunks > answer.estimates.max_stages or any(s.recompute for s in best.plan.stages):
            continue
        placed = with_schedule(answer.estimates, candidate, option)
        if placed is not None:
            priced = price_plan(answer.estimates, placed)
            yield placed, priced.plan.model_copy(update={"recompute": best.plan.recompute}), priced.partition


def _find(answer: SearchResult, candidate: RatedPlan, plan: Plan, partition: Partition) -> RankedPlan | None:
    """Return the plan in the best order that is found for it; None where none fits into the memory."""
    batch = answer.estimates.batch
    basis = fit_to_meshes(answer.estimates.basis, partition, plan, batch)
    free = plan.model_copy(update={"schedule": FOUND, "order": ()})
    try:
        ordered = find_order(basis, partition, free, batch, candidate.memory_limit, EFFORT)
    except PolylaneError:  # no order fits the memory: the plan is left out, and others are tried
        return None
    option = FOUND, candidate.option[1]
    return RankedPlan(replace(candidate, option=option), ordered, partition, predict(basis, partition, ordered, batch))


def _weighted(ranked_plan: RankedPlan) -> float:
    return weigh(ranked_plan.candidate, ranked_plan.prediction.seconds)
