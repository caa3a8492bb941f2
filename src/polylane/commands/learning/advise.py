"""``polylane advise``: which batch, with which plan, makes the most progress in a second at a run's noise scale."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from polylane.commands import planning, printing
from polylane.commands import user_inputs as inputs
from polylane.commands.learning.advise_request import AdviseRequest
from polylane.commands.learning.finished_steps import FinishedSteps, RunOptions, read_options, read_steps
from polylane.commands.requests import PlanRequest
from polylane.efficiency.batch_choice import (
    FEWEST_EPOCH_STEPS,
    BatchOption,
    RatedBatch,
    choose_batch,
    list_batches,
    rate_batches,
)
from polylane.efficiency.batch_rules import ScalingRule, learning_rate_factor
from polylane.errors import PolylaneError, format_plural
from polylane.plan.spec import shorten_plan

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.planner.problem import CapturedProblem


@planning.gc_disabled()
def run(request: AdviseRequest) -> None:
    """Print what other batches would bring to a run.

    Raises:
        PolylaneError: the folder is not one of a run; its noise scale is not known (yet); the recipe is wrong.
    """
    options, steps = read_options(request.run), read_steps(request.run)
    noise = steps.deciding_noise
    if noise.scale is None:
        raise PolylaneError(_explain_missing(request.run, steps))
    base = steps.batch or options.batch
    ranked = rate_batches(_find_options(request, options, base), noise, base)
    cheapest = min(ranked, key=lambda row: row.price_of_progress) if ranked[0].option.price else None
    words = _describe(request, steps, ranked, cheapest, base)
    if request.json:
        printing.print_json(
            {
                "noise": steps.noise.to_dict(),
                "adam_noise": steps.adam_noise.to_dict() if steps.adam_noise.batches else None,
                "batch": base,
                "samples_per_second": steps.samples_per_second,
                "batches": [_to_dict(row, noise.scale, base) for row in ranked],
                "words": words,
            }
        )
        return
    _show(ranked, noise.scale, base)
    for line in words:
        printing.console().print(line, markup=False)


def _explain_missing(folder: Path, steps: FinishedSteps) -> str:
    batches = steps.deciding_noise.batches
    if not batches:
        return (
            f"{folder}: the gradient noise was not measured: train with --noise on, which says where the plan does not "
            "allow it"
        )
    low = steps.deciding_noise.low
    bound = f", so that the noise scale is above {low:,.0f} samples" if low else ""
    return (
        f"{folder}: not enough data yet: after {format_plural(batches, 'measured step')} the gradient is not told from "
        f"its noise{bound}: train on, or measure more steps (--noise on)"
    )


def _find_options(request: AdviseRequest, run: RunOptions, base: int) -> list[BatchOption]:
    """Return the fastest plans for each batch, with their predicted throughput.

    Raises:
        PolylaneError: no batch has a plan that fits; the message is that of the last.
    """
    from polylane.cluster.spec import load_or_parse
    from polylane.planner.find_plans import find_plans

    largest = run.population // FEWEST_EPOCH_STEPS if run.population else base * 32
    batches = sorted(request.batches) or list_batches(base, max(largest, base))
    cluster = None if request.cluster is None else load_or_parse(request.cluster)
    cluster, problem = _capture(request, run, cluster, base)
    workers = min(request.workers or cluster.count, cluster.count)
    planned = _plan_request(request, run, base)
    options, refused = list[BatchOption](), None
    for batch in batches:
        # Plans with fewer devices are slower, and may make cheaper progress.
        for count in _worker_counts(workers) if cluster.price else [None]:
            try:
                answer = find_plans(
                    problem,
                    cluster,
                    batch,
                    planning.method_of(planned),
                    workers=count or workers,
                    fewer=count is None,
                    top=1,
                    fixed=planning.fixed_keys(request.plan, planned),
                )
            except PolylaneError as error:
                refused = error
                continue
            best = answer.ranked_plans[0]
            price = cluster.price * best.plan.workers / cluster.count
            speed = best.prediction.samples_per_second
            options.append(BatchOption(batch, speed, best.plan.spec, best.plan.workers, price))
    if not options:
        raise refused or PolylaneError("--batches names no batch")
    return options


def _worker_counts(max_workers: int) -> Iterator[int]:
    count = 1
    while count < max_workers:
        yield count
        count *= 2
    yield max_workers


def _plan_request(request: AdviseRequest, run: RunOptions, batch: int) -> PlanRequest:
    return PlanRequest(
        recipe=run.recipe,
        batch=batch,
        settings=run.settings,
        seed=run.seed,
        cluster=request.cluster or "",
        dtype=request.dtype,
        plan=request.plan,
    )


def _capture(
    request: AdviseRequest, run: RunOptions, cluster: Cluster | None, base: int
) -> tuple[Cluster, CapturedProblem]:
    """Return the cluster, and the training captured with what its prediction needs; this machine is measured."""
    # Operators are measured with the samples that plans for the base batch lead to, and extrapolated for others.
    planned = _plan_request(request, run, base)
    recipe = inputs.open_recipe(planned)
    if cluster is not None:
        return cluster, planning.capture_for_prediction(recipe, cluster, planned)[1]
    from polylane.auto.choose import EXAMPLE, measure
    from polylane.probe.machine import local_cluster
    from polylane.runtime.workers.threads import limit_to_one_thread

    limit_to_one_thread()
    problem = replace(inputs.open_problem(recipe, planned).problem, batch_size=None)
    graph, workers = problem.capture(EXAMPLE), request.workers or run.workers
    return local_cluster(workers), problem.captured(graph, profile=measure(graph, problem, workers))


def _to_dict(row: RatedBatch, scale: float, base: int) -> dict[str, Any]:
    rates = {str(rule): learning_rate_factor(rule, scale, row.option.batch, base) for rule in get_args(ScalingRule)}
    return {**asdict(row.option), **{k: v for k, v in asdict(row).items() if k != "option"}, "learning_rate": rates}


def _show(ranked: Sequence[RatedBatch], scale: float, base: int) -> None:
    columns = ["batch", "plan", "workers", "samples/s", "efficiency", "95%", "goodput", "per step", "rate", "Adam's"]
    is_priced = any(row.option.price for row in ranked)
    grid = printing.make_table("Batches, the most progress in a second first", *columns, left=["plan"])
    if is_priced:
        grid.add_column("price", justify="right", no_wrap=True)
    best_of_batch = {row.option.batch: row for row in reversed(ranked)}
    for row in ranked:
        option = row.option
        if best_of_batch[option.batch] is not row:  # another number of devices, which is slower
            continue
        grid.add_words(
            str(option.batch) + (" *" if option.batch == base else ""),
            shorten_plan(option.plan),
            str(option.workers),
            f"{option.samples_per_second:,.0f}",
            f"{row.efficiency:.0%}",
            "" if option.batch == base else f"{row.efficiency_low:.0%}-{row.efficiency_high:.0%}",
            f"{row.goodput:,.0f}",
            f"{row.gain:.2f}",
            f"{learning_rate_factor('adascale', scale, option.batch, base):.2f}",
            f"{learning_rate_factor('adascale-sqrt', scale, option.batch, base):.2f}",
            *([f"{row.price_of_progress:.2g}"] if is_priced else []),
        )
    printing.print_table(printing.console(), grid)


def _describe(
    request: AdviseRequest,
    steps: FinishedSteps,
    ranked: Sequence[RatedBatch],
    cheapest: RatedBatch | None,
    base: int,
) -> list[str]:
    """Return what the table means, in sentences."""
    noise, best, options = steps.deciding_noise, ranked[0], [row.option for row in ranked]
    assert noise.scale is not None and noise.low is not None and noise.high is not None
    kind = " as Adam divides gradients" if noise is steps.adam_noise else ""
    words = [
        f"The gradient noise scale{kind} is {noise.scale:,.0f} samples (95%: {noise.low:,.0f} to {noise.high:,.0f}), "
        f"from {format_plural(noise.batches, 'step')} of {base} samples (*). Goodput counts samples of such steps.",
    ]
    ends = sorted({choose_batch(options, scale, base).batch for scale in (noise.low, noise.high)})
    span = f"; within the interval {ends[0]} to {ends[-1]}" if len(ends) > 1 else ""
    at_base = max((row.goodput for row in ranked if row.option.batch == base), default=0.0)
    improvement = (
        f", {best.goodput / at_base:.2f} times the progress in a second of batches of {base}" if at_base else ""
    )
    words.append(f"Best: batches of {best.option.batch} by {best.option.plan}{improvement}{span}.")
    if len(ranked) > 1 and best.option.batch == max(option.batch for option in options):
        words.append("It is the largest batch compared: compare larger ones with --batches.")
    elif len(ranked) > 1 and best.option.batch == min(option.batch for option in options):
        words.append("It is the smallest batch compared: compare smaller ones with --batches.")
    if cheapest is not None and cheapest is not best:
        words.append(
            f"Cheapest: batches of {cheapest.option.batch} by {cheapest.option.plan}, at "
            f"{cheapest.price_of_progress / best.price_of_progress:.0%} of that one's price for the same progress."
        )
    words.append(
        f"A learning rate for batches of {base} follows by × {best.gain:.2f} (AdaScale, SGD) or × {best.gain**0.5:.2f} "
        f"(Adam); linear would be × {best.option.batch / base:.2f}."
    )
    if steps.samples_per_second and request.cluster is None:
        words.append(f"Measured in the run: {steps.samples_per_second:,.0f} samples/s. The table's are predicted.")
    return words
