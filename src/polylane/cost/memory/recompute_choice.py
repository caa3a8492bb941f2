"""What to drop: which tensors of a stage a forward pass drops, to be recomputed in the backward pass.

Everything follows from the captured graph and what autograd saves of it, nothing from the names of layers. A value is
dropped as a whole, with all tensors that view its memory.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import networkx as nx
from torch import fx

from polylane.cost.memory.attention_cores import find_attention_cores
from polylane.cost.memory.saved_tensors import Key, SavedTensors
from polylane.graph.cut_points import block_positions
from polylane.graph.graph import Graph
from polylane.graph.repeatable import NOTHING_DROPPED, DroppedTensors


@dataclass(frozen=True)
class RepeatedPiece:
    """Nodes that run again together, because each reads what another one makes.

    Attributes:
        names: names of the nodes.
        dropped: values that are saved without recomputation, and are not kept.
        own: bytes of what its nodes save besides inputs and results.
        read: values that its nodes read and no node of it makes.
    """

    names: frozenset[str]
    dropped: frozenset[Key]
    own: float
    read: frozenset[Key]


class SavedValues:
    """The values of a graph as pieces of memory: who makes, views, reads and saves them.

    Args:
        graph: the captured graph, before any sharding.
        keeping: what its operators save, on one rank.
    """

    def __init__(self, graph: Graph, keeping: SavedTensors) -> None:
        self.graph, self.keeping = graph, keeping
        self.values_of = self._find_values()
        self.own = defaultdict[str, float](float)  # bytes that nodes save besides inputs and results
        self.savers = defaultdict[Key, list[int]](list)  # value -> positions of the nodes that save it
        for name, saved in keeping.nodes.items():
            self.own[graph.nodes[saved.at].name] += saved.own_bytes if name in keeping.repeatable else 0
            for key in saved.keys:
                self.savers[keeping.storage_of[key]].append(saved.at)

    def _find_values(self) -> dict[str, tuple[Key, ...]]:
        """Return the memory of every node's results, by the first tensor in it: its own, or what it views."""
        keeping, names = self.keeping, [node.name for node in self.graph.nodes]
        found: dict[str, tuple[Key, ...]] = {}
        for saved in keeping.nodes.values():
            keys = [keeping.storage_of[key] for key in saved.output_keys if key in keeping.forms]
            found[names[saved.at]] = tuple(dict.fromkeys((*found.get(names[saved.at], ()), *keys)))
        # An item of a result with several is no operator of its own.
        for node in self.graph.code.fx.nodes:
            if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                source = node.args[0].meta.get("name", "")
                found[node.meta["name"]] = found.get(node.meta["name"]) or found.get(source, ())
        return found

    @cached_property
    def makers(self) -> dict[Key, str]:
        """Name of the node that makes each value; placeholders are made by none."""
        names = [node.name for node in self.graph.nodes]
        nodes = self.keeping.nodes
        return {key: names[nodes[key[0]].at] for keys in self.values_of.values() for key in keys if key[0] in nodes}

    @cached_property
    def views(self) -> dict[Key, list[str]]:
        """Names of the nodes whose results lie in each value's memory, its maker among them."""
        found = defaultdict[Key, list[str]](list)
        for name, keys in self.values_of.items():
            for key in keys:
                found[key].append(name)
        return found

    @cached_property
    def last_reads(self) -> dict[Key, int]:
        """Position of the last node that reads each value, or a view of it."""
        found: dict[Key, int] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in node.inputs:
                found |= dict.fromkeys(self.values_of.get(name, ()), position)
        return found

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """Names of the nodes that may run again, or a part of them where a rank has several operators for one."""
        names, keeping = self.graph.nodes, self.keeping
        return frozenset(names[each.at].name for name, each in keeping.nodes.items() if name in keeping.repeatable)

    def fixed_own(self, nodes: Collection[str]) -> float:
        """Return the bytes that operators of some nodes save besides inputs and results and that are always kept."""
        names, keeping = self.graph.nodes, self.keeping
        each = (saved for name, saved in keeping.nodes.items() if name not in keeping.repeatable)
        return float(sum(saved.own_bytes for saved in each if names[saved.at].name in nodes))

    @cached_property
    def fixed(self) -> set[Key]:
        """The values of which some tensor cannot be computed again."""
        keeping = self.keeping
        fixed = [saved for name, saved in keeping.nodes.items() if name not in keeping.repeatable]
        return {keeping.storage_of[key] for saved in fixed for key in saved.output_keys if key in keeping.forms}

    def bytes(self, keys: Iterable[Key]) -> float:
        """Return the bytes of some values."""
        return float(sum(self.keeping.storage_bytes[key] for key in keys))

    def drop(self, makers: Collection[str], staying: Collection[str] = ()) -> DroppedTensors:
        """Return what is dropped where these nodes run again: their results, unless something holds these anyway.

        Args:
            makers: names of nodes that run again.
            staying: names of nodes whose values stay, and those that they view.
        """
        kept = {key for name in (*staying, *self.graph.outputs) for key in self.values_of.get(name, ())}
        again = self.repeatable.intersection(makers)
        values = set[str]()
        for key, maker in self.makers.items():
            # All results of a node are dropped, or none.
            own = [each for each in self.values_of[maker] if self.makers.get(each) == maker]
            if maker in again and all(each not in kept and each not in self.fixed for each in own):
                values.update(self.views[key])
        return DroppedTensors(frozenset(values), again)

    def pieces(self, dropped: DroppedTensors, where: Collection[str] | None = None) -> list[RepeatedPiece]:
        """Return the pieces that run again, in the order of the graph.

        Args:
            dropped: what forward passes drop, by names of nodes.
            where: names of a stage's nodes; default: all.
        """
        own = self.graph.positions if where is None else where
        positions = self.graph.positions
        saved = {key for key, at in self.savers.items() if any(self.graph.nodes[i].name in own for i in at)}
        again = {self.makers[key] for key in saved if self.makers.get(key) in dropped.values}
        again |= {name for name in dropped.again if self.own.get(name)}
        wired = nx.Graph()
        for node in reversed(self.graph.nodes):
            if node.name in again and node.name in own:
                wired.add_node(node.name)
                for name in node.inputs:
                    if name in dropped.values and name in own:
                        again.add(name)
                        wired.add_edge(node.name, name)
        groups = sorted(nx.connected_components(wired), key=lambda names: min(positions[name] for name in names))
        return [self._piece(frozenset(names), dropped, saved) for names in groups]

    def _piece(self, names: frozenset[str], dropped: DroppedTensors, saved: Collection[Key]) -> RepeatedPiece:
        made = {key for key in saved if self.makers.get(key) in names & dropped.values}
        inputs = {each for name in names for each in self.graph.nodes[self.graph.positions[name]].inputs}
        read = {key for each in inputs - dropped.values for key in self.values_of.get(each, ())}
        own = sum(self.own[name] for name in names)
        return RepeatedPiece(names, frozenset(made), own, frozenset(key for key in read if key in self.makers))

    def leaving(self, nodes: Collection[str], stage: Collection[str]) -> set[str]:
        """Return the names of those of some nodes whose values other nodes of the stage read."""
        found = set[str]()
        for name in set(stage).difference(nodes):
            found.update(self.graph.nodes[self.graph.positions[name]].inputs)
        return found.intersection(nodes)

    def within(self, dropped: DroppedTensors, nodes: Collection[str], leaving: Collection[str]) -> DroppedTensors:
        """Return the part of what is dropped that some nodes make and none of them hands on.

        Args:
            dropped: what would be dropped of the whole graph.
            nodes: names of the nodes.
            leaving: names of those whose values others read.
        """
        sent = {key for name in leaving for key in self.values_of.get(name, ())}
        staying = {name for key in sent for name in self.views[key]}
        return DroppedTensors((dropped.values & set(nodes)) - staying, dropped.again & set(nodes))

    def on_stage(
        self, dropped: DroppedTensors, nodes: Collection[str], leaving: Collection[str], is_best: bool = False
    ) -> DroppedTensors:
        """Return what a stage drops: not what leaves it, and no piece for which more must be kept than it drops.

        Args:
            dropped: what would be dropped of the whole graph.
            nodes: names of the stage's nodes.
            leaving: names of the nodes whose values other stages read.
            is_best: whether it is known already that every piece is worth what must be kept for it.
        """
        sent = {key for name in leaving for key in self.values_of.get(name, ())}
        own = self.within(dropped, nodes, leaving)
        inside = {self.graph.positions[name] for name in nodes}
        again = set[str]()
        for piece in self.pieces(own, nodes):
            # Kept for the second run alone: not saved otherwise, nor held because it crosses between stages.
            more = {key for key in piece.read - sent if self.makers[key] in nodes}
            more = {key for key in more if inside.isdisjoint(self.savers.get(key, ()))}
            if is_best or self.bytes(more) < self.bytes(piece.dropped) + piece.own:
                again |= piece.names
        # A view of a value that is kept is kept with it.
        made = {name for key, maker in self.makers.items() if maker in again for name in self.views[key]}
        return DroppedTensors(own.values & made, frozenset(again))


def drop_in_blocks(values: SavedValues, bounds: Sequence[int]) -> DroppedTensors:
    """Return what full recomputation drops: everything but the values that cross between blocks (Chen et al., 2016).

    Args:
        values: the values of the graph.
        bounds: positions at which blocks begin and end, both ends of the graph included.
    """
    crossing = [values.makers[key] for key in crossing_values(values, bounds)]
    return values.drop([node.name for node in values.graph.nodes], crossing)


def crossing_values(values: SavedValues, bounds: Sequence[int] | None = None) -> set[Key]:
    """Return the values that cross between blocks.

    Args:
        values: the values of the graph.
        bounds: positions at which blocks begin and end; default: :func:`polylane.graph.cut_points.block_positions`.
    """
    bounds = block_positions(values.graph) if bounds is None else bounds
    block_of = {i: number for number, first in enumerate(bounds) for i in range(first, len(values.graph.nodes))}
    positions, makers = values.graph.positions, values.makers
    return {
        key
        for key, last in values.last_reads.items()
        if key in makers and block_of[positions[makers[key]]] != block_of[last]
    }


def drop_regions(values: SavedValues, regions: Sequence[Collection[str]]) -> DroppedTensors:
    """Return what is dropped inside of regions of nodes; what nodes outside of a region read of it is kept.

    For attentions this is selective recomputation (Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, section 5).
    """
    inside, leaving = set[str](), set[str]()
    for region in map(frozenset, regions):
        inside |= region
        for node in values.graph.nodes:
            if node.name not in region:
                leaving.update(region.intersection(node.inputs))
    return values.drop(inside, leaving)


def drop_by_mode(values: SavedValues, mode: str) -> DroppedTensors:
    """Return what is dropped of a whole graph: "none", "selective" or "full".

    Whatever the mode, the user's own calls of torch.utils.checkpoint are recomputed.
    """
    graph, found = values.graph, list[DroppedTensors]()
    if mode == "full":
        found.append(drop_in_blocks(values, block_positions(graph)))
    if mode == "selective":
        found.append(drop_regions(values, find_attention_cores(graph)))
    if graph.checkpoints:
        found.append(drop_regions(values, graph.checkpoints))
    return union_of(found)


def union_of(parts: Iterable[DroppedTensors]) -> DroppedTensors:
    """Return what is dropped in any of the parts."""
    values, again = set[str](), set[str]()
    for part in parts:
        values |= part.values
        again |= part.again
    return DroppedTensors(frozenset(values), frozenset(again)) if again else NOTHING_DROPPED
