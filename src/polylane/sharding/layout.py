"""Layout: the placements of one graph on all axes of a mesh, at any number of samples per worker."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache, cached_property, partial
from typing import Any

import torch
from torch import Tensor

from polylane.errors import PolylaneError, format_plural
from polylane.graph.graph import Graph
from polylane.graph.symbolic_sizes import batch_dimension
from polylane.placement.enumerate_strategies import StrategyOptions, enumerate_strategies
from polylane.placement.operator_view import OperatorView, view_operators
from polylane.placement.placement import (
    REPLICATE,
    REPLICATE_PARTIAL_GRAD,
    Partial,
    Placement,
    Shard,
    even_cuts,
    local_shape,
)
from polylane.placement.redistribute import assemble_shards, local_shard, pad_shard
from polylane.placement.rewrite import AxisSplit, State
from polylane.placement.strategy import OperatorCall
from polylane.sharding.admissible import SplitDemands
from polylane.sharding.carry_over import carry_over_split
from polylane.sharding.solve import carry_over, solve
from polylane.sharding.traced_split import NotTraced, SplitFormula

_CARRIED = 64  # sample counts for which carried-over splits are cached, beside the one that was chosen for
_ADMITTED = 4096  # sizes for which it is known whether a formula holds


class Layout:
    """The placements of a graph.

    Args:
        graph: the captured graph whose operators are split.
        samples: number of samples per worker that the splits were chosen for.
        splits: the chosen strategies by axis, in the order of the mesh.
        whole_parameters: parameters that every rank must hold whole, and the reason.
        plain: names of values that must not be Partial on any rank, nor their gradients.
        views: the graph's operators by axis, where they have been made already.
    """

    def __init__(
        self,
        graph: Graph,
        samples: int,
        splits: Mapping[str, AxisSplit],
        whole_parameters: Mapping[str, str] | None = None,
        plain: Collection[str] = (),
        views: Mapping[str, OperatorView] | None = None,
    ) -> None:
        self.graph, self.samples, self.splits = graph, samples, dict(splits)
        self.whole, self.never_partial = dict(whole_parameters or {}), frozenset(plain)
        self._views = views or {axis: view_operators(graph, samples, split.degree) for axis, split in splits.items()}
        self._chosen = _calls_by_axes(self._views), self.splits
        # Carried-over splits by number of samples: programs and the simulator ask for the same few numbers many times.
        self._carried: dict[
            tuple[int, tuple[int, ...]], tuple[Mapping[str, OperatorCall], Mapping[str, AxisSplit]]
        ] = {}
        self._formulas: dict[int, SplitFormula | None] = {}  # by number of samples
        self._admitted: dict[tuple[int, tuple[int, ...]], bool] = {}

    @property
    def view(self) -> OperatorView:
        """The graph's operators at the number of samples that the splits were chosen for."""
        return next(iter(self._views.values()))

    def at(
        self, samples: int, open_sizes: tuple[int, ...] = ()
    ) -> tuple[Mapping[str, OperatorCall], Mapping[str, AxisSplit]]:
        """Return every operator as a call, and the splits by axis.

        Args:
            samples: number of samples per worker.
            open_sizes: the batch's sizes that the graph leaves open; empty: those at which it was captured.
        """
        sizes = open_sizes or self.graph.code.nominal_sizes
        if samples == self.samples and sizes == self.graph.code.nominal_sizes:
            return self._chosen
        if (samples, sizes) not in self._carried:
            views = {
                axis: view_operators(self.graph, samples, split.degree, open_sizes=sizes)
                for axis, split in self.splits.items()
            }
            splits = {}
            for axis, split in self.splits.items():
                sampled = _sampled_leaves(self, split, self.graph) if axis == "data" else ()
                choice = _axis_options(views[axis], split.degree, axis, sampled, self.never_partial)
                splits[axis] = carry_over_split(split, self._views[axis], views[axis], choice)
            self._carried[samples, sizes] = _calls_by_axes(views), splits
            # Dictionaries keep insertion order: drop the oldest entry.
            if len(self._carried) > _CARRIED:
                del self._carried[next(iter(self._carried))]
        return self._carried[samples, sizes]

    def formula(self, samples: int, open_sizes: tuple[int, ...]) -> SplitFormula | None:
        """Return the splits as formulas of the open sizes; None where they do not hold at the given ones.

        All workers get the same: the formulas are those of the splits at the sizes from which the graph was captured.

        Args:
            samples: number of samples per worker.
            open_sizes: the batch's sizes that the graph leaves open.
        """
        if not open_sizes:
            return None
        if samples not in self._formulas:
            self._formulas[samples] = self._find_formula(samples)
        split_formula = self._formulas[samples]
        if split_formula is None:
            return None
        if (samples, open_sizes) not in self._admitted:
            if len(self._admitted) == _ADMITTED:
                self._admitted.clear()
            self._admitted[samples, open_sizes] = split_formula.admits((samples, *open_sizes))
        return split_formula if self._admitted[samples, open_sizes] else None

    def _find_formula(self, samples: int) -> SplitFormula | None:
        nominal = self.graph.code.nominal_sizes
        views = {
            axis: view_operators(self.graph, samples, s.degree, open_sizes=nominal) for axis, s in self.splits.items()
        }

        def view(degree: int, sizes: tuple[Any, ...]) -> OperatorView:
            return view_operators(self.graph, samples, degree, open_sizes=sizes[1:])

        try:
            return SplitFormula(view, self.at(samples)[1], views, (samples, *nominal))
        except NotTraced:  # a choice depends on the size: each size is then laid out by itself
            return None

    @cached_property
    def placement_hash(self) -> str:
        """Hash of the chosen placements; must be equal on all ranks, which choose independently."""
        chosen = []
        for axis, split in self.splits.items():
            steps = sorted((name, repr(s.inputs), repr(s.outputs)) for name, s in split.strategies.items())
            chosen.append(
                (axis, steps, sorted((key, repr(placement)) for key, placement in split.source_placements.items()))
            )
        return hashlib.sha256(repr(chosen).encode()).hexdigest()[:16]

    def source_placements(self, kind: str, name: str) -> dict[str, Placement]:
        """Return the placements of a parameter or buffer, by axis."""
        return {
            axis: split.source_placements.get((f"{kind}:{name}", 0), REPLICATE) for axis, split in self.splits.items()
        }

    def state(self, value: str, samples: int, open_sizes: tuple[int, ...] = ()) -> State:
        """Return the placements, one per axis, in which a node's value is made; see :meth:`at` for the sizes."""
        key = self.view.aliases.get(value, (value, 0))
        formula = self.formula(samples, open_sizes)
        if formula is not None:
            return formula.state(key, (samples, *open_sizes))
        return tuple(split.placement(key) for split in self.at(samples, open_sizes)[1].values())

    def local_shape(
        self,
        value: str,
        shape: tuple[int, ...],
        samples: int,
        coordinates: Mapping[str, int],
        open_sizes: tuple[int, ...] = (),
    ) -> tuple[int, ...]:
        """Return the shape of a node's value on the worker at ``coordinates``."""
        for axis, placement in zip(self.splits, self.state(value, samples, open_sizes), strict=True):
            shape = local_shape(shape, placement, coordinates[axis])
        return shape

    def partial_gradient_axes(self) -> dict[str, tuple[str, ...]]:
        """Return the parameters whose gradients are Partial on the ranks of an axis, and those axes."""
        parameter_axes = {}
        for key, source in self.view.sources.items():
            axes = tuple(
                axis
                for axis, split in self.splits.items()
                if split.source_placements.get(key) == REPLICATE_PARTIAL_GRAD
            )
            if source.role[0] == "parameter" and axes:
                parameter_axes[str(source.role[1])] = axes
        return parameter_axes


def choose_layout(
    graph: Graph,
    degrees: Mapping[str, int],
    samples: int,
    *,
    pins: Mapping[str, Mapping[str, str]] | None = None,
    whole: Mapping[str, str] | None = None,
    sampled: Sequence[bool] = (),
    plain: Collection[str] = (),
    offer: LayoutOffer | None = None,
) -> Layout:
    """Choose the placements of a graph on the axes of a mesh, one axis after the other.

    They are compared at nominal speeds, so that all workers, the planner and the simulator choose the same.

    Args:
        graph: the captured graph whose operators are split.
        degrees: ranks along each axis that splits operators, in the order of the mesh.
        samples: samples per worker; where replicas split the operators too, of all replicas.
        pins: placements that the plan asks for, by axis and then by name.
        whole: parameters that every rank must hold whole, and the reason.
        sampled: for each leaf of the batch, whether it is divided over the replicas; needed only if "data" is one of
            the axes: then the loss couples samples (in-batch negatives), so that averaging over replicas would be
            wrong.
        plain: names of values that must not be Partial on any rank, nor their gradients.
        offer: the graph's strategies at ``samples``, shared where several layouts are chosen.
    """
    splits: dict[str, AxisSplit] = {}
    views: dict[str, OperatorView] = {}
    offer = offer or LayoutOffer(graph, samples)
    # Each axis sees the splits of those before it, so that no two shard the same dimension.
    for axis, degree in degrees.items():
        shown = views[axis] = offer.view(degree)
        choice = _axis_options(shown, degree, axis, sampled, plain, offer)
        # Replicas hold all parameters: a plan's pins and whole parameters concern the other axes.
        axis_pins = {} if axis == "data" else _merge_pins((pins or {}).get(axis, {}), whole or {})
        splits[axis] = solve(shown, choice, degree, SplitDemands(axis, axis_pins, splits))
    return Layout(graph, samples, splits, whole, plain, views)


class LayoutOffer:
    """The strategies of a graph's operators for each number of ranks, enumerated once for all axes and meshes.

    Args:
        graph: the captured graph whose operators are split.
        samples: number of samples per worker in the views.

    Attributes:
        view: returns the graph's operators for an axis of a number of ranks.
        options: returns the strategies that the rules offer on an axis of a number of ranks.
    """

    def __init__(self, graph: Graph, samples: int) -> None:
        self.view = cache(partial(view_operators, graph, samples))
        self.options = cache(lambda degree: enumerate_strategies(self.view(degree), degree))


def _merge_pins(pins: Mapping[str, str], whole_parameters: Mapping[str, str]) -> dict[str, str]:
    for name, why in whole_parameters.items():
        if pins.get(name, "replicate") != "replicate":
            raise PolylaneError(f"plan: placements.{name}: {pins[name]}: every rank must hold it whole, for {why}")
    return {**dict.fromkeys(whole_parameters, "replicate"), **pins}


def _axis_options(
    shown: OperatorView,
    degree: int,
    axis: str,
    sampled: Sequence[bool],
    plain: Collection[str],
    offer: LayoutOffer | None = None,
) -> StrategyOptions:
    """Return the strategies that may be chosen along an axis.

    Raises:
        PolylaneError: replicas cannot divide the samples, because the model computes with a fixed number of them.
    """
    if axis == "data":
        # A graph whose input has a fixed size other than the batch's was captured for that number of samples only.
        for source in shown.sources.values():
            kind, index = source.role
            if kind == "input" and sampled[index] and source.value.shape[0] != shown.samples:
                captured = format_plural(source.value.shape[0], "sample")
                raise PolylaneError(
                    f"data={degree}: samples meet in the loss, so replicas hold the {shown.samples} samples of a batch "
                    f"together, but the model computes with {captured} and no other number; use data=1"
                )
    offered = enumerate_strategies(shown, degree) if offer is None else offer.options(degree)
    choice = _without_partial_sums(shown, offered, plain)
    return _data_parallel_options(shown, choice, degree, sampled) if axis == "data" else choice


def _without_partial_sums(shown: OperatorView, choice: StrategyOptions, plain: Collection[str]) -> StrategyOptions:
    """Return the strategies that leave no rank with a partial sum of the plain values or of their gradients."""
    keys = {shown.aliases.get(name, (name, 0)) for name in plain}
    if not keys:
        return choice
    steps = dict(choice.strategies)
    for step in shown.operators:
        places = [i for i, key in enumerate(step.output_keys) if key in keys]
        if places:
            steps[step.name] = tuple(s for s in steps[step.name] if all(_is_not_partial(s.outputs[i]) for i in places))
    sources = {
        k: tuple(p for p in ps if k not in keys or _is_not_partial(p)) for k, ps in choice.source_placements.items()
    }
    return StrategyOptions(steps, sources)


def _is_not_partial(placement: Placement) -> bool:
    # REPLICATE_PARTIAL_GRAD is a Replicate too, but its gradient is a partial sum: compare with REPLICATE itself.
    return placement == REPLICATE or isinstance(placement, Shard)


def _data_parallel_options(
    shown: OperatorView, choice: StrategyOptions, degree: int, sampled: Sequence[bool]
) -> StrategyOptions:
    """Return the options of the data axis: inputs are sharded by sample, and parameters' gradients are partial sums."""
    sources = dict(choice.source_placements)
    for key, source in shown.sources.items():
        kind, index = source.role
        if kind == "input" and sampled[index]:
            sources[key] = (Shard(0, even_cuts(source.value.shape[0], degree)),)
        elif kind == "parameter":
            sources[key] = (REPLICATE_PARTIAL_GRAD if source.value.gradient else REPLICATE,)
        else:
            sources[key] = (REPLICATE,)
    return StrategyOptions(choice.strategies, sources)


def layout_like(main: Layout, graph: Graph, plain: Collection[str] = ()) -> Layout:
    """Split another graph of the same model (evaluation, another loss) with the parameter placements of ``main``."""
    splits: dict[str, AxisSplit] = {}
    for axis, split in main.splits.items():
        shown = view_operators(graph, main.samples, split.degree)
        sampled = _sampled_leaves(main, split, graph) if axis == "data" else ()
        choice = _axis_options(shown, split.degree, axis, sampled, plain)
        splits[axis] = carry_over(split, shown, choice, axis, splits)
    return Layout(graph, main.samples, splits, plain=plain)


def _sampled_leaves(main: Layout, split: AxisSplit, graph: Graph) -> list[bool]:
    """Return which leaves of the batch are divided: as in ``main``; in another batch structure, those that may grow."""
    if graph.code.leaf_count != main.graph.code.leaf_count:
        values = {n.meta["role"]: n.meta.get("val") for n in graph.code.fx.nodes if n.op == "placeholder"}
        return [batch_dimension(values.get(("input", i))) == 0 for i in range(graph.code.leaf_count)]
    inputs = {s.role[1]: key for key, s in main.view.sources.items() if s.role[0] == "input"}
    return [
        isinstance(split.source_placements.get(inputs.get(i, ("", 0))), Shard)
        for i in range(max(inputs, default=-1) + 1)
    ]


def _calls_by_axes(views: Mapping[str, OperatorView]) -> Mapping[str, OperatorCall]:
    return {step.name: step.call for step in next(iter(views.values())).operators}


def local_part(tensor: Tensor, placements: Mapping[str, Placement], coordinates: Mapping[str, int]) -> Tensor:
    """Return a worker's part of a whole tensor, in its own memory where it is only a part."""
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            tensor = local_shard(tensor, placement, coordinates[axis])
    return tensor


def pad_local_part(part: Tensor, placements: Mapping[str, Placement], coordinates: Mapping[str, int]) -> Tensor:
    """Return a worker's part of a tensor in the whole tensor's shape, zero elsewhere; the part itself if it is all."""
    for axis, placement in placements.items():
        if isinstance(placement, Shard):
            part = pad_shard(part, placement, coordinates[axis])
    return part


def assemble_parts(parts: Mapping[tuple[int, ...], Tensor], state: State, degrees: tuple[int, ...]) -> Tensor:
    """Assemble a whole tensor from the parts of a mesh's ranks, which are keyed by their coordinates."""
    if not state:
        return parts[()]
    # The outermost axis first: assemble each of its ranks' parts over the inner axes, then join them along this axis.
    placement, inner_degrees = state[0], degrees[1:]
    rank_tensors = [
        assemble_parts({at[1:]: part for at, part in parts.items() if at[0] == index}, state[1:], inner_degrees)
        for index in range(degrees[0])
    ]
    if isinstance(placement, Partial):
        return torch.stack(rank_tensors).sum(0)
    # Replicated: every rank has the same value.
    return assemble_shards(rank_tensors, placement) if isinstance(placement, Shard) else rank_tensors[0]
