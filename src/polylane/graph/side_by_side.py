"""A graph run node by node on a small batch, whole and in two unequal parts, in float64."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode

from polylane.graph.batch import promoted, sample_count, take
from polylane.graph.check import Tables, bound, resized, tables
from polylane.graph.export import Whole, at, python_kept, reason_of
from polylane.graph.graph import Graph, Node
from polylane.graph.keying import AsPart, on_a_copy
from polylane.graph.part import Part
from polylane.graph.precision import PROMOTED, Promoted, innermost
from polylane.graph.rounding import MARGIN, floor, nudge, nudge_fractions, size
from polylane.graph.statistics import batch_norm, whole_batch_norm
from polylane.graph.twins import is_unfilled
from polylane.graph.whole_batch import WholeBatch

# Of an example batch; fewer than the fewest cannot be split unequally.
FEWEST, MOST = 5, 32
TOLERANCE = 1e-9

# Told of every node: what it gives of the whole, and of the parts; and how far rounding reaches in the whole.
Look = Callable[[Node, Any, list[Any], "Floor"], None]
Floor = float | list[Any]  # of a value, or of each of several


@dataclass
class Run:
    """One of three runs: the whole batch, or one of its two parts.

    Attributes:
        again: the whole batch once more, from numbers that differ by one unit in the last place.
    """

    part: Part
    table: Tables
    values: dict[fx.Node, Any] = field(default_factory=dict)
    again: list[Run] = field(default_factory=list)

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node is called with."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return tuple(args), dict(kwargs)


class PartFails(Exception):
    """A node that computes on the whole does not on a part of it; one sentence for the user."""


def three_runs(graph: Graph, whole: Whole, leaves: Sequence[Any], again: int = 0) -> list[Run]:
    """The whole of an example batch, and its two parts, ready to be run; each with tensors of its own.

    Args:
        again: how many times the whole is run once more, to see how far rounding reaches.
    """
    count = min(max(sample_count(leaves), FEWEST), MOST)
    at_sample = count // 2 + 1
    batch = promoted(resized(leaves, count), torch.float64)

    def run(start: int, stop: int) -> Run:
        return Run(Part(stop - start, first=start, batch=count), _in_float64(whole, graph, take(batch, start, stop)))

    runs = [run(start, stop) for start, stop in ((0, count), (0, at_sample), (at_sample, count))]
    for attempt in range(again):
        runs[0].again.append(run(0, count))
        table = runs[0].again[-1].table
        nudge({id(tensor): tensor for tensor in table["parameter"].values()}.values(), attempt)
        nudge_fractions((leaf for leaf in table["input"] if isinstance(leaf, Tensor)), attempt)
    return runs


def floor_of(value: Any, again: Sequence[Any]) -> Floor:
    """How far rounding reaches in a value that was computed several times."""
    if isinstance(value, Tensor):
        return floor(value, again)
    if isinstance(value, (list, tuple)):
        return [floor_of(each, others) for each, *others in zip(value, *again, strict=False)]
    return 0.0


def _in_float64(whole: Whole, graph: Graph, leaves: Sequence[Any]) -> Tables:
    """Values of its own for a run: nothing that it writes is seen elsewhere."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to(PROMOTED.get(tensor.dtype, tensor.dtype), copy=True)

    table = dict(tables(whole, graph.code.constants, leaves))
    for kind in ("parameter", "buffer", "constant"):
        first = {name: own(tensor) for name, tensor in table[kind].items()}
        table[kind] = {name: first.get(graph.tied.get(name, name), tensor) for name, tensor in first.items()}
    table["input"] = [own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return table


@torch.no_grad()
def side_by_side(graph: Graph, runs: list[Run], look: Look) -> list[list[Tensor]]:
    """Run the code node by node in all runs.

    Returns:
        Each one's outputs.

    Raises:
        PartFails: a node fails on a part of the batch; what one raises on the whole of it comes as it is.
    """
    with torch.random.fork_rng(devices=[]), Promoted():
        return _interpreted(graph, runs, look)


def _interpreted(graph: Graph, runs: list[Run], look: Look) -> list[list[Tensor]]:
    code, nodes = graph.code.fx, {node.id: node for node in graph.nodes}
    last_use = {used: node for node in code.nodes for used in node.all_input_nodes}
    again = runs[0].again
    for node in code.nodes:
        if node.op == "placeholder":
            for run in (*runs, *again):
                run.values[node] = bound(node, run.table, run.part)
        elif node.op == "output":
            return [[run.values[value] for value in node.args[0]] for run in runs]
        else:
            described = nodes[node.name]
            _run_node(node, runs, described)
            value, *parts = (run.values[node] for run in runs)
            look(described, value, parts, _reach(node, runs[0]) if again else 0.0)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    for run in (*runs, *again):
                        del run.values[used]
    raise AssertionError("code without an output")


def _reach(node: fx.Node, whole: Run) -> Floor:
    """How far rounding reaches in a node's value: no further than to a tiny share of what it is made of.

    What moves more between two runs is no rounding: a choice between values that are nearly the same, say.
    """
    most = max((_size(whole.values[used]) for used in node.all_input_nodes), default=0.0) * TOLERANCE / MARGIN
    return _capped(floor_of(whole.values[node], [run.values[node] for run in whole.again]), most)


def _capped(reach: Floor, most: float) -> Floor:
    return min(reach, most) if isinstance(reach, float) else [_capped(each, most) for each in reach]


def _size(value: Any) -> float:
    if isinstance(value, Tensor):
        return size(value)
    return max(map(_size, value), default=0.0) if isinstance(value, (list, tuple)) else 0.0


def _run_node(node: fx.Node, runs: list[Run], described: Node) -> None:
    whole, *parts = runs
    for run in (whole, *whole.again):
        run.values[node] = _call(node, run)
    if isinstance(node.target, WholeBatch):  # counted of the whole batch before any part is computed on
        for run in parts:
            run.values[node] = whole.values[node]
        return
    try:
        if innermost(node.target) is batch_norm:
            _normalize_together(node, parts)
            return
        if getattr(node.target, "normalizes", False):
            _as_replicas(node, parts)
            return
        for run in parts:
            run.values[node] = _call(node, run)
    except Exception as error:
        raise PartFails(
            f"the samples cannot be split: {described.name} fails on a part of the batch{at(described.source)}: "
            f"{reason_of(error)}; use data=1 and microbatches=1"
        ) from error


def _call(node: fx.Node, run: Run) -> Any:
    args, kwargs = run.arguments(node)
    target: Any = innermost(node.target)
    if is_unfilled(str(node.meta["op"])):  # whatever lay there differs from part to part
        return target(*args, **kwargs).zero_()
    if not isinstance(target, AsPart):
        return target(*args, **kwargs)
    # Which numbers the user's own Python draws is no question of samples, nor how often it was called.
    with Still(), python_kept(innermost(target.target).module) if target.effects else nullcontext():
        return target(*args, **kwargs)


def _normalize_together(node: fx.Node, parts: list[Run]) -> None:
    given = [run.arguments(node)[0][1:] for run in parts]  # without the part in hand
    outs = whole_batch_norm([x for x, *_ in given], *given[0][1:])
    for run, args, out in zip(parts, given, outs, strict=True):
        run.values[node] = out
        for own, first in zip(args[3:5], given[0][3:5], strict=True):  # running mean and variance
            if own is not None and own is not first:
                own.copy_(first)


def _as_replicas(node: fx.Node, parts: list[Run]) -> None:
    """Run the user's own Python on all parts at once, a thread and a copy each: they share statistics."""
    barrier = threading.Barrier(len(parts))
    given: list[Tensor] = [torch.empty(0)] * len(parts)
    target: Any = node.target
    copies = [on_a_copy(target) for _ in parts]

    def sums(i: int) -> Callable[[Tensor], Tensor]:
        def add(tensor: Tensor) -> Tensor:
            given[i] = tensor.clone()
            barrier.wait()
            tensor.copy_(torch.stack(given).sum(0))
            barrier.wait()
            return tensor

        return add

    def work(i: int) -> Any:
        try:
            with torch.no_grad(), Promoted(), Still():
                args, kwargs = parts[i].arguments(node)
                part = dataclasses.replace(parts[i].part, sum_replicas=sums(i))
                return copies[i](*(part if isinstance(arg, Part) else arg for arg in args), **kwargs)
        except threading.BrokenBarrierError:
            return None  # the other part says why
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        values = list(pool.map(work, range(len(parts))))
    for run, value in zip(parts, values, strict=True):
        run.values[node] = value


class Still(TorchFunctionMode):
    """Dropout that drops nothing, and random numbers that are all the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if name in ("rand", "rand_like", "uniform_"):
            return result.fill_(0.5)
        return result.fill_(0.0) if name in ("randn", "randn_like", "normal_") else result


def equal(a: Tensor, b: Any, reach: Floor = 0.0) -> bool:
    """Whether two values are one up to the rounding of float64.

    Args:
        reach: how far rounding reaches in ``a``, as :func:`floor_of` tells.
    """
    b = torch.as_tensor(b)
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b.to(a.dtype))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # what the caller's promotion makes of one it may not make of the other
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    most = MARGIN * reach if isinstance(reach, float) else 0.0
    return torch.allclose(a, b, rtol=TOLERANCE, atol=max(TOLERANCE * max(scale, 1e-30), most), equal_nan=True)


def mean_of(parts: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """The mean of what parts of so many samples give."""
    return sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
