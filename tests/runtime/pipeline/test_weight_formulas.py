"""Each operator that is linear in a weight: its weight gradient, computed later, is autograd's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.graph.capture.capture import capture
from polylane.graph.nodes.sample_slice import SampleSlice
from tests.support import subsets
from tests.support.reference.split_backward import pipeline, take_gradients

SAMPLES = 4


def rows(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


class Calling(nn.Module):
    """A function of an input and of weights, whose results' squares are summed; its input comes from a trained map."""

    def __init__(self, function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], comes_in: bool) -> None:
        super().__init__()
        self.function, self.comes_in = function, comes_in
        self.scale = nn.Parameter(rows(1) + 2)
        self.weights = nn.ParameterList(rows(*shape) for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        if x.is_floating_point() and not self.comes_in:
            x = x * self.scale
        return self.function(x, *self.weights).flatten(1)


def total(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) ** 2).sum()


def indices(*shape: int) -> Tensor:
    return torch.randint(0, 6, shape, generator=torch.Generator().manual_seed(1))


# By name: the function, the input, the shapes of the weights, and how many calls are deferred.
OPERATORS: dict[str, tuple[Callable[..., Tensor], Tensor, tuple[tuple[int, ...], ...], int]] = {
    "linear": (F.linear, rows(4, 5), ((3, 5), (3,)), 1),
    "linear 4-d": (F.linear, rows(4, 2, 3, 5), ((3, 5), (3,)), 1),
    "linear without bias": (F.linear, rows(4, 2, 5), ((3, 5),), 1),
    "matmul right": (torch.matmul, rows(4, 2, 5), ((5, 3),), 1),
    "matmul left": (lambda x, w: w @ x, rows(4, 5, 2), ((3, 5),), 1),
    "matmul vector": (lambda x, w: (x @ w)[:, None], rows(4, 5), ((5,),), 1),
    "matmul vector left": (lambda x, w: w @ x, rows(4, 5, 2), ((5,),), 1),
    "matmul broadcast": (lambda x, w: x[:, None] @ w, rows(4, 2, 5), ((3, 5, 2),), 1),
    "matmul broadcast left": (lambda x, w: w @ x[:, None], rows(4, 5, 2), ((3, 2, 5),), 1),
    "mm": (torch.mm, rows(4, 5), ((5, 3),), 1),
    "addmm": (lambda x, w, b: torch.addmm(b, x, w, beta=0.5, alpha=2.0), rows(4, 5), ((5, 3), (3,)), 1),
    "bmm": (lambda x, w: torch.bmm(x.transpose(0, 1), w).transpose(0, 1), rows(4, 2, 5), ((2, 5, 3),), 1),
    "baddbmm": (
        lambda x, w, b: torch.baddbmm(b, x.transpose(0, 1), w, beta=0.5, alpha=2.0).transpose(0, 1),
        rows(4, 2, 5), ((2, 5, 3), (1, 3)), 1,
    ),
    "einsum": (lambda x, w: torch.einsum("bti,hio->bhto", x, w), rows(4, 2, 5), ((3, 5, 2),), 1),
    "einsum, weight first": (lambda x, w: torch.einsum("hio, bti -> bho", w, x), rows(4, 2, 5), ((3, 5, 2),), 1),
    "einsum that sums the weight": (lambda x, w: torch.einsum("bti,io->bt", x, w), rows(4, 2, 5), ((5, 3),), 0),
    "einsum of a diagonal": (lambda x, w: torch.einsum("bti,ii->bt", x, w), rows(4, 2, 5), ((5, 5),), 0),
    "conv1d": (lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), rows(4, 2, 7), ((3, 2, 3), (3,)), 1),
    "conv2d": (
        lambda x, w, b: F.conv2d(x, w, b, padding=(1, 0), dilation=2, groups=2), rows(4, 4, 7, 6),
        ((6, 2, 3, 2), (6,)), 1,
    ),
    "conv2d same": (lambda x, w: F.conv2d(x, w, padding="same", dilation=(1, 3)), rows(4, 2, 7, 6), ((3, 2, 2, 4),), 1),
    "conv2d valid": (lambda x, w: F.conv2d(x, w, padding="valid"), rows(4, 2, 7, 6), ((3, 2, 2, 3),), 1),
    "conv3d": (lambda x, w: F.conv3d(x, w, stride=(1, 2, 1)), rows(4, 2, 4, 5, 3), ((3, 2, 2, 2, 2),), 1),
    "conv_transpose1d": (lambda x, w: F.conv_transpose1d(x, w, stride=2), rows(4, 2, 5), ((2, 3, 3),), 1),
    "conv_transpose2d": (
        lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, groups=2),
        rows(4, 4, 3, 3), ((4, 3, 3, 3), (6,)), 1,
    ),
    "conv_transpose3d": (lambda x, w: F.conv_transpose3d(x, w, dilation=2), rows(4, 2, 3, 3, 3), ((2, 2, 2, 2, 2),), 1),
    "embedding": (lambda x, w: F.embedding(x, w, padding_idx=2, scale_grad_by_freq=True), indices(4, 3), ((6, 3),), 1),
    "tied": (lambda x, w: F.linear(F.embedding(x, w), w), indices(4, 3), ((6, 3),), 2),
    "transposed twice": (lambda x, w: F.linear(x @ w, w), rows(4, 5), ((5, 5),), 2),
    "with another reader": (lambda x, w: F.linear(x, w) * w.sum(), rows(4, 5), ((3, 5),), 1),
    "of a chain": (
        lambda x, v, g: F.linear(F.linear(x, v * (g / v.norm(dim=1, keepdim=True))), v.t()), rows(4, 5),
        ((3, 5), (3, 1)), 2,
    ),
    "of a chain that others read": (
        lambda x, v, g: F.linear(x, torch.cat([v * g, v])) * g + (v * g).sum(), rows(4, 5), ((3, 5), (1,)), 1,
    ),
    "bias of another dtype": (lambda x, w, b: F.linear(x, w, b.double()), rows(4, 5), ((3, 5), (3,)), 1),
    "written in place": (lambda x, w: F.conv1d(x, w).mul_(2).relu_(), rows(4, 2, 5), ((3, 2, 2),), 1),
    "product of weights": (lambda x, a, b: F.linear(x, a @ b), rows(4, 5), ((3, 2), (2, 5)), 1),
    "scale alone": (lambda x, w: x * w, rows(4, 5), ((5,),), 0),
}  # fmt: skip


@pytest.mark.parametrize("comes_in", subsets.one_in(2, [False, True]))
@pytest.mark.parametrize("name", OPERATORS)
def test_a_weight_gradient_later_is_autograds(name: str, comes_in: bool) -> None:
    """Also on a first stage, whose inputs need no gradient; an operator is never run twice in the second half."""
    function, x, shapes, count = OPERATORS[name]
    model = Calling(function, shapes, comes_in)
    graph = capture(model, total, (x,))
    pipe = pipeline(model, graph, 1, True)
    code = pipe.runners[0].code
    assert sum(hasattr(n.target, "formula") for n in code.graph.nodes) == count
    fired: list[str] = []
    for parameter_name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda _, n=parameter_name: fired.append(n))
    for _ in range(2):  # the second time gradients are added
        pipe.forward(0, [x], SampleSlice(SAMPLES, 0, SAMPLES))
        pipe.backward(0, "backward_input")
        pipe.backward_weight(0)
    assert sorted(fired) == sorted(2 * [n for n, p in model.named_parameters() if p.grad is not None])
    found = take_gradients(model)
    (2 * total(model, (x,))).backward()
    for parameter_name, p in model.named_parameters():
        if p.grad is None:
            assert found[parameter_name] is None
        else:
            torch.testing.assert_close(found[parameter_name], p.grad, rtol=1e-12, atol=1e-13)
            assert found[parameter_name].stride() == p.grad.stride()
