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

from polylane.cost.communicate import Rates
from polylane.errors import PolylaneError
from polylane.placement.options import Options
from polylane.placement.rewrite import Split
from polylane.placement.view import View
from polylane.planner.allowed import Demands, allowed
from polylane.planner.blocks import HOPS, classes
from polylane.planner.build import Builder, labels_of
from polylane.planner.price import Prediction, Setting, predict
from polylane.planner.program import STATUS, Solution

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
class Report:
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

    prediction: Prediction
    least: float
    status: str
    gap: float
    classes: int
    seconds: float


@dataclass(frozen=True)
class Choice:
    """A split, and how it was found."""

    split: Split
    report: Report


@dataclass(frozen=True)
class Solved(Split):
    """A split that knows how it was found.

    Attributes:
        report: status and gap among others; what was found says the same without it.
    """

    report: Report | None = field(default=None, compare=False, repr=False)


def solve(
    view: View,
    options: Options,
    degree: int,
    *,
    purpose: str,
    rates: Rates | None = None,
    pins: Mapping[str, str] | None = None,
    taken: Mapping[str, Split] | None = None,
) -> Split:
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
    choice = choose(view, options, degree, Demands(purpose, pins or {}, taken or {}), rates=rates)
    return Solved(choice.split.degree, choice.split.steps, choice.split.sources, choice.report)


def carry(
    split: Split,
    view: View,
    options: Options,
    *,
    purpose: str,
    rates: Rates | None = None,
    taken: Mapping[str, Split] | None = None,
) -> Split:
    """The best split of another graph of the same model, with parameters and buffers placed as in ``split``.

    Args:
        split: of the first graph.
        view, options: of the other graph.
        purpose, rates, taken: as for :func:`solve`.
    """
    fixed = {
        key: split.sources[key]
        for key, source in view.sources.items()
        if source.role[0] in ("parameter", "buffer") and key in split.sources
    }
    demands = Demands(purpose, {}, taken or {}, fixed)
    return choose(view, options, split.degree, demands, rates=rates).split


def choose(
    view: View,
    options: Options,
    degree: int,
    demands: Demands,
    *,
    rates: Rates | None = None,
    hops: int = HOPS,
    slack: float = SLACK,
    gap: float = GAP,
) -> Choice:
    """As :func:`solve`, with what the search may take: see :class:`~polylane.planner.allowed.Demands`.

    Args:
        hops: how far the surroundings of two nodes must be alike for them to be chosen for together.
        slack: of the bytes that the purpose makes small.
        gap: relative distance from the best at which to stop.
    """
    start = time.perf_counter()
    setting = Setting(view, degree, rates or Rates(), demands.taken)
    choices = allowed(view, options, degree, demands)
    builder = Builder(setting, choices, demands, classes(view, labels_of(setting, choices), hops))
    builder.build()
    least, found = _search(builder, slack, gap)
    if not len(found.values):
        raise PolylaneError(f"placements: no split over {degree} ranks ({demands.purpose}) was found: {found.status}")
    split = builder.read(found.values)
    kinds, took = len(set(builder.colours.values())), time.perf_counter() - start
    return Choice(split, Report(predict(setting, split), least, found.status, found.gap, kinds, took))


def _search(builder: Builder, slack: float, gap: float) -> tuple[float, Solution]:
    """The least bytes, and a fast solution that has little more of them.

    A limit on the bytes would make the program's relaxation loose, and the search long. Bytes have a price instead
    (Lagrangian relaxation): what is found is the fastest of all solutions that have no more bytes than itself. The
    price is raised along the lower convex hull of seconds and bytes until the limit is kept, then lowered again in
    large steps while it is.
    """
    program, bytes_ = builder.program, builder.limited
    fast = program.solve(gap, bytes_)
    if not bytes_ or not len(fast.values):
        return 0.0, fast
    small = program.solve(gap, bytes_, math.inf)
    if not len(small.values):
        return 0.0, small
    least, most = small.more, (1 + slack) * small.more
    too_low, price, found = 0.0, 0.0, fast
    while found.more > most:
        too_low, price = price, (small.cost - found.cost) / (found.more - small.more)
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
        if other.more > most:
            break
        found = other
    # The limit is only as good as the least that is known.
    stopped = found.status if found.status != OPTIMAL else small.status
    return least, replace(found, status=stopped, gap=max(found.gap, small.gap))
