"""What autograd keeps of every operator, against known operators and against what torch itself packs."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from polylane.cost.memory.allocation_meter import AllocationMeter, storage_id
from polylane.cost.memory.operator_trial import GradientOrigin
from polylane.cost.memory.saved_by_operators import trace_saved_tensors
from polylane.cost.memory.saved_tensors import BackendSetting, SavedByOperator, SavedTensors
from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import placeholder_value, tensors_by_role
from polylane.graph.graph import Graph
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators import tiled_attention
from tests.support import models, subsets
from tests.support.reference.eager_and_captured import captured

SAMPLES = 6


class Of(nn.Module):
    """A function of an input as a model, with a parameter in front so that gradients flow."""

    def __init__(self, function: Callable[..., Tensor], *features: int, **modules: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(features[-1]))
        self.inner = nn.ModuleDict(modules)
        self.function, self.features = function, features

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale, **self.inner)


def keeping(model: nn.Module, features: tuple[int, ...], **setting: Any) -> tuple[Graph, SavedTensors]:
    graph = capture(model, lambda model, batch: model(batch).float().mean(), torch.randn(4, *features))
    return graph, trace_saved_tensors(graph, BackendSetting(SAMPLES, **setting))


def of(function: Callable[..., Tensor], *features: int, **modules: nn.Module) -> tuple[Graph, SavedTensors]:
    return keeping(Of(function, *features, **modules), features)


# Prefixes of placeholders that are in memory anyway, whether an operator saves them or not.
HELD = ("parameter:", "buffer:", "constant:")


def only(keeping: SavedTensors, operator: str) -> SavedByOperator:
    """The one node of an operator."""
    (name,) = [name for name in keeping.nodes if name.split("/")[-1].split("#")[0] == operator]
    return keeping.nodes[name]


def saved_bytes(keeping: SavedTensors) -> int:
    """Bytes that a forward pass saves, without what is in memory anyway; the batch where an operator saves it."""
    kept = {keeping.storage_of[key] for node in keeping.nodes.values() for key in node.keys}
    own = sum(node.own_bytes for node in keeping.nodes.values())
    return own + sum(keeping.storage_bytes[key] for key in kept if not key[0].startswith(HELD))


def kept_keys(node: SavedByOperator) -> set[str]:
    return {key[0] for key in node.keys}


# ---- operators that are known ----------------------------------------------------------------------------------------


def test_linear_keeps_its_input_and_relu_its_output_which_the_next_linear_shares() -> None:
    first, second = nn.Linear(8, 16), nn.Linear(16, 4)
    _, keep = of(lambda x, a, b: b(F.relu(a(x))), 8, a=first, b=second)
    assert kept_keys(keep.nodes["inner.a/linear"]) == {"mul", "parameter:inner.a.weight"}
    assert kept_keys(keep.nodes["relu"]) == {"relu"}
    assert kept_keys(keep.nodes["inner.b/linear"]) == {"relu", "parameter:inner.b.weight"}
    assert all(node.trial.own_tensors == () and node.trial.is_known for node in keep.nodes.values())
    # The input, which scaling it keeps; the scaled input; what relu gives, once.
    assert saved_bytes(keep) == SAMPLES * (8 + 8 + 16) * 4


def test_a_frozen_linear_keeps_no_input_but_its_weight() -> None:
    frozen = nn.Linear(8, 16).requires_grad_(False)
    _, keep = of(lambda x, a: a(x), 8, a=frozen)
    assert kept_keys(only(keep, "linear")) == {"parameter:inner.a.weight"}
    assert saved_bytes(keep) == SAMPLES * 8 * 4  # of the scaling in front


def test_what_no_gradient_flows_through_keeps_nothing() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
    head = nn.Linear(8, 2)
    _, keep = keeping(nn.Sequential(model, head), (8,))
    assert saved_bytes(keep) == SAMPLES * 8 * 4
    assert [name for name, node in keep.nodes.items() if node.keys or node.trial.own_tensors] == ["1/linear"]


def test_views_keep_nothing_and_what_reads_them_keeps_the_memory_behind_them() -> None:
    _, keep = of(lambda x: x.unflatten(-1, (2, 4)).transpose(1, 2).flatten(0, 1).square(), 8)
    views = [node for name, node in keep.nodes.items() if name.split("/")[-1] in ("unflatten", "transpose")]
    assert len(views) == 2 and not any(node.keys or node.trial.own_tensors for node in views)
    assert keep.storage_of["transpose", 0] == ("mul", 0) == keep.storage_of["unflatten", 0]
    # Transposed, it has to be copied to be flattened: new memory, which square keeps.
    assert keep.storage_of["flatten", 0] == ("flatten", 0)
    assert kept_keys(only(keep, "square" if "square" in keep.nodes else "pow")) == {"flatten"}


def test_chunks_of_one_value_count_once() -> None:
    _, keep = of(lambda x, a: torch.cat([q * k for q, k in [a(x).chunk(2, -1)]]), 8, a=nn.Linear(8, 12))
    product = next(node for name, node in keep.nodes.items() if name == "mul#2")
    assert {keep.storage_of[key] for key in product.keys} == {("inner.a/linear", 0)}
    assert saved_bytes(keep) == SAMPLES * (8 + 8 + 12) * 4


def test_layer_norm_keeps_a_mean_and_a_deviation_of_every_row() -> None:
    _, keep = of(lambda x, a: a(x), 3, 8, a=nn.LayerNorm(8))
    node = only(keep, "layer_norm")
    assert kept_keys(node) == {"mul", "parameter:inner.a.weight", "parameter:inner.a.bias"}
    assert list(node.trial.own_tensors) == [SAMPLES * 3 * 4] * 2


def test_batch_norm_keeps_its_input_and_two_numbers_of_every_channel() -> None:
    _, keep = of(lambda x, a: a(x), 3, 5, 5, a=nn.BatchNorm2d(3))
    node = only(keep, "batch_norm")
    assert "mul" in kept_keys(node) and "buffer:inner.a.running_mean" in kept_keys(node)
    assert list(node.trial.own_tensors) == [3 * 4] * 2


def test_batch_norm_over_replicas_keeps_its_input_and_what_it_is_normalized_by() -> None:
    model = Of(lambda x, a: a(x), 3, 5, 5, a=nn.BatchNorm2d(3))
    _, keep = keeping(model, (3, 5, 5), sync_batch_norm=True)
    node = only(keep, "batch_norm")
    assert node.trial.is_known and "mul" in kept_keys(node)
    sums = (2 * 3 + 1) * 8  # in float64, over all replicas; the count among them is needed again
    assert sorted(node.trial.own_tensors) == [3 * 4, 3 * 4, sums]  # and the mean and the variance of each channel


def test_dropout_keeps_its_mask_a_byte_for_each_element() -> None:
    _, keep = of(lambda x: F.dropout(x, 0.3, True), 8)
    node = only(keep, "dropout")
    assert not node.keys and list(node.trial.own_tensors) == [SAMPLES * 8]


def test_max_pool_keeps_where_the_maximum_was() -> None:
    _, keep = of(lambda x: F.max_pool2d(x, 2), 3, 8, 8)
    node = only(keep, "max_pool2d")
    assert kept_keys(node) == {"mul"} and sum(node.trial.own_tensors) == SAMPLES * 3 * 16 * 8


def test_embedding_keeps_the_indices_and_not_its_weight() -> None:
    graph = capture(nn.Embedding(10, 4), lambda m, batch: m(batch).mean(), torch.zeros(4, 5, dtype=torch.long))
    keep = trace_saved_tensors(graph, BackendSetting(SAMPLES))
    assert kept_keys(only(keep, "embedding")) == {"input:0"}
    assert saved_bytes(keep) == SAMPLES * 5 * 8


def attention(x: Tensor, mask: Tensor | None = None, causal: bool = True) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, mask, is_causal=causal)


HEADS, LENGTH, WIDE = 2, 16, 8
ROWS = SAMPLES * HEADS * LENGTH


@pytest.mark.parametrize(
    ("setting", "own", "output"),
    [
        # out and the logarithm of every row's sum of exponentials
        ({"device": "cpu"}, ROWS * 4, True),
        ({"device": "cuda", "dtype": torch.bfloat16}, ROWS * 4, True),  # flash
        ({"device": "cuda"}, SAMPLES * HEADS * 32 * 4, True),  # memory-efficient: rows in blocks of 32
        # the probabilities, and the mask with which they were made
        ({"fused_attention": False}, ROWS * LENGTH * 4 + LENGTH * LENGTH, False),
    ],
)
def test_attention_keeps_what_the_kernel_of_the_device_keeps(setting: Any, own: int, output: bool) -> None:
    _, keep = keeping(Of(attention, HEADS, LENGTH, WIDE), (HEADS, LENGTH, WIDE), **setting)
    node = only(keep, "scaled_dot_product_attention")
    assert node.trial.is_known
    assert ("scaled_dot_product_attention" in kept_keys(node)) is output
    small = 32  # a generator's seed and offset
    assert own <= node.own_bytes <= own + small


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_attention_with_dropout_in_tiles_keeps_its_inputs_alone(monkeypatch: pytest.MonkeyPatch, device: str) -> None:
    """What it needs meanwhile is the device's: a tile, of as many rows as suit it."""
    monkeypatch.setattr(tiled_attention, "LEAST_SCORES", 0)
    length = 1024

    def dropped(x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x * 2, x * 3, dropout_p=0.3)

    _, keep = keeping(Of(dropped, HEADS, length, WIDE), (HEADS, length, WIDE), device=device)
    node = only(keep, "scaled_dot_product_attention")
    assert node.trial.is_known
    assert not node.own_bytes and kept_keys(node) == {"mul", "mul#2", "mul#3"}  # x, x * 2, x * 3
    size = {"cpu": tiled_attention._TILE, "cuda": tiled_attention.TILE_ELSEWHERE}[device]
    tile = min(size, SAMPLES * HEADS * length * length)
    gradients = 5 * SAMPLES * HEADS * length * WIDE * 4
    assert 4 * tile < node.trial.forward_peak < node.trial.backward < 20 * tile + gradients


def test_the_mathematics_of_attention_keeps_no_more_than_with_a_mask_of_its_own() -> None:
    """Scores are what grows with the square of the length; a fused kernel does without."""
    sizes = {}
    for length in (16, 32):
        for fused in (True, False):
            model = Of(attention, HEADS, length, WIDE)
            graph = capture(model, lambda m, b: m(b).mean(), torch.randn(4, HEADS, length, WIDE))
            setting = BackendSetting(SAMPLES, fused_attention=fused)
            sizes[length, fused] = saved_bytes(trace_saved_tensors(graph, setting))
    assert sizes[32, True] == 2 * sizes[16, True]
    assert sizes[32, False] > 2 * sizes[16, False]


def test_autocast_keeps_copies_in_16_bits_and_of_every_weight_too() -> None:
    _, keep = keeping(nn.Linear(8, 4), (8,), autocast=torch.bfloat16)
    node = only(keep, "linear")
    assert list(node.trial.own_tensors) == [SAMPLES * 8 * 2]  # the batch needs no gradient: no weight
    _, keep = keeping(Of(lambda x, a: a(x), 8, a=nn.Linear(8, 4)), (8,), autocast=torch.bfloat16)
    assert sorted(only(keep, "linear").trial.own_tensors) == sorted([SAMPLES * 8 * 2, 8 * 4 * 2])


def test_a_function_of_the_users_own_is_run_too() -> None:
    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.other = x.exp()  # kept without anybody being told
            return x * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] * 2 + 0 * ctx.other

    _, keep = of(lambda x: Doubled.apply(x), 8)
    (node,) = [node for name, node in keep.nodes.items() if name.endswith("function")]
    assert node.trial.is_known and not node.keys and list(node.trial.own_tensors) == [SAMPLES * 8 * 4]


def test_gradients_of_views_and_sums_lie_in_the_memory_of_what_they_come_from() -> None:
    _, keep = of(lambda x: x.unflatten(-1, (2, 4)).flatten(1) + x, 8)
    # Nothing is added in place to a view, nor to a slice.
    view = GradientOrigin(0, is_addable=False)
    assert only(keep, "unflatten").trial.gradient_origins == (view,)
    assert only(keep, "add").trial.gradient_origins == (GradientOrigin(0), GradientOrigin(0))
    # The batch has none, the scale one of its own, a view of a sum.
    own = GradientOrigin(None, 8 * 4, is_addable=False)
    assert only(keep, "mul").trial.gradient_origins == (None, own)


def test_a_loss_needs_a_second_set_of_scores_on_its_way_back() -> None:
    graph = capture(nn.Linear(8, 50), models.classify, (torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    node = only(trace_saved_tensors(graph, BackendSetting(SAMPLES)), "cross_entropy_loss")
    scores = SAMPLES * 50 * 4
    assert sum(node.trial.own_tensors) == scores + 4  # log-softmax, and the sum of the weights
    assert node.trial.gradient_origins[0] == GradientOrigin(None, scores) and node.trial.backward >= scores


# ---- whole models ----------------------------------------------------------------------------------------------------


def packed(graph: Graph, whole: ModelWithLoss, leaves: Any, samples: int, autocast: torch.dtype | None) -> int:
    """Bytes of all memory that autograd packs in a forward pass of the captured graph, parameters apart."""
    table, part = tensors_by_role(whole, graph.code.constants, leaves), SampleSlice(samples, batch=samples)
    held = {storage_id(t) for kind in ("parameter", "buffer", "constant") for t in table[kind].values()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if storage_id(tensor) not in held:
            kept[storage_id(tensor)] = tensor.untyped_storage().nbytes()
        return tensor

    values: dict[fx.Node, Any] = {}
    cast = nullcontext() if autocast is None else torch.autocast("cpu", dtype=autocast)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), cast:
        for node in graph.code.fx.nodes:
            if node.op == "placeholder":
                values[node] = placeholder_value(node, table, part)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)  # type: ignore[operator]
    return sum(kept.values())


def statistics_in_16_bits(graph: Graph, samples: int) -> int:
    """Bytes by which torch's shapes-only normalizations fall short: two numbers of each group, in 16 bits, not 32."""
    groups = 0
    for node in graph.code.fx.nodes:
        op = str(node.meta.get("op", ""))
        if op.startswith(("aten.batch_norm", "aten.group_norm")):
            groups += node.meta["val"].shape[1] if "batch" in op else samples * node.args[1]
    return 2 * 2 * groups


@pytest.mark.parametrize(
    ("name", "precision"),
    subsets.one_in(3, subsets.pairs([*models.CASES, *models.TINY], ["float32", "bfloat16"]), first=1, several=True),
)
def test_models_keep_to_the_byte_what_torch_packs(name: str, precision: str) -> None:
    samples, autocast = (3, None) if precision == "float32" else (4, torch.bfloat16)
    graph, model, case = captured(name)
    leaves, rebuild = flatten(case.batch(samples, 3))
    whole = ModelWithLoss(copy.deepcopy(model), case.loss, rebuild)
    keep = trace_saved_tensors(graph, BackendSetting(samples, autocast=autocast))
    try:
        expected = packed(graph, whole, leaves, samples, autocast)
    except RuntimeError:
        assert autocast is not None, "it runs without autocast"
        assert not all(node.trial.is_known for node in keep.nodes.values())
        pytest.skip("this model does not run under autocast")
    assert all(node.trial.is_known for node in keep.nodes.values())
    short = 0
    if autocast is not None and name not in ("encoder", "t5"):
        short = statistics_in_16_bits(graph, samples)
        short += 2 * 2 * samples if name == "custom_function" else 0
    assert saved_bytes(keep) == expected - short


def test_a_run_leaves_the_user_s_model_and_generator_alone() -> None:
    graph, model, _ = captured("moe")
    before, state = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    trace_saved_tensors(graph, BackendSetting(3))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_kinds_run_once_so_that_depth_costs_little() -> None:
    class Deep(nn.Sequential):
        def __init__(self, depth: int) -> None:
            super().__init__(*[each for _ in range(depth) for each in (nn.Linear(8, 8), nn.GELU())])

    made = []
    for depth in (3, 30):
        graph = capture(Deep(depth), lambda m, b: m(b).mean(), torch.randn(4, 8))
        with AllocationMeter() as ledger:
            keep = trace_saved_tensors(graph, BackendSetting(SAMPLES))
        made.append((saved_bytes(keep), ledger.current_bytes))
    assert made[1][0] == made[0][0] + 27 * 2 * SAMPLES * 8 * 4
    assert made[0][1] == made[1][1] == 0  # and nothing is left of it


def test_meta_models_need_no_memory() -> None:
    with torch.device("meta"):
        model, batch = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.ReLU()), torch.empty(2, 1 << 20)
    graph = capture(model, lambda m, b: m(b).mean(), batch)
    keep = trace_saved_tensors(graph, BackendSetting(1 << 10))
    assert saved_bytes(keep) == 2 * math.prod((1 << 10, 1 << 20)) * 4
    assert not any(
        key[0].startswith(HELD) and key in keep.storage_bytes and keep.storage_bytes[key] == 0 for key in keep.forms
    )
