"""Let what travels travel while the rank computes: a move begins as soon as it can, and ends where it is needed.

In a backward pass autograd runs what is ready in the reverse order of the forward pass, so the order in which the
forward pass makes things is the order in which gradients are waited for, read backwards:

    forward:   begin(x)  ...  hold(w)  finish(x)  linear(x, w)
    backward:  linear: gradient of x  |  finish: its sum begins to travel  |  hold: gradient of w  |  begin: wait

The gradient of a weight is computed while that of the input travels (Megatron-LM does so in its column-parallel linear
layer; Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4).
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from polylane.placement.placement import Placement, gradient_placement
from polylane.placement.redistribute import Axis, Redistribute, begin_redistribute, collective_name


class BeginRedistribute:
    """The first half of a move: ``begin(axis, x)`` gives a token, for :class:`FinishRedistribute`."""

    __module__ = "polylane"

    def __init__(self, source: Placement, target: Placement) -> None:
        self.source, self.target = source, target
        self.__name__ = f"begin_{collective_name(source, target) or 'place'}"

    def __call__(self, axis: Axis, x: Tensor) -> Tensor:
        flight = _PendingRedistribute(axis, self.source, self.target)
        token = _BeginFunction.apply(x, flight)  # type: ignore[no-untyped-call]
        token.flight = flight
        return token  # type: ignore[no-any-return]


class FinishRedistribute:
    """The second half: ``finish(token)`` is the value in its new placement."""

    __module__ = "polylane"
    __name__ = "finish"

    def __call__(self, token: Tensor) -> Tensor:
        return _FinishFunction.apply(token, token.flight)  # type: ignore[attr-defined, no-any-return, no-untyped-call]


class _PendingRedistribute:
    """What is on its way, there and back."""

    def __init__(self, axis: Axis, source: Placement, target: Placement) -> None:
        self.axis, self.source, self.target = axis, source, target
        self.there: Callable[[], Tensor] | None = None
        self.back: Callable[[], Tensor] | None = None


class _BeginFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _PendingRedistribute) -> Tensor:
        ctx.flight = flight
        flight.there = begin_redistribute(flight.axis, x.detach(), flight.source, flight.target)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        back, ctx.flight.back = ctx.flight.back, None
        return (grads[0] if back is None else back()), None


class _FinishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _PendingRedistribute) -> Tensor:
        ctx.flight, ctx.shape = flight, token.shape
        assert flight.there is not None
        there, flight.there = flight.there, None
        out = there()
        return out.view_as(out) if out.data_ptr() == token.data_ptr() else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flight = ctx.flight
        flight.back = begin_redistribute(
            flight.axis, grads[0], gradient_placement(flight.target), gradient_placement(flight.source)
        )
        return _placeholder_gradient(grads[0], ctx.shape), None


def _placeholder_gradient(like: Tensor, shape: torch.Size) -> Tensor:
    """A gradient that takes no memory, on its way to where the true one is."""
    return like.new_zeros(()).expand(shape)


class HeldLinear:
    """A linear layer whose weight's gradient may wait: the weight is what a :class:`HoldWeight` gave."""

    __module__ = "polylane"
    __name__ = "linear"

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if x.dim() < 2 or torch.is_autocast_enabled(x.device.type):  # which casts in a backward pass of its own
            return torch.nn.functional.linear(x, weight, bias)
        return _HeldLinearFunction.apply(x, weight, bias, weight.later)  # type: ignore[attr-defined, no-any-return, no-untyped-call]


class HoldWeight:
    """A weight whose gradient is computed when this node's turn comes in the backward pass."""

    __module__ = "polylane"
    __name__ = "hold"

    def __call__(self, weight: Tensor) -> Tensor:
        later: list[tuple[Tensor, Tensor]] = []
        held = _HoldWeightFunction.apply(weight, later)  # type: ignore[no-untyped-call]
        held.later = later
        return held  # type: ignore[no-any-return]


class _HoldWeightFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.later = later
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        if not ctx.later:
            return grads[0], None
        x, grad = ctx.later.pop()
        return grad.flatten(0, -2).t().mm(x.flatten(0, -2)), None


class _HeldLinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, later: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), grad = ctx.saved_tensors, grads[0]
        wanted = ctx.needs_input_grad
        if wanted[1]:
            ctx.later.append((x, grad))
        return (
            grad @ weight if wanted[0] else None,
            _placeholder_gradient(grad, weight.shape) if wanted[1] else None,
            grad.flatten(0, -2).sum(0) if wanted[2] else None,
            None,
        )


def overlap_redistributions(graph: fx.Graph) -> None:
    """Take the moves of a rank's graph apart, in place, wherever something else can be computed meanwhile.

    All ranks must ask for what travels in the same order, and what a rank computes in an operator's turn depends on its
    part: where that is empty, or cut through, there may be more steps or fewer. So nothing here looks at them: only at
    turns and moves, of which all ranks have the same.
    """
    turns = _OperatorOrder(graph)
    for node in [n for n in graph.nodes if isinstance(n.target, Redistribute)]:
        axis, value = node.args
        assert isinstance(value, fx.Node) and isinstance(axis, fx.Node)
        if _is_weight(value):
            continue
        after, computes = turns.source_node(value, node)
        layers = _linear_readers(node)
        if computes or layers:
            _split_redistribute(graph, node, axis, value, after, turns.needed_before(node), layers)


class _OperatorOrder:
    """Which operators of the whole graph come one after another, whatever a rank computes in the turn of each.

    A move is in the turn of the operator that first asks for it, before all that is computed there.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.first: dict[int, fx.Node] = {}
        self.last: dict[int, fx.Node] = {}
        self.writing: list[int] = []
        self.computing: list[int] = []
        for node in graph.nodes:
            if isinstance(node.target, Redistribute):
                continue
            turn = node.meta["turn"]
            self.last[turn] = node
            if self.first.setdefault(turn, node) is not node or node.op != "call_function":
                continue
            if node.meta["writes"]:
                self.writing.append(turn)
            if node.target is not operator.getitem:
                self.computing.append(turn)

    def source_node(self, value: fx.Node, move: fx.Node) -> tuple[fx.Node, bool]:
        """The node after which a value is what a move moves: its own, or the last one that wrote in place.

        And whether anything is computed from then on until it is needed.
        """
        since, until = value.meta["turn"], move.meta["turn"]
        if not isinstance(value.target, (Redistribute, FinishRedistribute)):
            since += 1
        written = self.writing[bisect_left(self.writing, since) : bisect_left(self.writing, until)]
        if written:
            value, since = self.last[written[-1]], written[-1] + 1
        return value, bisect_left(self.computing, since) < bisect_left(self.computing, until)

    def needed_before(self, move: fx.Node) -> fx.Node:
        """The node before which what moves has to be there: the next move of the same value, or the operator."""
        turn = move.meta["turn"]
        following = (user for user in move.users if isinstance(user.target, Redistribute) and user.meta["turn"] == turn)
        return next(following, self.first[turn])


def _is_weight(node: fx.Node) -> bool:
    """Parameters stay in parts until they are needed: all of them whole at once might not fit."""
    return node.op == "placeholder" and node.meta.get("role", ("",))[0] in ("parameter", "buffer")


def _linear_readers(move: fx.Node) -> list[fx.Node]:
    """The linear layers that read a moved value whose gradient has to be summed: their weights' gradients may wait.

    A linear layer runs as it is on every rank's part, also an empty one.
    """
    target: Any = move.target
    if not collective_name(gradient_placement(target.target), gradient_placement(target.source)):
        return []
    return [
        user
        for user in move.users
        if str(user.target) == "aten.linear.default"
        and user.args[0] is move
        and isinstance(user.args[1], fx.Node)
        and user.args[1].op == "placeholder"
        and user.args[1] is not move
    ]


def _split_redistribute(
    graph: fx.Graph,
    move: fx.Node,
    axis: fx.Node,
    value: fx.Node,
    after: fx.Node,
    needed: fx.Node,
    layers: list[fx.Node],
) -> None:
    target: Any = move.target
    while after.next.op == "placeholder" or isinstance(after.next.target, BeginRedistribute):
        after = after.next
    with graph.inserting_after(after):
        token = graph.call_function(BeginRedistribute(target.source, target.target), (axis, value))
    with graph.inserting_before(needed):
        held = {layer: graph.call_function(HoldWeight(), (layer.args[1],)) for layer in layers}
        finished = graph.call_function(FinishRedistribute(), (token,))
    for made in (token, finished, *held.values()):
        made.meta = dict(move.meta)
    move.replace_all_uses_with(finished)
    graph.erase_node(move)
    for layer, weight in held.items():
        bias = layer.args[2] if len(layer.args) > 2 else None
        layer.target, layer.args = HeldLinear(), (layer.args[0], weight, bias)
