"""Admissible strategies: those that the rules offer on an axis, less what its purpose, pins and other axes forbid."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from polylane.errors import PolylaneError
from polylane.graph.symbolic_sizes import is_dynamic
from polylane.placement.enumerate_strategies import StrategyOptions
from polylane.placement.kernels.empty_shards import has_empty_rank
from polylane.placement.operator_view import GraphInput, OperatorView, TensorKey, graph_tensors
from polylane.placement.placement import Cuts, Placement, Replicate, Shard, even_cuts, join_cuts, shard_same_dim
from polylane.placement.rewrite import AxisSplit
from polylane.placement.rules.registry import composable_operators
from polylane.placement.strategy import Strategy

PURPOSES = ("tensor", "sequence", "data")

T = TypeVar("T")


@dataclass(frozen=True)
class SplitDemands:
    """The conditions that a split along one axis must satisfy.

    Attributes:
        purpose: "tensor": parameters are sharded, with as few bytes as possible, and samples are not split; "sequence":
            the same for activations, with replicated parameters; "data": as "sequence", but samples may be split too,
            and inputs are sharded where ``pins`` say so.
        pins: name of a parameter, buffer, source or node -> "replicate", "shard(<dim>)" or "partial".
        other_axes: splits already chosen along other axes, by axis; a dimension that one of them shards is not sharded
            here.
        fixed_placements: placements of graph inputs that are decided already, by key; pins do not apply to them.
    """

    purpose: str
    pins: Mapping[str, str] = field(default_factory=dict)
    other_axes: Mapping[str, AxisSplit] = field(default_factory=dict)
    fixed_placements: Mapping[TensorKey, Placement] = field(default_factory=dict)


def admissible_options(
    view: OperatorView, options: StrategyOptions, degree: int, demands: SplitDemands
) -> StrategyOptions:
    """Return the strategies and placements of graph inputs that satisfy all demands.

    Args:
        view: the graph's operators at one number of samples.
        options: every strategy and placement that the rules offer.
        degree: number of ranks along the axis.
        demands: the axis's purpose, pins and earlier splits.

    Raises:
        PolylaneError: no strategy satisfies a pin; the message names the plan's key and the possible placements.
        ValueError: ``demands.purpose`` is not in :data:`PURPOSES`.
    """
    if demands.purpose not in PURPOSES:
        raise ValueError(f"{demands.purpose} is no purpose of an axis")
    # Only the data axis may give different samples to different ranks; the other axes must leave each rank all samples.
    dims = sample_dims(view) if demands.purpose != "data" else {}
    steps, cache = dict[str, tuple[Strategy, ...]](), dict[Hashable, tuple[Strategy, ...]]()
    composable = composable_operators()
    for step in view.operators:
        offered = options.strategies[step.name]
        other_strategies = [split.strategies[step.name] for split in demands.other_axes.values()]
        # Operators of repeated blocks share one tuple of offered strategies, so that filtering is cached by its
        # identity; the splits of the other axes are compared by identity for the same reason.
        tensors = tuple(dims.get(key, frozenset()) for key in (*step.input_keys, *step.output_keys))
        kind = (id(offered), step.call.base, tensors, tuple(map(id, other_strategies)))
        if kind not in cache:
            is_composable = step.call.base in composable
            cache[kind] = tuple(
                s
                for s in offered
                if not _splits_samples(s, tensors, view.samples)
                and not any(axes_collide(s, other_strategy, is_composable) for other_strategy in other_strategies)
            )
        steps[step.name] = cache[kind]
    sources = {
        key: _source_placements(s, options.source_placements[key], degree, demands) for key, s in view.sources.items()
    }
    return _apply_pins(view, StrategyOptions(steps, sources), demands)


def _splits_samples(strategy: Strategy, dims: Sequence[frozenset[int]], samples: int) -> bool:
    placements = zip((*strategy.inputs, *strategy.outputs), dims, strict=True)
    return any(shards_samples(placement, grow, samples) for placement, grow in placements)


def axes_collide(strategy: Strategy, other_strategy: Strategy, together: bool) -> bool:
    """Return whether two axes cannot both split one operator with these strategies.

    Args:
        strategy, other_strategy: strategies of the same operator, one for each axis.
        together: whether the operator's own communication works on the local call that another axis has made smaller.
    """
    strategy_placements, other_placements = (
        (*strategy.inputs, *strategy.outputs),
        (*other_strategy.inputs, *other_strategy.outputs),
    )
    # Each axis would need the other's shards to cut the same dimension a second time.
    if any(shard_same_dim(a, b) for a, b in zip(strategy_placements, other_placements, strict=True)):
        return True
    # Composable operators communicate correctly on a sharded call, provided that no rank skips the collective: a rank
    # with an empty shard does not run the call (see kernels/empty_shards.py).
    if together and not any(map(has_empty_rank, (*strategy_placements, *other_placements))):
        return False
    # Otherwise an operator that communicates inside is not combined with another axis that changes the local call too:
    # its rule does not say that the two changes work together (composes=True).
    talks = (strategy.sent or strategy.messages) or (other_strategy.sent or other_strategy.messages)
    return bool(talks and strategy.local and other_strategy.local) and all(
        any(isinstance(p, Shard) for p in placements) for placements in (strategy_placements, other_placements)
    )


def _source_placements(
    source: GraphInput, placements: tuple[Placement, ...], degree: int, demands: SplitDemands
) -> tuple[Placement, ...]:
    if source.key in demands.fixed_placements:
        return (demands.fixed_placements[source.key],)
    kind = source.role[0]
    # Along "sequence" and "data" axes parameters are replicated: those axes divide activations and samples.
    if kind == "parameter" and demands.purpose != "tensor":
        placements = tuple(p for p in placements if isinstance(p, Replicate))
    elif kind not in ("parameter", "buffer"):
        placements = (*placements, *_pinned_input_cuts(source, degree, demands))
    other_placements = [
        split.source_placements[source.key]
        for split in demands.other_axes.values()
        if source.key in split.source_placements
    ]
    return tuple(p for p in placements if not any(shard_same_dim(p, placement) for placement in other_placements))


def _pinned_input_cuts(source: GraphInput, degree: int, demands: SplitDemands) -> list[Placement]:
    """Return the shards that pins allow for a graph input, which is replicated by default."""
    pattern = demands.pins.get(source.key[0], "")
    shards = [Shard(dim, even_cuts(size, degree)) for dim, size in enumerate(source.value.shape)]
    return [shard for shard in shards if str(shard) == pattern]


# ---- samples ---------------------------------------------------------------------------------------------------------


def sample_dims(view: OperatorView) -> Mapping[TensorKey, frozenset[int]]:
    """Return the dimensions of every tensor that grow with the number of samples."""
    return {
        key: frozenset(d for d, size in enumerate(tensor.shape) if is_dynamic(size))
        for key, tensor in graph_tensors(view.graph.code.fx)
    }


def shards_samples(placement: Placement, dims: frozenset[int], samples: int) -> bool:
    """Return whether a placement gives different samples to different ranks.

    Args:
        placement: the tensor's placement along one axis.
        dims: dimensions of the tensor that grow with the samples.
        samples: number of samples per worker.
    """
    # A dimension of [samples * heads] may be sharded if the cut is the same in every sample: by heads.
    return (
        isinstance(placement, Shard) and placement.dim in dims and not cuts_each_sample_alike(placement.cuts, samples)
    )


def cuts_each_sample_alike(cuts: Cuts, samples: int) -> bool:
    """Return whether a dimension of ``samples`` equal blocks, one after the other, is cut equally in each of them."""
    size = cuts[-1][-1]
    if samples < 1 or size % samples or len(cuts) % samples:
        return False
    sample_cuts = cuts[: len(cuts) // samples]
    return sample_cuts[-1][-1] == size // samples and join_cuts([sample_cuts] * samples) == cuts


# ---- pins ------------------------------------------------------------------------------------------------------------


def _apply_pins(view: OperatorView, options: StrategyOptions, demands: SplitDemands) -> StrategyOptions:
    steps, sources = dict(options.strategies), dict(options.source_placements)
    for name, pattern in demands.pins.items():
        pin = f"placements.{name}.{demands.purpose}: {pattern}"
        # A pin may name a graph input or a node; an alias (getitem of a node with several results) pins one output
        # only.
        source = next((k for k in ((f"parameter:{name}", 0), (f"buffer:{name}", 0), (name, 0)) if k in sources), None)
        step, index = view.aliases.get(name, (name, None))
        if source is not None and source not in demands.fixed_placements:
            sources[source] = _filter_by_pattern(sources[source], [(p,) for p in sources[source]], pattern, pin)
        elif step in steps:
            outputs = [s.outputs if index is None else (s.outputs[index],) for s in steps[step]]
            steps[step] = _filter_by_pattern(steps[step], outputs, pattern, pin)
    return StrategyOptions(steps, sources)


def _pattern_of(placement: Placement) -> str:
    # Whether the gradient of a replicated tensor is partial is chosen by the solver, not by the plan's pin.
    return "replicate" if isinstance(placement, Replicate) else str(placement)


def _filter_by_pattern(
    choices: tuple[T, ...], placed: Sequence[tuple[Placement, ...]], pattern: str, pin: str
) -> tuple[T, ...]:
    matches = tuple(
        c for c, placements in zip(choices, placed, strict=True) if all(_pattern_of(p) == pattern for p in placements)
    )
    if not matches:
        texts = [" and ".join(dict.fromkeys(map(_pattern_of, placements))) for placements in placed]
        raise PolylaneError(f"{pin}: not possible here; possible are {', '.join(dict.fromkeys(texts))}")
    return matches
