"""Carrying a split over to another number of samples: the strategies chosen once hold for all microbatch sizes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from polylane.cost.network.alpha_beta import RankSpeed
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey
from polylane.placement.placement import REPLICATE_PARTIAL_GRAD, Placement, Replicate, Shard, even_cuts, join_cuts
from polylane.placement.rewrite import AxisSplit
from polylane.placement.strategy import OperatorCall, Strategy, TensorValue
from polylane.sharding.admissible import cuts_each_sample_alike
from polylane.sharding.cost_model import CostSetting, value_bytes


def carry_over_split(
    split: AxisSplit, old_view: OperatorView, new_view: OperatorView, options: StrategyOptions
) -> AxisSplit:
    """Return the split of the same graph at another number of samples.

    An operator's new strategy has the pattern of the old one (the same kinds of placements and the same dimensions),
    and the same cuts where a dimension has the same size. Of several, the nearest by :func:`_strategy_distance`;
    without any, the operator runs whole on every rank. Graph inputs keep their placements.

    Args:
        split: the strategies that were chosen for ``old_view``.
        old_view, new_view: the graph at both numbers of samples.
        options: all strategies offered for the operators of ``new_view``.
    """
    old = {step.name: step for step in old_view.operators}
    steps: dict[str, Strategy] = {}
    # ``steps`` is filled below while ``result`` is read: placements of producers must be known before their readers'.
    result = AxisSplit(
        split.degree, steps, {key: resize_placement(split, key, s.value) for key, s in new_view.sources.items()}
    )
    setting = CostSetting(new_view, split.degree, RankSpeed(), {})
    for step in new_view.operators:  # producers come first
        chosen, was = split.strategies[step.name], old[step.name]
        offered = options.strategies[step.name]
        candidates = [s for s in offered if _same_strategy(s, chosen, step.call, was.call)]
        distance = partial(_strategy_distance, setting, result, step, chosen, old_view.samples)
        steps[step.name] = min(candidates, key=distance) if candidates else _replicated_strategy(offered)
    return result


def resize_placement(split: AxisSplit, key: TensorKey, value: TensorValue) -> Placement:
    """Return the placement of a graph input at another size: cut evenly where the sharded dimension has changed."""
    placement = split.source_placements[key]
    if isinstance(placement, Shard) and placement.size != value.shape[placement.dim]:
        return Shard(placement.dim, even_cuts(value.shape[placement.dim], split.degree))
    return placement


def _same_strategy(new: Strategy, old: Strategy, call: OperatorCall, old_call: OperatorCall) -> bool:
    """Return whether two strategies have the same pattern of placements, and the same cuts of unchanged dimensions."""
    placements = zip((*new.inputs, *new.outputs), (*old.inputs, *old.outputs), strict=True)
    values = zip((*call.inputs, *call.outputs), (*old_call.inputs, *old_call.outputs), strict=True)
    # A dimension whose size has changed (it grows with the samples) may have any cuts; all others keep theirs.
    for (a, b), (value, old_value) in zip(placements, values, strict=True):
        if not (isinstance(a, Shard) and isinstance(b, Shard)):
            if a != b:
                return False
        elif a.dim != b.dim or (value.shape[a.dim] == old_value.shape[b.dim] and a.cuts != b.cuts):
            return False
    return True


def _strategy_distance(
    setting: CostSetting, split: AxisSplit, step: OperatorNode, old: Strategy, samples: int, new: Strategy
) -> tuple[int, float, float]:
    """Return how far an operator's strategy is from the one chosen at another number of samples.

    Args:
        setting: the graph at the new number of samples.
        split: the placements found so far, of all that the operator reads.
        step: the operator at the new number of samples.
        old, samples: the strategy chosen before, at this number of samples.
        new: the strategy to compare.

    Returns:
        Shards that split samples differently, seconds and bytes of redistributions before the operator.
    """
    moved, size = 0.0, 0.0
    for key, placement in zip(step.input_keys, new.inputs, strict=True):
        # The producers of inputs have their new placements already; any difference costs a redistribution.
        if key in setting.values and (source := split.placement(key)) != placement:
            moved += setting.redistribution_seconds(key, source, placement)
            size += value_bytes(setting.values[key])
    pairs = zip((*new.inputs, *new.outputs), (*old.inputs, *old.outputs), strict=True)
    return sum(_breaks_samples(a, b, samples, setting.view.samples) for a, b in pairs), moved, size


def _breaks_samples(new: Placement, old: Placement, old_samples: int, new_samples: int) -> bool:
    """Return whether a dimension that was cut equally in every sample would no longer be."""
    if not (isinstance(new, Shard) and isinstance(old, Shard)) or new.size == old.size:
        return False
    # E.g. heads of [samples * heads]: each sample's heads are cut alike, so that every rank keeps all samples.
    if old_samples < 1 or not cuts_each_sample_alike(old.cuts, old_samples):
        return False
    return new.cuts != join_cuts([old.cuts[: len(old.cuts) // old_samples]] * new_samples)


def _replicated_strategy(strategies: Sequence[Strategy]) -> Strategy:
    """Return the strategy that is whole on every rank, with partial gradients where that is offered.

    Partial gradients suit readers that compute only a part: without them each would all-reduce the gradient at once.
    """

    def whole(strategy: Strategy) -> bool:
        return all(isinstance(p, Replicate) for p in (*strategy.inputs, *strategy.outputs))

    return max(filter(whole, strategies), key=lambda s: (*s.inputs, *s.outputs).count(REPLICATE_PARTIAL_GRAD))
