"""All strategies of all operators of a graph: rules and the cuts that neighbours ask for, until nothing new appears."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from polylane.placement.call import Call, Place, Strategy
from polylane.placement.placement import REPLICATE, SHARED, Cuts, Placement, Shard, even
from polylane.placement.rules.registry import strategies
from polylane.placement.view import Key, Source, Step, View, with_candidates

# Ways to cut one dimension that are looked at: the even one, and those that heads, groups and fused matrices ask for.
MOST_CUTS = 8


@dataclass(frozen=True)
class Options:
    """What may be chosen from.

    Attributes:
        steps: of every operator, by name.
        sources: of every placeholder, by key.
    """

    steps: Mapping[str, tuple[Strategy, ...]]
    sources: Mapping[Key, tuple[Placement, ...]]


def options(view: View, degree: int) -> Options:
    """Everything that the rules offer for a view."""
    search = _Search(view, degree)
    search.run()
    return Options(search.found, {key: search.placements(source) for key, source in view.sources.items()})


class _Search:
    """Cuts spread from tensor to tensor: a head asks that a projection be cut between heads."""

    def __init__(self, view: View, degree: int) -> None:
        self.view, self.degree = view, degree
        self.cuts: dict[tuple[Key, int], dict[Cuts, None]] = {}
        self.found: dict[str, tuple[Strategy, ...]] = {}
        self._cache: dict[object, tuple[Strategy, ...]] = {}
        self._users: dict[Key, list[Step]] = {}
        for step in view.steps:
            for key in {*step.reads, *step.gives}:
                self._users.setdefault(key, []).append(step)

    def run(self) -> None:
        waiting = deque(self.view.steps)
        queued = {step.name for step in waiting}
        while waiting:
            step = waiting.popleft()
            queued.discard(step.name)
            self.found[step.name] = found = self._strategies(step)
            for key in self._spread(step, found):
                for user in self._users.get(key, ()):
                    if user.name not in queued:
                        queued.add(user.name)
                        waiting.append(user)

    def _strategies(self, step: Step) -> tuple[Strategy, ...]:
        call = step.call
        if step.pinned:
            return (call.strategy("replicate", {}, REPLICATE, default=REPLICATE),)
        candidates: dict[Place, tuple[Cuts, ...]] = {}
        for part, keys in (("in", step.reads), ("out", step.gives)):
            for index, key in enumerate(keys):
                for dim in range((call.inputs if part == "in" else call.outputs)[index].dim):
                    known = self.cuts.get((key, dim))
                    if known:
                        candidates[part, index, dim] = tuple(known)
        signature = _signature(call, candidates)
        if signature not in self._cache:
            self._cache[signature] = strategies(with_candidates(call, candidates))
        return self._cache[signature]

    def _spread(self, step: Step, found: Sequence[Strategy]) -> list[Key]:
        """Tell the neighbours which cuts are of use here. Returns the tensors that got new ones."""
        changed: dict[Key, None] = {}
        for strategy in found:
            pairs = [*zip(step.reads, strategy.inputs, strict=True), *zip(step.gives, strategy.outputs, strict=True)]
            for key, placement in pairs:
                if isinstance(placement, Shard):
                    known = self.cuts.setdefault((key, placement.dim), {even(placement.size, self.degree): None})
                    if placement.cuts not in known and len(known) < MOST_CUTS:
                        known[placement.cuts] = None
                        changed[key] = None
        return list(changed)

    def placements(self, source: Source) -> tuple[Placement, ...]:
        """Of a placeholder: a parameter or buffer may lie in any way that an operator asks for; an input is whole."""
        kind = source.role[0]
        whole: tuple[Placement, ...] = (REPLICATE,)
        if kind == "parameter" and source.value.gradient:
            whole = (REPLICATE, SHARED)
        if kind not in ("parameter", "buffer"):
            return whole
        cut = [Shard(dim, cuts) for dim in range(source.value.dim) for cuts in self.cuts.get((source.key, dim), ())]
        return (*whole, *cut)


def _signature(call: Call, candidates: Mapping[Place, tuple[Cuts, ...]]) -> object:
    arguments = tuple((name, repr(value)) for name, value in call.arguments.items())
    return call.op, arguments, call.inputs, call.outputs, call.written, tuple(sorted(candidates.items()))
