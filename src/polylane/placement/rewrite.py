"""Graph + placements -> the graph that one rank runs, with its collectives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, fx

from polylane.graph.inplace import writes
from polylane.graph.sizes import Size
from polylane.graph.whole_batch import BatchSize
from polylane.placement.call import Call, Edit, Strategy
from polylane.placement.move import Move
from polylane.placement.move import name_of as collective
from polylane.placement.placement import REPLICATE, Placement, gradient, same_dim
from polylane.placement.together import together
from polylane.placement.view import Key, Sizes, bound, is_alias, key_of, name_of, op_of

# A value's placement on every axis of the mesh, in the mesh's order.
State = tuple[Placement, ...]


@dataclass(frozen=True)
class Split:
    """How all of a graph lies on one axis.

    Attributes:
        degree: ranks along the axis.
        steps: the chosen strategy of every operator, by its node's name.
        sources: the placement of every placeholder.
    """

    degree: int
    steps: Mapping[str, Strategy]
    sources: Mapping[Key, Placement]

    def placement(self, key: Key) -> Placement:
        """How a tensor lies where it is made."""
        if key in self.sources:
            return self.sources[key]
        strategy = self.steps.get(key[0])
        return strategy.outputs[key[1]] if strategy is not None and strategy.outputs else REPLICATE


@dataclass
class _Writer:
    """Writes one rank's graph, operator by operator."""

    splits: Mapping[str, Split]
    coordinates: Mapping[str, int]
    calls: Mapping[str, Call]
    sizes: Sizes
    aliases: Mapping[str, Key]
    dtypes: Mapping[str, torch.dtype]
    graph: fx.Graph = field(default_factory=fx.Graph)
    axes: dict[str, fx.Node] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    moved: dict[tuple[fx.Node, State], fx.Node] = field(default_factory=dict)

    def state(self, node: fx.Node) -> State:
        """How a node's value lies where it is made."""
        key = key_of(node)
        key = self.aliases.get(key[0], key)
        return tuple(split.placement(key) for split in self.splits.values())

    def as_needed(self, node: fx.Node, needed: State) -> Any:
        """A node's value as a consumer needs it; moved once for all consumers that need it so."""
        have, value = self.state(node), self.values[node]
        for i, placement in one_by_one(have, needed):
            after = (*have[:i], placement, *have[i + 1 :])
            known = self.moved.get((value, after))
            if known is None:
                axis = self.axes[list(self.splits)[i]]
                known = self.graph.call_function(Move(have[i], placement), (axis, value))
                known.meta["stands"] = False
                if node.op != "placeholder":  # one of those belongs to who asks for it first
                    known.meta["name"] = node.meta["name"]
                self.moved[value, after] = known
            value, have = known, after
        return value

    def step(self, node: fx.Node) -> fx.Node:
        """One operator, with the moves before it."""
        name, before = name_of(node), _end(self.graph)
        call = self.calls[name]
        chosen = {axis: split.steps[name] for axis, split in self.splits.items()}
        prefix, given, positional = bound(node, node.args, node.kwargs)
        number = iter(range(len(call.inputs)))

        def local(value: Any) -> Any:
            if isinstance(value, fx.Node):
                if _is_known_size(value):
                    return self.sizes.number(value)
                if not _is_tensor(value):
                    return self.values[value]
                index = next(number)
                return self.as_needed(value, tuple(s.inputs[index] for s in chosen.values()))
            if isinstance(value, (list, tuple)):
                return [local(v) for v in value]
            return {k: local(v) for k, v in value.items()} if isinstance(value, dict) else value

        arguments = {key: local(value) for key, value in given.items()}
        several = _returns(arguments) > 1  # before a rank's own changes: all ranks must find the same
        edit = Edit(
            call, self.graph, node.target,
            fx.map_arg(node.args[:prefix], self.values.__getitem__), arguments, positional,
            [{axis: s.outputs[i] for axis, s in chosen.items()} for i in range(len(call.outputs))],
            self.coordinates,
        )  # fmt: skip
        for axis, strategy in chosen.items():
            if strategy.local is not None:
                edit.axis, edit.index, edit.strategy = self.axes[axis], self.coordinates[axis], strategy
                edit.call = replace(call, degree=self.splits[axis].degree)
                strategy.local(edit)
        if any(s.local is not None for s in chosen.values()) and name in self.dtypes:
            edit.after(As(self.dtypes[name]))  # what stands in for the operator does as autocast lets that do
        if several:  # in the same order on all ranks
            edit.target = together(edit.target)
        result = edit.emit()
        _label(self.graph, before, node)
        result.meta["stands"] = True
        return result


class As:
    """A value in a dtype: ``as_(x)``."""

    __module__, __name__ = "polylane", "as_"

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, x: Tensor) -> Tensor:
        return x.to(self.dtype)


def _returns(arguments: Mapping[str, Any]) -> int:
    """How many of a call's arguments send their gradients through a collective of their own."""
    moves = [value.target for value in arguments.values() if isinstance(value, fx.Node)]
    return sum(isinstance(m, Move) and bool(collective(gradient(m.target), gradient(m.source))) for m in moves)


def _is_known_size(node: fx.Node) -> bool:
    """Whether a node is a size that follows from the samples in hand alone."""
    return isinstance(node.target, Size) and not isinstance(node.target, BatchSize)


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), Tensor)


def _end(graph: fx.Graph) -> fx.Node | None:
    return next(reversed(graph.nodes), None)


def _since(graph: fx.Graph, before: fx.Node | None) -> Iterator[fx.Node]:
    """What has been written since a node was the last one."""
    return takewhile(lambda node: node is not before, reversed(graph.nodes))


def _label(graph: fx.Graph, before: fx.Node | None, node: fx.Node) -> None:
    """Everything new belongs to the user's node."""
    for made in _since(graph, before):
        made.meta.setdefault("name", node.meta["name"])
        made.meta.setdefault("stands", False)  # for the node itself: only the last one does
        for key in ("stack_trace", "nn_module_stack", "module", "op"):
            if key in node.meta:
                made.meta.setdefault(key, node.meta[key])


def one_by_one(have: State, needed: State) -> Iterator[tuple[int, Placement]]:
    """The moves from one state to another, an axis at a time, such that no two axes ever cut the same dimension.

    Axes that wait for each other in a circle (two that swap their dimensions, say) cannot all go straight: one of them
    gathers first, and cuts again when its dimension is free.
    """
    now, waiting = list(have), [i for i, p in enumerate(needed) if have[i] != p]

    def in_the_way(i: int) -> int | None:
        return next((j for j in waiting if j != i and same_dim(now[j], needed[i])), None)

    while waiting:
        i = next((i for i in waiting if in_the_way(i) is None), None)
        if i is not None:
            waiting.remove(i)
            now[i] = needed[i]
        else:
            i = waiting[0]
            for _ in waiting:  # after so many, in the circle
                i = in_the_way(i)
                assert i is not None
            now[i] = REPLICATE
        yield i, now[i]


def rewrite(
    code: fx.Graph,
    calls: Mapping[str, Call],
    splits: Mapping[str, Split],
    samples: int,
    coordinates: Mapping[str, int],
    aliases: Mapping[str, Key] | None = None,
    leaving: Collection[str] = (),
    dtypes: Mapping[str, torch.dtype] | None = None,
) -> fx.Graph:
    """What one rank runs of a graph.

    Args:
        code: whole, as captured, or a stage of it; a placeholder's role ("value", name) is what another stage sends.
        calls: every operator as a call, by name.
        splits: by axis, in the order of the mesh.
        samples: in hand.
        coordinates: this rank's index on each axis.
        aliases: as in :class:`~polylane.placement.view.View`.
        leaving: names of results that stay as they lie where they are made: they go to another stage. All others are
            whole on every rank.
        dtypes: of what nodes give under autocast, by name.

    Returns:
        The code for this rank. Its first placeholders have the roles ("axis", name), the others are those of ``code``.
        Every node knows its "turn", the number of the one of ``code`` that it is written for, and whether that "writes"
        in place: both are the same on all ranks.
    """
    writer = _Writer(splits, coordinates, calls, Sizes(samples), aliases or {}, dtypes or {})
    for name in splits:
        writer.axes[name] = axis = writer.graph.placeholder(f"axis_{name}")
        axis.meta |= {"role": ("axis", name), "turn": -1, "writes": False}
    needed = tuple(REPLICATE for _ in splits)
    for turn, node in enumerate(code.nodes):
        before = _end(writer.graph)
        if node.op == "placeholder":
            writer.values[node] = copied = writer.graph.placeholder(node.name)
            copied.meta = dict(node.meta)
        elif node.op == "output":
            out = [
                writer.values[n] if n.meta.get("name") in leaving else writer.as_needed(n, needed) for n in node.args[0]
            ]
            writer.graph.output(tuple(out))
        elif not is_alias(node):
            writer.values[node] = writer.step(node)
        elif not _is_known_size(node):
            writer.values[node] = copied = writer.graph.node_copy(node, writer.values.__getitem__)
            copied.meta = dict(node.meta)
        for made in _since(writer.graph, before):
            made.meta |= {"turn": turn, "writes": _writes(node)}
    return writer.graph


def _writes(node: fx.Node) -> bool:
    """Whether the user's operator writes in place, also where it runs under a setting of its own."""
    name = op_of(node).removeprefix("aten.").partition(".")[0]
    in_place = name.endswith("_") and not name.endswith("__")
    return node.op == "call_function" and (in_place or bool(writes(node)))
