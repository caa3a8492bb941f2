"""Schedule trials: a plan of the finalists with the schedule that the simulator finds fastest for its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from polylane.plan.fixed_keys import ScheduleOption
from polylane.plan.lanes import stage_graph_of
from polylane.planner.find_order import build_problem
from polylane.planner.ranked_plan import PricedPlan, RankedPlan, ScheduleTrial, price_plan
from polylane.planner.schedule_options import PLAIN_SCHEDULE, penalize, usable_options
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan, change_schedule, cut_for_plain_schedule
from polylane.schedule.action import PASSES
from polylane.schedule.problem import lanes_to_orders, play_orders
from polylane.schedule.schedules import ASYNCHRONOUS, schedule_lanes

# Schedules are simulated whose passes alone, played by longest paths, end within this factor of the best.
NEAR = 1.02


def choose_schedule(
    estimates: CurveCache, plan: RankedPlan, options: Sequence[ScheduleOption], beat: float
) -> tuple[RankedPlan, int]:
    """Return a plan with the schedule with which it is fastest and fits, and how many passes were simulated for that.

    Every schedule's passes are played with the seconds of the plan's own stages; those that come near the best and fit
    are simulated. Whether the others fit is found out where it is asked.

    Args:
        estimates: cost curves of the graph on the cluster.
        plan: the plan as it was simulated, with one of the schedules.
        options: the schedules that it may have.
        beat: seconds of the best of other plans: a schedule that is far from them is not simulated.
    """
    best, passes, tried = plan, 0, list[ScheduleTrial]()
    for trial in sorted(_play_trials(estimates, plan, options), key=lambda t: penalize(t.seconds, t.option)):
        is_near = penalize(trial.seconds, trial.option) <= NEAR * min(beat, _weigh(best))
        if trial.priced is None or not is_near or trial.missing_bytes:
            tried.append(trial)
            continue
        rescheduled_plan = trial.priced.simulate()
        passes += rescheduled_plan.plan.pipeline * rescheduled_plan.plan.microbatches
        best = _keep_better(best, rescheduled_plan, best.trials)
    trials = sorted([*best.trials, *tried], key=lambda trial: trial.seconds)
    return replace(best, trials=tuple(trials)), passes


def simulate_runner_up(estimates: CurveCache, best: RankedPlan) -> RankedPlan:
    """Return the plan with the next best of its schedules simulated, if none of those that fit was."""
    if any(trial.is_simulated for trial in best.trials):
        return best
    fastest = next((trial for trial in best.trials if not trial.missing_bytes), None)
    if fastest is None:
        return best
    changed = with_schedule(estimates, best.candidate, fastest.option)
    assert changed is not None  # it was played
    other_trials = [trial for trial in best.trials if trial is not fastest]
    return _keep_better(best, price_plan(estimates, changed).simulate(), other_trials)


def _keep_better(best: RankedPlan, plan: RankedPlan, tried: Sequence[ScheduleTrial]) -> RankedPlan:
    """Return the better of two schedules of a plan, with the other one as a trial beside those given."""
    loser = plan
    if _weigh(plan) < _weigh(best):
        # Estimates are compared with estimates: the schedule changes it as it changes the simulated time.
        seconds = best.candidate.seconds * plan.prediction.seconds / best.prediction.seconds
        candidate = replace(plan.candidate, seconds=seconds, peak_bytes=float(plan.peak_bytes))
        best, loser = replace(plan, candidate=candidate), best
    trials = [*tried, ScheduleTrial(loser.candidate.option, loser.prediction.seconds, True)]
    return replace(best, trials=tuple(sorted(trials, key=lambda trial: trial.seconds)))


def _weigh(plan: RankedPlan) -> float:
    return penalize(plan.prediction.seconds, plan.candidate.option)


def _play_trials(estimates: CurveCache, plan: RankedPlan, options: Sequence[ScheduleOption]) -> list[ScheduleTrial]:
    """Return every other schedule that a plan's graph and its replicas allow, with the seconds that it would take."""
    candidate = plan.candidate
    stages, max_stages = len(candidate.meshes), estimates.max_stages
    usable = usable_options(options, stages, candidate.microbatches, max_stages, candidate.sync, candidate.turns)
    usable = [option for option in usable if option != candidate.option]
    if not usable or candidate.option[0] in ASYNCHRONOUS:
        return []
    # What follows the passes (reductions, the optimizer) stays.
    timeline = plan.prediction.timeline
    closing_seconds = timeline.makespan() - max(span.end for span in timeline.spans if span.action.kind in PASSES)
    trials = list[ScheduleTrial]()
    for option in usable:
        changed = with_schedule(estimates, candidate, option)
        if changed is None:
            continue
        priced = price_plan(estimates, changed)
        trials.append(ScheduleTrial(option, _play_passes(priced) + closing_seconds, False, priced))
    return trials


def with_schedule(estimates: CurveCache, candidate: RatedPlan, option: ScheduleOption) -> RatedPlan | None:
    """Return a candidate with another schedule, cut for it; None where its stages cannot be divided into chunks."""
    if option[1] > 1 and (candidate.stage_of_piece or len(set(candidate.meshes)) > 1):
        return None
    if candidate.option[1] > 1:
        plain = cut_for_plain_schedule(estimates, candidate)
        return None if plain is None else change_schedule(estimates, plain, option)
    return change_schedule(estimates, replace(candidate, option=PLAIN_SCHEDULE), option)


def _play_passes(priced: PricedPlan) -> float:
    """Return the seconds of the passes of a step and of the messages between them, each as early as it can be.

    Steps follow each other at the distance at which no worker has two at once.
    """
    plan, graph = priced.plan, stage_graph_of(priced.partition, priced.plan)
    problem = build_problem(priced.costs, graph, ())
    lanes = schedule_lanes(plan.schedule, graph, plan.microbatches, plan.stage_groups)
    orders = lanes_to_orders(problem, lanes)
    played = play_orders(problem, orders)
    assert played is not None  # named schedules have no circles
    ends, begins = ([played.heads[order[at]] for order in orders] for at in (-1, 0))
    durations = (played.seconds[order[-1]] for order in orders)
    return max(end + duration - begin for begin, end, duration in zip(begins, ends, durations, strict=True))
