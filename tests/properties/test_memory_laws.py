"""Laws of memory: what is predicted of any small model is what its passes hold, and stages make up the whole."""

from __future__ import annotations

import functools
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from polylane.cost.memory.allocation_meter import AllocationMeter
from polylane.cost.memory.live_ranges import LiveRanges, PeakMemory
from polylane.cost.memory.peak import TrainedBytes, recompute_blocks, shard_trained_bytes
from polylane.cost.memory.saved_by_operators import trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.state_sharding import StateSharding
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import placeholder_value, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.partition import cut_positions
from polylane.plan.sync import SUM
from tests.support import subsets
from tests.support.reference.allocator_peak import allocator_peak
from tests.support.reference.eager_and_captured import captured
from tests.support.simulated_tasks import one_stage_memory

WIDTH, SAMPLES = 64, 32
# Gradients of the loss itself, of one number each.
NUMBERS = 16

OPERATORS = ("linear", "relu", "gelu", "norm", "dropout", "chunk", "add", "multiply", "cat", "square")


class Random(nn.Module):
    """Operators one after the other; some read an earlier value as well."""

    def __init__(self, steps: list[tuple[str, int]]) -> None:
        super().__init__()
        self.steps = steps
        made = [nn.Linear(WIDTH, WIDTH) if name == "linear" else nn.LayerNorm(WIDTH) for name, _ in steps]
        self.layers = nn.ModuleList(made)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        values = [self.first(x)]
        for (name, back), layer in zip(self.steps, self.layers, strict=True):
            values.append(self.apply_one(name, layer, values[-1], values[-1 - back % len(values)]))
        return values[-1]

    def apply_one(self, name: str, layer: nn.Module, x: Tensor, earlier: Tensor) -> Tensor:
        if name in ("linear", "norm"):
            found: Tensor = layer(x)
        elif name == "dropout":
            found = F.dropout(x, 0.2, self.training)
        elif name == "chunk":
            a, b = x.chunk(2, -1)
            found = torch.cat([b, a], -1)
        elif name in ("add", "multiply"):
            found = x + earlier if name == "add" else x * earlier
        elif name == "cat":
            found = self.mix(torch.cat([x, earlier], -1))
        else:
            found = {"relu": F.relu, "gelu": F.gelu, "square": torch.square}[name](x)
        return found


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def held(graph: Graph, model: nn.Module, x: Tensor) -> tuple[int, int, int]:
    """Bytes alive at most in a forward pass, between the passes, and at most in the backward pass.

    The backward pass is measured by torch's allocator, since autograd adds no gradients up in place while a meter of
    operators looks on.
    """
    whole, part = ModelWithLoss(model, loss, lambda leaves: leaves[0]), SampleSlice(len(x), batch=len(x))
    table = tensors_by_role(whole, graph.code.constants, [x])
    arguments = [placeholder_value(node, table, part) for node in graph.code.fx.nodes if node.op == "placeholder"]
    code = fx.GraphModule(nn.Module(), graph.code.fx)
    model.zero_grad(set_to_none=True)
    gc.collect()
    with AllocationMeter([*model.parameters(), *graph.code.constants.values(), x]) as ledger:
        result = code(*arguments)
        forward, between = ledger.peak_bytes, ledger.current_bytes
    del result
    results: list[tuple[Tensor, ...]] = []
    allocator_peak(lambda: results.append(code(*arguments)))  # so that freeing what it keeps is seen
    return forward, between, allocator_peak(lambda: results.pop()[0].backward()) + between


@settings(max_examples=subsets.examples(8), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(1, 4)), min_size=1, max_size=7))
@example([("linear", 1), ("linear", 1), ("cat", 1)])  # gradients that are slices: nothing is added to them in place
@example([("add", 3), ("add", 2), ("cat", 1), ("cat", 1)])  # views, which a weight's gradients are, neither
@example([("square", 1), ("norm", 2), ("cat", 2), ("relu", 3)])  # what an operator has read is free when it is added up
def test_passes_hold_what_is_predicted_to_the_byte_forward_and_closely_backward(steps: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    model, x = Random(steps), torch.randn(SAMPLES, WIDTH)
    graph = capture(model, loss, x)
    forward, between, backward = held(graph, model, x)
    need = LiveRanges(graph, trace_saved_tensors(graph, BackendSetting(SAMPLES))).microbatch_memory(
        [(0, len(graph.nodes))]
    )
    assert need.forward_peak == forward
    assert need.saved + 4 == between  # and the loss
    biases = len(steps) * WIDTH * 4  # their gradients may be made before, or after, those of the weights
    # Of an operator that reads a value twice, seen alone, the two gradients and their sum are alive at once.
    twice = SAMPLES * WIDTH * 4 if any(n == "multiply" and not b % (i + 1) for i, (n, b) in enumerate(steps)) else 0
    assert need.first_backward_peak - biases - twice <= backward <= need.first_backward_peak + NUMBERS


@functools.cache
def ranges_of(name: str) -> tuple[Graph, LiveRanges, list[int]]:
    graph, *_ = captured(name)
    return graph, LiveRanges(graph, trace_saved_tensors(graph, BackendSetting(4))), cut_positions(graph)


# Capturing a model takes longer than all examples of it: three always, and all of them in `make test-all`.
MODELS = ("gpt", "unet", "moe", "densenet", "t5", "inception", "lstm")[: subsets.examples(7)]


@settings(max_examples=subsets.examples(60), deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_what_one_of_two_stages_sends_the_other_receives(name: str, data: Any) -> None:
    graph, found, positions = ranges_of(name)
    cut = data.draw(st.sampled_from(positions))
    first, second = found.microbatch_memory([(0, cut)]), found.microbatch_memory([(cut, len(graph.nodes))])
    assert first.values_received == second.values_sent == 0
    assert first.values_sent == second.values_received and first.gradients_received == second.gradients_sent
    whole = found.microbatch_memory([(0, len(graph.nodes))])
    # What is kept on both sides is held twice; what only crosses is held though nobody keeps it.
    assert first.live_bytes + second.live_bytes >= whole.saved
    assert first.saved + second.saved <= whole.saved
    assert max(first.forward_peak, second.forward_peak) <= whole.forward_peak + first.values_sent


@settings(max_examples=subsets.examples(60), deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_pieces_side_by_side_are_one(name: str, data: Any) -> None:
    graph, found, positions = ranges_of(name)
    a, b, c = sorted(data.draw(st.lists(st.sampled_from([0, *positions, len(graph.nodes)]), min_size=3, max_size=3)))
    assume(a < b < c)
    assert found.microbatch_memory([(a, b), (b, c)]) == found.microbatch_memory([(a, c)])


@settings(max_examples=subsets.examples(60), deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_recomputation_holds_what_enters_the_blocks_and_one_of_them(name: str, data: Any) -> None:
    graph, found, positions = ranges_of(name)
    cuts = sorted(data.draw(st.sets(st.sampled_from(positions), max_size=4)))
    ends = [0, *cuts, len(graph.nodes)]
    blocks = [found.microbatch_memory([piece]) for piece in pairwise(ends)]
    whole = found.microbatch_memory([(0, len(graph.nodes))])
    need = recompute_blocks(whole, blocks)
    assert need.live_bytes == sum(block.values_received for block in blocks)
    assert max(block.backward_peak - block.values_sent for block in blocks) <= need.backward_peak
    if not cuts:
        assert need.backward_peak == whole.backward_peak and need.first_backward_peak == whole.first_backward_peak


numbers = st.floats(0, 1e9, allow_nan=False)


@st.composite
def needs(draw: Any) -> PeakMemory:
    kept, received, sent = draw(numbers), draw(numbers), draw(numbers)
    live, first = kept + received + sent, draw(numbers)
    backward = live + sent + draw(numbers)  # the received gradients are there too when it begins
    return PeakMemory(kept, received, sent, sent, received, live, backward, backward + first, draw(numbers))


@st.composite
def loads(draw: Any) -> TrainedBytes:
    trained = draw(numbers)
    return TrainedBytes(trained + draw(numbers), trained, draw(numbers), draw(numbers), min(draw(numbers), trained))


@given(needs(), loads(), st.integers(1, 8), st.integers(1, 32))
def test_more_live_microbatches_never_hold_less(
    need: PeakMemory, load: TrainedBytes, live: int, microbatches: int
) -> None:
    less, more, all_live, no_more = (
        one_stage_memory(need, load, most, microbatches) for most in (live, live + 1, microbatches, 99)
    )
    assert less.total <= more.total + len(less.__dict__)  # rounding up
    assert all_live.total == no_more.total


@given(needs(), loads(), st.integers(1, 8), st.integers(1, 16))
def test_a_worker_holds_at_least_its_state_and_its_microbatches(
    need: PeakMemory, load: TrainedBytes, live: int, microbatches: int
) -> None:
    found = one_stage_memory(need, load, live, microbatches)
    held = min(live, microbatches)
    assert found.total >= load.parameters + load.states + held * need.live_bytes
    assert found.total >= load.parameters + load.trained + load.states + load.optimizer_workspace
    assert min(found.parameters, found.gradients, found.optimizer, found.activations, found.communication) >= 0


@given(loads(), st.integers(1, 64), st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_sharding_more_never_holds_more_state(load: TrainedBytes, replicas: int, dtype: str, masters: bool) -> None:
    totals = []
    for shard in ("none", "optimizer", "gradients", "parameters"):
        sharding = StateSharding.of(SUM.changed(shard=shard), replicas)
        own = shard_trained_bytes(load, TrainingOptions(dtype=dtype, masters=masters), sharding)
        totals.append(own.parameters + own.gradients + own.states)
    assert totals == sorted(totals, reverse=True) or replicas == 1
    assert totals[0] >= totals[-1] >= totals[0] / replicas * (1 - 1e-9)
    assert replicas > 1 or totals == pytest.approx([totals[0]] * 4)
