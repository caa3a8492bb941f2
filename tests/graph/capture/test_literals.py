"""Numbers in the user's code: a graph in float64 has them as the same code in float64 has them, not rounded."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from polylane.graph.batch import flatten
from polylane.graph.capture.capture import capture
from polylane.graph.capture.export import ModelWithLoss
from polylane.graph.capture.self_check import run_code, tensors_by_role
from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.precision import Promoted, default_float64

# What exists before the code runs has the precision that it was given, also in float64.
SCALAR, VECTOR = torch.tensor(0.1), torch.tensor([0.1, 1 / 3])


def written(x: Tensor) -> Tensor:
    factors = torch.ones(2)
    factors[0] = 1 / 3
    return x * factors


WAYS: dict[str, Callable[[Tensor], Tensor]] = {
    "a tensor": lambda x: x * torch.tensor([0.1, 1 / 3]),
    "a tensor of the values' dtype": lambda x: x * torch.tensor([0.1, 1 / 3], dtype=x.dtype),
    "a scalar": lambda x: x * torch.tensor(1 / 3),
    "an array": lambda x: x * torch.as_tensor(np.array([0.1, 1 / 3]), dtype=x.dtype),
    "made by a tensor": lambda x: x * x.new_tensor([0.1, 1 / 3]),
    "filled": lambda x: x * torch.full((2,), 1 / 3),
    "a range": lambda x: x * torch.arange(0.1, 0.8, 0.6),
    "between two ends": lambda x: x * torch.linspace(0.1, 0.7, 2),
    "written": written,
    "a number": lambda x: x * (1 / 3),
    "a scalar from before": lambda x: x * SCALAR,
    "a vector from before": lambda x: x * VECTOR,
    "in float16": lambda x: x * torch.tensor([0.1, 1 / 3], dtype=torch.float16),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_in_float64_has_the_numbers_of_the_code_in_float64(way: str) -> None:
    model, batch = nn.Linear(3, 2).double(), torch.randn(4, 3, dtype=torch.float64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return WAYS[way](model(batch)).square().mean()

    graph = capture(model, loss, batch, in_float64=True)
    leaves, rebuild = flatten(batch)
    whole = ModelWithLoss(model, loss, rebuild)
    table = tensors_by_role(whole, graph.code.constants, leaves)
    code = torch.fx.GraphModule(nn.Module(), graph.code.fx)
    got = run_code(code, graph.code.fx, table, SampleSlice(4))[0]
    with Promoted():
        expected = loss(model, batch)
    torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


def test_the_default_dtype_is_put_back_in_whatever_order_threads_leave() -> None:
    before, first, second = torch.get_default_dtype(), default_float64(), default_float64()
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.get_default_dtype() is torch.float64
    second.__exit__(None, None, None)
    assert torch.get_default_dtype() is before
