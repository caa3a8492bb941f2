"""Split runs: interpret a graph node by node on a small batch, whole and in two unequal parts, in float64."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, fx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from polylane.graph.batch import cast_leaves, sample_count, take_samples
from polylane.graph.capture.assign_keys import PythonOnSlice, copy_python_call
from polylane.graph.capture.export import ModelWithLoss, python_kept
from polylane.graph.capture.self_check import Tables, placeholder_value, resize_batch, tensors_by_role
from polylane.graph.flops import tensors_of
from polylane.graph.graph import Graph, Node
from polylane.graph.interpreter import GraphInterpreter
from polylane.graph.nodes.facts import is_unfilled, unwrap_settings
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.nodes.user_lines import format_line, reason_of
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.operators.whole_batch_counts import WholeBatchStatistic
from polylane.graph.precision import PROMOTED, Promoted
from polylane.graph.python_state.ended_threads import wait_gone
from polylane.graph.rounding_noise import MARGIN, max_magnitude, nudge_fractions, nudge_values, rounding_floor

T = TypeVar("T")

# Samples of the example batch: fewer than FEWEST cannot be split into two unequal parts of at least two.
FEWEST, MOST = 5, 32
TOLERANCE = 1e-9

# Called for every node with its value of the whole batch, of each part, and the rounding floors of the whole's tensors.
Look = Callable[[Node, Any, list[Any], list[float]], None]


@dataclass
class SplitRun:
    """One of three runs: of the whole batch, or of one of its two parts.

    Attributes:
        part: sample slice of the run.
        tensors_by_role: parameters, buffers, constants and inputs in float64, its own copies.
        nudged_runs: runs of the whole batch on values that differ by one unit in the last place.
    """

    part: SampleSlice
    tensors_by_role: Tables
    nudged_runs: list[SplitRun] = field(default_factory=list)


class PartFails(Exception):
    """A node that runs on the whole batch fails on a part of it; the message is one sentence for the user."""


def make_runs(graph: Graph, model_with_loss: ModelWithLoss, leaves: Sequence[Any], again: int = 0) -> list[SplitRun]:
    """Prepare the runs of an example batch: whole and two parts, each with its own copies of all tensors.

    Args:
        graph, model_with_loss, leaves: captured graph, its model with loss, and flat inputs of a batch.
        again: number of nudged runs of the whole, from which the rounding floor is measured.
    """
    count = min(max(sample_count(leaves), FEWEST), MOST)
    # Unequal parts, so that a plain mean of the parts' means differs from the mean over samples.
    at_sample = count // 2 + 1
    batch = cast_leaves(resize_batch(leaves, count), torch.float64)

    def run(start: int, stop: int) -> SplitRun:
        part = SampleSlice(stop - start, first=start, batch=count)
        return SplitRun(part, _in_float64(model_with_loss, graph, take_samples(batch, start, stop)))

    runs = [run(start, stop) for start, stop in ((0, count), (0, at_sample), (at_sample, count))]
    for attempt in range(again):
        runs[0].nudged_runs.append(run(0, count))
        table = runs[0].nudged_runs[-1].tensors_by_role
        nudge_values({id(tensor): tensor for tensor in table["parameter"].values()}.values(), attempt)
        nudge_fractions((leaf for leaf in table["input"] if isinstance(leaf, Tensor)), attempt)
    return runs


def _in_float64(model_with_loss: ModelWithLoss, graph: Graph, leaves: Sequence[Any]) -> Tables:
    """Return copies of all tensors in float64 for one run, so that its in-place writes stay its own."""

    def own(tensor: Tensor) -> Tensor:
        return tensor.detach().to(PROMOTED.get(tensor.dtype, tensor.dtype), copy=True)

    table = dict(tensors_by_role(model_with_loss, graph.code.constants, leaves))
    for kind in ("parameter", "buffer", "constant"):
        copies = {name: own(tensor) for name, tensor in table[kind].items()}
        table[kind] = {name: copies.get(graph.tied.get(name, name), tensor) for name, tensor in copies.items()}
    table["input"] = [own(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    return table


@torch.no_grad()
def run_split(graph: Graph, runs: list[SplitRun], look: Look) -> list[list[Tensor]]:
    """Run every node in all runs before the next node.

    Returns:
        Outputs of the whole and of each part, without the nudged runs.

    Raises:
        PartFails: a node fails on a part of the batch; errors on the whole batch are raised unchanged.
    """
    with torch.random.fork_rng(devices=[]), Promoted():
        results = _RunsInterpreter(graph, runs, look).run()
    whole_outputs, *parts = zip(*results, strict=True)
    return [list(whole_outputs), *(list(part) for part in parts[len(runs[0].nudged_runs) :])]


class _RunsInterpreter(GraphInterpreter):
    """Interprets all runs in lockstep; the value of a node is the list of its values in every run.

    Order of the runs: the whole, its nudged runs, the parts.
    """

    def __init__(self, graph: Graph, runs: Sequence[SplitRun], look: Look) -> None:
        super().__init__(graph.code.fx, self._values_of_placeholder)
        whole_run, *parts = runs
        self._runs, self._wholes = [whole_run, *whole_run.nudged_runs, *parts], 1 + len(whole_run.nudged_runs)
        self._look, self._nodes = look, {node.id: node for node in graph.nodes}

    def _values_of_placeholder(self, node: fx.Node) -> list[Any]:
        return [placeholder_value(node, run.tensors_by_role, run.part) for run in self._runs]

    def call_operator(self, node: fx.Node) -> list[Any]:
        described = self._nodes[node.name]
        wholes = [self._call(node, run) for run in range(self._wholes)]
        parts = self._of_parts(node, wholes[0], described)
        self._look(described, wholes[0], parts, self._rounding_floors(node, wholes))
        return [*wholes, *parts]

    def _arguments(self, node: fx.Node, run: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of a node in one run."""
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda used: self.env[used][run])
        return tuple(args), dict(kwargs)

    def _rounding_floors(self, node: fx.Node, wholes: Sequence[Any]) -> list[float]:
        """Return the rounding floor of each tensor of a node, capped at a tiny fraction of its inputs' magnitude.

        A larger difference between nudged runs is no rounding, but for example an argmax between nearly equal values.
        """
        if self._wholes == 1:
            return [0.0] * len(tensors_of(wholes[0]))
        inputs = [tensor for used in node.all_input_nodes for tensor in tensors_of(self.env[used][0])]
        limit = max(map(max_magnitude, inputs), default=0.0) * TOLERANCE / MARGIN
        tensor_rows = zip(*map(tensors_of, wholes), strict=False)
        return [min(rounding_floor(tensor, nudged_tensors), limit) for tensor, *nudged_tensors in tensor_rows]

    def _of_parts(self, node: fx.Node, whole_result: Any, described: Node) -> list[Any]:
        parts = range(self._wholes, len(self._runs))
        if isinstance(node.target, WholeBatchStatistic):  # computed over the whole batch before any part runs
            return [whole_result for _ in parts]
        try:
            target: Any = unwrap_settings(node.target)
            if target is batch_norm:
                return _run_batch_norms([self._arguments(node, run)[0] for run in parts])
            if isinstance(target, PythonOnSlice) and target.own.normalizes:
                arguments = [self._arguments(node, run) for run in parts]
                return _run_python_as_replicas(node, [self._runs[run].part for run in parts], arguments)
            return [self._call(node, run) for run in parts]
        except Exception as error:
            failure = f"{described.name} fails on a part of the batch{format_line(described.source)}"
            raise PartFails(f"the samples cannot be split: {failure}: {reason_of(error)}") from error

    def _call(self, node: fx.Node, run: int) -> Any:
        args, kwargs = self._arguments(node, run)
        target: Any = unwrap_settings(node.target)
        if is_unfilled(str(node.meta["op"])):  # uninitialized memory differs between runs: use zeros
            return target(*args, **kwargs).zero_()
        if not isinstance(target, PythonOnSlice):
            return target(*args, **kwargs)
        # The user's own Python must not differ between runs by its random numbers, nor by how often it was called.
        with WithoutRandomness(), python_kept(target.own.module) if target.own.effects else nullcontext():
            return target(*args, **kwargs)


def _run_batch_norms(arguments: Sequence[Sequence[Any]]) -> list[Any]:
    """Run a batch normalization on all parts with shared statistics, as replicas do.

    Args:
        arguments: arguments of each part's call, of which the first is the sample slice.
    """
    calls = [args[1:] for args in arguments]
    xs, (weight, bias, mean, variance, *options) = [x for x, *_ in calls], calls[0][1:]
    outs = functional.batch_norm(torch.cat(xs), mean, variance, weight, bias, *options[:3])
    for args in calls:
        for buffer, first_buffer in zip(args[3:5], calls[0][3:5], strict=True):  # running mean and variance
            if buffer is not None and buffer is not first_buffer:
                buffer.copy_(first_buffer)
    return list(torch.split(outs, [len(x) for x in xs]))


def _run_python_as_replicas(
    node: fx.Node, parts: Sequence[SampleSlice], arguments: Sequence[tuple[tuple[Any, ...], dict[str, Any]]]
) -> list[Any]:
    """Run the user's own Python on all parts at once, each with its own copy, with shared statistics."""
    target: Any = node.target
    copies = [copy_python_call(target) for _ in parts]

    def work(i: int, add: Callable[[Tensor], Tensor]) -> Any:
        with torch.no_grad(), Promoted(), WithoutRandomness():
            args, kwargs = arguments[i]
            part = dataclasses.replace(parts[i], sum_replicas=add)
            return copies[i](*(part if isinstance(arg, SampleSlice) else arg for arg in args), **kwargs)

    return run_as_replicas(len(parts), work)


def run_as_replicas(count: int, function: Callable[[int, Callable[[Tensor], Tensor]], T]) -> list[T]:
    """Run a function once for every replica, each in a thread; return their results.

    Args:
        count: number of replicas that compute the batch.
        function: function of a replica's number, and of what sums a tensor over all replicas, in place.
    """
    # The two barriers of ``add`` make its all-reduce: all have given, all have read.
    barrier = threading.Barrier(count)
    addends: list[Tensor] = [torch.empty(0)] * count

    def sums(i: int) -> Callable[[Tensor], Tensor]:
        def add(tensor: Tensor) -> Tensor:
            addends[i] = tensor.detach().clone()
            barrier.wait()
            tensor.copy_(torch.stack(addends).sum(0))
            barrier.wait()
            return tensor

        return add

    def guarded(i: int) -> Any:
        try:
            return function(i, sums(i))
        except threading.BrokenBarrierError:
            return None  # the other part raises the error
        except BaseException:
            barrier.abort()
            raise

    threads = list[int]()
    try:
        with ThreadPoolExecutor(count, initializer=lambda: threads.append(threading.get_native_id())) as pool:
            return list(pool.map(guarded, range(count)))
    finally:
        wait_gone(threads)  # workers may be forked next


class WithoutRandomness(TorchFunctionMode):
    """Function mode in which dropout drops nothing and random numbers are constants."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name.endswith("dropout") or name in ("dropout1d", "dropout2d", "dropout3d"):
            return args[0]
        result = func(*args, **(kwargs or {}))
        if name in ("rand", "rand_like", "uniform_"):
            return result.fill_(0.5)
        return result.fill_(0.0) if name in ("randn", "randn_like", "normal_") else result


def equal_within(a: Tensor, b: Any, reach: float = 0.0) -> bool:
    """Return whether two values are equal up to the rounding of float64.

    Args:
        a, b: values to compare; b may be a Python number.
        reach: rounding floor of ``a`` from :func:`rounding_floor_of`, on top of the tolerance.
    """
    b = torch.as_tensor(b)
    if a.shape != b.shape:
        return False
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b.to(a.dtype))
    wide = torch.complex128 if a.is_complex() or b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)  # only one of them may have been promoted by the caller
    scale = float(a.abs().nan_to_num(0.0, 0.0, 0.0).max()) if a.numel() else 0.0
    atol = max(TOLERANCE * max(scale, 1e-30), MARGIN * reach)
    return torch.allclose(a, b, rtol=TOLERANCE, atol=atol, equal_nan=True)


def mean_of_parts(parts: Sequence[Tensor], sizes: Sequence[int]) -> Any:
    """Return the mean of the parts' values, weighted by their samples."""
    return sum(n * part for n, part in zip(sizes, parts, strict=True)) / sum(sizes)
