"""Traced splits: the placements of a graph as formulas of its open sizes, for all sizes at which they hold.

The search for placements runs once, at the sizes from which the graph was captured. Its strategies are then asked for
again, operator by operator, with sizes that record what is computed with them (:mod:`polylane.graph.traced_sizes`):

    found at length 48      scores: shard(1) at 0, 24, 48            linear, whose rows are cut with them
    with a traced length    scores: shard(1) at 0, (n+1)//2, n       the same strategy of the same rule

Which strategy of a rule it is, is known by its position, so that any worker can trace the same split at any size that
the guards admit. Where they refuse one (a length below the number of ranks, say), it is searched for by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from polylane.graph.sized_values import SizedValue, as_traced
from polylane.graph.traced_sizes import SizeTrace
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey
from polylane.placement.placement import REPLICATE, Cuts, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit, State
from polylane.placement.rules.registry import iterate_strategies
from polylane.placement.strategy import OperatorCall, Place, Strategy
from polylane.sharding.carry_over import resize_placement


class NotTraced(Exception):
    """A split cannot be written as formulas of the open sizes."""


@dataclass(frozen=True)
class _Choice:
    """How one operator's strategy is found again.

    Attributes:
        index: its position among the strategies of the operator's rule.
        cuts: the cuts to offer, by dimension; None: those in which the producer makes it, or even ones.
    """

    index: int
    cuts: Mapping[Place, Cuts | None]


@dataclass(frozen=True)
class TracedSplit:
    """The splits of a graph on all axes, with traced sizes.

    Attributes:
        trace: what was computed and decided with the open sizes.
        calls: every operator as a call, by node name.
        splits: the strategies by axis, in the order of the mesh.
    """

    trace: SizeTrace
    calls: Mapping[str, OperatorCall]
    splits: Mapping[str, AxisSplit]


class SplitFormula:
    """The splits of a graph on all axes at one number of samples, by formulas of the open sizes.

    Wherever sizes are given, they are the number of samples, always the same one, and then the open sizes.

    Args:
        view: returns the graph's operators for an axis of a number of ranks, at given sizes.
        splits: the strategies by axis that were chosen at the sizes from which the graph was captured.
        views: the graph's operators by axis, at those sizes.
        nominal: the sizes at which they were chosen.

    Attributes:
        admits: tells whether the formulas hold at given sizes.

    Raises:
        NotTraced: a strategy is not among those that its rule offers for traced sizes.
    """

    def __init__(
        self,
        view: Callable[[int, tuple[Any, ...]], OperatorView],
        splits: Mapping[str, AxisSplit],
        views: Mapping[str, OperatorView],
        nominal: tuple[int, ...],
    ) -> None:
        self._view, self._splits, self._views = view, splits, views
        self._choices: dict[tuple[str, str], _Choice] = {}
        self.trace_at(nominal)  # finds the choices; what was decided on the way to them is no guard of theirs
        self._first = self.trace_at(nominal)
        self._first.trace.close()
        self.admits: Callable[[Sequence[int]], bool] = self._first.trace.compile_guards()
        self._states: dict[TensorKey, SizedValue] = {}

    def trace_at(self, sizes: Sequence[int]) -> TracedSplit:
        """Return the splits with traced sizes, whose trace is open for further decisions.

        Args:
            sizes: those with which decisions are made; :attr:`admits` must be true of them.
        """
        trace = SizeTrace(sizes)
        views = {axis: self._view(split.degree, trace.sizes) for axis, split in self._splits.items()}
        splits = {axis: self._trace_axis(axis, split, views[axis]) for axis, split in self._splits.items()}
        calls = {step.name: step.call for step in next(iter(views.values())).operators}
        return TracedSplit(trace, calls, splits)

    def state(self, key: TensorKey, sizes: tuple[int, ...]) -> State:
        """Return the placements of a tensor, one per axis, at sizes that are admitted."""
        if key not in self._states:
            self._states[key] = SizedValue(tuple(split.placement(key) for split in self._first.splits.values()))
        state: State = self._states[key].at(sizes)
        return state

    def _trace_axis(self, axis: str, split: AxisSplit, shown: OperatorView) -> AxisSplit:
        sources = {key: resize_placement(split, key, source.value) for key, source in shown.sources.items()}
        steps: dict[str, Strategy] = {}
        # ``steps`` is filled below while ``traced_split`` is read: producers come before their readers.
        traced_split = AxisSplit(split.degree, steps, sources)
        captured_steps = {step.name: step for step in self._views[axis].operators}
        for step in shown.operators:
            key = axis, step.name
            if key not in self._choices:
                self._choices[key] = _find_choice(
                    split.strategies[step.name], captured_steps[step.name], step, traced_split
                )
            choice = self._choices[key]
            steps[step.name] = next(islice(_ask_rule(step, traced_split, choice.cuts), choice.index, None))
        return traced_split


def _find_choice(chosen: Strategy, captured_step: OperatorNode, step: OperatorNode, traced_split: AxisSplit) -> _Choice:
    """Find a chosen strategy among those that the rule offers for traced sizes.

    Args:
        chosen: the strategy, at the sizes from which the graph was captured.
        captured_step: the same operator at those sizes, for messages.
        step: the operator with traced sizes.
        traced_split: the placements of all that it reads.

    Raises:
        NotTraced: it is not among them.
    """
    sharded = {
        (side, index, placement.dim): placement.cuts
        for side, placements in (("in", chosen.inputs), ("out", chosen.outputs))
        for index, placement in enumerate(placements)
        if isinstance(placement, Shard)
    }
    cuts: dict[Place, Cuts | None] = {}
    closed: dict[Place, Cuts | None] = {}
    for dimension, shard_cuts in sharded.items():
        formula = _derive_cuts(step, traced_split, dimension)
        if as_traced(formula) == shard_cuts:
            cuts[dimension] = None
        elif isinstance(_size_at(step.call, dimension), int):
            closed[dimension] = shard_cuts
    # Cuts of an open dimension in numbers would fix its size, and those of another may follow from an open one: both
    # are given only where the rule does not find them by the others.
    for offered in (cuts, cuts | closed, sharded | cuts):
        for index, strategy in enumerate(_ask_rule(step, traced_split, offered)):
            if as_traced((strategy.inputs, strategy.outputs)) == (chosen.inputs, chosen.outputs):
                return _Choice(index, offered)
    raise NotTraced(f"{captured_step.name}: {chosen.name}")


def _ask_rule(step: OperatorNode, traced_split: AxisSplit, cuts: Mapping[Place, Cuts | None]) -> Iterator[Strategy]:
    """Yield an operator's strategies with given cuts alone; None stands for those that :func:`_derive_cuts` returns."""
    call = step.call
    if step.is_pinned:
        return iter((call.strategy("replicate", {}, REPLICATE, default=REPLICATE),))
    derived_cuts = {
        dimension: fixed_cuts or _derive_cuts(step, traced_split, dimension) for dimension, fixed_cuts in cuts.items()
    }
    return iterate_strategies(replace(call, only_cuts=derived_cuts))


def _derive_cuts(step: OperatorNode, traced_split: AxisSplit, dimension: Place) -> Cuts:
    """Return the cuts in which a dimension is made; where none are known, even ones."""
    side, index, dim = dimension
    placement = traced_split.placement(step.input_keys[index]) if side == "in" else REPLICATE
    if isinstance(placement, Shard) and placement.dim == dim:
        return placement.cuts
    return even_cuts(_size_at(step.call, dimension), step.call.degree)


def _size_at(call: OperatorCall, dimension: Place) -> int:
    side, index, dim = dimension
    return (call.inputs if side == "in" else call.outputs)[index].shape[dim]
