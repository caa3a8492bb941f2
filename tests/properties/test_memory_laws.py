"""Laws of memory: what is predicted of any small model is what its passes hold, and stages make up the whole."""

from __future__ import annotations

import functools
import gc
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import models
from playing import one_stage_memory
from polylane.cost.memory import Load, recomputed, sharded
from polylane.cost.method import Method
from polylane.cost.residence import Need, Residence
from polylane.graph.capture import capture
from polylane.graph.check import bound, tables
from polylane.graph.export import Whole
from polylane.graph.graph import Graph
from polylane.graph.keeping import Setting
from polylane.graph.ledger import Ledger
from polylane.graph.part import Part
from polylane.graph.partition import cut_positions
from polylane.graph.saved import saved

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
    """Bytes alive at most in a forward pass, between the passes, and at most in the backward pass."""
    whole, part = Whole(model, loss, lambda leaves: leaves[0]), Part(len(x), batch=len(x))
    table = tables(whole, graph.code.constants, [x])
    arguments = [bound(node, table, part) for node in graph.code.fx.nodes if node.op == "placeholder"]
    code = fx.GraphModule(nn.Module(), graph.code.fx)
    model.zero_grad(set_to_none=True)
    gc.collect()
    with Ledger([*model.parameters(), *graph.code.constants.values(), x]) as ledger:
        result = code(*arguments)
        forward, between = ledger.peak, ledger.now
        ledger.peak = ledger.now
        result[0].backward()
        return forward, between, ledger.peak


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.tuples(st.sampled_from(OPERATORS), st.integers(1, 4)), min_size=1, max_size=7))
def test_passes_hold_what_is_predicted_to_the_byte_forward_and_closely_backward(steps: list[tuple[str, int]]) -> None:
    torch.manual_seed(0)
    model, x = Random(steps), torch.randn(SAMPLES, WIDTH)
    graph = capture(model, loss, x)
    forward, between, backward = held(graph, model, x)
    need = Residence(graph, saved(graph, Setting(SAMPLES))).need([(0, len(graph.nodes))])
    assert need.forward == forward
    assert need.kept + 4 == between  # and the loss
    # Autograd adds gradients up in place, but not while a ledger looks on.
    sums = (
        max(2 * WIDTH * WIDTH, SAMPLES * WIDTH) * 4 if {"add", "multiply", "cat"} & {name for name, _ in steps} else 0
    )
    biases = len(steps) * WIDTH * 4  # their gradients may be made before, or after, those of the weights
    # Of an operator that reads a value twice, seen alone, the two gradients and their sum are alive at once.
    twice = SAMPLES * WIDTH * 4 if any(n == "multiply" and not b % (i + 1) for i, (n, b) in enumerate(steps)) else 0
    assert need.first - biases - twice <= backward <= need.first + sums + NUMBERS


@functools.cache
def example(name: str) -> tuple[Graph, Residence, list[int]]:
    torch.manual_seed(0)
    case = models.CASES[name]() if name in models.CASES else models.example_case(name)
    graph = capture(case.model(), case.loss, case.batch(5, 1))
    return graph, Residence(graph, saved(graph, Setting(4))), cut_positions(graph)


MODELS = ("gpt", "unet", "densenet", "t5", "inception", "lstm", "moe")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_what_one_of_two_stages_sends_the_other_receives(name: str, data: Any) -> None:
    graph, found, positions = example(name)
    cut = data.draw(st.sampled_from(positions))
    first, second = found.need([(0, cut)]), found.need([(cut, len(graph.nodes))])
    assert first.received == second.sent == 0
    assert first.sent == second.received and first.asked == second.returned
    whole = found.need([(0, len(graph.nodes))])
    # What is kept on both sides is held twice; what only crosses is held though nobody keeps it.
    assert first.live + second.live >= whole.kept
    assert first.kept + second.kept <= whole.kept
    assert max(first.forward, second.forward) <= whole.forward + first.sent


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_pieces_side_by_side_are_one(name: str, data: Any) -> None:
    graph, found, positions = example(name)
    a, b, c = sorted(data.draw(st.lists(st.sampled_from([0, *positions, len(graph.nodes)]), min_size=3, max_size=3)))
    assume(a < b < c)
    assert found.need([(a, b), (b, c)]) == found.need([(a, c)])
    assert found.parameters([(a, b), (b, c)]) == found.parameters([(a, c)])


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MODELS), st.data())
def test_recomputation_holds_what_enters_the_blocks_and_one_of_them(name: str, data: Any) -> None:
    graph, found, positions = example(name)
    cuts = sorted(data.draw(st.sets(st.sampled_from(positions), max_size=4)))
    ends = [0, *cuts, len(graph.nodes)]
    blocks = [found.need([piece]) for piece in pairwise(ends)]
    whole = found.need([(0, len(graph.nodes))])
    need = recomputed(whole, blocks)
    assert need.live == sum(block.received for block in blocks)
    assert max(block.backward - block.sent for block in blocks) <= need.backward
    if not cuts:
        assert need.backward == whole.backward and need.first == whole.first


numbers = st.floats(0, 1e9, allow_nan=False)


@st.composite
def needs(draw: Any) -> Need:
    kept, received, sent = draw(numbers), draw(numbers), draw(numbers)
    live, first = kept + received + sent, draw(numbers)
    backward = live + draw(numbers)
    return Need(kept, received, sent, sent, received, live, backward, backward + first, draw(numbers))


@st.composite
def loads(draw: Any) -> Load:
    trained = draw(numbers)
    return Load(trained + draw(numbers), trained, draw(numbers), draw(numbers), min(draw(numbers), trained))


@given(needs(), loads(), st.integers(1, 8), st.integers(1, 32))
def test_more_live_microbatches_never_hold_less(need: Need, load: Load, live: int, microbatches: int) -> None:
    less, more, all_live, no_more = (
        one_stage_memory(need, load, most, microbatches) for most in (live, live + 1, microbatches, 99)
    )
    assert less.total <= more.total + len(less.__dict__)  # rounding up
    assert all_live.total == no_more.total


@given(needs(), loads(), st.integers(1, 8), st.integers(1, 16))
def test_a_worker_holds_at_least_its_state_and_its_microbatches(
    need: Need, load: Load, live: int, microbatches: int
) -> None:
    found = one_stage_memory(need, load, live, microbatches)
    held = min(live, microbatches)
    assert found.total >= load.parameters + load.states + held * need.live
    assert found.total >= load.parameters + load.trained + load.states + load.working
    assert min(found.parameters, found.gradients, found.optimizer, found.activations, found.communication) >= 0


@given(loads(), st.integers(1, 64), st.sampled_from(["float32", "bfloat16"]), st.booleans())
def test_sharding_more_never_holds_more_state(load: Load, replicas: int, dtype: str, masters: bool) -> None:
    totals = []
    for shard in ("none", "optimizer", "gradients", "parameters"):
        own = sharded(load, Method(dtype=dtype, masters=masters, shard=shard), replicas)  # type: ignore[arg-type]
        totals.append(own.parameters + own.gradients + own.states)
    assert totals == sorted(totals, reverse=True) or replicas == 1
    assert totals[0] >= totals[-1] >= totals[0] / replicas * (1 - 1e-9)
    assert replicas > 1 or totals == pytest.approx([totals[0]] * 4)
