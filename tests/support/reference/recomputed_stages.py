"""One stage, or a few by hand, with a part of what autograd saves dropped: what the tests of recomputation compare."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.cost.memory.live_ranges import LiveRanges, PeakMemory
from polylane.cost.memory.recompute_budget import dropped_on_stages
from polylane.cost.memory.recompute_choice import SavedValues
from polylane.cost.memory.saved_by_operators import trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import Partition
from polylane.plan.recompute import RecomputeRule
from polylane.runtime.parameters.model_tensors import ModelTensors
from polylane.runtime.pipeline.stage_code import extract_stage
from polylane.runtime.pipeline.stage_runner import StageRunner
from polylane.runtime.stage_hooks import StageHooks
from tests.support import models

CPU = torch.device("cpu")
SAMPLES = 4


def seeded(case: models.Case) -> nn.Module:
    torch.manual_seed(0)
    return case.model()


@cache
def captured(name: str) -> tuple[models.Case, Graph]:
    """One of the models of the tests with its graph of SAMPLES samples, which all tests of recomputation share."""
    case = models.CASES[name]() if name in models.CASES else models.example_case(name)
    return case, capture(seeded(case), case.loss, case.batch(SAMPLES, 0))


def stage_runner(
    model: nn.Module,
    graph: Graph,
    dropped: DroppedTensors = NOTHING_DROPPED,
    autocast: torch.dtype | None = None,
    in_halves: bool = False,
) -> StageRunner:
    """The whole model as one stage."""
    tensors = ModelTensors(model, [], CPU)
    table: dict[tuple[str, Any], Any] = {("parameter", n): p for n, p in tensors.parameters().items()}
    table |= {("buffer", n): b for n, b in tensors.buffers().items()}
    table |= {("constant", n): c for n, c in graph.code.constants.items()}
    code = extract_stage(Partition(graph, ()), 0, CPU, StageHooks(), in_halves, dropped)
    return StageRunner(code, table, frozenset(), CPU, autocast)


# The last graphs with what their operators save, which every mode is chosen from.
_traced = list[tuple[Graph, SavedTensors]]()


def trace(graph: Graph) -> SavedTensors:
    """What the operators of the whole graph save, on one rank; found once for the last few graphs."""
    known = next((saved for each, saved in _traced if each is graph), None)
    if known is None:
        known = trace_saved_tensors(graph, BackendSetting(graph.samples))
        _traced[:] = [*_traced[-3:], (graph, known)]
    return known


def drop(graph: Graph, rule: RecomputeRule) -> DroppedTensors:
    """What the whole graph drops as one stage."""
    keeping = trace(graph)
    return dropped_on_stages(Partition(graph, ()), [rule], [keeping])[0]


def predicted(graph: Graph, dropped: DroppedTensors) -> PeakMemory:
    """The memory of one microbatch on the whole graph as one stage."""
    keeping = trace(graph)
    pieces = SavedValues(graph, keeping).pieces(dropped)
    return LiveRanges(graph, keeping, dropped, pieces).microbatch_memory([(0, len(graph.nodes))])


@dataclass(frozen=True)
class Passes:
    """What microbatches gave one after another, and the bytes of the last one.

    Attributes:
        losses: of every microbatch.
        gradients, buffers: by name, after all of them.
        forward_peak, held, backward_peak: most bytes alive in the forward pass, between the passes, and in the
            backward pass.
    """

    losses: list[Tensor]
    gradients: dict[str, Tensor | None]
    buffers: dict[str, Tensor]
    forward_peak: int
    held: int
    backward_peak: int


def run_passes(runner: StageRunner, model: nn.Module, batch: Any, samples: int, microbatches: int = 2) -> Passes:
    """Forward and backward, microbatch after microbatch, counted by what is alive."""
    leaves = flatten(batch)[0]
    known = [*model.parameters(), *model.buffers(), *(each for each in leaves if isinstance(each, Tensor))]
    meter, losses = AllocationMeter(known), list[Tensor]()
    forward = held = backward = 0
    for i in range(microbatches):
        part = SampleSlice(samples, 0, samples, microbatch=i)
        with meter:
            meter.peak_bytes = before = meter.current_bytes
            live = runner.forward(i, {}, leaves, part)
            forward, held = meter.peak_bytes - before, meter.current_bytes - before
            seed = torch.ones((), dtype=live.loss[0].dtype)
            meter.ignore_tensors([seed])
            meter.peak_bytes = meter.current_bytes
            if runner.code.weight_groups:
                runner.backward_input(i, {}, seed)
                runner.backward_weight(i)
            else:
                runner.backward(i, {}, seed)
            backward = meter.peak_bytes - before
        losses.append(live.loss[0].detach().clone())
        del live
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return Passes(losses, gradients, dict(model.named_buffers()), forward, held, backward)


def assert_equal(found: Passes, plain: Passes) -> None:
    """Bit for bit: the same kernels ran, in the same order."""
    assert all(torch.equal(a, b) for a, b in zip(found.losses, plain.losses, strict=True))
    for ours, theirs in ((found.gradients, plain.gradients), (found.buffers, plain.buffers)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            other = ours[name]
            assert (tensor is None) == (other is None), name
            assert tensor is None or (other is not None and torch.equal(tensor, other)), name
