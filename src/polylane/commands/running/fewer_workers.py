"""Fewer workers: the plans by which a training goes on without some of its workers, made before any is lost."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from polylane.auto.choose import choose
from polylane.auto.on_workers import resolve_plan
from polylane.commands.requests import TrainRequest
from polylane.commands.running.resume import read_saved_plan
from polylane.errors import PolylaneError, clean_sentence, format_plural
from polylane.plan.fewer_workers import change_replicas, keep_numbers, keeps
from polylane.plan.fixed_keys import parse_auto
from polylane.plan.plan import AnyPlan, Plan
from polylane.plan.spec import default_microbatches, parse
from polylane.probe.machine import local_cluster
from polylane.runtime.workers.world import World

if TYPE_CHECKING:
    from polylane.compile.training_problem import TrainingProblem


def plan_fewer(problem: TrainingProblem | None, plan: AnyPlan, fewest: int, samples: int) -> dict[int, AnyPlan]:
    """Return a plan for each number of workers below a plan's; none for those numbers that have no plan.

    Args:
        problem: the training; where a search is needed, its model is measured. None: nothing is searched.
        plan: the plan that it begins with.
        fewest: the smallest number of workers.
        samples: number of samples of a batch.
    """
    plans: dict[int, AnyPlan] = {}
    microbatches = _microbatches_of(plan, None, samples)
    for workers in range(plan.processes - 1, fewest - 1, -1):
        if (fewer_replicas := change_replicas(plan, workers, microbatches)) is not None:
            plans[workers] = fewer_replicas
        elif problem is not None and (best := _search(problem, workers, plan, microbatches)) is not None:
            plans[workers] = best
    return plans


def _search(problem: TrainingProblem, workers: int, plan: AnyPlan, microbatches: int) -> Plan | None:
    # What is sharded or served changes no numbers, and may have no place among fewer workers.
    spec = parse(plan.spec) if isinstance(plan, Plan) else plan
    wishes = [keep_numbers(spec, microbatches), keep_numbers(replace(spec, sync=type(plan.sync)()), microbatches)]
    for wish in wishes if plan.sync.is_exact else wishes[:1]:
        try:
            # For the example's samples, which are fewer than the batch where the dataset is smaller.
            answer = choose(replace(problem, batch_size=None), (workers,), local_cluster(workers), True, wish)
            return answer.ranked_plans[0].plan
        except PolylaneError:
            continue
    return None


def describe_fewer(plans: Mapping[int, AnyPlan], fewest: int, max_workers: int) -> str:
    """Describe the plans for fewer workers in one line."""
    missing = [workers for workers in range(max_workers - 1, fewest - 1, -1) if workers not in plans]
    words = [f"with {workers} by {_describe_plan(plan)}" for workers, plan in plans.items()]
    words += [f"with {workers} not at all: there is no plan of the same numbers" for workers in missing]
    return f"if workers are lost: {'; '.join(words)}"


def _describe_plan(plan: AnyPlan) -> str:
    if isinstance(plan, Plan):
        return plan.spec
    words = [f"{axis}={n}" for axis in ("data", "pipeline", "sequence", "tensor") if (n := getattr(plan, axis)) > 1]
    return ",".join([*(words or ["data=1"]), f"microbatches={plan.microbatches}", *plan.sync.to_words()])


# Under torchrun ------------------------------------------------------------------------------------------------------


def plan_for_started(world: World, problem: TrainingProblem, request: TrainRequest) -> AnyPlan:
    """Return the plan for as many workers as torchrun has started this time; a collective of all workers.

    The plan that is asked for, if it takes so many. Otherwise, where the run goes on from checkpoints or has a range of
    workers, the one for so many workers with as many microbatches.

    Args:
        world: the process group of all workers.
        problem: the training; where a search is needed, rank 0 measures its model.
        request: the options of the command line; on every worker the same but for a plan that was taken over.

    Raises:
        PolylaneError: on every worker, where there is no plan for so many.
    """
    assert request.plan is not None
    _check_range(world, request)
    saved = gather_saved_plan(world, request)
    fixed = parse_auto(request.plan)
    small = replace(problem, batch_size=None)  # plans are searched for the example's samples
    if fixed is None:
        plan = parse(request.plan) if isinstance(request.plan, str) else request.plan
        if plan.processes == world.size or not request.is_elastic:
            return plan
        microbatches = _microbatches_of(plan, saved, small.samples)
        natural = change_replicas(plan, world.size, microbatches)
        if natural is not None:
            # Cuts of the checkpoint's plan are taken over, so that the numbers stay the same bit for bit.
            chosen = saved if saved is not None and parse(saved.spec) == natural else natural
            _tell(world, f"--plan takes {format_plural(plan.processes, 'worker')}, and there are {world.size} now: "
                  f"continues with {_describe_plan(natural)}")  # fmt: skip
            return chosen
        fixed = keep_numbers(plan, microbatches)
    elif saved is not None and "microbatches" not in fixed.counts:
        fixed = replace(fixed, counts={**fixed.counts, "microbatches": saved.microbatches})
    if saved is not None and saved.processes == world.size and keeps(saved, fixed):
        return saved
    return resolve_plan(world, small, f"auto,{fixed}" if str(fixed) else "auto")


def _check_range(world: World, request: TrainRequest) -> None:
    fewest, max_workers = request.fewest_workers, request.workers
    if fewest is not None and max_workers is not None and not fewest <= world.size <= max_workers:
        raise PolylaneError(f"--workers {fewest}:{max_workers}, but torchrun started {world.size}")


def gather_saved_plan(world: World, request: TrainRequest) -> Plan | None:
    """Return the plan of the checkpoint that the run goes on from, as rank 0 reads it; None for a fresh start.

    A collective of all workers.

    Raises:
        PolylaneError: on every worker, where the checkpoint is damaged.
    """
    saved_plan, error = None, ""
    if world.rank == 0 and request.resume_from is not None:
        try:
            saved_plan = read_saved_plan(request.resume_from)
        except PolylaneError as damaged:
            error = str(damaged)
    result: tuple[Plan | None, str] = world.all_gather_object((saved_plan, error))[0]
    if result[1]:
        raise PolylaneError(result[1])
    return result[0]


def _microbatches_of(plan: AnyPlan, saved: Plan | None, samples: int) -> int:
    if plan.microbatches is None and saved is not None:
        return saved.microbatches
    return default_microbatches(plan, samples)


def _tell(world: World, sentence: str) -> None:
    if world.rank == 0:
        print(f"polylane: {clean_sentence(sentence)}", file=sys.stderr, flush=True)
