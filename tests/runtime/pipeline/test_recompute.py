"""Recomputation changes no number, runs nothing of the user's twice, and takes the bytes that were predicted."""

from __future__ import annotations

import gc
import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.graph.batch import cast_leaves, flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors, repeatable_nodes
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.runtime.pipeline.recompute import DroppedTensor
from polylane.runtime.pipeline.stage_runner import find_failing_node
from tests.support import models
from tests.support.reference.recomputed_stages import (
    SAMPLES,
    assert_equal,
    captured,
    drop,
    predicted,
    run_passes,
    seeded,
    stage_runner,
)
from tests.support.workers.training import classify

FAST = ("lstm", "moe", "custom_function", "nested", "branching")
SLOW = tuple(name for name in models.CASES if name not in FAST)
EXAMPLES = ("digits", "gpt", "unet", "hf_llama")
every_model = pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in (*SLOW, *EXAMPLES))]
)


def case_of(name: str) -> models.Case:
    return models.CASES[name]() if name in models.CASES else models.example_case(name)


def random_drop(graph: Graph, seed: int) -> DroppedTensors:
    """Half of all nodes run again, whether that saves anything or not; of most of them the result is dropped."""
    draw = random.Random(seed)
    able = sorted(str(node.meta["name"]) for node in repeatable_nodes(graph.code.fx))
    again = frozenset(name for name in able if draw.random() < 0.5)
    return DroppedTensors(frozenset(n for n in sorted(again) if n not in graph.outputs and draw.random() < 0.7), again)


@every_model
def test_no_number_changes_in_float64(name: str) -> None:
    case = case_of(name)
    rows = case.batch(SAMPLES, 0)
    leaves, rebuild = flatten(rows)
    batch = rebuild(cast_leaves(leaves, torch.float64))

    def passes(dropped: DroppedTensors) -> Any:
        model = seeded(case).double()
        return run_passes(stage_runner(model, graph, dropped), model, batch, SAMPLES)

    graph = capture(seeded(case).double(), case.loss, batch, in_float64=True)
    plain = passes(NOTHING_DROPPED)
    assert any(gradient is not None and gradient.any() for gradient in plain.gradients.values())
    half = (predicted(graph, drop(graph, "full")).live_bytes + predicted(graph, NOTHING_DROPPED).live_bytes) / 2
    modes = ("full", "selective", f"budget:{math.ceil(half)}")
    for dropped in (*(drop(graph, mode) for mode in modes), random_drop(graph, 1), random_drop(graph, 2)):
        assert_equal(passes(dropped), plain)


@every_model
def test_bytes_are_those_predicted_and_never_more_than_without(name: str) -> None:
    (case, graph), found = captured(name), {}
    batch = case.batch(SAMPLES, 0)
    for mode in ("none", "selective", "full"):
        model, dropped = seeded(case), drop(graph, mode)
        found[mode] = run_passes(stage_runner(model, graph, dropped), model, batch, SAMPLES)
        need = predicted(graph, dropped)
        # The loss itself is alive between the passes, and the seed of its gradient in the backward pass.
        assert found[mode].held == pytest.approx(need.live_bytes, abs=16, rel=0.001)
        assert found[mode].forward_peak == pytest.approx(need.forward_peak, abs=16, rel=0.001)
        # Under a meter gradients are accumulated in new memory, and kernels free what they are done with early.
        assert found[mode].backward_peak <= 1.05 * need.backward_peak + 16
    for mode in ("selective", "full"):
        assert found[mode].held <= found["none"].held
        assert found[mode].forward_peak <= found["none"].forward_peak
        assert found[mode].backward_peak <= found["none"].backward_peak + 16


@pytest.mark.parametrize("name", ["vit", pytest.param("t5", marks=pytest.mark.slow)])
def test_full_recomputation_keeps_a_fraction(name: str) -> None:
    _, graph = captured(name)
    none, full = (predicted(graph, drop(graph, mode)) for mode in ("none", "full"))
    assert full.saved < none.saved / 5 and full.backward_peak < none.backward_peak / 2


class Mixed(nn.Module):
    """Batch statistics, dropout, user code and tensors of the size of a parameter."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 32), nn.Linear(32, 4)
        self.norm, self.drop = nn.BatchNorm1d(32), nn.Dropout(0.4)
        self.own = Branch()

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(torch.tanh(self.norm(self.first(x))))
        logits: Tensor = self.last(self.own(torch.relu(x) * x) + x)
        return logits


class Branch(nn.Module):
    """A leaf: its way depends on the data."""

    def forward(self, x: Tensor) -> Tensor:
        Mixed.calls += 1
        return x.sin() if float(x.sum()) > 0 else x.cos()


def mixed_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    return torch.randn(8, 6), torch.arange(8) % 4


def test_statistics_move_once_masks_repeat_and_user_code_runs_once() -> None:
    batch = mixed_batch()
    torch.manual_seed(0)
    graph = capture(Mixed(), classify, batch)
    able = frozenset(str(node.meta["name"]) for node in repeatable_nodes(graph.code.fx))
    assert any("batch_norm" in name for name in able) and any("dropout" in name for name in able)
    found = []
    for dropped in (NOTHING_DROPPED, DroppedTensors(able - set(graph.outputs), able)):
        torch.manual_seed(0)
        model = Mixed()
        runner, Mixed.calls = stage_runner(model, graph, dropped), 0
        found.append(run_passes(runner, model, batch, 8))
        assert Mixed.calls == 2  # microbatches
        assert model.norm.num_batches_tracked == 2
    assert_equal(found[1], found[0])
    assert found[1].held < found[0].held


def test_autocast_is_on_again() -> None:
    batch = mixed_batch()
    torch.manual_seed(0)
    graph = capture(Mixed(), classify, batch)
    found = []
    for mode in ("none", "full"):
        torch.manual_seed(0)
        model = Mixed()
        runner = stage_runner(model, graph, drop(graph, mode), torch.bfloat16)
        found.append(run_passes(runner, model, batch, 8))
    assert_equal(found[1], found[0])


@pytest.mark.parametrize(
    ("name", "autocast"),
    [("vit", None), ("vit", torch.bfloat16), ("moe", None), pytest.param("t5", None, marks=pytest.mark.slow)],
)
def test_backward_passes_in_two_halves_drop_the_same(name: str, autocast: torch.dtype | None) -> None:
    """What the gradients of weights are computed from is made again for the first half, and kept for the second."""
    (case, graph), found = captured(name), {}
    batch = case.batch(SAMPLES, 0)
    for mode in ("none", "full"):
        model, dropped = seeded(case), drop(graph, mode)
        runner = stage_runner(model, graph, dropped, autocast, in_halves=True)
        assert runner.code.weight_groups
        found[mode] = run_passes(runner, model, batch, SAMPLES)
    assert_equal(found["full"], found["none"])
    if autocast is None:
        assert found["full"].held == pytest.approx(predicted(graph, drop(graph, "full")).live_bytes, rel=0.05, abs=16)
    assert found["full"].held < found["none"].held / 1.5


def test_nothing_of_a_microbatch_is_left() -> None:
    batch = mixed_batch()
    torch.manual_seed(0)
    model = Mixed()
    graph = capture(model, classify, batch)
    runner = stage_runner(model, graph, drop(graph, "full"))
    run_passes(runner, model, batch, 8)
    held = runner.forward(0, {}, list(batch), _slice())
    # By type: isinstance() asks a weak proxy for its class, and raises where its object is gone.
    assert any(type(each) is DroppedTensor for each in gc.get_objects())
    # A forward pass without a backward pass: its handles go with the autograd graph, without the garbage collector.
    gc.disable()
    try:
        runner.live_microbatches.clear()
        del held
        assert not any(type(each) is DroppedTensor for each in gc.get_objects())
    finally:
        gc.enable()


def _slice() -> SampleSlice:
    return SampleSlice(8, 0, 8)


def test_without_gradients_nothing_is_recorded() -> None:
    batch = mixed_batch()
    torch.manual_seed(0)
    model = Mixed()
    graph = capture(model, classify, batch)
    runner = stage_runner(model, graph, drop(graph, "full"))
    with torch.no_grad():
        runner.forward(0, {}, list(batch), _slice())
    assert not runner.live_microbatches and runner.code.recomputation.record is None


def test_an_error_in_the_second_run_names_its_node() -> None:
    batch = mixed_batch()
    torch.manual_seed(0)
    model = Mixed()
    graph = capture(model, classify, batch)
    calls = list[Tensor]()

    def tanh(x: Tensor) -> Tensor:
        calls.append(x)
        if len(calls) > 1:
            raise RuntimeError("the second run fails")
        return torch.tanh(x)

    for each in graph.code.fx.nodes:
        each.target = tanh if each.meta.get("name") == "tanh" else each.target
    runner = stage_runner(model, graph, drop(graph, "full"))
    calls.clear()  # of the trial that finds what it saves
    runner.forward(0, {}, list(batch), _slice())
    with pytest.raises(RuntimeError, match="the second run fails") as caught:
        runner.backward(0, {}, torch.ones(()))
    node = find_failing_node(runner, caught.value)
    assert node is not None and node.name == "tanh"


class Checkpointed(nn.Module):
    """The user recomputes some of it, and inside of that some of it once more."""

    def __init__(self, reentrant: bool, wanted: bool = True) -> None:
        super().__init__()
        self.reentrant, self.wanted = reentrant, wanted
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.2), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)
        )
        self.stem, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def _block(self, x: Tensor) -> Tensor:
        nested: Tensor = self._again(self.inner[1], self.inner[0](x))
        return nested

    def _again(self, function: Any, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(function, x, use_reentrant=self.reentrant) if self.wanted else function(x)
        return found

    def forward(self, x: Tensor) -> Tensor:
        x = self._again(self._block, self.stem(x))
        logits: Tensor = self.head(self._again(self.inner[2], x))
        return logits


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_user_s_own_checkpoints_are_recomputed(reentrant: bool) -> None:
    torch.manual_seed(1)
    batch = torch.randn(8, 16), torch.arange(8) % 4
    found = []
    for wanted in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(reentrant, wanted)
        graph = capture(model, classify, batch)
        assert len(graph.checkpoints) == (2 if wanted else 0)  # the nested one is part of the outer
        assert not graph.notes
        found.append(run_passes(stage_runner(model, graph, drop(graph, "none")), model, batch, 8))
        assert found[-1].held == pytest.approx(predicted(graph, drop(graph, "none")).live_bytes, abs=16)
    outer, last = graph.checkpoints
    assert {name.split("/")[0] for name in outer} == {f"inner.{i}.{j}" for i in (0, 1) for j in range(5)}
    assert {name.split("/")[0] for name in last} == {f"inner.2.{j}" for j in range(5)}
    assert_equal(found[1], found[0])
    # Kept are what enters each, and what the head reads.
    assert found[1].held < found[0].held / 5
