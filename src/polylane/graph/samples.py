"""Is the loss a mean over samples? Found by computing a batch whole and in two unequal parts, in float64."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from polylane.graph.batch import promoted, sample_count, take
from polylane.graph.check import Tables, bound, resized, tables
from polylane.graph.export import Loss, Whole, at, reason_of
from polylane.graph.graph import Graph, Node
from polylane.graph.keying import AsPart
from polylane.graph.part import Part
from polylane.graph.precision import PROMOTED, Promoted, innermost
from polylane.graph.statistics import batch_norm, whole_batch_norm
from polylane.graph.twins import is_unfilled


class Order(StrEnum):
    """How the parts of a batch make up a value of the whole."""

    ROWS = "rows"  # one after another along the dimension of the samples
    ALIKE = "alike"  # the same for any samples
    MEAN = "mean"  # in their mean, weighted by their samples
    SUM = "sum"
    OTHER = "other"


# Of an example batch; fewer than the fewest cannot be split unequally.
FEWEST, MOST = 5, 32
TOLERANCE = 1e-9
NOISE = 0.1  # in every parameter, for values that are not the start's


@dataclass
class _Run:
    """One of three runs side by side: the whole batch, or one of its two parts."""

    part: Part
    table: Tables
    values: dict[fx.Node, Any] = field(default_factory=dict)

    def arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self.values.__getitem__)
        return tuple(args), dict(kwargs)


class _PartFails(Exception):
    pass


def splits_exactly(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> str | None:
    """Whether the batch may be split: its parts' losses make up the whole's, and its buffers end the same.

    Args:
        graph: captured from ``model`` and ``loss``.
        model: with its values; unchanged by this.
        loss: the user's.
        leaves: an example batch, flat.

    Returns:
        None where splitting is exact (or cannot be tried, on the meta device); else one sentence for the user, that
        names the first node whose parts do not make up the whole.
    """
    whole = Whole(model, loss, lambda flat: flat)
    if any(parameter.is_meta for parameter in whole.parameters()):
        return None
    runs = _runs(graph, whole, leaves)
    differing: list[Node] = []
    try:
        outputs = _side_by_side(graph, runs, differing, {})
    except _PartFails as failure:
        return str(failure)
    if not _makes_up(graph.mean, outputs, [run.part.samples for run in runs[1:]]):
        return _not_a_mean(graph, next((n for n in differing if not n.free), (differing or [graph.nodes[-1]])[0]))
    for name, buffer in runs[0].table["buffer"].items():
        if not all(_equal(buffer, run.table["buffer"][name]) for run in runs[1:]):
            writer = next((n for n in reversed(graph.nodes) if name in n.buffers), graph.nodes[-1])
            return (
                f"the buffer {name} depends on how the samples are divided: {writer.name} writes it"
                f"{at(writer.source)}, and replicas would disagree; use data=1"
            )
    return None


def seen_orders(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> dict[str, Order]:
    """How the parts of a batch make up every value, by its node's name; empty where that cannot be tried.

    Seen with the model's values and again with others nearby: at the start a value may be zero, which is a sum as well
    as a mean.
    """
    whole = Whole(model, loss, lambda flat: flat)
    if any(parameter.is_meta for parameter in whole.parameters()):
        return {}
    found: list[dict[str, Order]] = []
    for noise in (0.0, NOISE):
        runs = _runs(graph, whole, leaves)
        for run in runs if noise else ():
            random = torch.Generator().manual_seed(0)
            for value in (*run.table["parameter"].values(), *run.table["buffer"].values()):
                if value.is_floating_point():
                    value.add_(noise * torch.randn(value.shape, generator=random).to(value))
        orders: dict[str, Order] = {}
        with contextlib.suppress(Exception):  # whoever prepares a training has seen why
            _side_by_side(graph, runs, [], orders)
        found.append(orders)
    own, nearby = found
    return {name: _agreed(order, nearby.get(name, Order.OTHER)) for name, order in own.items()}


def _agreed(own: Order, nearby: Order) -> Order:
    """What a value is that was seen twice."""
    return own if own is nearby else nearby if own is Order.ALIKE else Order.OTHER


def _runs(graph: Graph, whole: Whole, leaves: Sequence[Any]) -> list[_Run]:
    """The whole of an example batch, and its two parts."""
    count = min(max(sample_count(leaves), FEWEST), MOST)
    batch = promoted(resized(leaves, count), torch.float64)
    at_sample = count // 2 + 1
    return [
        _Run(Part(stop - start, first=start, batch=count), _in_float64(whole, graph, take(batch, start, stop)))
        for start, stop in ((0, count), (0, at_sample), (at_sample, count))
    ]


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
def _side_by_side(
    graph: Graph, runs: list[_Run], differing: list[Node], orders: dict[str, Order]
) -> list[list[Tensor]]:
    """Run the code node by node in all runs; each one's outputs. Notes where two parts do not make up the whole."""
    with torch.random.fork_rng(devices=[]), Promoted():
        return _interpreted(graph, runs, differing, orders)


def _interpreted(graph: Graph, runs: list[_Run], differing: list[Node], orders: dict[str, Order]) -> list[list[Tensor]]:
    code, nodes = graph.code.fx, {node.id: node for node in graph.nodes}
    last_use = {used: node for node in code.nodes for used in node.all_input_nodes}
    sizes = [run.part.samples for run in runs[1:]]
    for node in code.nodes:
        if node.op == "placeholder":
            for run in runs:
                run.values[node] = bound(node, run.table, run.part)
        elif node.op == "output":
            return [[run.values[value] for value in node.args[0]] for run in runs]
        else:
            described = nodes[node.name]
            _run_node(node, runs, described)
            value, *parts = (run.values[node] for run in runs)
            if not _related(value, parts, sizes):
                differing.append(described)
            if isinstance(value, Tensor):
                orders[described.name] = _order(described, value, parts, sizes)
            for used in node.all_input_nodes:
                if last_use[used] is node:
                    for run in runs:
                        del run.values[used]
    raise AssertionError("code without an output")


def _run_node(node: fx.Node, runs: list[_Run], described: Node) -> None:
    whole, *parts = runs
    whole.values[node] = _call(node, whole)
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
        raise _PartFails(
            f"the samples cannot be split: {described.name} fails on a part of the batch{at(described.source)}: "
            f"{reason_of(error)}; use data=1 and microbatches=1"
        ) from error


def _call(node: fx.Node, run: _Run) -> Any:
    args, kwargs = run.arguments(node)
    target: Any = innermost(node.target)
    if is_unfilled(str(node.meta["op"])):  # whatever lay there differs from part to part
        return target(*args, **kwargs).zero_()
    if not isinstance(target, AsPart):
        return target(*args, **kwargs)
    with _Still():  # which numbers the user's own Python draws is no question of samples
        return target(*args, **kwargs)


def _normalize_together(node: fx.Node, parts: list[_Run]) -> None:
    given = [run.arguments(node)[0][1:] for run in parts]  # without the part in hand
    outs = whole_batch_norm([x for x, *_ in given], *given[0][1:])
    for run, args, out in zip(parts, given, outs, strict=True):
        run.values[node] = out
        for own, first in zip(args[3:5], given[0][3:5], strict=True):  # running mean and variance
            if own is not None and own is not first:
                own.copy_(first)


def _as_replicas(node: fx.Node, parts: list[_Run]) -> None:
    """Run the user's own Python on all parts at once, a thread and a copy each: they share statistics."""
    barrier = threading.Barrier(len(parts))
    given: list[Tensor] = [torch.empty(0)] * len(parts)
    target: Any = node.target
    copies = [target.copied() for _ in parts]

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
            with torch.no_grad(), Promoted(), _Still():
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


class _Still(TorchFunctionMode):
    """Dropout that drops nothing, and random numbers that are all the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if name in ("rand", "rand_like", "uniform_"):
            return result.fill_(0.5)
        return result.fill_(0.0) if name in ("randn", "randn_like", "normal_") else result


def _makes_up(mean: bool, outputs: list[list[Tensor]], sizes: list[int]) -> bool:
    if mean:
        (value,), *parts = outputs
        return _equal(value, sum(n * part[0] for n, part in zip(sizes, parts, strict=True)) / sum(sizes))
    (total, count), *parts = outputs
    return _equal(total / count, sum(part[0] for part in parts) / sum(part[1] for part in parts))


def _related(value: Any, parts: list[Any], sizes: list[int]) -> bool:
    """Whether parts make up the whole: one after another, all alike, in sum, in mean, or in another order."""
    if isinstance(value, (list, tuple)):
        return all(_related(v, list(each), sizes) for v, *each in zip(value, *parts, strict=False))
    if not isinstance(value, Tensor) or not all(isinstance(part, Tensor) for part in parts):
        return True
    if all(part.shape == value.shape for part in parts):
        number = value.dtype != torch.bool
        return (
            all(_equal(value, part) for part in parts)
            or (number and _equal(value, sum(parts)))
            or (number and _equal(value, sum(n * p for n, p in zip(sizes, parts, strict=True)) / sum(sizes)))
        )
    along = [d for d in range(value.dim()) if any(p.shape[d] != value.shape[d] for p in parts)]
    if len(along) == 1 and sum(p.shape[along[0]] for p in parts) == value.shape[along[0]]:
        return _equal(value, torch.cat(parts, along[0])) or _same_elements(value, parts)
    return False


def _order(node: Node, value: Tensor, parts: list[Tensor], sizes: list[int]) -> Order:
    dim = node.batch_dim
    if value.is_floating_point() and bool(value.isnan().any()):
        return Order.OTHER  # nothing can be seen of it
    if dim is not None:
        rest = {tuple(n for d, n in enumerate(t.shape) if d != dim) for t in (value, *parts)}
        return Order.ROWS if len(rest) == 1 and _equal(value, torch.cat(parts, dim)) else Order.OTHER
    if any(part.shape != value.shape for part in parts):
        return Order.OTHER
    if all(_equal(value, part) for part in parts):
        return Order.ALIKE
    if not (value.is_floating_point() or value.is_complex()):
        return Order.OTHER
    if _equal(value, sum(n * p for n, p in zip(sizes, parts, strict=True)) / sum(sizes)):
        return Order.MEAN
    return Order.SUM if _equal(value, sum(parts)) else Order.OTHER


def orders_of(graph: Graph, seen: Mapping[str, Order]) -> dict[str, Order]:
    """How the parts of a batch make up every value of a graph.

    Args:
        graph: seen or not.
        seen: by node name; see :func:`seen_orders`.

    Returns:
        By node name. What is the same for parts of one batch counts as their mean if it depends on them: it may be so
        by chance (a zero at the start), and a mean of what is alike is the same again.
    """
    code, moving, result = graph.code.fx, set[fx.Node](), dict[str, Order]()
    roles = {node: node.meta["role"][0] for node in code.nodes if node.op == "placeholder"}
    names = {node.id: node for node in graph.nodes}
    for node in code.nodes:
        if roles.get(node) == "input" or any(used in moving for used in node.all_input_nodes):
            moving.add(node)
        if node.op != "call_function" or node.name not in names:
            continue
        described, val = names[node.name], node.meta.get("val")
        continuous = isinstance(val, Tensor) and (val.is_floating_point() or val.is_complex())
        order = seen.get(described.name)
        if order is None:
            order = _unseen(described, val, graph.samples) if node in moving else Order.ALIKE
        elif order is Order.ALIKE and node in moving and continuous:
            order = Order.MEAN
        result[described.name] = order
    return result


def _unseen(node: Node, val: Any, samples: int) -> Order:
    """Where nothing was computed: rows of samples lie in order if each sample has one. Of all else nothing is known."""
    rows = isinstance(val, Tensor) and node.batch_dim is not None and node.shape[node.batch_dim] == samples
    return Order.ROWS if rows else Order.OTHER


def _same_elements(value: Tensor, parts: list[Tensor]) -> bool:
    if value.is_complex():
        return False
    return _equal(value.flatten().sort().values, torch.cat([p.flatten() for p in parts]).sort().values)


def _equal(a: Tensor, b: Any) -> bool:
    b = torch.as_tensor(b)
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b.to(a.dtype))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # what the caller's promotion makes of one it may not make of the other
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    return torch.allclose(a, b, rtol=TOLERANCE, atol=TOLERANCE * max(scale, 1e-30), equal_nan=True)


def _not_a_mean(graph: Graph, node: Node) -> str:
    line = at(node.source)
    where = f"in {node.module}" if node.module not in ("", "loss") else "in the loss" if node.module else "in the model"
    if not node.shape and node.op not in ("leaf", "function"):
        return (
            f"the loss is not a mean over samples: {node.name} {where}{line} does not add up over the parts of a batch "
            "as a mean does (an average over what does not count alike, a sum, a maximum); return a mean over the "
            "samples or polylane.Mean(total, count) from loss, or use data=1 and microbatches=1"
        )
    own = ", or draws on state of its own (Python's random, a counter)" if node.op == "leaf" else ""
    return (
        f"the loss is not a mean over samples: {node.name} {where}{line} makes each sample depend on the others "
        f"of its batch{own}; use data=1 and microbatches=1"
    )
