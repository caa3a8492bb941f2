"""Moves that are taken apart give what they gave whole, and what a rank computes meanwhile comes in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from polylane.graph.capture.capture import capture
from polylane.graph.precision import InAutocast
from polylane.placement.operator_view import view_operators
from polylane.placement.overlap import (
    BeginRedistribute,
    finish,
    hold,
    linear,
    overlap_redistributions,
)
from polylane.placement.placement import PARTIAL, REPLICATE, REPLICATE_PARTIAL_GRAD, Shard, even_cuts
from polylane.placement.rewrite import AxisSplit, rewrite
from polylane.placement.strategy import Strategy
from tests.placement.split_checks import ThreadAxis, on_rank, on_threads

aten = torch.ops.aten


class Told(ThreadAxis):
    """Tells when a sum begins and when it is waited for."""

    def __init__(self, axis: ThreadAxis) -> None:
        super().__init__(axis.ring, axis.index)
        self.events: list[str] = []

    def begin_all_reduce(self, tensor: Tensor) -> Any:
        self.events.append("begins")
        result = self.all_reduce(tensor)

        def finish() -> Tensor:
            self.events.append("awaited")
            return result

        return finish


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.query, self.key, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)
        self.aside = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.tanh() * self.scale if hasattr(self, "scale") else self.aside.weight.sum() * x
        hidden = self.query(x) + self.key(x)
        out = self.down(hidden)
        return out + self.aside(x).sin()


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def split_graph(dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, fx.Graph, Any, AxisSplit]:
    """Queries and keys by columns, then rows; everything else on every rank."""
    model, batch = TwoLayers().to(dtype), torch.randn(5, 4, dtype=dtype)
    graph = capture(model, loss, batch)
    shown = view_operators(graph, 5, 2)
    columns, hidden = Shard(0, even_cuts(6, 2)), Shard(1, even_cuts(6, 2))
    steps: dict[str, Strategy] = {}
    sources: dict[Any, Any] = dict.fromkeys(shown.sources, REPLICATE)
    for step in shown.operators:
        call = step.call
        if step.module in ("query", "key"):
            steps[step.name] = Strategy("columns", (REPLICATE_PARTIAL_GRAD, columns, columns), (hidden,))
            sources |= {(f"parameter:{step.module}.{n}", 0): columns for n in ("weight", "bias")}
        elif step.module == "down":
            steps[step.name] = Strategy("rows", (hidden, Shard(1, even_cuts(6, 2)), PARTIAL), (PARTIAL,))
            sources["parameter:down.weight", 0] = Shard(1, even_cuts(6, 2))
        elif call.base == "add" and call.outputs[0].shape == (5, 6):
            steps[step.name] = Strategy("dim", (hidden, hidden), (hidden,))
        else:
            steps[step.name] = call.strategy("replicate", {}, REPLICATE, default=REPLICATE)
    return model, batch, graph.code.fx, {s.name: s.call for s in shown.operators}, AxisSplit(2, steps, sources)


def run(
    own: fx.Graph, axis: Any, model: nn.Module, batch: Tensor, split: AxisSplit
) -> tuple[Tensor, dict[str, Tensor]]:
    given = {}
    for name, parameter in model.named_parameters():
        placement = split.source_placements.get((f"parameter:{name}", 0))
        data = parameter.detach()
        if isinstance(placement, Shard):
            (start, stop), *_ = placement.ranges(axis.index)
            data = data.narrow(placement.dim, start, stop - start)
        given[name] = data.clone().requires_grad_()
    values: dict[fx.Node, Any] = {}
    for node in own.nodes:
        if node.op == "placeholder":
            kind, key = node.meta["role"]
            values[node] = {"axis": axis, "part": None, "input": batch}.get(kind, given.get(key))
        elif node.op == "output":
            (value,) = fx.map_arg(node.args[0], values.__getitem__)
            value.backward()
            return value.detach(), {n: p.grad for n, p in given.items() if p.grad is not None}
        else:
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    raise AssertionError


def test_taken_apart_gives_the_same() -> None:
    model, batch, code, calls, split = split_graph()

    def work(axis: ThreadAxis) -> list[Any]:
        plain = rewrite(code, calls, {"x": split}, 5, {"x": axis.index})
        apart = rewrite(code, calls, {"x": split}, 5, {"x": axis.index})
        overlap_redistributions(apart)
        return [run(graph, axis, model, batch, split) for graph in (plain, apart)]

    whole = loss(model, batch)
    whole.backward()
    for (expected, grads), (value, others) in on_threads(2, work):
        torch.testing.assert_close(value, expected, rtol=0, atol=0)
        torch.testing.assert_close(value, whole.detach(), rtol=1e-12, atol=0)
        assert grads.keys() == others.keys() and len(grads) == 8
        for name, grad in grads.items():
            torch.testing.assert_close(others[name], grad, rtol=1e-12, atol=1e-14, msg=name)


def test_work_comes_between_begin_and_finish() -> None:
    _, _, code, calls, split = split_graph()
    own = rewrite(code, calls, {"x": split}, 5, {"x": 0})
    overlap_redistributions(own)
    order = {node: i for i, node in enumerate(own.nodes)}
    begun = [n for n in own.nodes if isinstance(n.target, BeginRedistribute)]
    assert len(begun) == 2  # the input of queries and keys, once for both, and what the rows sum up to
    held = [n for n in own.nodes if n.target is hold]
    finished = [n for n in own.nodes if n.target is finish]
    assert len(held) == 2 and len(finished) == 2
    assert order[begun[0]] < min(order[h] for h in held) < max(order[h] for h in held) < order[finished[0]]
    aside = next(n for n in own.nodes if "aside" in str(n.meta.get("name")) and str(n.target) == "aten.linear.default")
    assert order[begun[1]] < order[aside] < order[finished[1]]
    assert sum(n.target is linear for n in own.nodes) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_weights_gradients_are_computed_while_the_inputs_travels(dtype: torch.dtype) -> None:
    """Also where autocast casts both."""
    model, batch, code, calls, split = split_graph(dtype)

    def work(axis: ThreadAxis) -> list[str]:
        told = Told(axis)
        own = rewrite(code, calls, {"x": split}, 5, {"x": axis.index})
        overlap_redistributions(own)
        for node in own.nodes:
            if node.target is hold:
                node.target = _telling(told.events)
        with torch.autocast("cpu", torch.bfloat16):
            run(own, told, model, batch, split)
        return told.events

    for events in on_threads(2, work):
        assert events == ["begins", "awaited", "begins", "weight", "weight", "awaited"]


def _telling(events: list[str]) -> Any:
    def held(weight: Tensor) -> Tensor:
        out = hold(weight)
        assert out.grad_fn is not None
        # What it gets takes no memory: the product is not there yet.
        out.grad_fn.register_prehook(lambda grads: events.append("late" if any(grads[0].stride()) else "weight"))
        return out

    return held


class WritesUnderAutocast(nn.Module):
    """Writes in place to a part of what a split layer reads later, under a setting of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        part = hidden[:, 0]
        with torch.autocast("cpu", enabled=False):
            part.mul_(2.0)
            aside = torch.sin(x)
        return self.down(hidden) + aside[:, :3] + part.unsqueeze(1)


def test_nothing_begins_before_the_last_write() -> None:
    model, batch = WritesUnderAutocast().double(), torch.randn(5, 4, dtype=torch.float64)
    graph = capture(model, loss, batch)
    assert any(isinstance(n.target, InAutocast) and n.meta["op"] == "aten.mul_.Tensor" for n in graph.code.fx.nodes)
    shown = view_operators(graph, 5, 2)
    hidden, steps, sources = Shard(1, even_cuts(6, 2)), dict[str, Strategy](), dict.fromkeys(shown.sources, REPLICATE)
    for step in shown.operators:
        steps[step.name] = step.call.strategy("replicate", {}, REPLICATE, default=REPLICATE)
        if step.module == "down":
            steps[step.name] = Strategy("rows", (hidden, hidden, PARTIAL), (PARTIAL,))
    calls, split = {s.name: s.call for s in shown.operators}, AxisSplit(2, steps, sources)

    def work(axis: ThreadAxis) -> Any:
        own = on_rank(graph.code.fx, calls, {"x": split}, 5, {"x": axis.index})
        return run(own, axis, model, batch, split)

    whole = loss(model, batch)
    whole.backward()
    for value, grads in on_threads(2, work):
        torch.testing.assert_close(value, whole.detach(), rtol=1e-12, atol=0)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(grads[name], parameter.grad, rtol=1e-12, atol=1e-14, msg=name)


def test_a_layer_that_waits_has_the_gradients_of_complex_numbers() -> None:
    """They are conjugate, as autograd has them: a product's gradient is with the conjugate of the other factor."""
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=torch.complex128) for shape in ((2, 3, 4), (5, 4), (5,))]

    def gradients(layer: Any) -> tuple[Tensor, ...]:
        x, weight, bias = (tensor.clone().requires_grad_() for tensor in given)
        value = layer(x, weight, bias)
        return torch.autograd.grad((value.abs().tanh() + value.real).sum(), (x, weight, bias))

    held = gradients(lambda x, weight, bias: linear(x, hold(weight), bias))
    torch.testing.assert_close(held, gradients(nn.functional.linear))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_layer_that_waits_casts_as_autocast_does(dtype: torch.dtype) -> None:
    """The bits are those of layers which autocast casts, one bias twice, and no gradient is the layer's own."""
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=dtype) for shape in ((2, 3, 8), (8, 8), (8,))]

    def gradients(layer: Any) -> tuple[Tensor, ...]:
        x, weight, bias = (tensor.clone().requires_grad_() for tensor in given)
        with torch.autocast("cpu", torch.bfloat16):
            value = layer(torch.tanh(layer(x * 2, weight, bias)).to(dtype), weight, bias)
        assert value.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
        return value, *torch.autograd.grad(value.to(dtype).square().sum(), (x, weight, bias))

    def waiting(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return linear(x, hold(weight), bias)

    def plain(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return nn.functional.linear(x, weight.view_as(weight), bias)

    for held, expected in zip(gradients(waiting), gradients(plain), strict=True):
        assert torch.equal(held, expected)
