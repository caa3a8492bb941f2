"""Self-check of captured code before first use: two steps on two batches, eager against captured, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from polylane.graph.batch import (
    Rebuild,
    cast_leaves,
    clone_leaves,
    is_sampled,
    sample_count,
    sampled_leaves,
    take_first_samples,
    to_device,
)
from polylane.graph.capture.export import ModelWithLoss, model_restored
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.open_sizes import OpenSizes
from polylane.graph.operators.device_arguments import copy_to_device
from polylane.graph.precision import Promoted, cast_module
from polylane.graph.python_state.moved_module import moved_module
from polylane.graph.readings.batch_readings import Reading, are_answered
from polylane.graph.sparse_gradients import densify

# Differences in float64 below this, relative to the largest element, count as rounding.
ROUNDING = 1e-9

# Number of samples that the self-check uses, if the model works with so few.
FEW = 4

Tables = Mapping[str, Any]


@dataclass(frozen=True)
class Difference:
    """What a captured graph computes differently from the model itself."""

    what: str  # "the loss", "the gradient of fc.weight", "the buffer bn.running_mean"
    buffer: str | None = None


def tensors_by_role(model_with_loss: ModelWithLoss, constants: Mapping[str, Tensor], leaves: Sequence[Any]) -> Tables:
    """Return the values of a graph's placeholders by role: the model's own parameters and buffers, and a batch."""
    return {
        "parameter": dict(model_with_loss.named_tensors("parameters")),
        "buffer": dict(model_with_loss.named_tensors("buffers")),
        "constant": constants,
        "input": leaves,
    }


def placeholder_value(node: fx.Node, table: Tables, part: SampleSlice) -> Any:
    """Return the value of a placeholder."""
    kind, key = node.meta["role"]
    return part if kind == "part" else table[kind][key]


def run_code(code: Callable[..., Any], graph: fx.Graph, table: Tables, part: SampleSlice) -> Any:
    """Run captured code on the values of ``table``."""
    return code(*[placeholder_value(node, table, part) for node in graph.nodes if node.op == "placeholder"])


def other_batch(leaves: Sequence[Any]) -> list[Any]:
    """Return a different batch: the samples rotated by one, without the last one where there are three or more."""
    samples = sample_count(leaves)
    return resize_batch(leaves, samples - 1 if samples > 2 else samples, turn=1)


def resize_batch(leaves: Sequence[Any], count: int, turn: int = 0) -> list[Any]:
    """Return a batch of ``count`` samples: those of ``leaves`` in rotation, from ``turn`` before the first on."""
    samples = sample_count(leaves)
    return [
        leaf[(torch.arange(count, device=leaf.device) - turn) % samples] if is_sampled(leaf, samples) else leaf
        for leaf in leaves
    ]


def first_difference(
    model_with_loss: ModelWithLoss,
    graph: fx.Graph,
    constants: dict[str, Tensor],
    leaves: Sequence[Any],
    sizes: Collection[int] = (),
    opened: OpenSizes | None = None,
    other_batches: Sequence[Sequence[Any]] = (),
    readings: Sequence[Reading] = (),
    device: torch.device | None = None,
) -> Difference | None:
    """Compare two consecutive steps of the model and of its captured code; return the first difference.

    Differences that are rounding only, as shown in float64, do not count: a library that asks whether it is being
        exported may choose another kernel.

    Args:
        model_with_loss: model and loss, restored afterwards.
        graph: captured code of model and loss.
        constants: tensors that the code closes over, by name.
        leaves: flat leaves of an example batch.
        sizes: further numbers of samples to try; those for which the model itself fails are skipped.
        opened: the other sizes that the code leaves open; None: it leaves none.
        other_batches: flat leaves of batches of other open sizes to try.
        readings: questions to a batch; the code is checked on batches alone that answer as this one does.
        device: where both run if they can, since a model for an accelerator takes minutes on the host; they run where
            the model is with None, where memory is short, and where the model makes tensors of its own on the host.

    Returns:
        The first difference, or None if there is none.
    """
    if device is not None and any(parameter.device != device for parameter in model_with_loss.parameters()):
        with suppress(_RunsElsewhere, torch.OutOfMemoryError), moved_module(model_with_loss, device):
            # A model that fails there has nothing that its code could be held against.
            first_batch = to_device(take_first_samples(leaves, FEW), device)
            with model_restored(model_with_loss):
                if not _run_steps(model_with_loss, model_with_loss, [first_batch]):
                    raise _RunsElsewhere
            values = {name: value.to(device) for name, value in constants.items()}
            batches = [to_device(batch, device) for batch in other_batches]
            code, moved = copy_to_device(graph, device), to_device(leaves, device)
            return _first_difference_here(model_with_loss, code, values, moved, sizes, opened, batches, readings)
    return _first_difference_here(model_with_loss, graph, constants, leaves, sizes, opened, other_batches, readings)


class _RunsElsewhere(Exception):
    """The model does not run on the device on which its code was to be checked."""


def _first_difference_here(
    model_with_loss: ModelWithLoss,
    graph: fx.Graph,
    constants: Mapping[str, Tensor],
    leaves: Sequence[Any],
    sizes: Collection[int],
    opened: OpenSizes | None,
    other_batches: Sequence[Sequence[Any]],
    readings: Sequence[Reading],
) -> Difference | None:
    first_batch = take_first_samples(leaves, FEW)
    few = sample_count(first_batch) < sample_count(leaves)
    if few and not (are_answered(readings, first_batch) and runs_without_gradients(model_with_loss, first_batch)):
        first_batch = list(leaves)
    # Two batches in a row: state that the first step leaves (buffers, flags) must act on the second.
    runs = [[first_batch, other_batch(first_batch)], *([resize_batch(leaves, size)] for size in sizes)]
    runs += [[list(batch), other_batch(batch)] for batch in other_batches]
    if readings:  # the same batch twice, where another one answers otherwise
        kept_runs = [[batch for batch in batches if are_answered(readings, batch)] for batches in runs]
        runs = [[*run, *run[: len(of) - len(run)]] for run, of in zip(kept_runs, runs, strict=True) if run]
    captured = _CapturedCode(model_with_loss, fx.GraphModule(nn.Module(), graph), graph, constants, opened)
    differences = (_find_difference(captured, batches, _equal_bits) for batches in runs)
    difference = next((difference for difference in differences if difference is not None), None)
    return None if difference is None or _differs_by_rounding_only(captured, runs) else difference


@dataclass(frozen=True)
class _CapturedCode:
    """Captured code to be compared.

    Attributes:
        whole: model and loss that it was captured from.
        run: the code as a function of its placeholders' values.
        graph: the graph of the code itself.
        constants: tensors that the code closes over, by name.
        opened: the sizes that the code leaves open beside the number of samples, or None.
    """

    whole: ModelWithLoss
    run: Callable[..., Any]
    graph: fx.Graph
    constants: Mapping[str, Tensor]
    opened: OpenSizes | None = None

    def __call__(self, *batch: Any) -> Any:
        """Run the code on a batch's leaves, with the model's present parameters and buffers."""
        count = sample_count(batch)
        table = tensors_by_role(self.whole, self.constants, batch)
        sizes = () if self.opened is None else self.opened.find(batch)
        assert sizes is not None, "the code is checked on batches that it admits"
        return run_code(self.run, self.graph, table, SampleSlice(count, batch=count, open_sizes=sizes))


def take_what_runs(model: nn.Module, loss: Any, rebuild: Rebuild, leaves: Sequence[Any], count: int) -> Sequence[Any]:
    """Return the first ``count`` samples of a batch, or all of it where so few are no batch.

    Nodes of a graph cannot be taken alone: its edges are no samples, and some would have no end. Of a model without
    data it is not tried.
    """
    split = sampled_leaves(leaves)
    part = take_first_samples(leaves, min(count, sample_count(leaves)), split)
    shared = any(isinstance(leaf, Tensor) and leaf.dim() for leaf, flag in zip(leaves, split, strict=True) if not flag)
    if not shared or any(parameter.is_meta for parameter in model.parameters()):
        return part
    return part if runs_without_gradients(ModelWithLoss(model, loss, rebuild), clone_leaves(part)) else leaves


def runs_without_gradients(model_with_loss: ModelWithLoss, batch: Sequence[Any]) -> bool:
    """Return whether the loss runs on a batch under ``torch.no_grad()``; the model is restored afterwards."""
    try:
        with model_restored(model_with_loss), torch.no_grad():
            model_with_loss(*batch)
    except Exception:  # a loss that calls backward itself, or whose hooks need a gradient
        return False
    return True


def _differs_by_rounding_only(captured: _CapturedCode, runs: Sequence[Any]) -> bool:
    # If the difference shrinks with the precision it is rounding; a wrong branch stays different in float64.
    raised = {
        name: value.double() if value.is_floating_point() and value.dtype != torch.float64 else value
        for name, value in captured.constants.items()
    }
    captured = replace(captured, constants=raised)
    with cast_module(captured.whole, torch.float64), Promoted():
        try:
            wide = ([cast_leaves(batch, torch.float64) for batch in batches] for batches in runs)
            return all(_find_difference(captured, batches, _equal_up_to_rounding) is None for batches in wide)
        except torch.OutOfMemoryError:  # says nothing about the numbers
            raise
        except Exception:  # kernels without float64: the difference counts as it is
            return False


def _find_difference(
    captured: _CapturedCode, batches: Sequence[Any], is_equal: Callable[[Any, Any], bool]
) -> Difference | None:
    model_with_loss = captured.whole
    with model_restored(model_with_loss) as restore:
        expected = _run_steps(model_with_loss, model_with_loss, batches)
        if not expected:  # the model itself fails on a batch of that size
            return None
        restore()
        # Compare as many steps as the model itself completes.
        got = _run_steps(model_with_loss, captured, batches[: len({step for step, _, _ in expected})])
    difference = next((d for (_, d, a), (_, _, b) in zip(expected, got, strict=False) if not is_equal(a, b)), None)
    return difference or (Difference("the run") if len(got) < len(expected) else None)


def _run_steps(
    model_with_loss: ModelWithLoss, run: Callable[..., Any], batches: Sequence[Sequence[Any]]
) -> list[tuple[int, Difference, Any]]:
    """Return loss, gradients and buffers after every step on ``batches``, up to the first that fails."""
    records: list[tuple[int, Difference, Any]] = []
    for step, batch in enumerate(batches):
        model_with_loss.zero_grad(set_to_none=True)
        try:
            result = run(*clone_leaves(batch))
            values = [value.detach().clone() for value in result]
            if result[0].requires_grad:
                result[0].backward()
        except torch.OutOfMemoryError:  # of an accelerator: no fault of the model
            raise
        # The steps before are compared. Where only one of the two runs raises, their records differ in number.
        except Exception:
            return records
        records += [(step, Difference("the loss"), value) for value in values]
        for name, parameter in model_with_loss.named_parameters():
            plain = name.removeprefix("model.")
            grad = None if parameter.grad is None else densify(parameter.grad).clone()
            records.append((step, Difference(f"the gradient of {plain}"), grad))
        for name, buffer in model_with_loss.named_buffers():
            plain = name.removeprefix("model.")
            records.append((step, Difference(f"the buffer {plain}", buffer=plain), buffer.detach().clone()))
    return records


def _equal_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if isinstance(a, FakeTensor) or isinstance(b, FakeTensor):  # a value of the export, without numbers
        return False
    if a is None or b is None:
        # A parameter that the loss does not reach: eager leaves no gradient, captured code may leave zeros.
        gradient = a if b is None else b
        return gradient is None or not bool(gradient.any())
    if a.device.type == "cpu":
        return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6, equal_nan=True)  # accelerators' atomics reorder sums


def _equal_up_to_rounding(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None or not a.is_floating_point() or a.shape != b.shape:
        return _equal_bits(a, b)
    scale = float(a.abs().max()) if a.numel() else 0.0
    return _equal_bits(a, b) or bool((a - b).abs().max() <= ROUNDING * (1 + scale))
