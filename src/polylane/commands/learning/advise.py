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
from polylane.efficiency.batch_rules import ScalingRule, choose_rule, learning_rate_factor
from polylane.efficiency.noise_window import NoiseScale
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
    noise = steps.noise.deciding
    if noise.scale is None:
        raise PolylaneError(_explain_missing(request.run, steps))
    base = steps.batch or options.batch
    ranked = rate_batches(_find_options(request, options, base), noise, base)
    words = [*_describe_run(options, steps, base), *_describe_best(options, noise, ranked, base)]
    rule = choose_rule(options.divides_gradients or steps.noise.is_divided)
    words.append(_describe_rate(steps, ranked[0].option, noise.scale, rule, base))
    measured = ""
    if steps.samples_per_second and request.cluster is None:
        measured = f"; the run made {steps.samples_per_second:,.0f} with batches of {base}, by its own plan"
    words.append(f"The table's samples/s are predicted{measured}.")
    if request.json:
        printing.print_json(
            {
                "noise": steps.noise.plain.to_dict(),
                "adam_noise": steps.noise.adam.to_dict() if steps.noise.is_divided else None,
                "batch": base,
                "samples_per_second": steps.samples_per_second,
                "batches": [_to_dict(row, noise.scale, base) for row in ranked],
                "words": words,
            }
        )
        return
    _show(ranked, noise.scale, rule, base)
    for line in words:
        printing.console().print(line, markup=False)


def _explain_missing(folder: Path, steps: FinishedSteps) -> str:
    batches = steps.noise.deciding.batches
    if not batches:
        return (
            f"{folder}: the gradient noise was not measured: train with --noise on, which says where the plan does not "
            "allow it"
        )
    low = steps.noise.deciding.low
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

    batches = sorted(request.batches) or list_batches(base, _find_largest(run, base))
    cluster = None if request.cluster is None else load_or_parse(request.cluster)
    # What this machine costs is not known: the presets' prices are those of rented devices.
    total_price = 0.0 if cluster is None else cluster.price
    cluster, problem = _capture(request, run, cluster, base)
    workers = min(request.workers or cluster.count, cluster.count)
    planned = _plan_request(request, run, base)
    options, refused = list[BatchOption](), None
    for batch in batches:
        # Plans with fewer devices are slower, and may make cheaper progress.
        for count in _worker_counts(workers) if total_price else [None]:
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
            price = total_price * best.plan.workers / cluster.count
            speed = best.prediction.samples_per_second
            options.append(BatchOption(batch, speed, best.plan.spec, best.plan.workers, price))
    if not options:
        raise refused or PolylaneError("--batches names no batch")
    return options


def _find_largest(run: RunOptions, base: int) -> int:
    """Return the most samples of a batch that is compared unless the user names others."""
    return max(run.population // FEWEST_EPOCH_STEPS if run.population else base * 32, base)


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


def _show(ranked: Sequence[RatedBatch], scale: float, rule: ScalingRule, base: int) -> None:
    columns = ["batch", "plan", "workers", "samples/s", "efficiency", "95%", "goodput", "per step", "rate"]
    is_priced = any(row.option.price for row in ranked)
    grid = printing.make_table("Batches, the most progress in a second first", *columns, left=["plan"])
    if is_priced:
        grid.add_column("price/1,000 steps", justify="right", no_wrap=True)
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
            f"{learning_rate_factor(rule, scale, option.batch, base):.2f}",
            *([f"{row.price_of_progress:.2g}"] if is_priced else []),
        )
    printing.print_table(printing.console(), grid)


def _describe_run(run: RunOptions, steps: FinishedSteps, base: int) -> list[str]:
    """Return what the run has measured, and what the table counts by, in sentences."""
    noise = steps.noise.deciding
    assert noise.scale is not None and noise.low is not None and noise.high is not None
    kind = " of gradients as Adam divides them" if steps.noise.is_divided else ""
    sizes = " to ".join(str(size) for size in sorted({steps.measured_sizes[0], steps.measured_sizes[-1]}))
    words = [
        f"The gradient noise scale{kind} is {noise.scale:,.0f} samples (95%: {noise.low:,.0f} to {noise.high:,.0f}), "
        f"from {format_plural(noise.batches, 'measured step')} of {sizes} samples."
    ]
    if steps.rate_factor is not None:
        words.append(
            f"--batch auto has changed the batch from {run.batch} to {base} samples, and the learning rate with it: it "
            f"is {steps.rate_factor:.2f} times what it would be with the first batch."
        )
    return [*words, f"Goodput counts samples of batches of {base} (*), those of the run's latest steps."]


def _describe_best(run: RunOptions, noise: NoiseScale, ranked: Sequence[RatedBatch], base: int) -> list[str]:
    """Return which batch makes the most progress in a second, and which the cheapest, in sentences."""
    best, options = ranked[0], [row.option for row in ranked]
    assert noise.low is not None and noise.high is not None
    ends = sorted({choose_batch(options, scale, base).batch for scale in (noise.low, noise.high)})
    span = f"; at the ends of the noise scale's interval {ends[0]} and {ends[-1]}" if len(ends) > 1 else ""
    at_base = max((row.goodput for row in ranked if row.option.batch == base), default=0.0)
    improvement = (
        f", {best.goodput / at_base:.2f} times the progress in a second of batches of {base}" if at_base else ""
    )
    words = [f"Best: batches of {best.option.batch} by {best.option.plan}{improvement}{span}."]
    sizes = [option.batch for option in options]
    if min(sizes) < max(sizes) == best.option.batch:
        bound = ""
        if run.population and 2 * best.option.batch > _find_largest(run, base):
            bound = f", and twice it would be more than a quarter of the {run.population:,} samples of an epoch"
        words.append(f"It is the largest batch compared{bound}: compare larger ones with --batches.")
    elif min(sizes) == best.option.batch < max(sizes):
        words.append("It is the smallest batch compared: compare smaller ones with --batches.")
    cheapest = min(ranked, key=lambda row: row.price_of_progress)
    if cheapest.option.price and cheapest is not best:
        words.append(
            f"Cheapest: batches of {cheapest.option.batch} by {cheapest.option.plan}, at "
            f"{cheapest.price_of_progress / best.price_of_progress:.0%} of that one's price for the same progress."
        )
    return words


def _describe_rate(steps: FinishedSteps, best: BatchOption, scale: float, rule: ScalingRule, base: int) -> str:
    """Return how the learning rate follows to the best batch, in a sentence."""
    if best.batch == base:
        return "The learning rate stays as it is."
    latest = "" if steps.learning_rate is None else f" ({steps.learning_rate:.4g} in the latest step)"
    words = (
        "AdaScale's gain" if rule == "adascale" else "the root of AdaScale's gain, as the optimizer divides gradients"
    )
    return (
        f"With batches of {best.batch} multiply the run's learning rate{latest} by "
        f"{learning_rate_factor(rule, scale, best.batch, base):.2f}: {words}."
    )
