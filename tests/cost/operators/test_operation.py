"""What operators ask of a device, from their shapes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from polylane.cost.operators.operation import Operation, PassDemand, Product, operation
from polylane.placement.strategy import OperatorCall, TensorValue

Shape = tuple[int, ...]


def call(op: str, inputs: dict[str, Any], outputs: list[Shape], /, gradient: bool = True, **more: Any) -> OperatorCall:
    """A call whose tensor arguments are given by name as shapes (with a dtype, where it is not float32)."""
    values: dict[str, TensorValue] = {}
    for index, (name, given) in enumerate(inputs.items()):
        shape, dtype = given if isinstance(given[-1:], tuple) and isinstance(given[-1], torch.dtype) else (given, None)
        kind = dtype or torch.float32
        values[name] = TensorValue(tuple(shape), kind, gradient and kind.is_floating_point, index)
    given_back = tuple(TensorValue(shape, torch.float32, gradient, i, "out") for i, shape in enumerate(outputs))
    return OperatorCall(f"aten.{op}.default", {**values, **more}, tuple(values.values()), given_back, 1)


def priced(made: OperatorCall, item: int | None = None) -> Operation:
    return operation(made, [v.shape for v in made.inputs], [v.shape for v in made.outputs], item)


def flops(each: PassDemand) -> float:
    return each.flops + sum(product.flops for product in each.products)


def test_linear_is_one_product_and_two_back() -> None:
    found = priced(call("linear", {"input": (4, 8, 32), "weight": (64, 32), "bias": (64,)}, [(4, 8, 64)]))
    assert found.kind == "matmul"
    assert found.forward.products == (Product(32, 64, 32, row_elements=32),)
    assert found.backward.products == (Product(32, 32, 64, row_elements=32), Product(64, 32, 32, row_elements=32))
    # The weight's gradient is added up (read twice, written); the bias's reads the gradient of the output.
    assert found.backward.bytes == 4 * (3 * 64 * 32 + 32 * 64)


def test_what_needs_no_gradient_costs_none() -> None:
    found = priced(call("linear", {"input": (8, 32), "weight": (64, 32)}, [(8, 64)], gradient=False))
    assert found.backward == PassDemand()
    made = call("linear", {"input": ((8, 32), torch.int64), "weight": (64, 32)}, [(8, 64)])
    assert [p.m for p in priced(made).backward.products] == [64]  # the weight's only


def test_products_in_batches() -> None:
    found = priced(call("bmm", {"self": (6, 10, 16), "mat2": (6, 16, 12)}, [(6, 10, 12)]))
    assert found.forward.products == (Product(10, 12, 16, batch=6, row_elements=12),)
    assert flops(found.backward) == 2 * flops(found.forward)
    many = priced(call("matmul", {"self": (2, 3, 10, 16), "other": (2, 3, 16, 12)}, [(2, 3, 10, 12)]))
    assert many.forward.products == found.forward.products
    shared = priced(call("matmul", {"self": (2, 3, 10, 16), "other": (16, 12)}, [(2, 3, 10, 12)]))
    assert shared.forward.products == (Product(60, 12, 16, row_elements=12),)
    assert flops(shared.forward) == flops(found.forward)


def test_a_product_with_a_vector() -> None:
    for op, name in (("mv", "vec"), ("matmul", "other")):
        found = priced(call(op, {"self": (10, 16), name: (16,)}, [(10,)]))
        assert flops(found.forward) == 2 * 10 * 16
    dot = priced(call("matmul", {"self": (16,), "other": (16,)}, [()]))
    assert flops(dot.forward) == 2 * 16


def test_added_products() -> None:
    found = priced(call("addmm", {"self": (12,), "mat1": (10, 16), "mat2": (16, 12)}, [(10, 12)]))
    assert found.forward.products == (Product(10, 12, 16, row_elements=12),)
    found = priced(call("baddbmm", {"self": (1, 10, 12), "batch1": (5, 10, 16), "batch2": (5, 16, 12)}, [(5, 10, 12)]))
    assert flops(found.forward) == 2 * 5 * 10 * 16 * 12


@pytest.mark.parametrize("equation", ["bik,bkj->bij", "ik,kj->ij", "bhqd,bhkd->bhqk", "bqhd,bkhd->bhqk"])
def test_einsum_counts_every_combination_of_letters(equation: str) -> None:
    sizes = {"b": 3, "i": 4, "j": 5, "k": 6, "h": 2, "q": 7, "d": 8}
    left, right, out = equation.replace("->", ",").split(",")
    shape = {text: tuple(sizes[x] for x in text) for text in (left, right, out)}
    values = tuple(TensorValue(shape[x], torch.float32, True, i) for i, x in enumerate((left, right)))
    result = (TensorValue(shape[out], torch.float32, True, 0, "out"),)
    made = OperatorCall("aten.einsum.default", {"equation": equation, "tensors": list(values)}, values, result, 1)
    assert flops(priced(made).forward) == 2 * math.prod(sizes[x] for x in set(left + right))
    assert flops(priced(made).backward) == 2 * flops(priced(made).forward)


def test_contractions() -> None:
    found = priced(call("tensordot", {"self": (3, 4, 5), "other": (4, 5, 6)}, [(3, 6)]))
    assert flops(found.forward) == pytest.approx(2 * 3 * 20 * 6)
    made = call("bilinear", {"input1": (7, 3), "input2": (7, 4), "weight": (5, 3, 4)}, [(7, 5)])
    assert flops(priced(made).forward) == 2 * 7 * 12 * 5


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_convolution(groups: int, stride: int) -> None:
    shape = (2, 8, 12, 12)
    layer = nn.Conv2d(8, 16, 3, stride=stride, padding=1, groups=groups)
    out = tuple(layer(torch.zeros(shape)).shape)
    weight = tuple(layer.weight.shape)
    found = priced(
        call("conv2d", {"input": shape, "weight": weight, "bias": (16,)}, [out], groups=groups, stride=[stride, stride])
    )
    whole = 2 * math.prod(out) * math.prod(weight[1:])
    assert found.kind == "convolution"
    assert flops(found.forward) == whole
    assert [p.flops for p in found.backward.products] == pytest.approx([whole, whole])


def test_transposed_convolution_does_what_the_convolution_undoes() -> None:
    layer = nn.ConvTranspose2d(8, 16, 4, stride=2, padding=1)
    out = tuple(layer(torch.zeros(2, 8, 6, 6)).shape)
    weight = tuple(layer.weight.shape)
    found = priced(call("conv_transpose2d", {"input": (2, 8, 6, 6), "weight": weight}, [out], groups=1))
    whole = 2 * 2 * 8 * 6 * 6 * math.prod(weight[1:])
    assert [p.flops for p in (*found.forward.products, *found.backward.products)] == pytest.approx([whole] * 3)


@pytest.mark.parametrize("causal", [False, True])
def test_attention(causal: bool) -> None:
    shape = (2, 4, 128, 16)
    made = call(
        "scaled_dot_product_attention", dict.fromkeys(("query", "key", "value"), shape), [shape], is_causal=causal
    )
    found = priced(made)
    assert (found.kind, found.key_length) == ("attention", 128)
    assert found.forward.flops == 4 * math.prod(shape) * 128 * (0.5 if causal else 1)
    assert found.backward.flops == 2.5 * found.forward.flops
    assert found.forward.bytes == 4 * 4 * math.prod(shape)


@pytest.mark.parametrize("op", ["lstm", "gru"])
def test_recurrent_layers_walk_through_the_steps(op: str) -> None:
    layer = (nn.LSTM if op == "lstm" else nn.GRU)(8, 16, num_layers=2, bidirectional=True, batch_first=True)
    params = list(layer.parameters())
    shapes = [(3, 10, 8), (4, 3, 16), *(tuple(p.shape) for p in params)]
    values = tuple(TensorValue(s, torch.float32, i != 1, i) for i, s in enumerate(shapes))
    result = (TensorValue((3, 10, 32), torch.float32, True, 0, "out"),)
    made = OperatorCall(f"aten.{op}.input", {"input": values[0], "batch_first": True}, values, result, 1)
    found = priced(made)
    matrices = [p for p in params if p.dim() == 2]
    assert flops(found.forward) == sum(2 * 30 * p.numel() for p in matrices)
    assert flops(found.backward) == 2 * flops(found.forward)
    assert [p.repeats for p in found.forward.products] == [1, 10] * 4  # two layers, two directions
    assert {p.m for p in found.forward.products} == {30, 3}


def test_bytes_of_what_computes_little() -> None:
    size = 4 * 2 * 3 * 8
    assert priced(call("gelu", {"self": (2, 3, 8)}, [(2, 3, 8)])).forward.bytes == 2 * size
    unknown = priced(call("some_operator", {"self": (2, 3, 8), "other": (8,)}, [(2, 3, 8)]))
    assert unknown.kind == "memory"
    assert unknown.forward.bytes == 2 * size + 4 * 8
    assert unknown.backward.bytes > unknown.forward.bytes


def test_a_fork_adds_its_gradients_up() -> None:
    size = 4 * 6 * 8
    assert priced(call("add", {"self": (6, 8), "other": (6, 8)}, [(6, 8)])).backward.bytes == 3 * size
    assert priced(call("add", {"self": (6, 8)}, [(6, 8)], other=1.0)).backward.bytes == 0
    assert priced(call("add", {"self": (6, 8), "other": (8,)}, [(6, 8)])).backward.bytes == size


def test_dropout_costs_nothing_where_nothing_is_dropped() -> None:
    def dropout(p: float, train: bool) -> Operation:
        return priced(call("dropout", {"input": (6, 8)}, [(6, 8)], p=p, train=train))

    assert dropout(0.1, True).forward.bytes == 6 * 8 * (4 + 4 + 1)
    assert dropout(0.1, False).forward == dropout(0.0, True).forward == PassDemand()


@pytest.mark.parametrize("op", ["view", "transpose", "permute", "unsqueeze", "flatten", "detach", "reshape"])
def test_views_are_free(op: str) -> None:
    found = priced(call(op, {"self": (6, 8)}, [(8, 6)]))
    assert (found.kind, found.forward, found.backward) == ("view", PassDemand(), PassDemand())


def test_views_whose_gradients_are_not() -> None:
    parts = priced(call("chunk", {"self": (6, 8)}, [(3, 8), (3, 8)]))
    assert (parts.forward, parts.backward.bytes) == (PassDemand(), 2 * 4 * 48)
    piece = priced(call("slice", {"self": (6, 8)}, [(3, 8)]))
    assert piece.backward.bytes == 4 * (48 + 2 * 24)
    expanded = priced(call("expand", {"self": (1, 8)}, [(6, 8)]))
    assert expanded.backward.bytes == 4 * (48 + 8)
    assert priced(call("expand", {"self": (6, 8)}, [(6, 8)])).backward == PassDemand()


def test_16_bits_move_half_as_much() -> None:
    made = call("layer_norm", {"input": (6, 8), "weight": (8,), "bias": (8,)}, [(6, 8)])
    assert priced(made, 2).forward.bytes == priced(made).forward.bytes / 2
    indices = call("index_select", {"self": (6, 8), "index": ((5,), torch.int64)}, [(5, 8)])
    assert priced(indices).forward.bytes == 4 * (48 + 40) + 8 * 5
    assert priced(indices, 2).forward.bytes == 2 * (48 + 40) + 8 * 5  # indices keep their size


def test_losses_of_16_bits_are_computed_in_32() -> None:
    made = call("cross_entropy_loss", {"self": (6, 100), "target": ((6,), torch.int64)}, [()])
    assert priced(made).forward.bytes == 600 * 8
    assert priced(made, 2).forward.bytes == 600 * (8 + 6)


def test_an_embedding_reads_the_rows_it_needs() -> None:
    made = call("embedding", {"weight": (1000, 8), "indices": ((5,), torch.int64)}, [(5, 8)])
    assert priced(made).forward.bytes == 2 * 4 * 40 + 8 * 5
    assert priced(made).backward.bytes >= 4 * 4 * 8000  # its gradient is dense


def test_local_shapes_count() -> None:
    made = call("linear", {"input": (4, 8, 32), "weight": (64, 32), "bias": (64,)}, [(4, 8, 64)])
    whole = priced(made)
    part = operation(made, [(4, 8, 32), (32, 32), (32,)], [(4, 8, 32)])
    assert flops(part.forward) == flops(whole.forward) / 2
    assert flops(whole.scaled(0.25).forward) == flops(whole.forward) / 4
    assert whole.scaled(0.25).backward.bytes == whole.backward.bytes / 4


def test_in_place_operators_are_known_by_their_plain_name() -> None:
    made = call("dropout_", {"input": (6, 8)}, [(6, 8)], p=0.1, train=True)
    found = operation(
        OperatorCall(made.op, made.arguments, made.inputs, made.outputs, 1, frozenset({0})), [(6, 8)], [(6, 8)]
    )
    assert found.forward.bytes == 6 * 8 * 9


@pytest.mark.parametrize("empty", [(0, 8), (6, 0)])
def test_empty_parts_cost_nothing_but_their_start(empty: Shape) -> None:
    made = call("linear", {"input": empty, "weight": (4, empty[1])}, [(empty[0], 4)])
    assert flops(priced(made).forward) == 0
    assert priced(call("gelu", {"self": empty}, [empty])).forward.bytes == 0
