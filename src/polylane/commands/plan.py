"""``polylane plan``: search the fastest plan for a cluster, and explain what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from rich.text import Text

from polylane.cluster.figures import format_size
from polylane.commands import planning, printing
from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError
from polylane.plan.fixed_keys import NOTHING_FIXED, FixedKeys
from polylane.planner.memory_reserve import USUAL, MemoryReserve, memory_limit

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import PlanRequest
    from polylane.cost.operators.training_options import TrainingOptions
    from polylane.planner.problem import CapturedProblem
    from polylane.planner.ranked_plan import RankedPlan
    from polylane.planner.search import SearchResult

MOST = 1 << 14  # most devices that "would do" may propose where nothing fits


@planning.gc_disabled()
def run(request: PlanRequest) -> None:
    """Search the plans, print the best ones and why, and write the best one where that is asked for.

    Raises:
        PolylaneError: an option or the recipe is wrong, or nothing fits: the message then says how many devices would
            do.
    """
    from polylane.cluster.spec import load_or_parse
    from polylane.plan.plan_file import dump
    from polylane.planner import advice

    method, output = planning.method_of(request), request.output
    if output is not None:
        _check_plan_can_say(method)
    bound = None if request.memory is None else _parse_bytes(request.memory)
    cluster = load_or_parse(request.cluster)
    fixed, reserve = planning.fixed_keys(request.plan, request), planning.reserve_of(request)
    method = planning.with_fixed(method, fixed)
    _, problem = planning.capture_on_meta(inputs.open_recipe(request), cluster, request)
    answer = search_for(
        problem,
        cluster,
        request.batch,
        method,
        workers=request.workers,
        memory=bound,
        top=request.top,
        fixed=fixed,
        reserve=reserve,
    )
    kept = reserve.of(min(device.memory for device in cluster.devices(range(request.workers or cluster.count))))
    told = advice.advise(answer)
    if output is not None:
        printing.write_text(output, dump(answer.ranked_plans[0].plan))
    words = advice.advice_sentences(told, answer.ranked_plans[0], format_size)
    if request.json:
        printing.print_json(
            {
                "plans": [_row(each, cluster) for each in answer.ranked_plans],
                "advice": asdict(told),
                "words": words,
                "memory_limit": answer.wish.memory_limit,
                "reserve": kept,
            }
        )
        return
    _show(answer, cluster, [*words, _describe_limit(answer.wish.memory_limit, kept)])
    if output is not None:
        printing.console().print(f"The best plan is in {output}: polylane train {request.recipe} --plan {output}")


def _describe_limit(limit: float, kept: int) -> str:
    """Describe how much memory plans may take, and how much they leave."""
    rest = f", and leave {format_size(kept)} of it free (--reserve)" if kept else ""
    return f"Plans take at most {format_size(limit)} of a device's memory{rest}."


def _check_plan_can_say(method: TrainingOptions) -> None:
    """Refuse to write a plan that is not the one that was priced.

    Raises:
        PolylaneError: the prices would rest on an option that no plan can say, for the runtime does not do it.
    """
    if method.dtype == "float16":
        raise PolylaneError(
            "--dtype float16 is priced, but the runtime does not do it, and no plan says it: leave out --dtype, or -o"
        )


def search_for(
    problem: CapturedProblem,
    cluster: Cluster,
    batch: int,
    method: TrainingOptions,
    *,
    workers: int | None = None,
    memory: int | None = None,
    top: int = 5,
    fixed: FixedKeys | None = None,
    reserve: MemoryReserve = USUAL,
) -> SearchResult:
    """Search the fastest plans for a training on a cluster.

    Args:
        problem: the training, with its model captured.
        cluster: the devices and links on which it is to run.
        batch: number of samples of a step, over all workers.
        method: precision and recomputation of the training.
        workers: how many devices to use at most; None: all.
        memory: bytes that a worker may use; None: all that a device has but the reserve.
        top: how many plans are wanted.
        fixed: keys that a plan must have; None: all are searched.
        reserve: memory that is kept free on every device.

    Raises:
        PolylaneError: more workers than devices, or nothing fits: the message then says how many devices would do.
    """
    from polylane.planner.problem import build_cost_model
    from polylane.planner.recompute_search import search_with_recomputation
    from polylane.planner.search import SearchRequest, search
    from polylane.planner.search_progress import show_progress
    from polylane.planner.stage_curves import CurveCache

    most = cluster.count if workers is None else workers
    if most > cluster.count:
        raise PolylaneError(f"--workers {most}: the cluster has {printing.format_plural(cluster.count, 'device')}")
    limit = memory_limit(cluster, most, reserve, memory)
    host = max(group.devices for group in cluster.hosts)  # the ranks that share an operator are on one host
    fixed = fixed or NOTHING_FIXED
    # An optimizer that must see whole parameters cannot update shards of them.
    shardings = () if problem.whole else fixed.shardings
    counts = candidate_worker_counts(most)
    wish = SearchRequest(counts, host, limit, max(top, 1), shardings=shardings, fixed=fixed)
    basis = build_cost_model(problem, cluster, method)
    with show_progress() as told:
        answer = search_with_recomputation(
            basis, lambda prices: search(CurveCache(prices, batch, sync=fixed.sync), wish, told=told), fixed.recompute
        )
    if not answer.ranked_plans:
        raise PolylaneError(_explain_nothing_fits(answer))
    return _with_exact_memory(answer)


def _with_exact_memory(answer: SearchResult) -> SearchResult:
    """Return the answer with the memory of its first plan as ``simulate`` computes it, for the local samples.

    The memory of the others is scaled from a small example to the batch, and so an upper bound: what does not grow with
    the samples is counted for each of them. A first plan that turns out not to fit is left out.
    """
    from polylane.cost.predict import predict
    from polylane.planner.problem import fit_to_meshes

    for index, found in enumerate(answer.ranked_plans):
        basis = fit_to_meshes(answer.estimates.basis, found.partition, found.plan, answer.estimates.batch)
        prediction = predict(basis, found.partition, found.plan, answer.estimates.batch)
        if max(stage.memory.total for stage in prediction.stages) <= found.candidate.memory_limit:
            first = replace(found, prediction=prediction)
            return replace(answer, ranked_plans=(first, *answer.ranked_plans[index + 1 :]))
    return answer


def candidate_worker_counts(most: int) -> tuple[int, ...]:
    """Return the numbers of workers to compare: all, and since fewer may be faster, a half, a quarter and one."""
    found = [most]
    while found[-1] > 1 and len(found) < 3:
        found.append(found[-1] // 2)
    return tuple(dict.fromkeys([*found, 1]))


def _parse_bytes(text: str) -> int:
    from polylane.cluster.figures import figure

    found = figure(text)
    if found is None or not found[0] > 0 or found[1] not in ("size", None):
        raise PolylaneError(f'--memory takes a size, as in "30 GB", not {text!r}')
    return int(found[0])


def _explain_nothing_fits(answer: SearchResult) -> str:
    """Describe that nothing fits, by how much, and how many devices would do."""
    from polylane.planner.advice import devices_needed

    workers = printing.format_plural(max(answer.wish.workers), "worker")
    if not answer.too_large_candidates:
        if str(answer.wish.fixed):
            return f"no plan for {workers} and a batch of {answer.estimates.batch} samples has {answer.wish.fixed}"
        return (
            f"no plan for {workers}: a batch of {printing.format_plural(answer.estimates.batch, 'sample')} is too small"
        )
    least = min(answer.too_large_candidates, key=lambda c: c.peak_bytes)
    words = (
        f"nothing fits on {workers}: the leanest plan needs {format_size(least.peak_bytes)} per worker, "
        f"{format_size(least.peak_bytes - least.memory_limit)} more than it may have"
    )
    # This repeats the search on larger clusters.
    found = devices_needed(answer, MOST)
    return f"{words}; {found} such devices would do" if found else f"{words}; more devices do not help"


def _row(found: RankedPlan, cluster: Cluster) -> dict[str, Any]:
    prediction = found.prediction
    worst = max((stage.memory for stage in prediction.stages), key=lambda memory: memory.total)
    return {
        "plan": found.plan.spec,
        "workers": found.plan.workers,
        "step_seconds": prediction.seconds,
        "samples_per_second": prediction.samples_per_second,
        "memory": worst.total,
        "utilization": prediction.utilization,
        "exposed_communication": prediction.exposed_communication,
        # The price of a cluster is per hour and for all of its devices; a plan pays for those that it uses.
        "price": cluster.price * found.plan.workers / cluster.count * prediction.seconds / 3600,
        "estimate_seconds": found.candidate.seconds,
    }


def _show(answer: SearchResult, cluster: Cluster, words: Sequence[str]) -> None:
    title = f"Of {answer.compared_count} plans, {len(answer.fitting_candidates)} fit; the fastest"
    columns = ("plan", "workers", "step", "samples/s", "memory", "computing", "messages", "price")
    grid = printing.make_table(title, *columns, left=["plan"])
    grid.columns[0].overflow, grid.columns[0].ratio = "fold", 1
    for found in answer.ranked_plans:
        row = _row(found, cluster)
        bound = "" if found is answer.ranked_plans[0] else "≤ "  # see _with_exact_memory
        grid.add_row(
            Text(row["plan"]),
            str(row["workers"]),
            printing.format_duration(row["step_seconds"]),
            f"{row['samples_per_second']:,.1f}",
            bound + format_size(row["memory"]),
            f"{row['utilization']:.0%}",
            f"{row['exposed_communication']:.0%}",
            f"{row['price']:.2g}" if row["price"] else "",
        )
    printing.console().print(grid)
    for line in words:
        printing.console().print(line, markup=False)
