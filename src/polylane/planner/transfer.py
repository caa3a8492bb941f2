"""The same split for another number of samples: what was chosen once holds for every microbatch and the last batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polylane.cost.communicate import Rates
from polylane.placement.call import Call, Strategy, Value
from polylane.placement.options import Options
from polylane.placement.placement import SHARED, Placement, Replicate, Shard, even, joined
from polylane.placement.rewrite import Split
from polylane.placement.view import Key, Step, View
from polylane.planner.price import Setting, bytes_of, price_of_move
from polylane.planner.sample_cuts import inside_samples


def transfer(split: Split, before: View, after: View, options: Options) -> Split:
    """``split`` for the same graph with other sizes.

    A step's new strategy has the pattern of the old one (the same kinds of placements and the same dimensions), and the
    same cuts where a dimension has the same size. Of several, the one that needs what its producers give; without any,
    the step runs whole on every rank. Sources lie as they did.

    Args:
        split: chosen for ``before``.
        before, after: the graph at both numbers of samples.
        options: of ``after``.
    """
    old = {step.name: step for step in before.steps}
    steps: dict[str, Strategy] = {}
    result = Split(split.degree, steps, {key: _resized(split, key, s.value) for key, s in after.sources.items()})
    setting = Setting(after, split.degree, Rates(), {})
    for step in after.steps:  # producers come first
        chosen, was = split.steps[step.name], old[step.name]
        same = [s for s in options.steps[step.name] if _alike(s, chosen, step.call, was.call)]
        compare = _Compare(setting, result, step, chosen, before.samples)
        steps[step.name] = min(same, key=compare.distance) if same else _whole(options.steps[step.name])
    return result


def _resized(split: Split, key: Key, value: Value) -> Placement:
    placement = split.sources[key]
    if isinstance(placement, Shard) and placement.size != value.shape[placement.dim]:
        return Shard(placement.dim, even(value.shape[placement.dim], split.degree))
    return placement


def _alike(new: Strategy, old: Strategy, call: Call, before: Call) -> bool:
    return _pattern(new.inputs, old.inputs, call.inputs, before.inputs) and _pattern(
        new.outputs, old.outputs, call.outputs, before.outputs
    )


def _pattern(
    new: Sequence[Placement], old: Sequence[Placement], values: Sequence[Value], before: Sequence[Value]
) -> bool:
    for a, b, value, other in zip(new, old, values, before, strict=True):
        if not (isinstance(a, Shard) and isinstance(b, Shard)):
            if a != b:
                return False
        elif a.dim != b.dim or (value.shape[a.dim] == other.shape[b.dim] and a.cuts != b.cuts):
            return False
    return True


@dataclass(frozen=True)
class _Compare:
    """How far a strategy of a step is from the one that it had at another number of samples."""

    setting: Setting
    split: Split
    step: Step
    old: Strategy
    samples: int

    def distance(self, strategy: Strategy) -> tuple[int, float, float]:
        """Cuts that are not the same in every sample, the price of the moves before it, the bytes of those."""
        moved, size = 0.0, 0.0
        for key, placement in zip(self.step.reads, strategy.inputs, strict=True):
            if key in self.setting.values and (source := self.split.placement(key)) != placement:
                moved += price_of_move(self.setting, key, source, placement).seconds
                size += bytes_of(self.setting.values[key])
        pairs = zip((*strategy.inputs, *strategy.outputs), (*self.old.inputs, *self.old.outputs), strict=True)
        return sum(self._other(a, b) for a, b in pairs), moved, size

    def _other(self, new: Placement, old: Placement) -> bool:
        """Whether a dimension that was cut alike in every sample would no longer be so."""
        if not (isinstance(new, Shard) and isinstance(old, Shard)) or new.size == old.size:
            return False
        if self.samples < 1 or not inside_samples(old.cuts, self.samples):
            return False
        first = old.cuts[: len(old.cuts) // self.samples]
        return new.cuts != joined([first] * self.setting.view.samples)


def _whole(strategies: Sequence[Strategy]) -> Strategy:
    """Whole on every rank; with partial gradients where possible, which suits readers that do a part of the work."""

    def whole(strategy: Strategy) -> bool:
        return all(isinstance(p, Replicate) for p in (*strategy.inputs, *strategy.outputs))

    return max(filter(whole, strategies), key=lambda s: (*s.inputs, *s.outputs).count(SHARED))
