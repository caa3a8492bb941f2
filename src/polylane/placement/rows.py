"""Values that hold their samples in order: where that cannot be seen, it is proven, operator by operator.

An operator's rule says what each of two ranks computes when the samples are cut between them. Where that is the very
call that a replica makes which has these samples alone, the replicas' parts of the value make up the whole of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from polylane.errors import PolylaneError
from polylane.graph.export import Loss
from polylane.graph.graph import Graph
from polylane.graph.inplace import alias_groups, writes
from polylane.graph.keying import PerPart
from polylane.graph.orders import Order, Seen, seen_orders
from polylane.graph.precision import innermost
from polylane.graph.sizes import grows, size_function
from polylane.graph.statistics import batch_norm
from polylane.graph.twins import functional_name
from polylane.placement.call import Call, Edit, Place, Strategy, Value
from polylane.placement.placement import REPLICATE, Cuts, Partial, Placement, Replicate, Shard, even, local_shape
from polylane.placement.rules.registry import strategies
from polylane.placement.view import Key, Step, View, bound, key_of, op_of, view, with_candidates

aten = torch.ops.aten

# Two replicas with two samples each.
OWN, REPLICAS = 2, 2
WHOLE = OWN * REPLICAS
ROW_EACH = even(WHOLE, REPLICAS)

# They give all that they take, in the same order, or each element several times: the shape of their value says it all.
_REFORMING = {"flatten", "ravel", "reshape", "reshape_as", "squeeze", "unflatten", "unsqueeze", "view", "view_as"}
_EXPANDING = {"broadcast_to", "expand", "expand_as"}
# They give elements of what they take, wherever they put them.
_MOVING = {*_REFORMING, *_EXPANDING, "alias", "clone", "contiguous", "detach", "permute", "slice", "to", "transpose"}
# One number all over, in any size.
_FILLED = {"full", "ones", "zeros"}


def known_orders(graph: Graph, model: nn.Module, loss: Loss, leaves: Sequence[Any]) -> Seen:
    """How the parts of a batch make up the values of a graph: seen where that can be, else proven where that can be.

    Args:
        graph: captured from ``model`` and ``loss``.
        model: with its values, or on the meta device.
        loss: the user's.
        leaves: an example batch, flat.
    """
    seen = seen_orders(graph, model, loss, leaves)
    if all(node.name in seen.orders for node in graph.nodes if node.dtype):
        return seen
    return replace(seen, orders={**proven_orders(graph, seen.orders), **seen.orders})


def proven_orders(graph: Graph, known: Mapping[str, Order] | None = None) -> dict[str, Order]:
    """The values of a graph that hold samples in their order, or are the same for any, by the rules of its operators.

    Args:
        graph: nothing of it is computed.
        known: of some of its values, by node name.
    """
    nodes = graph.code.fx.nodes
    inputs = [n.meta["val"] for n in nodes if n.op == "placeholder" and n.meta["role"][0] == "input"]
    if not any(isinstance(val, Tensor) and any(map(grows, val.shape)) for val in inputs):
        return {}  # it holds for one number of samples
    if any(map(_writes_unseen, nodes)):
        return {}
    try:
        whole, own = view(graph, WHOLE, REPLICAS), view(graph, OWN, REPLICAS)
    except PolylaneError:  # not for these
        return {}
    walk = _Walk(graph, known or {}, whole)
    for step, part in zip(whole.steps, own.steps, strict=True):
        walk.take(step, part.call)
    orders = {}
    for name in graph.positions:
        key = whole.aliases.get(name, (name, 0))
        if key in walk.states and key not in walk.numbers and walk.states[key] == walk.lies[key]:
            orders[name] = Order.ALIKE if walk.states[key] == REPLICATE else Order.ROWS
    return orders


def _writes_unseen(node: fx.Node) -> bool:
    """Whether an operator writes in place under a setting, or with a key, of its own: whose memory, nobody tells."""
    base = op_of(node).split(".")[1] if node.op == "call_function" and op_of(node).startswith("aten.") else ""
    return base.endswith("_") and not base.endswith("__") and not writes(node)


@dataclass
class _Walk:
    """From the inputs on: of every tensor of which it is known, how its samples lie on two replicas.

    Attributes:
        graph: of which the tensors are.
        known: of some of them, how the parts of a batch make them up.
        view: the graph at the samples of both replicas.
        states: cut between them (in the middle, if it is in order), or the same on both.
        lies: of all tensors, what that would be if it were in order; None where it cannot be.
        numbers: those that have in each row the row's own number, which in a part is another one than in the whole.
    """

    graph: Graph
    known: Mapping[str, Order]
    view: View
    states: dict[Key, Placement] = field(default_factory=dict)
    lies: dict[Key, Placement | None] = field(default_factory=dict)
    numbers: set[Key] = field(default_factory=set)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self._memory, self._lost = alias_groups(code), set[Key]()
        self._nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        for node in code.nodes:
            vals = node.meta.get("val")
            for number, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals]):
                if isinstance(val, Tensor):
                    self.lies[key_of(node)[0], key_of(node)[1] + number] = _in_order(val)
        self.states |= {key: p for key in self.view.sources if (p := self.lies[key]) is not None}
        keys = {name: self.view.aliases.get(name, (name, 0)) for name in self.known}
        lying = (Order.ROWS, Order.ALIKE)
        self._known = {key: self.lies.get(key) if self.known[name] in lying else None for name, key in keys.items()}

    def take(self, step: Step, own: Call) -> None:
        """One operator: find out about its values; ``own``: as a replica calls it."""
        found = self._proven(step, own) if any(key not in self._known for key in step.gives) else None
        for place, key in enumerate(step.gives):
            placement = self._known[key] if key in self._known else found[place] if found is not None else None
            if placement is not None:
                self.states[key] = placement
            else:
                self._lose(step)

    def _lose(self, step: Step) -> None:
        """Whatever shares memory to which something unknown is written is unknown from then on."""
        if written := {self._memory[each] for each in writes(self._nodes[step.name])}:
            self._lost |= {key_of(node) for node, memory in self._memory.items() if memory in written}
            self.states = {key: placement for key, placement in self.states.items() if key not in self._lost}

    def _proven(self, step: Step, own: Call) -> Sequence[Placement | None] | None:
        """How an operator's values lie, if that can be proven."""
        base, node, in_order = step.call.base, self._nodes[step.name], [self.lies.get(key) for key in step.gives]
        if any(lies is None for lies in in_order) or any(key in self._lost for key in step.gives):
            return None
        if any(key not in self.states for key in step.reads):
            return None
        if base in _REFORMING and step.call.inputs[0].count != step.call.outputs[0].count:
            return None  # it holds for another number of samples
        if not step.reads and base in _FILLED:
            return in_order if {**step.call.arguments, "size": ()} == {**own.arguments, "size": ()} else None
        if not step.reads and base == "arange" and step.call.arguments != own.arguments:
            self.numbers |= {*step.gives}
            first, stride = step.call.arguments.get("start", 0), step.call.arguments.get("step", 1)
            return in_order if (first, step.call["end"], stride) == (0, WHOLE, 1) else None
        numbered = [key in self.numbers for key in step.reads]
        if base == "index" and any(numbered):
            return in_order if self._from_own_rows(step, in_order[0]) else None
        if any(numbered):
            self.numbers |= {*step.gives}
            if base not in _MOVING or len(numbered) > 1:
                return None
        given, call = [self.states[key] for key in step.reads], with_candidates(step.call, _cuts(step, self.states))
        if writes(node):
            call = replace(call, op=functional_name(node) or call.op, written=frozenset())
        fitting = [s for s in strategies(call) if _plain(s.inputs) == given and _gives(s, call, own)]
        return next((_plain(s.outputs) for s in fitting if _as_replicas(node, call, own, s)), None)

    def _from_own_rows(self, step: Step, lies: Placement | None) -> bool:
        """Whether what stands at some positions stands, of every sample, in the row that has the sample's number."""
        x, indices = step.reads[0], step.call["indices"]
        if x in self.numbers or self.states[x] != Shard(0, ROW_EACH) or not all(isinstance(i, Value) for i in indices):
            return False
        if [step.reads[i.index] in self.numbers for i in indices] != [True, *[False] * (len(indices) - 1)]:
            return False
        placed = [(self.states[step.reads[i.index]], i.dim) for i in indices]
        wide = max(dims for _, dims in placed)  # they are broadcast to each other, and their dimensions come first
        rows = [Shard(p.dim + wide - dims, p.cuts) for p, dims in placed if isinstance(p, Shard)]
        return isinstance(placed[0][0], Shard) and placed[0][0].cuts == ROW_EACH and all(row == lies for row in rows)


def _in_order(val: Tensor) -> Placement | None:
    """How a tensor lies if it holds its samples in order, all with as many rows, or none of them; None: it cannot."""
    growing = [dim for dim, size in enumerate(val.shape) if grows(size)]
    if not growing:
        return REPLICATE
    try:
        of = size_function(val.shape[growing[0]])
    except ValueError:  # it depends on the data
        return None
    if len(growing) > 1 or any(of(samples) != samples * of(1) for samples in range(1, 2 * WHOLE)):
        return None
    return Shard(growing[0], even(of(WHOLE), REPLICAS))


def _plain(placements: Sequence[Placement]) -> list[Placement]:
    """Without a thought of gradients."""
    return [REPLICATE if isinstance(p, Replicate) else p for p in placements]


def _cuts(step: Step, states: Mapping[Key, Placement]) -> dict[Place, tuple[Cuts, ...]]:
    """How the dimensions of what an operator reads are cut."""
    placed = [(number, states[key]) for number, key in enumerate(step.reads)]
    return {("in", number, p.dim): (p.cuts,) for number, p in placed if isinstance(p, Shard)}


def _gives(strategy: Strategy, call: Call, own: Call) -> bool:
    """Whether each of two ranks has what a replica has, and no mere summand of it."""
    every = list(zip(strategy.outputs, call.outputs, own.outputs, strict=True))
    return not any(isinstance(p, Partial) for p in strategy.outputs) and all(
        local_shape(whole.shape, p, rank) == part.shape for p, whole, part in every for rank in range(REPLICAS)
    )


def _as_replicas(node: fx.Node, call: Call, own: Call, strategy: Strategy) -> bool:
    """Whether each of two ranks computes what a replica with its samples does."""
    target = innermost(node.target)
    if isinstance(target, PerPart) or not call.op.startswith("aten."):
        return False  # numbers that each part draws for itself; the user's own Python
    if target is batch_norm:
        return True  # replicas share their statistics
    cut = any(isinstance(p, Shard) for p in strategy.outputs)
    if call.prefix and (node.args[2] is not None) is not cut:
        return False  # the numbers drawn are not the samples' own
    return all(_calls_the_same(node, call, own, strategy, rank) for rank in range(REPLICAS))


def _calls_the_same(node: fx.Node, call: Call, own: Call, strategy: Strategy, rank: int) -> bool:
    graph, names = fx.Graph(), bound(node, node.args, node.kwargs)[2]
    tensors = [graph.placeholder(f"x{value.index}") for value in call.inputs]
    prefix = fx.map_arg(node.args[: call.prefix], lambda n: graph.placeholder(n.name))

    def edit(of: Call, outputs: Sequence[Placement]) -> Edit:
        given = [{"": placement} for placement in outputs]
        return Edit(of, graph, node.target, prefix, _on(tensors, of.arguments), names, given, {"": rank})

    changed = edit(call, strategy.outputs)
    if strategy.local is not None:
        changed.index, changed.strategy, changed.axis = rank, strategy, graph.placeholder("axis")
        strategy.local(changed)
    before = list(graph.nodes)
    made, plain = changed.emit(), edit(own, strategy.outputs).emit()
    if any(n.op != "placeholder" for n in before) or len(graph.nodes) > len(before) + 2:
        return False  # more than one operator
    if innermost(made.target) is innermost(plain.target) and (made.args, made.kwargs) == (plain.args, plain.kwargs):
        return True
    if made.target is aten.slice.Tensor and call.base == "slice":
        return made.args == (tensors[0], *_stretch(own))
    in_general = (made.target is aten.reshape.default and call.base in _REFORMING) or (
        made.target is aten.expand.default and call.base in _EXPANDING
    )
    return in_general and made.args == (tensors[0], list(own.outputs[0].shape))


def _on(tensors: Sequence[fx.Node], value: Any) -> Any:
    """A call's arguments, on tensors of a graph."""
    if isinstance(value, Value):
        return tensors[value.index]
    if isinstance(value, (list, tuple)):
        return [_on(tensors, each) for each in value]
    return {key: _on(tensors, each) for key, each in value.items()} if isinstance(value, dict) else value


def _stretch(call: Call) -> tuple[int, int, int, int]:
    """Along which dimension a slice goes, from where, to where, by which steps."""
    dim = call["dim"] % call["self"].dim
    return dim, *slice(call["start"], call["end"], call["step"]).indices(call["self"].shape[dim])
