"""Finding a training's plans: one search, with all that the training needs, for `plan`, `simulate` and plan="auto"."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from polylane.cluster.cluster import Cluster
from polylane.cluster.figures import format_size
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import predict
from polylane.errors import PolylaneError, format_plural
from polylane.graph.batch import count_parts
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.graph.sparse_gradients import find_sparse_gradients
from polylane.plan.fixed_keys import NOTHING_FIXED, FixedKeys
from polylane.plan.options import ROUND_ROBIN
from polylane.plan.plan import Plan
from polylane.plan.recompute import NONE
from polylane.planner.advice import describe_candidate, devices_needed
from polylane.planner.memory_reserve import USUAL, MemoryReserve, memory_limit
from polylane.planner.order_trials import try_found_orders
from polylane.planner.problem import CapturedProblem, build_cost_model, fit_to_meshes
from polylane.planner.recompute_search import search_with_recomputation
from polylane.planner.search import SearchRequest, SearchResult, search
from polylane.planner.search_progress import show_progress
from polylane.planner.stage_curves import CurveCache
from polylane.planner.uniform_plans import RatedPlan
from polylane.samples.batch_layout import BatchLayout, batch_layouts
from polylane.samples.derivation import Derivation, derive_composition
from polylane.samples.leaf_effects import effects_by_module
from polylane.samples.microbatch_limit import MinSamples, min_samples
from polylane.samples.split_dependence import depends_on_split

# Up to this many workers every number of them is compared.
EVERY_COUNT = 8
MOST_DEVICES = 1 << 14  # most devices that "would do" may propose where nothing fits


def find_plans(
    problem: CapturedProblem,
    cluster: Cluster,
    batch: int,
    method: TrainingOptions,
    *,
    workers: int | None = None,
    fewer: bool = True,
    memory: int | None = None,
    top: int = 5,
    fixed: FixedKeys = NOTHING_FIXED,
    reserve: MemoryReserve = USUAL,
) -> SearchResult:
    """Search the fastest plans for a training on a cluster.

    Args:
        problem: the training, with its model captured.
        cluster: the devices and links on which it is to run; plans take the first devices.
        batch: number of samples of a step, over all workers.
        method: precision and overlap of the training; what ``fixed`` says of precision and recomputation counts.
        workers: how many devices to use at most; None: all.
        fewer: whether plans may take fewer than that.
        memory: bytes that a worker may use; None: all that a device has but the reserve.
        top: how many plans are wanted.
        fixed: keys that a plan must have.
        reserve: memory that is kept free on every device.

    Raises:
        PolylaneError: nothing fits, and the message says what comes closest; or the batch is too small.
    """
    graph, max_workers = problem.graph, cluster.count if workers is None else workers
    fewest, composition, refusals = check_batch(graph, batch), derive_composition(graph), list[str]()
    wish = SearchRequest(
        candidate_worker_counts(max_workers) if fewer else (max_workers,),
        max(group.devices for group in cluster.hosts),  # the ranks that share an operator are on one host
        memory_limit(cluster, max_workers, reserve, memory),
        max(top, 1),
        batch_is_indivisible=not composition.is_proven,
        # Replicas in turn compute microbatches: who asks for them asks for several.
        takes_whole_batches=depends_on_split(graph.code) and fixed.replicas != ROUND_ROBIN,
        # An optimizer that must see whole parameters cannot update shards of them, and sparse gradients are not cut.
        shardings=() if problem.whole or find_sparse_gradients(graph) else fixed.shardings,
        fixed=fixed,
        check=_make_check(problem, refusals),
    )
    is_single = bool(composition.counters) or wish.microbatches == 1
    keep = _make_filter(problem, batch, fewest, is_single, 1 if fewer else max_workers)
    staying = _staying_values(graph, composition)
    basis = build_cost_model(problem, cluster, keep_options(method, fixed))
    with show_progress() as progress:
        answer = search_with_recomputation(
            basis,
            lambda prices: search(CurveCache(prices, batch, staying, fixed.sync), wish, keep=keep, told=progress),
            fixed.recompute,
        )
    if not answer.ranked_plans:
        refused = f"no plan is found that the training allows: {refusals[-1]}" if refusals else ""
        raise PolylaneError(refused or explain_nothing_fits(answer))
    return try_found_orders(_with_exact_memory(answer))


def _make_check(problem: CapturedProblem, refusals: list[str]) -> Callable[[Plan, Partition], None]:
    """Return the training's check of a full plan, which also notes in ``refusals`` what is said of refused ones."""

    def check(plan: Plan, partition: Partition) -> None:
        try:
            problem.check(plan, partition)
        except PolylaneError as error:
            refusals.append(str(error))
            raise

    return check


def _make_filter(
    problem: CapturedProblem, batch: int, fewest: MinSamples, takes_whole_batches: bool, min_workers: int
) -> Callable[[RatedPlan], bool]:
    """Return whether a training allows the microbatches, workers and stages of a candidate.

    Args:
        problem: the training, with its model captured.
        batch: number of samples of a step.
        fewest: fewest samples that a microbatch of the model needs at once.
        takes_whole_batches: whether there may be one microbatch alone: a buffer counts calls, or others would change
            what is computed, and were not asked for.
        min_workers: fewest workers that a plan may have.
    """
    effects = {effect.kind for _, effect in effects_by_module(problem.graph)}
    is_single = takes_whole_batches or bool(effects & {"state", "clock"})

    def allowed(candidate: RatedPlan) -> bool:
        parts = 1 if is_single else count_parts(batch, candidate.microbatches, fewest.samples)
        # A clock shows another time to every worker of a stage.
        if parts != candidate.microbatches or ("clock" in effects and candidate.workers > len(candidate.meshes)):
            return False
        if candidate.workers < min_workers:
            return False
        return len(candidate.meshes) == 1 or not problem.has_coupled_updates()

    return allowed


def _staying_values(graph: Graph, composition: Derivation) -> list[str]:
    """Return the values that must stay within a stage: of unknown batch layout, other replicas cannot divide them.

    Without replicas they need not.
    """
    layouts = batch_layouts(graph, composition.batch_layouts) if composition.is_proven else {}
    return [name for name, layout in layouts.items() if layout is BatchLayout.UNKNOWN]


def check_batch(graph: Graph, batch: int) -> MinSamples:
    """Return the fewest samples that a microbatch may have.

    Raises:
        PolylaneError: a batch has fewer.
    """
    fewest = min_samples([graph])
    fewest.check(batch, "a batch", "take larger batches")
    return fewest


def keep_options(method: TrainingOptions, fixed: FixedKeys) -> TrainingOptions:
    """Return the training options with the precision and the recomputation that a search must keep."""
    changes = {"dtype": fixed.precision, "recompute": fixed.recompute, "compiled": fixed.compile}
    return replace(method, **{key: value for key, value in changes.items() if value is not None})  # type: ignore[arg-type]


def candidate_worker_counts(max_workers: int) -> tuple[int, ...]:
    """Return the numbers of workers to compare, since fewer may be faster: every one, or all, halves and one."""
    if max_workers <= EVERY_COUNT:
        return tuple(range(max_workers, 0, -1))
    return tuple(dict.fromkeys([max_workers, max_workers // 2, max_workers // 4, 1]))


def _with_exact_memory(answer: SearchResult) -> SearchResult:
    """Return the answer with the memory of its first plan as ``simulate`` computes it, for the local samples.

    The memory of the others is scaled from a small example to the batch, and so an upper bound: what does not grow with
    the samples is counted for each of them. A first plan that turns out not to fit is left out.
    """
    for index, ranked_plan in enumerate(answer.ranked_plans):
        basis = fit_to_meshes(answer.estimates.basis, ranked_plan.partition, ranked_plan.plan, answer.estimates.batch)
        prediction = predict(basis, ranked_plan.partition, ranked_plan.plan, answer.estimates.batch)
        if max(stage.memory.total for stage in prediction.stages) <= ranked_plan.candidate.memory_limit:
            first_plan = replace(ranked_plan, prediction=prediction)
            return replace(answer, ranked_plans=(first_plan, *answer.ranked_plans[index + 1 :]))
    return answer


def explain_nothing_fits(answer: SearchResult) -> str:
    """Describe why a search found no plan: which one comes closest, by how much, and how many devices would do."""
    wish, count, batch = answer.wish, max(answer.wish.workers), answer.estimates.batch
    workers = format_plural(count, "worker")
    if not answer.too_large_candidates:
        if wish.batch_is_indivisible:
            return f"there is no plan for {workers} that keeps a batch whole, whose samples meet in the loss: give one"
        if str(wish.fixed):
            return (
                f"there is no plan for {workers} and batches of {batch} with {wish.fixed}: fix less, or other numbers"
            )
        return f"there is no plan for {workers} and batches of {batch}: the model or the batch is too small"
    leanest = min(answer.too_large_candidates, key=lambda c: c.peak_bytes)
    mode = answer.estimates.basis.method.recompute
    line = describe_candidate(leanest) + (f",recompute={mode}" if mode != NONE else "")
    words = (
        f"nothing fits on {workers} with {format_size(wish.memory_limit)} each: the leanest plan ({line}) needs "
        f"{format_size(leanest.peak_bytes)} per worker, {format_size(leanest.peak_bytes - wish.memory_limit)} more"
    )
    # This repeats the search on larger clusters.
    devices = devices_needed(answer, MOST_DEVICES)
    return f"{words}; {devices} such devices would do" if devices else f"{words}; more devices do not help"
