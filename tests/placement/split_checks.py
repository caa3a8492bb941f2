"""Run an operator split in every way that its rule offers, on ranks that are threads, against the operator whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.placement.operator_view import ViewSizes, make_call, with_neighbour_cuts
from polylane.placement.overlap import finish, overlap_redistributions
from polylane.placement.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Cuts, Placement, Shard, even_cuts, join_cuts
from polylane.placement.redistribute import Redistribute
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import OperatorCall, Strategy

TOLERANCE = 1e-9


class Ring:
    """What the threads of an axis share."""

    def __init__(self, degree: int) -> None:
        self.degree = degree
        self.barrier = threading.Barrier(degree)
        self.slots: list[Any] = [None] * degree


class ThreadAxis:
    """An axis whose ranks are threads of this process."""

    def __init__(self, ring: Ring, index: int) -> None:
        self.ring, self.index, self.degree = ring, index, ring.degree

    def _all(self, asked: tuple[Any, ...], value: Any) -> list[Any]:
        self.ring.slots[self.index] = asked, value
        self.ring.barrier.wait(20)
        slots = list(self.ring.slots)
        self.ring.barrier.wait(20)
        assert len({known for known, _ in slots}) == 1, f"ranks ask for {[known for known, _ in slots]} at a time"
        return [own for _, own in slots]

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(("sum", tensor.shape, tensor.dtype), tensor.detach().clone())).sum(0)

    def maximum(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._all(("maximum", tensor.shape, tensor.dtype), tensor.detach().clone())).amax(0)

    def exchange(self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]) -> list[Tensor | None]:
        dtype = next(p.dtype for p in pieces if p is not None)
        every = self._all(("exchange", dtype), [None if p is None else p.detach().clone() for p in pieces])
        received = [sent[self.index] for sent in every]
        for i, (tensor, shape) in enumerate(zip(received, shapes, strict=True)):
            if i == self.index:
                continue
            assert (tensor is None) == (shape is None), f"rank {self.index} wants {shape} of {i}, which sends {tensor}"
            assert tensor is None or tuple(tensor.shape) == tuple(shape or ()), (tuple(tensor.shape), shape)
        return received

    def begin_all_reduce(self, tensor: Tensor) -> Callable[[], Tensor]:
        result = self.all_reduce(tensor)
        return lambda: result

    def begin_exchange(
        self, pieces: Sequence[Tensor | None], shapes: Sequence[Sequence[int] | None]
    ) -> Callable[[], list[Tensor | None]]:
        result = self.exchange(pieces, shapes)
        return lambda: result


def on_threads(degree: int, work: Callable[[ThreadAxis], Any]) -> list[Any]:
    """``work`` on every rank of an axis; the first error of any of them."""
    ring = Ring(degree)

    def guarded(index: int) -> Any:
        try:
            return work(ThreadAxis(ring, index))
        except BaseException:
            ring.barrier.abort()
            raise

    with ThreadPoolExecutor(degree) as pool:
        futures = [pool.submit(guarded, i) for i in range(degree)]
        errors = [e for f in futures if (e := f.exception()) is not None]
        real = [e for e in errors if not isinstance(e, threading.BrokenBarrierError)]
        if errors:
            raise (real or errors)[0]
        return [f.result() for f in futures]


def on_rank(*args: Any, **kwargs: Any) -> fx.Graph:
    """What a rank runs: a graph rewritten, as by :func:`rewrite`, with its moves taken apart."""
    graph = rewrite(*args, **kwargs)
    overlap_redistributions(graph)
    return graph


def travels(graph: fx.Graph) -> list[str]:
    """What a rank's graph asks of its axes, and what it waits for, in order: all ranks must do so alike."""
    axes = {n for n in graph.nodes if n.op == "placeholder" and n.meta["role"][0] == "axis"}
    return [
        f"{node.target.__name__} of {node.meta['name']}"  # type: ignore[union-attr]
        for node in graph.nodes
        if axes.intersection(node.all_input_nodes) or node.target is finish
    ]


def graph_of(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], value: Any) -> tuple[fx.Graph, list[Tensor]]:
    """A graph of one operator, whose placeholders are the tensors among its arguments."""
    graph, tensors = fx.Graph(), list[Tensor]()

    def settle(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            node = graph.placeholder(f"x{len(tensors)}")
            node.meta = {"val": arg.to("meta"), "role": ("input", len(tensors)), "grad": arg.requires_grad}
            tensors.append(arg)
            return node
        if isinstance(arg, (list, tuple)):
            return [settle(a) for a in arg]
        return arg

    part = graph.placeholder("part")
    part.meta["role"] = ("part", 0)
    settled = [settle(a) for a in args]
    settled = [part if isinstance(a, SampleSlice) else a for a in settled]
    node = graph.call_function(target, tuple(settled), {k: settle(v) for k, v in kwargs.items()})
    node.meta = {"val": fx.node.map_aggregate(value, lambda v: v.to("meta") if isinstance(v, Tensor) else v)}
    node.meta["name"] = "op"
    if isinstance(value, (list, tuple)):
        outs = []
        for i, each in enumerate(value):
            taken = graph.call_function(__import__("operator").getitem, (node, i))
            taken.meta = {"val": each.to("meta"), "name": f"op.{i}"}
            outs.append(taken)
        graph.output(tuple(outs))
    else:
        graph.output((node,))
    return graph, tensors


def call_for(graph: fx.Graph, degree: int, gradient: bool, op: str | None = None) -> OperatorCall:
    """The one operator of a graph as a call."""
    node = next(n for n in graph.nodes if n.op == "call_function" and n.meta["name"] == "op")
    if op is not None:
        node.meta["op"] = op

    def flows(n: fx.Node) -> bool:
        return bool(n.meta.get("grad", gradient))

    call, _ = make_call(node, ViewSizes(1), degree, flows)
    return call


def check(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    degree: int = 2,
    cuts: Mapping[tuple[str, int, int], Sequence[Cuts]] | None = None,
    op: str | None = None,
    part: SampleSlice | None = None,
    only: Callable[[Strategy], bool] | None = None,
    tolerance: float = TOLERANCE,
) -> list[Strategy]:
    """Every strategy of an operator against the operator itself: values and gradients.

    Args:
        target: the operator, as in a captured graph.
        args, kwargs: its arguments; floating tensors that require a gradient get one.
        degree: ranks.
        cuts: further cuts of dimensions, as neighbours would ask for them: ("in" or "out", which, dim) -> cuts.
        op: the operator's name, where ``target`` is one of our own in its place.
        only: which strategies to check.

    Returns:
        The strategies that were checked.
    """
    kwargs = dict(kwargs or {})
    part = part or SampleSlice(1)
    whole_args = [a.detach().clone().requires_grad_(a.requires_grad) if isinstance(a, Tensor) else a for a in args]
    leaves: list[Tensor] = []

    def leaf(value: Any) -> Any:
        if isinstance(value, Tensor):
            leaves.append(value.detach().clone().requires_grad_(value.requires_grad))
            return leaves[-1]
        return [leaf(v) for v in value] if isinstance(value, (list, tuple)) else value

    whole_args, whole_kwargs = [leaf(a) for a in args], {k: leaf(v) for k, v in kwargs.items()}
    expected = target(*whole_args, **whole_kwargs)
    graph, tensors = graph_of(target, args, kwargs, expected)
    outs = list(expected) if isinstance(expected, (list, tuple)) else [expected]
    gradient = any(o.requires_grad for o in outs)
    random = torch.Generator().manual_seed(7)
    seeds = [torch.randn(o.shape, generator=random, dtype=o.dtype) if o.requires_grad else None for o in outs]
    pairs = [(o, s) for o, s in zip(outs, seeds, strict=True) if s is not None]
    if pairs:
        torch.autograd.backward([o for o, _ in pairs], [s for _, s in pairs])
    wanted = [t.grad if t.grad is not None else torch.zeros_like(t) for t in leaves]
    call = call_for(graph, degree, gradient, op)
    if cuts:
        call = with_neighbour_cuts(call, {place: tuple(each) for place, each in cuts.items()})
    checked = []
    for strategy in strategies(call):
        if only is not None and not only(strategy):
            continue
        _check_one(graph, call, strategy, degree, tensors, part, seeds, outs, wanted, tolerance)
        checked.append(strategy)
    return checked


def _check_one(
    graph: fx.Graph, call: OperatorCall, strategy: Strategy, degree: int, tensors: Sequence[Tensor], part: SampleSlice,
    seeds: Sequence[Tensor | None], outs: Sequence[Tensor], wanted: Sequence[Tensor], tolerance: float,
) -> None:  # fmt: skip
    inputs = [n for n in graph.nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
    split = AxisSplit(degree, {"op": strategy}, {(f"input:{i}", 0): REPLICATE for i in range(len(inputs))})

    def work(axis: ThreadAxis) -> tuple[list[Tensor], list[Tensor], list[str]]:
        own = on_rank(graph, {"op": call}, {"x": split}, 1, {"x": axis.index})
        given = [t.detach().clone().requires_grad_(t.requires_grad) for t in tensors]
        values: dict[fx.Node, Any] = {}
        results: Any = ()
        for node in own.nodes:
            if node.op == "placeholder":
                kind, key = node.meta["role"]
                values[node] = axis if kind == "axis" else part if kind == "part" else given[key]
            elif node.op == "output":
                results = fx.map_arg(node.args[0], values.__getitem__)
            else:
                arguments = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*arguments[0], **arguments[1])  # type: ignore[operator]
        roots = [(r, s) for r, s in zip(results, seeds, strict=True) if s is not None]
        if roots:
            torch.autograd.backward([r for r, _ in roots], [s for _, s in roots])
        grads = [g.grad if g.grad is not None else torch.zeros_like(g) for g in given]
        return [r.detach() for r in results], grads, travels(own)

    where = f"{call.op} {strategy.name} {strategy.inputs} -> {strategy.outputs} on {degree} ranks"
    try:
        ranks = on_threads(degree, work)
    except BaseException as error:
        raise AssertionError(f"{where}: {type(error).__name__}: {error}") from error
    for rank, (values, grads, asked) in enumerate(ranks):
        assert asked == ranks[0][2], f"{where}: rank {rank} asks for {asked}, rank 0 for {ranks[0][2]}"
        for i, (value, out) in enumerate(zip(values, outs, strict=True)):
            _close(value, out.detach(), tolerance, f"{where}: output {i} of rank {rank}")
        for i, (grad, right) in enumerate(zip(grads, wanted, strict=True)):
            if right.is_floating_point() or right.is_complex():
                _close(grad, right, tolerance, f"{where}: gradient of input {i} of rank {rank}")


def _close(value: Tensor, right: Tensor, tolerance: float, where: str) -> None:
    assert value.shape == right.shape, f"{where}: {tuple(value.shape)} instead of {tuple(right.shape)}"
    assert value.dtype == right.dtype, f"{where}: {value.dtype} instead of {right.dtype}"
    if not (right.is_floating_point() or right.is_complex()):
        assert torch.equal(value, right), f"{where}: differs"
        return
    scale = max(float(right.abs().nan_to_num().max()) if right.numel() else 0.0, 1e-3)
    same = torch.allclose(value, right, rtol=0, atol=tolerance * scale, equal_nan=True)
    assert same, f"{where}: off by {float((value - right).abs().max() / scale):.3g}"


def uneven(size: int, degree: int, shift: int = 1) -> Cuts:
    """One segment, cut where nobody would: the last ranks get most."""
    ends = even_cuts(size, degree)[0]
    return (tuple(max(0, p - shift) if 0 < p < size else p for p in ends),)


def uneven_cuts(shape: Sequence[int], degree: int) -> dict[tuple[str, int, int], list[Cuts]]:
    """Cuts of the first input that nobody else would ask for: uneven, with empty parts, and in two segments."""
    cuts: dict[tuple[str, int, int], list[Cuts]] = {}
    for dim, size in enumerate(shape):
        if size > 1:
            halves = join_cuts([even_cuts(size // 2, degree), uneven(size - size // 2, degree)])
            cuts["in", 0, dim] = [uneven(size, degree), ((0, *[size] * degree),), halves]
    return cuts


def tensor(*shape: int, seed: int = 0, grad: bool = True) -> Tensor:
    """Normal numbers in float64, the same ones for a shape and a seed."""
    random = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=random, dtype=torch.float64).requires_grad_(grad)


def names_of_cuts(checked: Iterable[Strategy]) -> set[str]:
    """Names of the strategies that cut something."""
    return {strategy.name for strategy in checked} - {"replicate", "replicate, with partial gradients"}


def cut_inputs(checked: Iterable[Strategy]) -> set[int]:
    """Dimensions of the first input along which some strategy cuts it."""
    return {strategy.inputs[0].dim for strategy in checked if isinstance(strategy.inputs[0], Shard)}


def cut_outputs(checked: Iterable[Strategy]) -> set[int]:
    """Dimensions of the first output along which some strategy cuts it."""
    return {strategy.outputs[0].dim for strategy in checked if isinstance(strategy.outputs[0], Shard)}


def large_dims(shape: Iterable[int]) -> set[int]:
    """Dimensions that can be cut: those of more than one entry."""
    return {dim for dim, size in enumerate(shape) if size > 1}


__all__ = [
    "REPLICATE_PARTIAL_GRAD",
    "Placement",
    "Redistribute",
    "Shard",
    "ThreadAxis",
    "check",
    "cut_inputs",
    "cut_outputs",
    "even_cuts",
    "join_cuts",
    "large_dims",
    "names_of_cuts",
    "on_rank",
    "on_threads",
    "tensor",
    "travels",
    "uneven",
    "uneven_cuts",
]  # fmt: skip
