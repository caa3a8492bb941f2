"""Choosing placements for a whole graph on one mesh axis: the cheapest split, found by an integer linear program.

constraints.py states the program; blocks that are repeated are chosen for once. The memory limit is a price of bytes in
the objective. (Zheng et al., Alpa, OSDI 2022, section 4.2, choose so for one mesh dimension at a time.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from polylane.cost.integer_program import STATUS, IntegerSolution
from polylane.cost.network.alpha_beta import RankSpeed
from polylane.errors import PolylaneError
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import OperatorView, TensorKey
from polylane.placement.placement import Placement, Replicate
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands, admissible_options
from polylane.sharding.constraints import ProgramBuilder, choice_labels
from polylane.sharding.cost_model import CostSetting, LayoutPrediction, predict_split

# A faster split may take this share more of the limited bytes than the least possible.
SLACK = 0.05
GAP = 1e-4  # relative distance from the optimum at which the solver may stop: prices are not known any better
OPTIMAL = STATUS[0]
# Prices within this relative distance count as equal: the search over prices has converged.
CLOSE = 1e-5
# The price of bytes is divided by this, once the limit is kept.
CHEAPER = 4.0
# Rounds of refinement. Enough to tell the two halves of a block apart; middle blocks of a deep model remain equal.
HOPS = 3


@dataclass(frozen=True)
class SolveReport:
    """How a split was found.

    Attributes:
        prediction: seconds and bytes of the split by the cost model.
        least: the least possible bytes of the parameters and of their redistributed copies; of activations where the
            axis splits those.
        status: "optimal" (within :data:`GAP` of the best) or "stopped early".
        gap: relative distance from the best bound; infinite where that is not known.
        classes: number of equivalence classes of nodes, each chosen for once.
        seconds: wall-clock duration of the search.
    """

    prediction: LayoutPrediction
    least: float
    status: str
    gap: float
    classes: int
    seconds: float


@dataclass(frozen=True)
class SolvedSplit(AxisSplit):
    """A split with the report of its search.

    Attributes:
        report: status and gap of the search; not compared, so that equal splits are equal without it.
    """

    report: SolveReport = field(compare=False, repr=False)


def solve(
    view: OperatorView, options: StrategyOptions, degree: int, demands: SplitDemands, *, rates: RankSpeed | None = None
) -> SolvedSplit:
    """Return the split that costs least.

    What the purpose makes small (bytes of parameters, or of activations) may exceed the least possible by
    :data:`SLACK`.

    Args:
        view: the graph's operators at one number of samples.
        options: all strategies that the rules offer.
        degree: number of ranks along the axis.
        demands: purpose, pins, and the splits of other axes.
        rates: operations, bytes and messages a second of every rank.

    Raises:
        PolylaneError: no strategy satisfies a pin, or the demands contradict each other.
    """
    start = time.perf_counter()
    setting = CostSetting(view, degree, rates or RankSpeed(), demands.other_axes)
    choices = admissible_options(view, options, degree, demands)
    classes = equivalence_classes(view, choice_labels(setting, choices))
    builder = ProgramBuilder(setting, choices, demands, classes)
    builder.build()
    least_bytes, result = _search_solution(builder)
    if not len(result.values):
        raise PolylaneError(f"placements: no split over {degree} ranks ({demands.purpose}) was found: {result.status}")
    split = builder.read_solution(result.values)
    kinds, took = len(set(classes.values())), time.perf_counter() - start
    report = SolveReport(predict_split(setting, split), least_bytes, result.status, result.gap, kinds, took)
    return SolvedSplit(degree, split.strategies, split.source_placements, report)


def carry_over(
    split: AxisSplit, view: OperatorView, options: StrategyOptions, purpose: str, other_axes: Mapping[str, AxisSplit]
) -> AxisSplit:
    """Return the best split of another graph of the same model, with parameters and buffers placed as in ``split``.

    Args:
        split: the strategies chosen for the first graph.
        view, options: operators and offered strategies of the other graph.
        purpose, other_axes: as in :class:`SplitDemands`.
    """
    fixed = {
        key: _offered_like(split.source_placements[key], options.source_placements.get(key, ()))
        for key, source in view.sources.items()
        if source.role[0] in ("parameter", "buffer") and key in split.source_placements
    }
    return solve(view, options, split.degree, SplitDemands(purpose, {}, other_axes, fixed))


def _offered_like(placement: Placement, offered: Sequence[Placement]) -> Placement:
    """Return a tensor's placement in another graph: where it is whole, its gradient may be a partial sum in one alone.

    A parameter that a loss does not train has no gradient in that loss's graph; in another one's it has.
    """
    if placement in offered or not isinstance(placement, Replicate):
        return placement
    return next((candidate for candidate in offered if isinstance(candidate, Replicate)), placement)


def _search_solution(builder: ProgramBuilder) -> tuple[float, IntegerSolution]:
    """Return the least possible bytes, and a fast solution whose limited bytes are within the slack of them.

    A limit on the bytes as a constraint would make the program's relaxation loose, and the search long. Bytes have a
    price in the objective instead (Lagrangian relaxation): each solution found is the fastest of all with no more bytes
    than it has. The price is raised along the lower convex hull of (bytes, seconds) until the limit is kept, then
    lowered again by a large step if it still is.
    """
    program, bytes_ = builder.program, builder.limited_terms
    # The two ends of the convex hull: the fastest solution (bytes are free) and the smallest (only bytes count).
    fast = program.solve(GAP, bytes_)
    if not bytes_ or not len(fast.values):
        return 0.0, fast
    small = program.solve(GAP, bytes_, math.inf)
    if not len(small.values):
        return 0.0, small
    least_bytes, limit = small.secondary_cost, (1 + SLACK) * small.secondary_cost
    too_low, price, result = 0.0, 0.0, fast
    while result.secondary_cost > limit:
        # The slope of the line between the current point and the smallest: at this price both are equally good, so that
        # the program finds a point below the line, if there is one.
        too_low, price = price, (small.cost - result.cost) / (result.secondary_cost - small.secondary_cost)
        # The slope no longer rises: no point of the hull is between the two.
        if price <= too_low * (1 + CLOSE):
            return least_bytes, small
        result = program.solve(GAP, bytes_, price)
        if not len(result.values):
            return least_bytes, small
    # Steps along the hull may overshoot: a lower price may keep the limit with a faster split.
    if price / CHEAPER > too_low:
        trial = program.solve(GAP, bytes_, price / CHEAPER)
        result = trial if trial.secondary_cost <= limit else result
    # The limit is only as good as the least bytes that are known: report the worse of the two searches.
    stopped = result.status if result.status != OPTIMAL else small.status
    return least_bytes, replace(result, status=stopped, gap=max(result.gap, small.gap))


# ---- blocks that are repeated ----------------------------------------------------------------------------------------


def equivalence_classes(view: OperatorView, labels: Mapping[str, Hashable]) -> Mapping[str, int]:
    """Return the class of every operator and graph input, by node name.

    Colour refinement (Weisfeiler and Leman, 1968) for a few rounds: after k of them two nodes have the same colour if
    their neighbourhoods are equal up to k edges away.

    Args:
        view: the graph's operators and their edges.
        labels: what must be equal within a class, by node name (the name in a graph input's key).
    """
    reads: dict[str, tuple[TensorKey, ...]] = {key[0]: () for key in view.sources}
    reads.update({step.name: step.input_keys for step in view.operators})
    users: dict[str, list[tuple[str, int, int]]] = {name: [] for name in reads}
    for step in view.operators:
        for index, (name, output) in enumerate(step.input_keys):
            if name in users:
                users[name].append((step.name, index, output))
    # A node whose value is an output of the graph differs from its equals inside: outputs must be whole.
    results = {name: sorted(i for n, i in view.output_keys if n == name) for name, _ in view.output_keys}
    colours = _number_labels((name, (labels[name], tuple(results.get(name, ())))) for name in reads)
    for _ in range(HOPS):
        colours = _number_labels(
            # Order matters among inputs (argument positions), not among users, which are sorted.
            (
                name,
                (
                    colours[name],
                    tuple((colours.get(n, -1), i) for n, i in reads[name]),
                    tuple(sorted((colours[n], i, o) for n, i, o in users[name])),
                ),
            )
            for name in reads
        )
    return colours


def _number_labels(labelled: Iterable[tuple[str, Hashable]]) -> dict[str, int]:
    numbers: dict[Hashable, int] = {}
    return {name: numbers.setdefault(label, len(numbers)) for name, label in labelled}
