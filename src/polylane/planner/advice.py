"""Advice on a found plan: its bottleneck, the alternatives, what would make it faster, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polylane.cluster.cluster import Cluster, Links
from polylane.cluster.link import Link
from polylane.cost.predict import Prediction
from polylane.observe.time_account import account_time
from polylane.plan.fixed_keys import ScheduleOption
from polylane.plan.options import ROUND_ROBIN
from polylane.plan.spec import format_degrees, shorten_plan
from polylane.plan.sync import SUM
from polylane.planner.ranked_plan import RankedPlan, weigh
from polylane.planner.schedule_options import PLAIN_SCHEDULE, penalize
from polylane.planner.search import SearchResult, search
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan, UniformPlan, rate_uniform_plan

ISSUING = "the host, which does not issue operators as fast as the device computes them"
# Relative speed-up below which a change is not worth mentioning.
WORTH = 0.03
# Plans of a search, the fastest first, that are rated again to see what would make the step faster.
RATED_AGAIN = 48


@dataclass(frozen=True)
class StepShare:
    """Fraction of a step that the busiest worker spends on one activity."""

    name: str
    share: float


@dataclass(frozen=True)
class Improvement:
    """Speed-up by a change: ``faster`` is the ratio of samples per second, with the best plan then."""

    change: str
    faster: float
    plan: str


@dataclass(frozen=True)
class ScheduleAdvice:
    """The best plan's pipeline schedule, beside the others of the same stages and microbatches.

    Attributes:
        name: name of the best plan's schedule, and its chunks.
        bubble: fraction of the workers' time in which they wait.
        runner_up: the next best one; "" if none fits.
        runner_up_times: its simulated step, relative to that of the best; None if there is none.
        plain_times: 1F1B's step relative to that of the best, maybe an estimate; None where it is one of these two.
        not_fitting: (schedule, missing bytes of the worker with the most) of those that memory excludes.
    """

    name: str
    bubble: float
    runner_up: str
    runner_up_times: float | None
    plain_times: float | None
    not_fitting: tuple[tuple[str, float], ...]


@dataclass(frozen=True)
class Advice:
    """Everything that is reported about the best plan of a search.

    Attributes:
        parts: fractions of the best plan's step, the largest first.
        families: (family, its best plan, step time relative to the best) for every other family that fits.
        alone: step time of one device relative to the best; None if the model does not fit on it, or the plan's fixed
            keys ask for more.
        helps: changes that would speed up the step, the most effective first.
        excluded: (plan, relative step time, missing bytes) of plans that would be faster but do not fit.
        schedule: the best plan's schedule beside the others, where there are any.
        one_is_too_small: whether one device was tried and lacks the memory.
    """

    parts: tuple[StepShare, ...]
    families: tuple[tuple[str, str, float], ...]
    alone: float | None
    helps: tuple[Improvement, ...]
    excluded: tuple[tuple[str, float, float], ...]
    schedule: ScheduleAdvice | None = None
    one_is_too_small: bool = False


def advise(answer: SearchResult) -> Advice:
    """Return advice on the result of a search that found at least one plan."""
    best = answer.ranked_plans[0]
    return Advice(
        step_shares(best.prediction),
        tuple(_compare_families(answer, best)),
        _single_device_factor(answer, best),
        tuple(_find_improvements(answer, best)),
        tuple(
            (describe_candidate(c), c.seconds / best.candidate.seconds, c.peak_bytes - c.memory_limit)
            for c in answer.too_large_candidates
            if c.seconds < best.candidate.seconds * (1 - WORTH)
        ),
        compare_schedules(best),
        any(c.workers == 1 for c in answer.too_large_candidates),
    )


def compare_schedules(best: RankedPlan) -> ScheduleAdvice | None:
    """Return the schedule of a plan beside the others that were tried; None where there is nothing to schedule."""
    if not best.trials:
        return None
    seconds = best.prediction.seconds
    lacking = tuple((describe_schedule(t.option), t.missing_bytes) for t in best.trials if t.missing_bytes)
    # Only a simulated time is said.
    rival = min((t for t in best.trials if t.is_simulated), key=lambda t: penalize(t.seconds, t.option), default=None)
    plain = next((t.seconds / seconds for t in best.trials if t.option == PLAIN_SCHEDULE), None)
    return ScheduleAdvice(
        describe_schedule(best.candidate.option),
        best.prediction.bubble,
        "" if rival is None else describe_schedule(rival.option),
        None if rival is None else rival.seconds / seconds,
        None if rival is None or rival.option == PLAIN_SCHEDULE else plain,
        lacking,
    )


def describe_schedule(option: ScheduleOption) -> str:
    """Return a schedule's name, with its chunks where it has any."""
    name, chunks = option
    return f"{name} with {chunks} chunks" if chunks > 1 else name


def step_shares(prediction: Prediction) -> tuple[StepShare, ...]:
    """Return the fractions of a step: computing, collectives inside passes, pipeline, gradients, optimizer."""
    step, timeline = prediction.seconds, prediction.timeline
    if not step:
        return ()
    # The busiest lane is the bottleneck; its waits inside passes are reported separately from exposed messages.
    lane = max(range(timeline.ranks), key=lambda rank: timeline.busy()[rank])
    stage = prediction.plan.stage_and_replica(prediction.lanes[lane])[0]
    stage_cost, microbatches = prediction.stages[stage], prediction.plan.turns(stage)
    waits = microbatches * stage_cost.collective_seconds
    account = account_time(timeline).ranks[lane]
    moving = max(0.0, account.moving - waits)
    issuing = microbatches * stage_cost.passes.stalled
    seconds = {
        "computing": timeline.busy()[lane] - stage_cost.update_seconds - issuing,
        ISSUING: issuing,
        "collectives of split operators": waits,
        "gradients and messages that nothing hides": moving,
        "waiting for other stages": max(0.0, account.waited + account.bubble - prediction.overlap),
        "the optimizer": stage_cost.update_seconds,
    }
    return tuple(
        StepShare(n, s / step) for n, s in sorted(seconds.items(), key=lambda item: -item[1]) if s > 0.005 * step
    )


def plan_family(candidate: RatedPlan) -> str:
    """Return the family of a plan: the axes along which it is parallel, in words."""
    if candidate.workers == 1:
        return "one device"
    if candidate.stage_of_piece:
        return "branches"
    axes = [axis for axis in ("data", "sequence", "tensor") if max(getattr(m, axis) for m in candidate.meshes) > 1]
    if len(candidate.meshes) > 1:
        axes.append("pipeline")
    return " and ".join(axes) + (", unequal stages" if len(set(candidate.meshes)) > 1 else "")


def describe_candidate(candidate: RatedPlan) -> str:
    """Return a candidate as one line in the plan syntax."""
    words = [*format_degrees(candidate.meshes), f"microbatches={candidate.microbatches}"]
    schedule, chunks = candidate.option
    words += [] if candidate.option == PLAIN_SCHEDULE else [f"schedule={schedule}"]
    words += [f"chunks={chunks}"] if chunks > 1 else []
    words += [f"replicas={ROUND_ROBIN}"] if candidate.takes_turns else []
    return ",".join([*words, *candidate.sync.to_words()])


def _compare_families(answer: SearchResult, best: RankedPlan) -> list[tuple[str, str, float]]:
    families: dict[str, RatedPlan] = {}
    for candidate in answer.fitting_candidates:
        families.setdefault(plan_family(candidate), candidate)
    # The best plan's own family is no alternative; a single device is reported separately.
    families.pop(plan_family(best.candidate), None)
    families.pop("one device", None)
    order = sorted(families.items(), key=lambda item: item[1].seconds)
    return [(name, describe_candidate(c), c.seconds / best.candidate.seconds) for name, c in order]


def _single_device_factor(answer: SearchResult, best: RankedPlan) -> float | None:
    single = [c.seconds for c in answer.fitting_candidates if c.workers == 1]
    return min(single) / best.candidate.seconds if single else None


def _find_improvements(answer: SearchResult, best: RankedPlan) -> list[Improvement]:
    """Rate the fastest plans of a search again, with twice the bandwidth, memory or batch; return what is faster.

    By estimate only, and plans with equal meshes only. Those that were too large are among them: with more memory they
    may fit.
    """
    estimates, wish = answer.estimates, answer.wish
    cluster, gains = estimates.basis.cluster, list[Improvement]()
    pace = best.candidate.seconds / estimates.batch
    known_plans = sorted((*answer.fitting_candidates, *answer.too_large_candidates), key=lambda c: c.seconds)
    equal_plans = [c for c in known_plans if len(set(c.meshes)) == 1 and not c.stage_of_piece][:RATED_AGAIN]

    def rate_again(change: str, curves: CurveCache, limit: float, counts: Sequence[int] = (1,)) -> None:
        variants = {c.sync: curves.with_sync(c.sync) if c.sync != SUM else curves for c in equal_plans}
        uniform_plans = [
            (variants[c.sync], replace(uniform, microbatches=count * uniform.microbatches))
            for c, uniform in ((c, UniformPlan.of(c)) for c in equal_plans)
            for count in counts
        ]
        rated_plans = [rate_uniform_plan(*pair, limit, wish.fixed.schedules) for pair in uniform_plans]
        fitting = [c for c in rated_plans if c is not None and c.fits]
        if fitting:
            fastest = min(fitting, key=lambda c: weigh(c, c.seconds))
            gains.append(Improvement(change, pace / (fastest.seconds / curves.batch), describe_candidate(fastest)))

    if cluster.count > 1:
        rate_again("links twice as fast", estimates.on_cluster(with_faster_links(cluster, 2.0)), wish.memory_limit)
    rate_again("twice the memory", estimates, 2 * wish.memory_limit)
    double_batch = CurveCache(estimates.basis, 2 * estimates.batch, estimates.staying, estimates.sync)
    counts = (1,) if wish.microbatches is not None else (1, 2)
    rate_again("twice the batch", double_batch, wish.memory_limit, counts)
    return sorted((h for h in gains if h.faster > 1 + WORTH), key=lambda h: -h.faster)


def with_faster_links(cluster: Cluster, factor: float) -> Cluster:
    """Return the cluster with ``factor`` times the bandwidth on every link."""

    def better(link: Link | None) -> Link | None:
        if link is None:
            return None
        total = None if link.total is None else link.total * factor
        local = None if link.local is None else link.local * factor
        return link.model_copy(update={"bandwidth": link.bandwidth * factor, "total": total, "local": local})

    hosts = tuple(group.model_copy(update={"link": better(group.link)}) for group in cluster.hosts)
    links = cluster.links
    return Cluster(
        hosts, Links(hosts=better(links.hosts), racks=better(links.racks), sites=better(links.sites)), cluster.speeds
    )


def with_more_hosts(cluster: Cluster, factor: int) -> Cluster:
    """Return the cluster with ``factor`` times the hosts of each kind; a single host's link also connects hosts."""
    hosts = tuple(group.model_copy(update={"count": group.count * factor}) for group in cluster.hosts)
    between = cluster.links.hosts or cluster.hosts[0].link
    return Cluster(hosts, cluster.links.model_copy(update={"hosts": between}), cluster.speeds)


def devices_needed(answer: SearchResult, max_devices: int) -> int | None:
    """Return how many such devices would have the memory, in powers of two; None if even ``max_devices`` have not."""
    estimates, wish = answer.estimates, answer.wish
    cluster, factor = estimates.basis.cluster, 2
    if (
        estimates.footprint.available_bytes(wish.memory_limit) <= 0
    ):  # what a worker takes beyond its tensors is too much
        return None
    while cluster.count * factor <= max_devices:
        workers = max(wish.workers) * factor
        curves = estimates.on_cluster(with_more_hosts(cluster, factor))
        if search(curves, replace(wish, workers=(workers,)), finalists=0).fitting_candidates:
            return workers
        factor *= 2
    return None


def _explain_single_device(advice: Advice) -> str:
    if advice.parts and advice.parts[0].name == ISSUING:
        return "the host has as many operators to issue however few samples a device has, so a part takes as long"
    return "what they would send each other takes longer than it saves"


def _explain_schedule(schedule: ScheduleAdvice, show_bytes: Callable[[float], str]) -> str:
    words = f"Schedule {schedule.name}, under which workers wait {schedule.bubble:.0%} of a step"
    if schedule.runner_up:
        words += f"; with {schedule.runner_up} it would take {schedule.runner_up_times:.2f} times as long"
        words += f", with 1f1b about {schedule.plain_times:.2f}" if schedule.plain_times is not None else ""
    lacking = " and ".join(f"{name} needs {show_bytes(lack)} more memory" for name, lack in schedule.not_fitting[:2])
    return f"{words}{'; ' * bool(lacking)}{lacking}."


def advice_sentences(advice: Advice, best: RankedPlan, show_bytes: Callable[[float], str]) -> Sequence[str]:
    """Return the advice as sentences for the user."""
    lines = []
    if advice.parts:
        main_part, *smaller_parts = advice.parts
        also = ", ".join(f"{part.name} {part.share:.0%}" for part in smaller_parts)
        lines.append(f"Bound by {main_part.name}, {main_part.share:.0%} of a step{f'; then {also}' if also else ''}.")
    if advice.schedule is not None:
        lines.append(_explain_schedule(advice.schedule, show_bytes))
    for name, line, times in advice.families[:4]:
        length = f"{times:.2f} times as long" if times >= 1.005 else "as long"
        lines.append(f"Best with {name} instead: {shorten_plan(line)}, {length}.")
    if best.candidate.workers == 1:
        lines.append(f"One device is better than several: {_explain_single_device(advice)}.")
    elif advice.alone is not None:
        lines.append(f"One device alone would take {advice.alone:.2f} times as long.")
    elif advice.one_is_too_small:
        lines.append("One device alone does not have the memory.")
    for help_ in advice.helps:
        lines.append(f"With {help_.change}: {help_.faster:.2f} times as fast, as {shorten_plan(help_.plan)}.")
    if not advice.helps:
        lines.append("Neither faster links, nor more memory, nor a bigger batch would make it more than 3% faster.")
    for line, times, lack in advice.excluded[:3]:
        lines.append(f"{line} would take {times:.2f} of the time, but needs {show_bytes(lack)} more memory per worker.")
    return lines
