"""Overlapping communication with computation: redistributions start as early as possible and are waited for late.

In a backward pass autograd runs ready nodes in the reverse order of the forward pass, so that the order in which the
forward pass creates nodes, read backwards, is the order in which gradients are waited for:

    forward:   begin(x)  ...  hold(w)  finish(x)  linear(x, w)
    backward:  linear: gradient of x  |  finish: its all-reduce starts  |  hold: gradient of w  |  begin: wait

The gradient of a weight is computed while that of the input is all-reduced (as in Megatron-LM's column-parallel linear
layer; Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, 2022, section 4).
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from polylane.placement.placement import Placement
from polylane.placement.redistribute import Axis, Redistribute, begin_redistribute, collective_name, gradient_ends


class BeginRedistribute:
    """The first half of a redistribution: ``begin(axis, x)`` returns a token for :func:`finish`."""

    __module__ = "polylane"

    def __init__(self, source: Placement, target: Placement) -> None:
        self.source, self.target = source, target
        self.__name__ = f"begin_{collective_name(source, target) or 'place'}"

    def __call__(self, axis: Axis, x: Tensor) -> Tensor:
        flight = _PendingRedistribute(axis, self.source, self.target)
        token = _BeginFunction.apply(x, flight)  # type: ignore[no-untyped-call]
        token.flight = flight
        return token  # type: ignore[no-any-return]


def finish(token: Tensor) -> Tensor:
    """Wait for a redistribution, as its second half, and return the value in its new placement."""
    return _FinishFunction.apply(token, token.flight)  # type: ignore[attr-defined, no-any-return, no-untyped-call]


class _PendingRedistribute:
    """A redistribution's collectives in flight, forward and backward, shared by its begin and finish nodes."""

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
        # finish's backward has started the gradient's collective; wait here, as late as possible.
        back, ctx.flight.back = ctx.flight.back, None
        return (grads[0] if back is None else back()), None


class _FinishFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: _PendingRedistribute) -> Tensor:
        ctx.flight, ctx.shape = flight, token.shape
        assert flight.there is not None
        complete, flight.there = flight.there, None
        out = complete()
        # A view, so that autograd sees a new tensor where the redistribution returned the token's own memory.
        return out.view_as(out) if out.data_ptr() == token.data_ptr() else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        flight = ctx.flight
        flight.back = begin_redistribute(flight.axis, grads[0], *gradient_ends(flight.source, flight.target))
        # begin must get a gradient of the token's shape for its backward to run; the true one comes by ``flight.back``.
        return _placeholder_gradient(grads[0], ctx.shape), None


def _placeholder_gradient(like: Tensor, shape: torch.Size) -> Tensor:
    """Return a gradient of zeros that takes no memory, in place of one that arrives by another way."""
    return like.new_zeros(()).expand(shape)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute a linear layer whose weight gradient is computed later: the weight comes from :func:`hold`.

    Under autocast the input is cast here, as it would be in the layer, so that the gradient is a product of what the
    layer computed with; the weight and the bias are cast in the layer, which has autocast's own cast of a parameter.
    """
    if x.dim() < 2 or not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return torch.nn.functional.linear(x, weight, bias)
    device = x.device.type
    if torch.is_autocast_enabled(device) and x.is_floating_point() and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(device))
    gradients: list[Tensor] = []
    x = _LinkFunction.apply(x, weight, weight.later, gradients)  # type: ignore[attr-defined, no-untyped-call]
    result = torch.nn.functional.linear(x, weight.detach(), bias)
    assert result.grad_fn is not None
    result.grad_fn.register_prehook(lambda grads: gradients.append(grads[0]))
    return result


def hold(weight: Tensor) -> Tensor:
    """Return a weight whose gradient is computed when this node's backward runs, not when the linear layer's does."""
    later: list[tuple[Tensor, Tensor]] = []
    held_weight = _HoldWeightFunction.apply(weight, later)  # type: ignore[no-untyped-call]
    held_weight.later = later
    return held_weight  # type: ignore[no-any-return]


class _HoldWeightFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, later: list[tuple[Tensor, Tensor]]) -> Tensor:
        ctx.later, ctx.dtype = later, weight.dtype
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # The layer ran without :func:`linear` (a vector, or an input without gradient): its gradient is the true one.
        if not ctx.later:
            return grads[0], None
        x, grad = ctx.later.pop()
        product = grad.flatten(0, -2).t().mm(x.flatten(0, -2).conj())  # of real numbers conj() is the tensor itself
        return product.to(ctx.dtype), None


class _LinkFunction(torch.autograd.Function):
    """The input of a layer that reads its weight detached: links the weight to it, whose gradient it leaves to hold."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, later: list[tuple[Tensor, Tensor]], gradients: list[Tensor]
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.later, ctx.gradients, ctx.placeholder = later, gradients, weight.new_zeros(()).expand(weight.shape)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        # Only input and output gradient are kept; :func:`hold`'s backward multiplies them.
        ctx.later.append((ctx.saved_tensors[0], ctx.gradients.pop()))
        return grads[0], ctx.placeholder, None, None


def overlap_redistributions(graph: fx.Graph) -> None:
    """Split the redistributions of a rank's graph, in place, wherever something can be computed in the meantime.

    All ranks must start collectives in the same order, but the nodes that a rank runs for an operator depend on its
        part: an empty or segmented part takes more nodes or fewer. Decisions here therefore use only operators'
        positions in the whole graph ("turn") and the redistributions, both of which are the same on all ranks.

    Args:
        graph: one rank's graph, as :func:`polylane.placement.rewrite.rewrite` returns it.
    """
    turns = _OperatorOrder(graph)
    for node in [n for n in graph.nodes if isinstance(n.target, Redistribute)]:
        value = node.args[1]
        assert isinstance(value, fx.Node)
        if value.op == "placeholder" and value.meta["role"][0] in ("parameter", "buffer"):
            continue  # gathering all weights early might not fit into memory
        source_node, computes = turns.source_node(value, node)
        layers = _linear_readers(node)
        if computes or layers:
            # Without computation in between, two nodes would only add overhead; a linear layer's weight gradient is
            # computation.
            _split_redistribute(graph, node, source_node, turns.needed_before(node), layers)


class _OperatorOrder:
    """The operators of the whole graph by position ("turn"), whatever nodes a rank runs for each of them.

    A redistribution has the turn of the operator that first needs it, and precedes all that is computed there.
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
        """Return the node after which a value can be redistributed, and whether anything is computed in between.

        That is the node itself, or the last one that writes in place before the redistribution.
        """
        since, until = value.meta["turn"], move.meta["turn"]
        # A value made by a redistribution is ready before its turn's operator runs, any other only after its own turn.
        if not (value.target is finish or isinstance(value.target, Redistribute)):
            since += 1
        written = self.writing[bisect_left(self.writing, since) : bisect_left(self.writing, until)]
        # In-place writes may change the value through an alias: start after the last of them.
        if written:
            value, since = self.last[written[-1]], written[-1] + 1
        return value, bisect_left(self.computing, since) < bisect_left(self.computing, until)

    def needed_before(self, move: fx.Node) -> fx.Node:
        """Return the node before which a redistribution must finish: the value's next one, or the operator."""
        turn = move.meta["turn"]
        following = (user for user in move.users if isinstance(user.target, Redistribute) and user.meta["turn"] == turn)
        return next(following, self.first[turn])


def _linear_readers(move: fx.Node) -> list[fx.Node]:
    """Return the linear layers that read a redistributed value whose gradient needs a collective.

    Their weight gradients can wait. A linear layer runs unchanged on every rank's part, also an empty one, so that all
    ranks find the same layers.
    """
    target: Any = move.target
    if not collective_name(*gradient_ends(target.source, target.target)):
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
    graph: fx.Graph, move: fx.Node, source_node: fx.Node, needed: fx.Node, layers: Sequence[fx.Node]
) -> None:
    """Start a redistribution behind one node and finish it before another; linear layers then hold their weights."""
    target: Any = move.target
    # Keep the order of several redistributions that start at the same node.
    while source_node.next.op == "placeholder" or isinstance(source_node.next.target, BeginRedistribute):
        source_node = source_node.next
    with graph.inserting_after(source_node):
        token = graph.call_function(BeginRedistribute(target.source, target.target), move.args)
    # hold before finish: in the backward pass the weight gradient then comes after the start of the all-reduce.
    with graph.inserting_before(needed):
        weights = {layer: graph.call_function(hold, (layer.args[1],)) for layer in layers}
        finished = graph.call_function(finish, (token,))
    for new_node in (token, finished, *weights.values()):
        new_node.meta = dict(move.meta)
    move.replace_all_uses_with(finished)
    graph.erase_node(move)
    for layer, weight in weights.items():
        bias = layer.args[2] if len(layer.args) > 2 else None
        layer.target, layer.args = linear, (layer.args[0], weight, bias)
