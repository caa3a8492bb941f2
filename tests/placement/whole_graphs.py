"""Whole graphs, split over a mesh whose ranks are threads: every value and gradient against the graph run whole."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.batch import flatten
from polylane.graph.capture.assign_keys import copy_python_call
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.placement.enumerate_strategies import StrategyOptions, enumerate_strategies
from polylane.placement.operator_view import OperatorView, TensorKey, tensor_key, view_operators
from polylane.placement.placement import REPLICATE, Placement, Replicate, Shard, gradient_placement
from polylane.placement.rewrite import AxisSplit, State
from polylane.placement.strategy import Strategy
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.sharding.admissible import SplitDemands, admissible_options
from polylane.sharding.layout import assemble_parts, local_part
from polylane.verify.rounding_floor import relative_error
from polylane.verify.verify import TOLERANCE, batch_in_float64
from tests.placement.split_checks import Ring, ThreadAxis, on_rank, travels
from tests.support.reference.eager_and_captured import captured

SAMPLES = 4
FLOOR = 1e-3  # of the largest gradient: what is zero in truth is rounding, another number in every order of summation
# How often a choice is one that splits, where there is such a one.
BOLD = 0.8

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Run:
    """What one execution of a graph leaves behind.

    Attributes:
        results: the loss, or its total and count.
        values: of every node, by name.
        sources: parameters and buffers afterwards, and constants, by key; parameters have their gradients.
    """

    results: tuple[Tensor, ...]
    values: Mapping[str, Tensor]
    sources: Mapping[TensorKey, Tensor]


@dataclass(frozen=True)
class Subject:
    """A captured case, with one batch, and what it computes whole.

    Attributes:
        table: every placeholder's value, by role.
        seeds: what is fed to the results on the way back.
    """

    name: str
    graph: Graph
    table: Mapping[tuple[str, Any], Any]
    whole: Run

    @functools.cached_property
    def viewed(self) -> dict[int, tuple[OperatorView, StrategyOptions]]:
        return {}

    def at(self, degree: int) -> tuple[OperatorView, StrategyOptions]:
        """The graph's view for so many ranks, and all that may be chosen."""
        if degree not in self.viewed:
            shown = view_operators(self.graph, SAMPLES, degree)
            self.viewed[degree] = shown, enumerate_strategies(shown, degree)
        return self.viewed[degree]


@functools.cache
def subject(name: str) -> Subject:
    """A case or an example, captured in float64 at one number of samples and run whole at another."""
    graph, model, case = captured(name, in_float64=True)
    tensors = ModelTensors(model, [case.loss], torch.device("cpu"))
    leaves = [_without_ties(leaf) for leaf in flatten(batch_in_float64(case.batch(SAMPLES, 2)))[0]]
    by_kind: dict[str, Mapping[Any, Any]] = {
        "parameter": tensors.parameters(),
        "buffer": tensors.buffers(),
        "constant": graph.code.constants,
        "input": dict(enumerate(leaves)),
        "part": {0: SampleSlice(SAMPLES, 0, SAMPLES, seed=3)},
    }
    table = {(kind, key): value for kind, every in by_kind.items() for key, value in every.items()}
    return Subject(name, graph, table, execute(graph, graph.code.fx, table.__getitem__, {}))


def _without_ties(leaf: Any) -> Any:
    """No two neighbours of an image equal: at a tie of a maximum, rounding decides where its gradient goes."""
    noise = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1
    return leaf + 0.01 * torch.randn(leaf.shape, generator=torch.Generator().manual_seed(1)) if noise else leaf


def execute(
    graph: Graph, code: fx.Graph, given: Callable[[tuple[str, Any]], Any], axes: Mapping[str, ThreadAxis]
) -> Run:
    """Run code node by node, forward and backward, on copies of what is given for its placeholders."""
    values: dict[fx.Node, Any] = {}
    kept: dict[str, Tensor] = {}
    sources: dict[TensorKey, Tensor] = {}
    results: tuple[Tensor, ...] = ()
    for node in code.nodes:
        if node.op == "placeholder":
            role = node.meta["role"]
            value = axes[role[1]] if role[0] == "axis" else given(role)
            if isinstance(value, Tensor):
                value = value.detach().clone()
                if role[0] == "parameter":
                    value.requires_grad_(graph.parameters[role[1]].trainable)
                sources[tensor_key(node)] = value
            values[node] = value
        elif node.op == "output":
            results = tuple(fx.map_arg(node.args[0], values.__getitem__))
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            try:
                # The same operator for this thread alone: ranks are threads here, and share every module.
                values[node] = value = copy_python_call(node.target)(*args, **kwargs)
            except Exception as error:
                error.add_note(f"{node.meta['name']}: {node.target}")
                raise
            if isinstance(value, Tensor) and node.meta.get("stands", True):
                if value.requires_grad:
                    value.retain_grad()
                kept[node.meta["name"]] = value
    if results[0].requires_grad:
        results[0].backward()
    return Run(results, kept, sources)


# ---- choosing --------------------------------------------------------------------------------------------------------


def random_split(
    shown: OperatorView,
    offered: StrategyOptions,
    degree: int,
    random: Random,
    taken: Mapping[str, AxisSplit] | None = None,
) -> AxisSplit:
    """Any strategy for every operator, any placement for every source, whether they suit each other or not."""
    taken = taken or {}
    if taken:
        steps = admissible_options(shown, offered, degree, SplitDemands("data", {}, taken)).strategies
        offered = StrategyOptions(
            steps, admissible_options(shown, offered, degree, SplitDemands("tensor", {}, taken)).source_placements
        )
    sources = {key: _drawn(random, every, _splits) for key, every in offered.source_placements.items()}
    steps, fixed = dict[str, Strategy](), dict[TensorKey, Placement]()
    split = AxisSplit(degree, steps, sources)
    for step in shown.operators:
        written = {step.input_keys[i]: i for i in step.call.written_inputs if step.input_keys[i] in sources}
        if step.is_pinned:  # it may share memory with any buffer that it reads
            written |= {key: i for i, key in enumerate(step.input_keys) if key[0].startswith("buffer:")}
        fits = [
            s
            for s in offered.strategies[step.name]
            if all(fixed.get(key, s.inputs[i]) == s.inputs[i] for key, i in written.items())
            and all(s.inputs[i] in offered.source_placements[key] for key, i in written.items())
        ]
        assert fits, f"nothing can be chosen for {step.name}"
        steps[step.name] = chosen = _drawn(random, fits, lambda s: any(map(_splits, (*s.inputs, *s.outputs))))
        fixed |= {key: chosen.inputs[i] for key, i in written.items()}
        sources |= fixed
    return split


def _drawn(random: Random, every: Sequence[Any], bold: Callable[[Any], bool]) -> Any:
    bolder = [each for each in every if bold(each)]
    return random.choice(bolder if bolder and random.random() < BOLD else every)


def _splits(placement: Placement) -> bool:
    return not isinstance(placement, Replicate)


# ---- running ---------------------------------------------------------------------------------------------------------


def on_mesh(degrees: Mapping[str, int], work: Callable[[dict[str, ThreadAxis]], Any]) -> dict[Coordinates, Any]:
    """``work`` on every rank of a mesh, by coordinates; the first error of any of them."""
    rings: dict[tuple[str, Coordinates], Ring] = {}
    names, ranks = list(degrees), list(itertools.product(*(range(n) for n in degrees.values())))
    for at in ranks:
        for i, name in enumerate(names):
            rings.setdefault((name, at[:i] + at[i + 1 :]), Ring(degrees[name]))

    def guarded(at: Coordinates) -> Any:
        try:
            return work({name: ThreadAxis(rings[name, at[:i] + at[i + 1 :]], at[i]) for i, name in enumerate(names)})
        except BaseException:
            for ring in rings.values():
                ring.barrier.abort()
            raise

    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = {at: pool.submit(guarded, at) for at in ranks}
        errors = [e for f in futures.values() if (e := f.exception()) is not None]
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return {at: f.result() for at, f in futures.items()}


def run_split(case: Subject, splits: Mapping[str, AxisSplit]) -> dict[Coordinates, Run]:
    """Every rank's run of a graph that is split so."""
    calls = {step.name: step.call for step in case.at(next(iter(splits.values())).degree)[0].operators}
    aliases = case.at(next(iter(splits.values())).degree)[0].aliases
    asked: dict[Coordinates, list[str]] = {}

    def work(axes: dict[str, ThreadAxis]) -> Run:
        coordinates = {name: axis.index for name, axis in axes.items()}
        code = on_rank(case.graph.code.fx, calls, splits, SAMPLES, coordinates, aliases)
        asked[tuple(coordinates.values())] = travels(code)

        def given(role: tuple[str, Any]) -> Any:
            value = case.table[role]
            if not isinstance(value, Tensor):
                return value
            key = (str(role[1]) if role[0] == "value" else f"{role[0]}:{role[1]}", 0)
            placements = {name: split.source_placements.get(key, REPLICATE) for name, split in splits.items()}
            return local_part(value.detach(), placements, coordinates)

        return execute(case.graph, code, given, axes)

    ranks = on_mesh({name: split.degree for name, split in splits.items()}, work)
    first = next(iter(asked.values()))
    for at, own in asked.items():
        assert own == first, f"rank {at} asks for {own} of the others, the first one for {first}"
    return ranks


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare(case: Subject, splits: Mapping[str, AxisSplit]) -> None:
    """Run a graph split and hold everything against the whole graph, to 1e-9 of rounding.

    Raises:
        AssertionError: naming the first value (from the inputs on), or the first gradient (from the loss back), that
            differs, the operator that gives it, and its strategy.
    """
    try:
        ranks = run_split(case, splits)
    except Exception as error:
        where = "".join(f"{note} ({_named(note, case, splits)}): " for note in getattr(error, "__notes__", ()))
        raise AssertionError(f"{case.name}: {where}{type(error).__name__}: {error}") from error
    wrong = next(_different_values(case, splits, ranks), None)
    assert wrong is None, f"{case.name}: {wrong}"
    if next(_different_gradients(case, splits, ranks, case.whole.sources), None) is not None:
        # Of inner values only to say where: a maximum of equals may send its gradient back by any of them.
        wrong = next(_different_gradients(case, splits, ranks, _tensors(case, splits)))
        raise AssertionError(f"{case.name}: {wrong}")


def _named(note: str, case: Subject, splits: Mapping[str, AxisSplit]) -> str:
    key = (note.split(": ")[0], 0)
    return _told(key, splits) if all(key[0] in split.strategies for split in splits.values()) else "placeholder"


def _different_values(
    case: Subject, splits: Mapping[str, AxisSplit], ranks: Mapping[Coordinates, Run]
) -> Iterator[str]:
    aliases = case.at(next(iter(splits.values())).degree)[0].aliases
    whole, degrees = case.whole, tuple(split.degree for split in splits.values())
    for name, value in whole.values.items():
        key = aliases.get(name, (name, 0))
        state = tuple(split.placement(key) for split in splits.values())
        yield from _wrong("value", key, splits, value, {at: r.values[name] for at, r in ranks.items()}, state, degrees)
    for at, run in ranks.items():
        for i, (result, right) in enumerate(zip(run.results, whole.results, strict=True)):
            if _error(right.detach(), result.detach()) > TOLERANCE:
                yield f"result {i} of rank {at} is {result} instead of {right}"
    for key, value in whole.sources.items():
        state = tuple(split.source_placements.get(key, REPLICATE) for split in splits.values())
        yield from _wrong("value", key, splits, value, {at: r.sources[key] for at, r in ranks.items()}, state, degrees)


def _tensors(case: Subject, splits: Mapping[str, AxisSplit]) -> dict[TensorKey, Tensor]:
    """Every tensor of the whole graph whose gradient is known."""
    aliases = case.at(next(iter(splits.values())).degree)[0].aliases
    inner = {aliases.get(name, (name, 0)): value for name, value in case.whole.values.items() if value.retains_grad}
    return dict(case.whole.sources) | inner


def _different_gradients(
    case: Subject,
    splits: Mapping[str, AxisSplit],
    ranks: Mapping[Coordinates, Run],
    tensors: Mapping[TensorKey, Tensor],
) -> Iterator[str]:
    degrees = tuple(split.degree for split in splits.values())
    aliases = case.at(degrees[0])[0].aliases
    names = {aliases.get(name, (name, 0)): name for name in case.whole.values}
    largest = (float(t.grad.abs().max()) for t in case.whole.sources.values() if t.grad is not None and t.grad.numel())
    floor = FLOOR * max(largest, default=0.0)
    for key, value in reversed(tensors.items()):
        if value.requires_grad:
            mine = {at: r.sources[key] if key in r.sources else r.values[names[key]] for at, r in ranks.items()}
            state = tuple(gradient_placement(split.placement(key)) for split in splits.values())
            grads = {at: _gradient(tensor) for at, tensor in mine.items()}
            yield from _wrong("gradient", key, splits, _gradient(value), grads, state, degrees, floor)


def _error(expected: Tensor, got: Tensor, floor: float = 0.0) -> float:
    """As :func:`~polylane.verify.relative_error.relative_error`; infinities that are equal are no error."""
    if expected.is_floating_point() and expected.shape == got.shape and bool(expected.isinf().any()):
        equal = expected == got
        expected, got = (t.masked_fill(equal & expected.isinf(), 0) for t in (expected, got))
    return relative_error(expected, got, floor)


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def _wrong(
    what: str, key: TensorKey, splits: Mapping[str, AxisSplit], right: Tensor, parts: Mapping[Coordinates, Tensor],
    state: State, degrees: tuple[int, ...], floor: float = 1e-12,
) -> Iterator[str]:  # fmt: skip
    told = f"{what} of {key[0]}{f'[{key[1]}]' if key[1] else ''} ({_told(key, splits)})"
    right, parts = right.detach(), {at: part.detach() for at, part in parts.items()}
    for at, part in parts.items():
        if part.dtype != right.dtype:
            yield f"{told}: rank {at} has {part.dtype} instead of {right.dtype}"
    for i, placement in enumerate(state):
        if placement == REPLICATE:
            for at, part in parts.items():
                first = parts[(*at[:i], 0, *at[i + 1 :])]
                if part.shape != first.shape or _error(first, part, floor) > TOLERANCE:
                    yield f"{told}: rank {at} is not equal to the first rank"
    try:
        value = assemble_parts(parts, state, degrees)
    except (RuntimeError, IndexError) as error:
        yield f"{told}: {[tuple(p.shape) for p in parts.values()]} do not make up {tuple(right.shape)}: {error}"
        return
    if value.shape != right.shape:
        yield f"{told}: {tuple(value.shape)} instead of {tuple(right.shape)}"
    elif (error := _error(right, value, floor)) > TOLERANCE:
        yield f"{told}: off by {error:.2g}"


def _told(key: TensorKey, splits: Mapping[str, AxisSplit]) -> str:
    chosen = []
    for axis, split in splits.items():
        if key in split.source_placements:
            chosen.append(f"{axis}: {split.source_placements[key]}")
        else:
            s = split.strategies[key[0]]
            told = f"{', '.join(map(str, s.inputs))} -> {', '.join(map(str, s.outputs))}"
            cuts = [p.cuts for p in (*s.inputs, *s.outputs) if isinstance(p, Shard)]
            chosen.append(f"{axis}={split.degree}: {s.name!r}: {told}, cuts {cuts}")
    return "; ".join(chosen)


__all__ = ["Subject", "compare", "random_split", "subject"]
