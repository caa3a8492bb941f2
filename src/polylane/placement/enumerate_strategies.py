"""Strategy enumeration: what the rules offer, with cuts propagated between neighbours until nothing new appears."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polylane.placement.operator_view import GraphInput, OperatorNode, OperatorView, TensorKey, with_neighbour_cuts
from polylane.placement.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Cuts, Placement, Shard, even_cuts
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import OperatorCall, Place, Strategy

# Limit on the cuts of one dimension: the even one, and those that heads, groups and fused matrices ask for.
MOST_CUTS = 8


@dataclass(frozen=True)
class StrategyOptions:
    """The alternatives among which placements are chosen.

    Attributes:
        strategies: all strategies of every operator, by node name.
        source_placements: all placements of every graph input, by key.
    """

    strategies: Mapping[str, tuple[Strategy, ...]]
    source_placements: Mapping[TensorKey, tuple[Placement, ...]]


def enumerate_strategies(view: OperatorView, degree: int) -> StrategyOptions:
    """Return all strategies and placements that the rules offer for a view, on an axis of ``degree`` ranks."""
    search = _StrategySearch(view, degree)
    search.run()
    return StrategyOptions(search.found, {key: search.placements(source) for key, source in view.sources.items()})


class _StrategySearch:
    """Fixed-point search: cuts spread from tensor to tensor (attention asks that a projection be cut between heads)."""

    def __init__(self, view: OperatorView, degree: int) -> None:
        self.view, self.degree = view, degree
        # Insertion-ordered sets: the order decides ties in the solver, and must be the same on every rank.
        self.cuts: dict[tuple[TensorKey, int], dict[Cuts, None]] = {}
        self.found: dict[str, tuple[Strategy, ...]] = {}
        self._cache: dict[object, tuple[Strategy, ...]] = {}
        self._asked: dict[int, Sequence[_Cut]] = {}  # by identity of the tuples in _cache, which keeps them alive
        # Operators with equal calls have equal strategies: number them, so that repeated blocks are looked up, not
        # computed.
        forms: dict[object, int] = {}
        self._forms = {step.name: forms.setdefault(_strategy_key(step.call), len(forms)) for step in view.operators}
        self._users: dict[TensorKey, list[OperatorNode]] = {}
        for step in view.operators:
            for key in {*step.input_keys, *step.output_keys}:
                self._users.setdefault(key, []).append(step)

    # Worklist: an operator is looked at again whenever one of its tensors has got a new way to be cut.
    def run(self) -> None:
        waiting = deque(self.view.operators)
        queued = {step.name for step in waiting}
        while waiting:
            step = waiting.popleft()
            queued.discard(step.name)
            self.found[step.name] = strategies = self._strategies(step)
            for key in self._spread_cuts(step, strategies):
                for user in self._users.get(key, ()):
                    if user.name not in queued:
                        queued.add(user.name)
                        waiting.append(user)

    def _strategies(self, step: OperatorNode) -> tuple[Strategy, ...]:
        call = step.call
        if step.is_pinned:
            if step.name not in self._cache:
                self._cache[step.name] = (call.strategy("replicate", {}, REPLICATE, default=REPLICATE),)
            return self._cache[step.name]
        candidates: dict[Place, tuple[Cuts, ...]] = {}
        for part, keys in (("in", step.input_keys), ("out", step.output_keys)):
            for index, key in enumerate(keys):
                for dim in range((call.inputs if part == "in" else call.outputs)[index].dim):
                    known_cuts = self.cuts.get((key, dim))
                    if known_cuts:
                        candidates[part, index, dim] = tuple(known_cuts)
        # The rule's result depends only on the call and on the cuts that neighbours ask for.
        signature = self._forms[step.name], tuple(candidates.items())
        if signature not in self._cache:
            self._cache[signature] = strategies(with_neighbour_cuts(call, candidates))
        return self._cache[signature]

    def _spread_cuts(self, step: OperatorNode, strategies: Sequence[Strategy]) -> list[TensorKey]:
        """Record this operator's cuts on its tensors, and return the tensors that got new ones."""
        changed: dict[TensorKey, None] = {}
        if id(strategies) not in self._asked:
            self._asked[id(strategies)] = _distinct_cuts(strategies)
        for part, index, dim, size, cuts in self._asked[id(strategies)]:
            key = (step.input_keys if part == "in" else step.output_keys)[index]
            known_cuts = self.cuts.get((key, dim))
            if known_cuts is None:
                known_cuts = self.cuts[key, dim] = {even_cuts(size, self.degree): None}
            if cuts not in known_cuts and len(known_cuts) < MOST_CUTS:
                known_cuts[cuts] = None
                changed[key] = None
        return list(changed)

    def placements(self, source: GraphInput) -> tuple[Placement, ...]:
        """Return the placements of a graph input: parameters and buffers as any operator asks, inputs replicated."""
        kind = source.role[0]
        placements: tuple[Placement, ...] = (REPLICATE,)
        if kind == "parameter" and source.value.gradient:
            placements = (REPLICATE, REPLICATE_PARTIAL_GRAD)
        if kind not in ("parameter", "buffer"):
            return placements
        cut = [Shard(dim, cuts) for dim in range(source.value.dim) for cuts in self.cuts.get((source.key, dim), ())]
        return (*placements, *cut)


def _strategy_key(call: OperatorCall) -> object:
    """Return what must be equal for two calls to have the same strategies, given the same neighbours' cuts."""
    arguments = tuple((name, repr(value)) for name, value in call.arguments.items())
    return call.op, arguments, call.inputs, call.outputs, call.written_inputs


# One cut of one tensor: side ("in" or "out"), index of the tensor, its dimension, that dimension's size, the cuts.
_Cut = tuple[str, int, int, int, Cuts]


def _distinct_cuts(strategies: Sequence[Strategy]) -> Sequence[_Cut]:
    """Return all cuts that strategies have, each once, in their order."""
    cuts: dict[_Cut, None] = {}
    for strategy in strategies:
        for part, placements in (("in", strategy.inputs), ("out", strategy.outputs)):
            for index, placement in enumerate(placements):
                if isinstance(placement, Shard):
                    cuts[part, index, placement.dim, placement.size, placement.cuts] = None
    return list(cuts)
