"""Plans that recompute: searched where memory keeps faster plans out, with the recomputation that is needed for that.

A search has whole modes, for all stages alike. The best plan of one is given what memory it leaves: its stages
recompute within budgets (:mod:`polylane.cost.memory.recompute_budget`) as large as still fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from polylane.cost.plan_cost import CostModel, PlanCost
from polylane.cost.predict import predict
from polylane.errors import PolylaneError
from polylane.plan.plan import Plan
from polylane.plan.recompute import BUDGET, MODES, NONE, format_recompute
from polylane.planner.problem import fit_to_meshes
from polylane.planner.ranked_plan import RankedPlan, price_plan, weigh
from polylane.planner.search import SearchResult
from polylane.planner.uniform_plans import RatedPlan

# A plan that does not fit is missed if it would be this much faster than the best that fits.
MISSED = 0.98
# Plans of a mode that are simulated with what the runtime recomputes; and halvings of the range of budgets.
REALIZED, HALVINGS = 3, 4


def search_with_recomputation(
    basis: CostModel, search_once: Callable[[CostModel], SearchResult], fixed: str | None = None
) -> SearchResult:
    """Search the fastest plans that fit, those that recompute among them where that makes faster ones fit.

    Args:
        basis: prices of the training, with the mode of ``fixed``, if there is one, in their options.
        search_once: searches with given prices.
        fixed: the mode of recomputation that plans must have; None: as much as is needed.
    """
    if fixed is not None:
        answer = search_once(basis)
        return (
            answer
            if fixed == NONE
            else _keep_fitting(answer, *_realize_mode(basis, answer, fixed, len(answer.ranked_plans)))
        )
    plain = search_once(basis)
    if not _misses_plans(plain):
        return plain
    best, answers = list(plain.ranked_plans), dict[str, SearchResult]({NONE: plain})
    for mode in MODES[1:]:
        result = search_once(replace(basis, method=replace(basis.method, recompute=mode)))
        fitting, too_large = _realize_mode(basis, result, mode)
        answers[mode] = _keep_fitting(result, fitting, too_large)
        best += fitting
    if not best:
        # What comes closest is the leanest of all.
        return min(
            answers.values(), key=lambda item: min((c.peak_bytes for c in item.too_large_candidates), default=math.inf)
        )
    best.sort(key=_weigh)
    answer = answers[format_recompute(best[0].plan.recompute)]
    if best[0].plan.recompute != NONE:
        best[0] = _fill_memory(basis, best[0], answer)
    return replace(answer, ranked_plans=tuple(best[: plain.wish.plan_count]))


def _realize_mode(
    basis: CostModel, answer: SearchResult, mode: str, max_plans: int = REALIZED
) -> tuple[list[RankedPlan], list[RatedPlan]]:
    """Return the ``max_plans`` best plans of a mode as the runtime recomputes, and those that do not fit so."""
    fitting, too_large = list[RankedPlan](), list[RatedPlan]()
    for ranked_plan in answer.ranked_plans:
        if len(fitting) == max_plans:
            break
        realized_plan = _realize(basis, ranked_plan, _say(ranked_plan, mode).plan, answer)
        if realized_plan.peak_bytes <= realized_plan.candidate.memory_limit:
            fitting.append(realized_plan)
        else:
            too_large.append(replace(realized_plan.candidate, peak_bytes=float(realized_plan.peak_bytes)))
    if too_large and not fitting:
        fitting = _realize_smaller(basis, answer, mode, max_plans)
    return sorted(fitting, key=_weigh), too_large


def _realize_smaller(basis: CostModel, answer: SearchResult, mode: str, max_plans: int) -> list[RankedPlan]:
    """Return plans with smaller microbatches than the best, where none of these fits as the runtime recomputes.

    Of those that divide model and workers alike, the one with the largest microbatches that fit.
    """
    tried = {ranked.candidate.division: 0 for ranked in answer.ranked_plans}
    for ranked_plan in answer.ranked_plans:
        division, count = ranked_plan.candidate.division, ranked_plan.candidate.microbatches
        tried[division] = max(count, tried[division])
    fitting = list[RankedPlan]()
    for candidate in sorted(answer.fitting_candidates, key=lambda candidate: candidate.microbatches):
        if len(fitting) == max_plans:
            break
        if candidate.microbatches <= tried.get(candidate.division, candidate.microbatches):
            continue
        ranked_plan = price_plan(answer.estimates, candidate).simulate()
        realized_plan = _realize(basis, ranked_plan, _say(ranked_plan, mode).plan, answer)
        if realized_plan.peak_bytes <= candidate.memory_limit:
            fitting.append(realized_plan)
            del tried[candidate.division]  # with more microbatches it is slower
    return fitting


def _keep_fitting(answer: SearchResult, fitting: Sequence[RankedPlan], too_large: Sequence[RatedPlan]) -> SearchResult:
    """Return the answer with the plans that fit as the runtime recomputes, and the others among those too large."""
    candidates = tuple(sorted([*answer.too_large_candidates, *too_large], key=lambda candidate: candidate.seconds))
    return replace(answer, ranked_plans=tuple(fitting), too_large_candidates=candidates)


def _misses_plans(answer: SearchResult) -> bool:
    """Return whether memory keeps a plan out that is estimated to be faster than the best one that fits."""
    if not answer.ranked_plans:
        return bool(answer.too_large_candidates)
    fastest = answer.ranked_plans[0].candidate.seconds
    return any(candidate.seconds < MISSED * fastest for candidate in answer.too_large_candidates)


def _weigh(ranked_plan: RankedPlan) -> float:
    return weigh(ranked_plan.candidate, ranked_plan.prediction.seconds)


def _say(ranked_plan: RankedPlan, mode: str) -> RankedPlan:
    """Return a plan that says what it was priced with."""
    return replace(ranked_plan, plan=ranked_plan.plan.model_copy(update={"recompute": mode}))


def _realize(basis: CostModel, ranked_plan: RankedPlan, plan: Plan, answer: SearchResult) -> RankedPlan:
    """Return a plan with its prediction as the runtime recomputes: what the search knows is whole blocks."""
    batch = answer.estimates.batch
    costs = fit_to_meshes(basis, ranked_plan.partition, plan, batch)
    return replace(ranked_plan, plan=plan, prediction=predict(costs, ranked_plan.partition, plan, batch))


def _fill_memory(basis: CostModel, ranked_plan: RankedPlan, answer: SearchResult) -> RankedPlan:
    """Return the plan with the largest budgets on its stages that fit, if it is faster with them."""
    costs = fit_to_meshes(basis, ranked_plan.partition, ranked_plan.plan, answer.estimates.batch)
    stages, batch = range(ranked_plan.plan.pipeline), answer.estimates.batch
    live_bytes = [
        [PlanCost(costs, ranked_plan.partition, plan, batch).microbatch_memory(stage).live_bytes for stage in stages]
        for plan in (ranked_plan.plan, ranked_plan.plan.model_copy(update={"recompute": NONE}))
    ]
    best, low, high = ranked_plan, 0.0, 1.0
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        budgets = [floor + middle * (ceiling - floor) for floor, ceiling in zip(*live_bytes, strict=True)]
        tried = _try_budgets(basis, ranked_plan, budgets, answer)
        if tried is None or tried.peak_bytes > ranked_plan.candidate.memory_limit:
            high = middle
            continue
        low, best = middle, min(best, tried, key=_weigh)
    return best


def _try_budgets(
    basis: CostModel, ranked_plan: RankedPlan, budgets: Iterable[float], answer: SearchResult
) -> RankedPlan | None:
    """Return the plan with a budget of bytes for each stage; None where a stage cannot keep within its own."""
    words = [f"{BUDGET}{int(budget)}B" for budget in budgets]
    changes: dict[str, Any] = {"recompute": words[0]}
    if len(words) > 1:
        pairs = zip(ranked_plan.plan.stages, words, strict=True)
        changes = {"stages": tuple(s.model_copy(update={"recompute": word}) for s, word in pairs), "recompute": NONE}
    try:
        return _realize(basis, ranked_plan, ranked_plan.plan.model_copy(update=changes), answer)
    except PolylaneError:  # the training refuses it, or it does not fit: another choice is tried
        return None
