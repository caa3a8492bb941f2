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

from polylane.graph.batch import cast_leaves, sample_count, take_samples
from polylane.graph.capture.assign_keys import PythonOnSlice, copy_python_call
from polylane.graph.capture.export import ModelWithLoss, format_line, python_kept, reason_of
from polylane.graph.capture.functionalize import is_unfilled
from polylane.graph.capture.self_check import Tables, placeholder_value, resize_batch, tensors_by_role
from polylane.graph.graph import Graph, Node
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.operators.sync_batch_norm import batch_norm, whole_batch_norm
from polylane.graph.operators.whole_batch_counts import WholeBatchStatistic
from polylane.graph.precision import PROMOTED, Promoted, unwrap_settings
from polylane.graph.rounding_noise import MARGIN, max_magnitude, nudge_fractions, nudge_values, rounding_floor
from polylane.graph.sample_slice import SampleSlice

# Of an example batch; fewer than the fewest cannot be split unequally.
FEWEST, MOST = 5, 32
TOLERANCE = 1e-9

# Told of every node: what it gives of the whole, and of the parts; and how far rounding reaches in the whole.
Look = Callable[[Node, Any, list[Any], "Floor"], None]
Floor = float | list[Any]  # of a value, or of each of several


@dataclass
class SplitRun:
    """One of three runs: the whole batch, or one of its two parts.

    Attributes:
        nudged_runs: the whole batch once more, from numbers that differ by one unit in the last place.
    """

    part: SampleSlice
    tensors_by_role: Tables
    nudged_runs: list[SplitRun] = field(default_factory=list)


class PartFails(Exception):
    """A node that computes on the whole does not on a part of it; one sentence for the user."""


def make_runs(graph: Graph, whole: ModelWithLoss, leaves: Sequence[Any], again: int = 0) -> list[SplitRun]:
    """The whole of an example batch, and its two parts, ready to be run; each with tensors of its own.

    Args:
        again: how many times the whole is run once more, to see how far rounding reaches.
    """
    count = min(max(sample_count(leaves), FEWEST), MOST)
    at_sample = count // 2 + 1
    batch = cast_leaves(resize_batch(leaves, count), torch.float64)

    def run(start: int, stop: int) -> SplitRun:
        return SplitRun(
            SampleSlice(stop - start, first=start, batch=count),
            _in_float64(whole, graph, take_samples(batch, start, stop)),
        )

    runs = [run(start, stop) for start, stop in ((0, count), (0, at_sample), (at_sample, count))]
    for attempt in range(again):
        runs[0].nudged_runs.append(run(0, count))
        table = runs[0].nudged_runs[-1].tensors_by_role
        nudge_values({id(tensor): tensor for tensor in table["parameter"].values()}.values(), attempt)
        nudge_fractions((leaf for leaf in table["input"] if isinstance(leaf, Tensor)), attempt)
    return runs


def rounding_floor_of(value: Any, again: Sequence[Any]) -> Floor:
    """How far rounding reaches in a value that was computed several times."""
    if isinstance(value, Tensor):
        return rounding_floor(value, again)
    if isinstance(value, (list, tuple)):
        return [rounding_floor_of(each, others) for each, *others in zip(value, *again, strict=False)]
    return 0.0


def _in_float64(whole: ModelWithLoss, graph: Graph, leaves: Sequence[Any]) -> Tables:
    """Values of its own for a run: nothing that it writes is seen elsewhere."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to(PROMOTED.get(tensor.dtype, tensor.dtype), copy=True)

    table = dict(tensors_by_role(whole, graph.code.constants, leaves))
    for kind in ("parameter", "buffer", "constant"):
        first = {name: own(tensor) for name, tensor in table[kind].items()}
        table[kind] = {name: first.get(graph.tied.get(name, name), tensor) for name, tensor in first.items()}
    table["input"] = [own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return table


@torch.no_grad()
def run_split(graph: Graph, runs: list[SplitRun], look: Look) -> list[list[Tensor]]:
    """Run the code node by node in all runs.

    Returns:
        Each one's outputs.

    Raises:
        PartFails: a node fails on a part of the batch; what one raises on the whole of it comes as it is.
    """
    with torch.random.fork_rng(devices=[]), Promoted():
        results = _RunsInterpreter(graph, runs, look).run()
    whole, *parts = zip(*results, strict=True)
    return [list(whole), *(list(part) for part in parts[len(runs[0].nudged_runs) :])]


class _RunsInterpreter(GraphInterpreter):
    """Runs each node in all runs before the next one. A node's value: that of each run, the whole's first.

    The order is: the whole, the whole ``again``, the parts.
    """

    def __init__(self, graph: Graph, runs: Sequence[SplitRun], look: Look) -> None:
        super().__init__(
            graph.code.fx, lambda node: [placeholder_value(node, run.tensors_by_role, run.part) for run in self._runs]
        )
        whole, *parts = runs
        self._runs, self._wholes = [whole, *whole.nudged_runs, *parts], 1 + len(whole.nudged_runs)
        self._look, self._nodes = look, {node.id: node for node in graph.nodes}

    def call_operator(self, node: fx.Node) -> list[Any]:
        """The node's value in every run, which is looked at."""
        described = self._nodes[node.name]
        wholes = [self._call(node, run) for run in range(self._wholes)]
        parts = self._of_parts(node, wholes[0], described)
        self._look(described, wholes[0], parts, self._reach(node, wholes) if self._wholes > 1 else 0.0)
        return [*wholes, *parts]

    def _arguments(self, node: fx.Node, run: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What a node is called with in one run."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self.env[used][run])
        return tuple(args), dict(kwargs)

    def _reach(self, node: fx.Node, wholes: Sequence[Any]) -> Floor:
        """How far rounding reaches in a node's value: no further than to a tiny share of what it is made of.

        What moves more between two runs is no rounding: a choice between values that are nearly the same, say.
        """
        most = max((_magnitude(self.env[used][0]) for used in node.all_input_nodes), default=0.0) * TOLERANCE / MARGIN
        return _cap_reach(rounding_floor_of(wholes[0], wholes[1:]), most)

    def _of_parts(self, node: fx.Node, whole: Any, described: Node) -> list[Any]:
        parts = range(self._wholes, len(self._runs))
        if isinstance(node.target, WholeBatchStatistic):  # counted of the whole batch before any part is computed on
            return [whole for _ in parts]
        try:
            if unwrap_settings(node.target) is batch_norm:
                return _run_batch_norms([self._arguments(node, run)[0] for run in parts])
            if getattr(node.target, "normalizes", False):
                given = [self._arguments(node, run) for run in parts]
                return _run_as_replicas(node, [self._runs[run].part for run in parts], given)
            return [self._call(node, run) for run in parts]
        except Exception as error:
            raise PartFails(
                f"the samples cannot be split: {described.name} fails on a part of the "
                f"batch{format_line(described.source)}: "
                f"{reason_of(error)}; use data=1 and microbatches=1"
            ) from error

    def _call(self, node: fx.Node, run: int) -> Any:
        args, kwargs = self._arguments(node, run)
        target: Any = unwrap_settings(node.target)
        if is_unfilled(str(node.meta["op"])):  # whatever is in that memory differs from part to part
            return target(*args, **kwargs).zero_()
        if not isinstance(target, PythonOnSlice):
            return target(*args, **kwargs)
        # Which numbers the user's own Python draws is no question of samples, nor how often it was called.
        with (
            WithoutRandomness(),
            python_kept(unwrap_settings(target.target).module) if target.effects else nullcontext(),
        ):
            return target(*args, **kwargs)


def _cap_reach(reach: Floor, most: float) -> Floor:
    return min(reach, most) if isinstance(reach, float) else [_cap_reach(each, most) for each in reach]


def _magnitude(value: Any) -> float:
    if isinstance(value, Tensor):
        return max_magnitude(value)
    return max(map(_magnitude, value), default=0.0) if isinstance(value, (list, tuple)) else 0.0


def _run_batch_norms(arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """A batch normalization of all parts, with the statistics of their samples together.

    Args:
        arguments: of each part's call; the first is the part itself.
    """
    given = [args[1:] for args in arguments]
    outs = whole_batch_norm([x for x, *_ in given], *given[0][1:])
    for args in given:
        for own, first in zip(args[3:5], given[0][3:5], strict=True):  # running mean and variance
            if own is not None and own is not first:
                own.copy_(first)
    return list(outs)


def _run_as_replicas(
    node: fx.Node, parts: Sequence[SampleSlice], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """Run the user's own Python on all parts at once, a thread and a copy each: they share statistics."""
    barrier = threading.Barrier(len(parts))
    given: list[Tensor] = [torch.empty(0)] * len(parts)
    target: Any = node.target
    copies = [copy_python_call(target) for _ in parts]

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
            with torch.no_grad(), Promoted(), WithoutRandomness():
                args, kwargs = arguments[i]
                part = dataclasses.replace(parts[i], sum_replicas=sums(i))
                return copies[i](*(part if isinstance(arg, SampleSlice) else arg for arg in args), **kwargs)
        except threading.BrokenBarrierError:
            return None  # the other part says why
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(work, range(len(parts))))


class WithoutRandomness(TorchFunctionMode):
    """Dropout that drops nothing, and random numbers that are all the same."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if name in ("rand", "rand_like", "uniform_"):
            return result.fill_(0.5)
        return result.fill_(0.0) if name in ("randn", "randn_like", "normal_") else result


def equal_within(a: Tensor, b: Any, reach: Floor = 0.0) -> bool:
    """Whether two values are one up to the rounding of float64.

    Args:
        reach: how far rounding reaches in ``a``, as :func:`rounding_floor_of` tells.
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


def mean_of_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """The mean of what parts of so many samples give."""
    return sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
