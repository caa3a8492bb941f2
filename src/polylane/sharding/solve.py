"""The placements of a whole graph on one mesh axis: the choice that costs least, found by an integer program.

One variable for every strategy of every operator and every placement of every source; a tensor that is made in one
placement and needed in another flows from the one to the other at the price of the move, paid once for all who need it
so. The flows make the program's linear relaxation tight: mostly it is whole at once. (Zheng et al., Alpa, OSDI 2022,
section 4.2, choose so for one dimension of the mesh at a time; blocks that are alike are chosen for once here.)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.errors import PolylaneError
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import OperatorView
from polylane.placement.rewrite import AxisSplit
from polylane.sharding.admissible import SplitDemands, admissible_options
from polylane.sharding.constraints import ProgramBuilder, choice_labels
from polylane.sharding.cost_model import CostSetting, LayoutPrediction, predict_split
from polylane.sharding.equivalent_nodes import HOPS, equivalence_classes
from polylane.sharding.integer_program import STATUS, IntegerSolution

# How much more memory than the least possible a faster split may take.
SLACK = 0.05
GAP = 1e-4
OPTIMAL = STATUS[0]
# What counts as equal.
CLOSE = 1e-5
# How far and how often the price of bytes is lowered.
CHEAPER = 4.0
LOWERINGS = 1


@dataclass(frozen=True)
class SolveReport:
    """How a split was found.

    Attributes:
        prediction: what it costs by the model.
        least: bytes of the parameters, and of what moves make of them, at the least possible; the same of activations
            where the axis splits those.
        status: "optimal", which is within :data:`GAP` of the best, or "stopped early".
        gap: how far it may be from the best, relatively; infinite where that is not known.
        classes: of nodes that were chosen for together.
        seconds: that the search took.
    """

    prediction: LayoutPrediction
    least: float
    status: str
    gap: float
    classes: int
    seconds: float


@dataclass(frozen=True)
class SplitChoice:
    """A split, and how it was found."""

    split: AxisSplit
    report: SolveReport


@dataclass(frozen=True)
class SolvedSplit(AxisSplit):
    """A split that knows how it was found.

    Attributes:
        report: status and gap among others; what was found says the same without it.
    """

    report: SolveReport | None = field(default=None, compare=False, repr=False)


def solve(
    view: OperatorView,
    options: StrategyOptions,
    degree: int,
    *,
    purpose: str,
    rates: RankSpeed | None = None,
    pins: Mapping[str, str] | None = None,
    taken: Mapping[str, AxisSplit] | None = None,
) -> AxisSplit:
    """The split that costs least.

    Args:
        view: the graph.
        options: what may be chosen.
        degree: ranks along the axis.
        purpose: "tensor": parameters are used in parts, as small as they can (up to :data:`SLACK`), samples are not
            cut; "sequence": the same of activations, parameters are whole; "data": as "sequence", but samples may be
            cut too, and inputs come in parts where ``pins`` say so.
        rates: of every rank.
        pins: name of a parameter, buffer, source or node -> "replicate", "shard(<dim>)" or "partial".
        taken: how the graph lies on other axes, by axis.

    Raises:
        PolylaneError: a pin that nothing meets, or demands that contradict each other.
    """
    choice = choose_split(view, options, degree, SplitDemands(purpose, pins or {}, taken or {}), rates=rates)
    return SolvedSplit(choice.split.degree, choice.split.strategies, choice.split.source_placements, choice.report)


def carry_over(
    split: AxisSplit,
    view: OperatorView,
    options: StrategyOptions,
    *,
    purpose: str,
    rates: RankSpeed | None = None,
    taken: Mapping[str, AxisSplit] | None = None,
) -> AxisSplit:
    """The best split of another graph of the same model, with parameters and buffers placed as in ``split``.

    Args:
        split: of the first graph.
        view, options: of the other graph.
        purpose, rates, taken: as for :func:`solve`.
    """
    fixed = {
        key: split.source_placements[key]
        for key, source in view.sources.items()
        if source.role[0] in ("parameter", "buffer") and key in split.source_placements
    }
    demands = SplitDemands(purpose, {}, taken or {}, fixed)
    return choose_split(view, options, split.degree, demands, rates=rates).split


def choose_split(
    view: OperatorView,
    options: StrategyOptions,
    degree: int,
    demands: SplitDemands,
    *,
    rates: RankSpeed | None = None,
    hops: int = HOPS,
    slack: float = SLACK,
    gap: float = GAP,
) -> SplitChoice:
    """As :func:`solve`, with what the search may take: see :class:`~polylane.sharding.admissible.SplitDemands`.

    Args:
        hops: how far the surroundings of two nodes must be alike for them to be chosen for together.
        slack: of the bytes that the purpose makes small.
        gap: relative distance from the best at which to stop.
    """
    start = time.perf_counter()
    setting = CostSetting(view, degree, rates or RankSpeed(), demands.other_axes)
    choices = admissible_options(view, options, degree, demands)
    builder = ProgramBuilder(
        setting, choices, demands, equivalence_classes(view, choice_labels(setting, choices), hops)
    )
    builder.build()
    least, found = _search_solution(builder, slack, gap)
    if not len(found.values):
        raise PolylaneError(f"placements: no split over {degree} ranks ({demands.purpose}) was found: {found.status}")
    split = builder.read_solution(found.values)
    kinds, took = len(set(builder.classes.values())), time.perf_counter() - start
    return SplitChoice(split, SolveReport(predict_split(setting, split), least, found.status, found.gap, kinds, took))


def _search_solution(builder: ProgramBuilder, slack: float, gap: float) -> tuple[float, IntegerSolution]:
    """The least bytes, and a fast solution that has little more of them.

    A limit on the bytes would make the program's relaxation loose, and the search long. Bytes have a price instead
    (Lagrangian relaxation): what is found is the fastest of all solutions that have no more bytes than itself. The
    price is raised along the lower convex hull of seconds and bytes until the limit is kept, then lowered again in
    large steps while it is.
    """
    program, bytes_ = builder.program, builder.limited_terms
    fast = program.solve(gap, bytes_)
    if not bytes_ or not len(fast.values):
        return 0.0, fast
    small = program.solve(gap, bytes_, math.inf)
    if not len(small.values):
        return 0.0, small
    least, most = small.secondary_cost, (1 + slack) * small.secondary_cost
    too_low, price, found = 0.0, 0.0, fast
    while found.secondary_cost > most:
        too_low, price = price, (small.cost - found.cost) / (found.secondary_cost - small.secondary_cost)
        if price <= too_low * (1 + CLOSE):
            return least, small
        found = program.solve(gap, bytes_, price)
        if not len(found.values):
            return least, small
    for _ in range(LOWERINGS):
        price /= CHEAPER
        if price <= too_low:
            break
        other = program.solve(gap, bytes_, price)
        if other.secondary_cost > most:
            break
        found = other
    # The limit is only as good as the least that is known.
    stopped = found.status if found.status != OPTIMAL else small.status
    return least, replace(found, status=stopped, gap=max(found.gap, small.gap))
