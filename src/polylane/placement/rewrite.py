"""Graph rewriting: from a captured graph and its placements to the graph that one rank runs, with collectives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.interpreter import map_nested
from polylane.graph.nodes.facts import bind_arguments, operator_name
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.whole_batch_counts import BatchSize
from polylane.graph.symbolic_sizes import SymbolicSize
from polylane.placement.kernels.joint_gradients import joint_gradients
from polylane.placement.operator_view import TensorKey, ViewSizes, is_alias, node_name, tensor_key
from polylane.placement.placement import REPLICATE, Placement, shard_same_dim
from polylane.placement.redistribute import Redistribute, collective_name, gradient_ends
from polylane.placement.strategy import OperatorCall, RankCall, Strategy

# A value's placement on every axis of the mesh, in the mesh's order.
State = tuple[Placement, ...]


@dataclass(frozen=True)
class AxisSplit:
    """The placements of a graph on one axis.

    Attributes:
        degree: number of ranks along the axis.
        strategies: the chosen strategy of every operator, by node name.
        source_placements: the chosen placement of every placeholder, by key.
    """

    degree: int
    strategies: Mapping[str, Strategy]
    source_placements: Mapping[TensorKey, Placement]

    def placement(self, key: TensorKey) -> Placement:
        """Return the placement in which a tensor is made."""
        if key in self.source_placements:
            return self.source_placements[key]
        strategy = self.strategies.get(key[0])
        return strategy.outputs[key[1]] if strategy is not None and strategy.outputs else REPLICATE


@dataclass
class _RankWriter:
    """Writes one rank's graph, operator by operator."""

    splits: Mapping[str, AxisSplit]
    coordinates: Mapping[str, int]
    calls: Mapping[str, OperatorCall]
    sizes: ViewSizes
    aliases: Mapping[str, TensorKey]
    dtypes: Mapping[str, torch.dtype]
    graph: fx.Graph = field(default_factory=fx.Graph)
    axes: dict[str, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    redistributed: dict[tuple[fx.Node, State], fx.Node] = field(default_factory=dict)

    def placements_of(self, node: fx.Node) -> State:
        """Return the placements, one per axis, in which a node's value is made."""
        key = tensor_key(node)
        key = self.aliases.get(key[0], key)
        return tuple(split.placement(key) for split in self.splits.values())

    def redistribute_to(self, node: fx.Node, needed: State) -> Any:
        """Return a node's value as a consumer needs it, redistributed once for all consumers with the same need."""
        have, value = self.placements_of(node), self.values[node]
        if have == needed:  # by far most reads
            return value
        for i, placement in rewrite_by_axis(have, needed):
            state = (*have[:i], placement, *have[i + 1 :])
            # Keyed by the rewritten node: partial redistributions on the way are shared between consumers too.
            redistribution = self.redistributed.get((value, state))
            if redistribution is None:
                axis = self.axes[list(self.splits)[i]]
                redistribution = self.graph.call_function(Redistribute(have[i], placement), (axis, value))
                redistribution.meta["stands"] = False
                if node.op != "placeholder":  # a placeholder's move is named by its first reader
                    redistribution.meta["name"] = node.meta["name"]
                self.redistributed[value, state] = redistribution
            value, have = redistribution, state
        return value

    def write_operator(self, node: fx.Node) -> fx.Node:
        """Write one operator, with the redistributions before it."""
        name, last_node = node_name(node), _last_node(self.graph)
        call = self.calls[name]
        chosen = {axis: split.strategies[name] for axis, split in self.splits.items()}
        prefix, bound_arguments, positional = bind_arguments(node)
        # Tensors are numbered in the order in which view_operators numbered them: bind_arguments gives the same order.
        number = iter(range(len(call.inputs)))

        def local(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if _is_known_size(value):
                    return self.sizes.number(value)
                if not isinstance(value.meta.get("val"), Tensor):
                    return self.values[value]
                index = next(number)
                return self.redistribute_to(value, tuple(s.inputs[index] for s in chosen.values()))
            return value

        arguments = map_nested(local, bound_arguments)
        # Counted before strategies insert nodes of this rank's own: all ranks must decide the same.
        several = _count_gradient_collectives(arguments) > 1
        edit = RankCall(
            call, self.graph, node.target,
            fx.map_arg(node.args[:prefix], self.values.__getitem__), arguments, positional,
            [{axis: s.outputs[i] for axis, s in chosen.items()} for i in range(len(call.outputs))],
            self.coordinates,
        )  # fmt: skip
        for axis, strategy in chosen.items():
            # Strategies of several axes change the same call in turn; each sees the axis and the rank's position on it.
            if strategy.local is not None:
                edit.axis, edit.index, edit.strategy = self.axes[axis], self.coordinates[axis], strategy
                edit.call = replace(call, degree=self.splits[axis].degree)
                strategy.local(edit)
        if any(s.local is not None for s in chosen.values()) and name in self.dtypes:
            edit.append(as_, self.dtypes[name])  # a rewritten operator does not get autocast's cast of the result
        if several:  # gradients that go through collectives must arrive in one order on all ranks
            edit.target = joint_gradients(edit.target)
        result = edit.emit()
        _label_nodes(self.graph, last_node, node)
        result.meta["stands"] = True
        return result


def as_(dtype: torch.dtype, x: Tensor) -> Tensor:
    """Cast a value to a dtype."""
    return x.to(dtype)


def _count_gradient_collectives(arguments: Mapping[str, Any]) -> int:
    """Return how many of a call's arguments send their gradients through a collective of their own."""
    moves = [value.target for value in arguments.values() if isinstance(value, fx.Node)]
    return sum(isinstance(m, Redistribute) and bool(collective_name(*gradient_ends(m.source, m.target))) for m in moves)


def _is_known_size(node: fx.Node) -> bool:
    """Return whether a node is a size that follows from the number of local samples alone."""
    return isinstance(node.target, SymbolicSize) and not isinstance(node.target, BatchSize)


def _last_node(graph: fx.Graph) -> fx.Node | None:
    return next(iter(reversed(graph.nodes)), None)


def _nodes_since(graph: fx.Graph, last_node: fx.Node | None) -> Iterator[fx.Node]:
    """Return the nodes written since ``last_node`` was the last one, newest first."""
    return takewhile(lambda node: node is not last_node, reversed(graph.nodes))


def _label_nodes(graph: fx.Graph, last_node: fx.Node | None, node: fx.Node) -> None:
    """Give all new nodes the user-facing name and source location of the node that they are written for."""
    for new_node in _nodes_since(graph, last_node):
        new_node.meta.setdefault("name", node.meta["name"])
        new_node.meta.setdefault("stands", False)  # True only for the node that returns the operator's value
        for key in ("stack_trace", "nn_module_stack", "module", "op"):
            if key in node.meta:
                new_node.meta.setdefault(key, node.meta[key])


def rewrite_by_axis(have: State, needed: State) -> Iterator[tuple[int, Placement]]:
    """Yield the redistributions from one state to another, one axis at a time.

    No two axes shard the same dimension in between. Axes that wait for each other in a cycle (two that swap their
    dimensions, say) cannot all go directly: one of them gathers first, and shards again when its dimension is free.

    Yields:
        The index of an axis, and its next placement.
    """
    state, waiting = list(have), [i for i, p in enumerate(needed) if have[i] != p]

    def in_the_way(i: int) -> int | None:
        return next((j for j in waiting if j != i and shard_same_dim(state[j], needed[i])), None)

    while waiting:
        i = next((i for i in waiting if in_the_way(i) is None), None)
        if i is not None:
            waiting.remove(i)
            state[i] = needed[i]
        else:
            i = waiting[0]
            for _ in waiting:  # after as many steps along "blocked by", surely on the cycle
                i = in_the_way(i)
                assert i is not None
            state[i] = REPLICATE
        yield i, state[i]


def rewrite(
    code: fx.Graph,
    calls: Mapping[str, OperatorCall],
    splits: Mapping[str, AxisSplit],
    samples: int,
    coordinates: Mapping[str, int],
    aliases: Mapping[str, TensorKey] | None = None,
    leaving: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
    open_sizes: tuple[int, ...] = (),
) -> fx.Graph:
    """Return the graph that one rank runs.

    Args:
        code: the captured graph or one stage of it; a placeholder's role ("value", name) is what another stage sends.
        calls: every operator as a call, by node name.
        splits: the chosen strategies by axis, in the order of the mesh.
        samples: number of samples of this worker.
        coordinates: this rank's index on each axis, by axis name.
        aliases: nodes that name one of several tensors, as in :class:`~polylane.placement.operator_view.OperatorView`.
        leaving: names of results that keep the placement in which they are made, because they go to another stage; all
            others are replicated.
        dtypes: dtype of each node's value under autocast, by node name.
        open_sizes: the batch's sizes that the code leaves open; empty: those at which it was captured.

    Returns:
        The rank's graph. Its first placeholders have the roles ("axis", name), the others are those of ``code``. Every
        node has the meta entries "turn", the index of the node of ``code`` that it is written for, and "writes",
        whether that node writes in place: both are equal on all ranks.
    """
    sizes = ViewSizes(samples, open_sizes=open_sizes)
    writer = _RankWriter(splits, coordinates, calls, sizes, aliases or {}, dtypes or {})
    for name in splits:
        writer.axes[name] = axis = writer.graph.placeholder(f"axis_{name}")
        # Turn -1: axes are ready before all operators, see overlap.py.
        axis.meta |= {"role": ("axis", name), "turn": -1, "writes": False}
    needed = tuple(REPLICATE for _ in splits)
    for turn, node in enumerate(code.nodes):
        last_node = _last_node(writer.graph)
        if node.op == "placeholder":
            writer.values[node] = copied = writer.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
        elif node.op == "output":
            out = [
                writer.values[n] if n.meta.get("name") in leaving else writer.redistribute_to(n, needed)
                for n in node.args[0]
            ]
            writer.graph.output(tuple(out))
        elif not is_alias(node):
            writer.values[node] = writer.write_operator(node)
        # Known sizes became constants of the arguments; only data-dependent ones and getitem nodes are copied.
        elif not _is_known_size(node):
            writer.values[node] = copied = writer.graph.node_copy(node, writer.values.__getitem__)
            copied.meta = dict(node.meta)
        for new_node in _nodes_since(writer.graph, last_node):
            new_node.meta |= {"turn": turn, "writes": _writes(node)}
    return writer.graph


def _writes(node: fx.Node) -> bool:
    """Return whether the user's operator writes in place, also where it runs under a setting of its own."""
    name = operator_name(node).removeprefix("aten.").partition(".")[0]
    # "add_" writes in place, "__and__" does not.
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and (in_place or bool(written_arguments(node)))
