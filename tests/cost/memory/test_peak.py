"""What a worker holds: against live bytes of real steps, and against what is known of optimizers and sharded states."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import build_objectives
from polylane.cost.memory.attention_cores import find_attention_cores
from polylane.cost.memory.live_ranges import LiveRanges, PeakMemory
from polylane.cost.memory.optimizer_state import OptimizerState, probe_optimizer_state
from polylane.cost.memory.peak import (
    MemoryMargin,
    TrainedBytes,
    peak_memory,
    recompute_blocks,
    shard_trained_bytes,
)
from polylane.cost.memory.recompute_budget import dropped_on_stages
from polylane.cost.memory.recompute_choice import SavedValues
from polylane.cost.memory.saved_by_operators import saved_on_rank, trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedTensors
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.state_sharding import UNSHARDED, StateSharding
from polylane.graph.batch import flatten, sample_count
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.graph.partition import Partition
from polylane.plan.sync import SUM
from polylane.runtime.workers.team import fork_workers
from polylane.schedule.action import Action, ActionKind
from polylane.sharding.layout import choose_layout
from tests.support import subsets
from tests.support.reference.step_memory import alive, parameter_bytes, predicted
from tests.support.simulated_tasks import one_stage_memory
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import classify

WIDTH, DEPTH, SAMPLES = 64, 4, 256


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(list(parameters), lr=0.01)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for _ in range(DEPTH) for each in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 4))


def batch(samples: int = SAMPLES) -> tuple[Tensor, Tensor]:
    return torch.randn(samples, WIDTH), torch.zeros(samples, dtype=torch.long)


# ---- one microbatch --------------------------------------------------------------------------------------------------


def residence(model: nn.Module, example: Any, loss: Any = classify, **setting: Any) -> tuple[Graph, LiveRanges]:
    graph = capture(model, loss, example)
    return graph, LiveRanges(
        graph, trace_saved_tensors(graph, BackendSetting(sample_count(flatten(example)[0]), **setting))
    )


def recomputing(graph: Graph, keeping: SavedTensors, mode: str) -> LiveRanges:
    values = SavedValues(graph, keeping)
    (dropped,) = dropped_on_stages(Partition(graph, ()), [mode], [keeping])
    return LiveRanges(graph, keeping, dropped, values.pieces(dropped))


def test_a_chain_needs_what_every_layer_keeps_and_one_gradient() -> None:
    graph, found = residence(mlp(), batch())
    need = found.microbatch_memory([(0, len(graph.nodes))])
    layer, scores = SAMPLES * WIDTH * 4, SAMPLES * 4 * 4
    # Of every layer the input of its GELU and that of the linear after it; of the loss the logarithms and a number.
    assert need.saved == 2 * DEPTH * layer + scores + 4
    assert need.batch_bytes == layer + SAMPLES * 8  # the first input is the batch itself
    assert need.values_received == need.values_sent == need.gradients_received == need.gradients_sent == 0
    assert need.forward_peak == need.saved + scores + 4  # the scores themselves, until the loss has read them; the loss
    # The largest moment of the way back is the last linear's: the gradients of what it gave, read, and of its weights.
    assert need.backward_peak == 2 * DEPTH * layer + scores + layer + (WIDTH + 1) * 4 * 4


def test_a_stage_holds_what_it_receives_and_sends_besides() -> None:
    graph, found = residence(mlp(), batch())
    layer = SAMPLES * WIDTH * 4
    middle = [i for i, node in enumerate(graph.nodes) if node.name in ("2/linear", "6/linear")]
    need = found.microbatch_memory([(middle[0], middle[1])])
    assert need.values_received == need.values_sent == need.gradients_received == need.gradients_sent == layer
    assert need.saved == 3 * layer  # three linears' inputs and two GELUs' inputs; one input came, one output goes
    assert need.live_bytes == 5 * layer


def test_what_two_stages_keep_counts_on_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(WIDTH, WIDTH) for _ in "abc")

        def forward(self, x: Tensor) -> Tensor:
            y = self.a(x)
            return self.b(y).relu() + self.c(y)

    graph, found = residence(Twice(), batch())
    cut = graph.positions["c/linear"]
    first, second = found.microbatch_memory([(0, cut)]), found.microbatch_memory([(cut, len(graph.nodes))])
    layer = SAMPLES * WIDTH * 4
    assert first.values_sent == 2 * layer == second.values_received  # y, and what relu gives
    assert first.saved == 0 and second.saved == SAMPLES * WIDTH * 4 + 4  # log-softmax
    whole = found.microbatch_memory([(0, len(graph.nodes))])
    assert whole.saved == 2 * layer + second.saved


def test_a_layer_that_reads_the_batch_keeps_nothing_else() -> None:
    graph, found = residence(mlp(), batch())
    first = graph.positions["0/linear"]
    assert found.microbatch_memory([(first, first + 1)]).saved == 0


def test_pieces_of_one_stage_exchange_nothing_with_each_other() -> None:
    graph, found = residence(mlp(), batch())
    cuts = [graph.positions[name] for name in ("2/linear", "4/linear")]
    count = len(graph.nodes)
    outer = found.microbatch_memory([(0, cuts[0]), (cuts[1], count)])
    inner = found.microbatch_memory([(cuts[0], cuts[1])])
    assert outer.values_received == inner.values_sent and outer.values_sent == inner.values_received


class Attending(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.qkv, self.out, self.dropout = nn.Linear(32, 96), nn.Linear(32, 32), dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4).contiguous().unbind(0)
        scores = (q @ k.transpose(-2, -1)) * 8**-0.5
        shares = F.dropout(scores.softmax(-1), self.dropout, self.training)
        return self.out((shares @ v).transpose(1, 2).flatten(2))


def mean(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Layer(nn.Module):
    """A transformer's layer with all its dropouts."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), 0.1, self.training)


@functools.cache
def layers(depth: int, hidden: int, heads: int, samples: int, length: int) -> Graph:
    model = nn.Sequential(*[Layer(hidden, heads) for _ in range(depth)])
    return capture(model, mean, torch.randn(samples, length, hidden))


@pytest.mark.parametrize(("again", "scores"), [(False, 5), (True, 0)])
def test_a_transformer_s_layer_keeps_34_sbh_and_its_scores(again: bool, scores: int) -> None:
    """Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022, equations 2 and 6."""
    s, b, h, a = 128, 2, 256, 8
    kept = []
    for depth in (1, 2):
        graph = layers(depth, h, a, b, s)
        keeping = trace_saved_tensors(graph, BackendSetting(b, dtype=torch.bfloat16))
        ranges = recomputing(graph, keeping, "selective" if again else "none")
        kept.append(ranges.microbatch_memory([(0, len(graph.nodes))]).saved)
    assert kept[1] - kept[0] == pytest.approx(s * b * h * 34 + scores * a * s * s * b, rel=0.01)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_selective_recomputation_keeps_no_scores(dropout: float) -> None:
    sizes = {}
    for length in (64, 128):
        graph = capture(nn.Sequential(Attending(dropout), Attending(dropout)), mean, torch.randn(2, length, 32))
        keeping, cores = trace_saved_tensors(graph, BackendSetting(2)), find_attention_cores(graph)
        assert len(cores) == 2
        every = [(0, len(graph.nodes))]
        plain, selective = (
            LiveRanges(graph, keeping).microbatch_memory(every),
            recomputing(graph, keeping, "selective").microbatch_memory(every),
        )
        scores = 2 * 4 * length * length * (4 if not dropout else 4 + 4 + 1)  # shares; dropped ones and their mask
        assert plain.saved - selective.saved == 2 * scores
        # In its own backward pass one attention has its scores again.
        assert selective.saved + scores <= selective.backward_peak < plain.backward_peak
        sizes[length] = selective.saved
    assert sizes[128] <= 2 * sizes[64]


def test_full_recomputation_keeps_what_enters_the_blocks_and_one_block() -> None:
    graph, found = residence(mlp(), batch())
    ends = [0, *(graph.positions[f"{i}/linear"] for i in (2, 4, 6, 8)), len(graph.nodes)]
    blocks = [found.microbatch_memory([piece]) for piece in pairwise(ends)]
    whole = found.microbatch_memory([(0, len(graph.nodes))])
    layer = SAMPLES * WIDTH * 4
    need = recompute_blocks(whole, blocks)
    assert need.saved == 4 * layer and need.live_bytes == 4 * layer
    assert 4 * layer < need.backward_peak < whole.backward_peak
    one = max(block.backward_peak for block in blocks)
    assert need.backward_peak <= 4 * layer + one


# ---- what an optimizer keeps -----------------------------------------------------------------------------------------


def state_of(factory: Callable[[Any], torch.optim.Optimizer], model: nn.Module, device: str = "cpu") -> OptimizerState:
    graph = capture(model, lambda m, x: m(x).mean(), torch.randn(2, 6, dtype=next(model.parameters()).dtype))
    return probe_optimizer_state(graph, factory, device)


@pytest.mark.parametrize(
    ("factory", "each", "once"),
    [
        (lambda p: torch.optim.SGD(p, lr=0.1), 0, 0),
        (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), 4, 0),
        (lambda p: torch.optim.AdamW(p), 8, 4),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), 12, 4),
        (lambda p: torch.optim.Adagrad(p), 4, 4),
    ],
)
def test_states_for_each_element_and_once(factory: Any, each: int, once: int) -> None:
    state = state_of(factory, nn.Linear(6, 3))
    for name, shape in (("weight", (1000, 300)), ("bias", (7,))):
        elements = torch.Size(shape).numel()
        assert state.bytes(name, shape) == each * elements + once


def test_states_of_rows_and_columns_grow_with_them_alone() -> None:
    state = state_of(lambda p: torch.optim.Adafactor(p), nn.Linear(6, 3))
    assert state.bytes("weight", (1000, 300)) == (1000 + 300 + 1) * 4


def test_states_have_the_dtype_of_their_parameters() -> None:
    state = state_of(adamw, nn.Sequential(nn.Linear(6, 3), nn.Linear(3, 2)).double())
    assert state.bytes("0.weight", (10, 10)) == 2 * 8 * 100 + 4


def test_parameters_that_an_optimizer_leaves_out_have_no_state() -> None:
    state = state_of(lambda p: torch.optim.AdamW([q for n, q in p if "bias" not in n]), nn.Linear(6, 3))
    assert state.bytes("bias", (3,)) == 0 < state.bytes("weight", (3, 6))


def test_on_cuda_torch_s_optimizers_step_all_parameters_at_once() -> None:
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(5)])
    one, every = state_of(adamw, model), state_of(adamw, model, "cuda")
    assert not one.steps_all_at_once and every.steps_all_at_once
    assert (
        one.step_bytes([400] * 100) == round(one.workspace_factor * 400) and every.step_bytes([400] * 100) >= 400 * 100
    )


def test_an_optimizer_that_cannot_be_tried_counts_as_adam() -> None:
    def broken(parameters: Any) -> torch.optim.Optimizer:
        raise ValueError("only for large models")

    state = state_of(broken, nn.Linear(6, 3))
    assert state.bytes("weight", (10, 10)) == 8 * 100 + 4


# ---- sharded states --------------------------------------------------------------------------------------------------


def test_zero_shards_sixteen_bytes_of_every_parameter() -> None:
    """Rajbhandari et al., 2020, figure 1: 7.5 billion parameters on 64 devices, Adam in mixed precision."""
    parameters = 7.5e9
    load = TrainedBytes(parameters * 4, parameters * 4, parameters * 8)

    def held(shard: Any) -> float:
        sharding = StateSharding.of(SUM.changed(shard=shard), 64)
        own = shard_trained_bytes(load, TrainingOptions(dtype="float16"), sharding)
        return (own.parameters + own.gradients + own.states) / 1e9

    assert held("none") == pytest.approx(120.0)
    assert held("optimizer") == pytest.approx(31.4, abs=0.05)
    assert held("gradients") == pytest.approx(16.6, abs=0.05)
    assert held("parameters") == pytest.approx(1.9, abs=0.05)


def test_sixteen_bits_throughout_take_half_of_everything() -> None:
    load = TrainedBytes(400.0, 400.0, 800.0)
    own = shard_trained_bytes(load, TrainingOptions(dtype="bfloat16", masters=False), UNSHARDED)
    assert (own.parameters, own.gradients, own.states) == (200.0, 200.0, 400.0)


NEED = PeakMemory(
    100.0, 10.0, 10.0, 10.0, 10.0, forward_peak=115.0, backward_peak=150.0, first_backward_peak=155.0, batch_bytes=1.0
)
LOAD = TrainedBytes(1000.0, 1000.0, 2000.0, optimizer_workspace=50.0)


def test_the_step_is_the_worst_moment_of_small_activations() -> None:
    small = PeakMemory(1.0, 0, 0, 0, 0, 1.0, 2.0, 2.0, 0)
    found = one_stage_memory(small, LOAD, 1, 4)
    assert found.moment == "step" and found.total == 1000 + 1000 + 2000 + 50


def test_live_microbatches_count_beyond_the_one_under_way() -> None:
    found = one_stage_memory(NEED, LOAD, 3, 8)
    assert found.moment == "backward" and found.gradients == 1000
    assert found.activations == 2 * 120 + 150 + 8
    assert found.communication == 0  # it has no messages


def test_a_margin_comes_on_top_of_all_tensors() -> None:
    plain, more = one_stage_memory(NEED, LOAD, 1, 1), one_stage_memory(NEED, LOAD, 1, 1, MemoryMargin(0.1, 7))
    assert more.margin == -(-plain.total // 10) + 7 and more.total == plain.total + more.margin


# ---- against real steps ----------------------------------------------------------------------------------------------


RUN = (
    "data=1",
    "data=2",
    "pipeline=2,microbatches=4,schedule=1f1b",
    "pipeline=2,microbatches=4,schedule=afab",
    "tensor=2",
    "sequence=2",
    "data=1,microbatches=4",
)


@pytest.mark.parametrize(("plan", "transport"), subsets.one_in(2, subsets.pairs(RUN, ["", "gloo"]), several=True))
def test_predictions_hold_for_steps_that_are_run(plan: str, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("POLYLANE_TRANSPORT", transport)
    example = batch()
    prepared = compile_training(mlp(), build_objectives(classify, adamw, None), example, plan)
    measured = fork_workers(lambda _: alive(prepared, example), prepared.plan.workers)
    # Here every replica has the whole batch; samples that are loaded are only those that it needs.
    others = sum(leaf.nbytes for leaf in example) * (1 - 1 / prepared.plan.degree("data", 0))
    for found, real in zip(predicted(prepared, SAMPLES, adamw), measured, strict=True):
        assert found.total + others == pytest.approx(real, rel=0.03)


# ---- where operators are split ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axis", "degree"),
    subsets.one_in(2, [("tensor", 2), ("tensor", 4), ("sequence", 2), ("sequence", 4)], several=True),
)
def test_ranks_that_share_operators_share_what_is_kept(axis: str, degree: int) -> None:
    graph = layers(2, 64, 8, 2, 64)
    layout = choose_layout(graph, {axis: degree}, 2)
    every, setting = [(0, len(graph.nodes))], BackendSetting(2)
    kept = trace_saved_tensors(graph, setting)
    kept_of_part = saved_on_rank(graph, setting, *layout.at(2), aliases=layout.view.aliases)
    whole, part = LiveRanges(graph, kept), LiveRanges(graph, kept_of_part)
    share = part.microbatch_memory(every).saved / whole.microbatch_memory(every).saved
    assert 1 / degree * 0.99 <= share <= 1 / degree + 0.12  # what feeds a split operator whole is kept whole
    held, trained = parameter_bytes(graph, kept_of_part, every)
    assert held == trained
    if axis == "tensor":
        assert held == pytest.approx(parameter_bytes(graph, kept, every)[0] / degree, rel=0.05)
    else:
        assert held == parameter_bytes(graph, kept, every)[0]


def test_everything_that_a_rank_runs_is_tried() -> None:
    class Space(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())

    graph = capture(Space(), mean, torch.randn(4, 1, 16, 16))
    layout = choose_layout(graph, {"sequence": 2}, 4)
    keeping = saved_on_rank(graph, BackendSetting(4), *layout.at(4), aliases=layout.view.aliases)
    assert all(node.trial.is_known for node in keeping.nodes.values())
    halves = LiveRanges(graph, keeping).microbatch_memory([(0, len(graph.nodes))])
    whole = LiveRanges(graph, trace_saved_tensors(graph, BackendSetting(4))).microbatch_memory([(0, len(graph.nodes))])
    # A half of everything, with a row of the neighbour's around what is convolved; the normalized values are its own.
    assert 0.5 * whole.saved <= halves.saved <= 0.6 * whole.saved


def test_microbatches_between_two_halves_hold_what_their_weight_gradients_need() -> None:
    """Two wait for their second half while a third runs its first one."""
    need = replace(NEED, between_halves=70.0, input_half_peak=160.0, weight_half_peak=90.0)
    kinds = [ActionKind.FORWARD] * 3 + [ActionKind.BACKWARD_INPUT] * 3 + [ActionKind.BACKWARD_WEIGHT] * 3
    lane = [Action(kind, 0, i % 3) for i, kind in enumerate(kinds)]
    alone = TrainedBytes(0.0, 0.0, 0.0)
    found = peak_memory(lane, {0: need}, {0: 0.0}, alone)
    # Before the first of the first halves three are live; before the last one two wait.
    assert found.activations == 3 + max(2 * need.live_bytes + 160, need.live_bytes + 70 + 160, 2 * 70 + 160)
    short = [lane[0], lane[3], lane[6], *lane[1:3], lane[4], lane[7], lane[5], lane[8]]
    assert peak_memory(short, {0: need}, {0: 0.0}, alone).activations == 3 + need.live_bytes + 160


def test_whole_passes_beside_halves_hold_nothing_for_later() -> None:
    """Each pass of an order counts by what it is: only those that are halved wait for their second half."""
    need = replace(NEED, between_halves=70.0, input_half_peak=160.0, weight_half_peak=90.0)
    forwards = [Action(ActionKind.FORWARD, 0, i) for i in range(3)]
    first, second, whole = ActionKind.BACKWARD_INPUT, ActionKind.BACKWARD_WEIGHT, ActionKind.BACKWARD
    alone = TrainedBytes(0.0, 0.0, 0.0)

    def peak(*passes: tuple[ActionKind, int]) -> float:
        lane = [*forwards, *(Action(kind, 0, i) for kind, i in passes)]
        return peak_memory(lane, {0: need}, {0: 0.0}, alone).activations - 3

    assert peak((whole, 0), (whole, 1), (whole, 2)) == 2 * need.live_bytes + need.backward_peak
    assert peak((whole, 0), (first, 1), (second, 1), (whole, 2)) == max(
        2 * need.live_bytes + need.backward_peak, need.live_bytes + 160
    )
    assert peak((first, 0), (second, 0), (whole, 1), (whole, 2)) == max(
        2 * need.live_bytes + 160, need.live_bytes + need.backward_peak
    )


# ---- weights that are gathered cast ----------------------------------------------------------------------------------


def test_what_is_gathered_cast_is_saved_by_no_operator() -> None:
    """Under autocast a linear layer saves a cast of its weight; ZeRO-3 gathers it cast, and autograd keeps none."""
    example = torch.ones(4, 64), torch.zeros(4, dtype=torch.long)
    graph = capture(nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)), classify, example)
    saved = {
        gathers: trace_saved_tensors(graph, BackendSetting(4, autocast=torch.bfloat16, gathers_cast=gathers))
        for gathers in (False, True)
    }
    own = {gathers: sum(node.own_bytes for node in trace.nodes.values()) for gathers, trace in saved.items()}
    # The input of the first layer has a cast of its own. The first layer's weight is not read in a backward pass.
    assert own[False] - own[True] == 2 * 64 * 64
    assert saved[True].storage_bytes == saved[False].storage_bytes
