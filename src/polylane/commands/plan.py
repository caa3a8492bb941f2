"""``polylane plan``: search the fastest plan for a cluster, and explain what bounds it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from polylane.cluster.figures import format_size
from polylane.commands import planning, printing
from polylane.commands import user_inputs as inputs
from polylane.errors import PolylaneError, format_plural
from polylane.plan.spec import shorten_plan

if TYPE_CHECKING:
    from polylane.cluster.cluster import Cluster
    from polylane.commands.requests import PlanRequest
    from polylane.planner.ranked_plan import RankedPlan
    from polylane.planner.search import SearchResult


@planning.gc_disabled()
def run(request: PlanRequest) -> None:
    """Search the plans, print the best ones and why, and write the best one where that is asked for.

    Raises:
        PolylaneError: an option or the recipe is wrong, or nothing fits: the message then says how many devices would
            do.
    """
    from polylane.cluster.spec import load_or_parse
    from polylane.inspection.plan_report import count_found_communicators
    from polylane.plan.plan_file import dump
    from polylane.planner import advice
    from polylane.planner.find_plans import find_plans
    from polylane.planner.memory_reserve import refuse_whole_reserve

    method, output = planning.method_of(request), request.output
    bound = None if request.memory is None else planning.parse_memory(request.memory)
    cluster = load_or_parse(request.cluster)
    fixed, reserve = planning.fixed_keys(request.plan, request), planning.reserve_of(request)
    if request.workers is not None and request.workers > cluster.count:
        devices = format_plural(cluster.count, "device")
        raise PolylaneError(f"--workers {request.workers}: the cluster has {devices}")
    refuse_whole_reserve(cluster, request.workers or cluster.count, reserve)
    training, problem = planning.capture_for_prediction(inputs.open_recipe(request), cluster, request)
    answer = find_plans(
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
    free_bytes = reserve.of(min(device.memory for device in cluster.devices(range(request.workers or cluster.count))))
    suggestions = advice.advise(answer)
    if output is not None:
        printing.write_text(output, dump(answer.ranked_plans[0].plan))
    words = advice.advice_sentences(suggestions, answer.ranked_plans[0], format_size)
    communicators = None
    if cluster.device(0).type == "cuda":
        communicators = count_found_communicators(training, problem, answer.ranked_plans[0])
    if request.json:
        printing.print_json(
            {
                "plans": [_row(ranked_plan, cluster) for ranked_plan in answer.ranked_plans],
                "advice": asdict(suggestions),
                "words": words,
                "memory_limit": answer.wish.memory_limit,
                "reserve": free_bytes,
                "communicators": communicators,
            }
        )
        return
    notes = _describe_communicators(communicators or ())
    _show(answer, cluster, [*words, _describe_limit(answer.wish.memory_limit, free_bytes), *notes])
    if output is not None:
        printing.console().print(f"The best plan is in {output}: polylane train {request.recipe} --plan {output}")


def _describe_limit(limit: float, free_bytes: int) -> str:
    """Describe how much memory plans may take, and how much they leave."""
    reserve_note = f", and leave {format_size(free_bytes)} of it free (--reserve)" if free_bytes else ""
    return f"Plans take at most {format_size(limit)} of a device's memory{reserve_note}."


def _describe_communicators(counts: Sequence[int]) -> list[str]:
    """Describe how many communicators each worker of the first plan has, by rank; nothing where there are none."""
    if not any(counts):
        return []
    numbers = printing.format_extent(counts)
    beginning = f"Communicators of a worker by the first plan, where NCCL connects GPUs: {numbers}"
    return [f"{beginning}; their memory is not in any prediction."]


def _row(ranked_plan: RankedPlan, cluster: Cluster) -> dict[str, Any]:
    prediction = ranked_plan.prediction
    worst = max((stage.memory for stage in prediction.stages), key=lambda memory: memory.total)
    return {
        "plan": ranked_plan.plan.spec,
        "workers": ranked_plan.plan.workers,
        "step_seconds": prediction.seconds,
        "samples_per_second": prediction.samples_per_second,
        "memory": worst.total,
        "utilization": prediction.utilization,
        "moving": prediction.moving,
        "waiting": prediction.waiting,
        "bubble": prediction.bubble,
        # The price of a cluster is per hour and for all of its devices; a plan pays for those that it uses.
        "price": cluster.price * ranked_plan.plan.workers / cluster.count * prediction.seconds / 3600,
        "estimate_seconds": ranked_plan.candidate.seconds,
    }


def _show(answer: SearchResult, cluster: Cluster, words: Sequence[str]) -> None:
    skipped = f" ({answer.skipped_count} more cannot be the fastest)" if answer.skipped_count else ""
    title = f"Of {answer.rated_count} plans, {len(answer.fitting_candidates)} fit{skipped}; the fastest"
    columns = ("plan", "workers", "step", "samples/s", "memory", "computing", "moving", "price/step")
    grid = printing.make_table(title, *columns, left=["plan"])
    for ranked_plan in answer.ranked_plans:
        row = _row(ranked_plan, cluster)
        bound = "" if ranked_plan is answer.ranked_plans[0] else "≤ "  # see _with_exact_memory
        grid.add_words(
            shorten_plan(row["plan"]),
            str(row["workers"]),
            printing.format_duration(row["step_seconds"]),
            f"{row['samples_per_second']:,.1f}",
            bound + format_size(row["memory"]),
            f"{row['utilization']:.0%}",
            f"{row['moving']:.0%}",
            f"{row['price']:.2g}" if row["price"] else "",
        )
    printing.print_table(printing.console(), grid)
    for line in words:
        printing.console().print(line, markup=False)
