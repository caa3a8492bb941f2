"""What may be chosen on an axis: the options less what its purpose, pins and the other axes forbid."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeVar

from polylane.errors import PolylaneError
from polylane.placement.call import Strategy
from polylane.placement.options import Options
from polylane.placement.placement import Placement, Replicate, Shard, even
from polylane.placement.rewrite import Split
from polylane.placement.rules.registry import composing
from polylane.placement.view import Key, Source, Step, View
from polylane.planner.sample_cuts import cuts_samples, sample_dims

PURPOSES = ("tensor", "sequence", "data")

T = TypeVar("T")


@dataclass(frozen=True)
class Demands:
    """What a split must keep to.

    Attributes:
        purpose: "tensor" splits parameters, "sequence" activations, "data" samples.
        pins: name of a parameter, buffer, source or node -> "replicate", "shard(<dim>)" or "partial".
        taken: how the graph lies on other axes, by axis; a dimension that is cut there is not cut here.
        fixed: placements of sources that are decided already.
    """

    purpose: str
    pins: Mapping[str, str] = field(default_factory=dict)
    taken: Mapping[str, Split] = field(default_factory=dict)
    fixed: Mapping[Key, Placement] = field(default_factory=dict)


def allowed(view: View, options: Options, degree: int, demands: Demands) -> Options:
    """The options that meet all demands.

    Raises:
        PolylaneError: a pin that nothing meets, naming the plan's key and what is possible.
        ValueError: an unknown purpose.
    """
    if demands.purpose not in PURPOSES:
        raise ValueError(f"{demands.purpose} is no purpose of an axis")
    dims = sample_dims(view) if demands.purpose != "data" else {}
    steps, known = dict[str, tuple[Strategy, ...]](), dict[Hashable, tuple[Strategy, ...]]()
    for step in view.steps:
        offered = options.steps[step.name]
        samples = tuple(dims.get(key, frozenset()) for key in (*step.reads, *step.gives))
        others = tuple(id(split.steps[step.name]) for split in demands.taken.values())
        kind = (id(offered), step.call.base, samples, others)
        if kind not in known:
            known[kind] = _of_step(view, step, offered, demands, dims)
        steps[step.name] = known[kind]
    sources = {key: _of_source(s, options.sources[key], degree, demands) for key, s in view.sources.items()}
    return _pinned(view, Options(steps, sources), demands)


def _of_step(
    view: View,
    step: Step,
    strategies: tuple[Strategy, ...],
    demands: Demands,
    dims: Mapping[Key, frozenset[int]],
) -> tuple[Strategy, ...]:
    others = [split.steps[step.name] for split in demands.taken.values()]
    together = step.call.base in composing()

    def fits(strategy: Strategy) -> bool:
        pairs = chain(zip(step.reads, strategy.inputs, strict=True), zip(step.gives, strategy.outputs, strict=True))
        if any(cuts_samples(placement, dims.get(key, frozenset()), view.samples) for key, placement in pairs):
            return False
        return not any(collide(strategy, other, together) for other in others)

    return tuple(filter(fits, strategies))


def collide(one: Strategy, other: Strategy, together: bool) -> bool:
    """Whether two axes cannot split an operator so at a time.

    Args:
        one, other: strategies of one operator, each for an axis.
        together: whether what communicates inside goes together with what another axis changes in the call.
    """
    mine, theirs = (*one.inputs, *one.outputs), (*other.inputs, *other.outputs)
    if any(_same_dim(a, b) for a, b in zip(mine, theirs, strict=True)):
        return True
    if together and _everywhere(mine) and _everywhere(theirs):
        return False
    talks = (one.sent or one.messages) or (other.sent or other.messages)
    return bool(talks and one.local and other.local and _cut(mine) and _cut(theirs))


def _everywhere(placements: Iterable[Placement]) -> bool:
    """Whether every rank has a part of whatever is cut: one that has none of it skips what others wait for."""
    return all(p.length(i) for p in placements if isinstance(p, Shard) for i in range(len(p.cuts[0]) - 1))


def _same_dim(a: Placement, b: Placement) -> bool:
    return isinstance(a, Shard) and isinstance(b, Shard) and a.dim == b.dim


def _cut(placements: Iterable[Placement]) -> bool:
    return any(isinstance(p, Shard) for p in placements)


def _of_source(
    source: Source, placements: tuple[Placement, ...], degree: int, demands: Demands
) -> tuple[Placement, ...]:
    if source.key in demands.fixed:
        return (demands.fixed[source.key],)
    kind = source.role[0]
    if kind == "parameter" and demands.purpose != "tensor":
        placements = tuple(p for p in placements if isinstance(p, Replicate))
    elif kind not in ("parameter", "buffer"):
        placements = (*placements, *_cuts_on_demand(source, degree, demands))
    others = [split.sources[source.key] for split in demands.taken.values() if source.key in split.sources]
    return tuple(p for p in placements if not any(_same_dim(p, other) for other in others))


def _cuts_on_demand(source: Source, degree: int, demands: Demands) -> list[Placement]:
    """An input comes whole, unless somebody says how it is cut."""
    pattern = demands.pins.get(source.key[0], "")
    every = [Shard(dim, even(size, degree)) for dim, size in enumerate(source.value.shape)]
    return [shard for shard in every if str(shard) == pattern]


# ---- pins ------------------------------------------------------------------------------------------------------------


def _pinned(view: View, options: Options, demands: Demands) -> Options:
    steps, sources = dict(options.steps), dict(options.sources)
    for name, pattern in demands.pins.items():
        where = f"placements.{name}.{demands.purpose}: {pattern}"
        source = next((k for k in _source_keys(name) if k in sources), None)
        step, index = view.aliases.get(name, (name, None))
        if source is not None and source not in demands.fixed:
            sources[source] = _matching(sources[source], [(p,) for p in sources[source]], pattern, where)
        elif step in steps:
            steps[step] = _matching(steps[step], [_outputs(s, index) for s in steps[step]], pattern, where)
    return Options(steps, sources)


def _source_keys(name: str) -> list[Key]:
    return [(f"parameter:{name}", 0), (f"buffer:{name}", 0), (name, 0)]


def _outputs(strategy: Strategy, index: int | None) -> tuple[Placement, ...]:
    return strategy.outputs if index is None else (strategy.outputs[index],)


def matches(placement: Placement, pattern: str) -> bool:
    """Whether a placement is of a pattern: "replicate", "shard(1)", "partial"."""
    return _pattern(placement) == pattern


def _pattern(placement: Placement) -> str:
    return "replicate" if isinstance(placement, Replicate) else str(placement)


def _matching(
    choices: tuple[T, ...], placed: Sequence[tuple[Placement, ...]], pattern: str, where: str
) -> tuple[T, ...]:
    found = tuple(c for c, each in zip(choices, placed, strict=True) if all(matches(p, pattern) for p in each))
    if not found:
        texts = [" and ".join(dict.fromkeys(map(_pattern, each))) for each in placed]
        raise PolylaneError(f"{where}: not possible here; possible are {', '.join(dict.fromkeys(texts))}")
    return found
