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
import numpy as np
from torch import fx

from polylane.cost.memory.attention_cores import find_attention_cores
from polylane.cost.memory.saved_tensors import Key, SavedTensors
from polylane.graph.capture.repeatable import NOTHING_DROPPED, DroppedTensors
from polylane.graph.cut_points import block_positions
from polylane.graph.graph import Graph


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
        self._saved_by = defaultdict[str, set[Key]](set)  # the same by node
        self.dropped_by_mode: dict[str, DroppedTensors] = {}  # cache of `drop_by_mode`
        for name, saved in keeping.nodes.items():
            self.own[graph.nodes[saved.at].name] += saved.own_bytes if name in keeping.repeatable else 0
            for key in saved.keys:
                self.savers[keeping.storage_of[key]].append(saved.at)
                self._saved_by[graph.nodes[saved.at].name].add(keeping.storage_of[key])

    def _find_values(self) -> dict[str, tuple[Key, ...]]:
        """Return the memory of every node's results, by the first tensor in it: its own, or what it views."""
        keeping, names = self.keeping, [node.name for node in self.graph.nodes]
        values: dict[str, tuple[Key, ...]] = {}
        for saved in keeping.nodes.values():
            keys = [keeping.storage_of[key] for key in saved.output_keys if key in keeping.forms]
            values[names[saved.at]] = tuple(dict.fromkeys((*values.get(names[saved.at], ()), *keys)))
        # An item of a result with several is no operator of its own.
        for node in self.graph.code.fx.nodes:
            if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
                source = node.args[0].meta.get("name", "")
                values[node.meta["name"]] = values.get(node.meta["name"]) or values.get(source, ())
        return values

    @cached_property
    def makers(self) -> dict[Key, str]:
        """Name of the node that makes each value; placeholders are made by none."""
        names = [node.name for node in self.graph.nodes]
        nodes = self.keeping.nodes
        return {key: names[nodes[key[0]].at] for keys in self.values_of.values() for key in keys if key[0] in nodes}

    @cached_property
    def _made_by(self) -> dict[str, list[Key]]:
        """The values that each node makes."""
        keys = defaultdict[str, list[Key]](list)
        for key, maker in self.makers.items():
            keys[maker].append(key)
        return keys

    @cached_property
    def views(self) -> dict[Key, list[str]]:
        """Names of the nodes whose results share each value's memory, the node that makes it among them."""
        view_names = defaultdict[Key, list[str]](list)
        for name, keys in self.values_of.items():
            for key in keys:
                view_names[key].append(name)
        return view_names

    @cached_property
    def last_reads(self) -> dict[Key, int]:
        """Position of the last node that reads each value, or a view of it."""
        positions: dict[Key, int] = {}
        for position, node in enumerate(self.graph.nodes):
            for name in node.inputs:
                positions |= dict.fromkeys(self.values_of.get(name, ()), position)
        return positions

    @cached_property
    def repeatable(self) -> frozenset[str]:
        """Names of the nodes that may run again, or a part of them where a rank has several operators for one."""
        names, keeping = self.graph.nodes, self.keeping
        return frozenset(names[saved.at].name for name, saved in keeping.nodes.items() if name in keeping.repeatable)

    def fixed_own(self, nodes: Collection[str]) -> float:
        """Return the bytes that operators of some nodes save besides inputs and results and that are always kept."""
        names, keeping = self.graph.nodes, self.keeping
        fixed_operators = (saved for name, saved in keeping.nodes.items() if name not in keeping.repeatable)
        return float(sum(saved.own_bytes for saved in fixed_operators if names[saved.at].name in nodes))

    @cached_property
    def fixed(self) -> set[Key]:
        """The values of which some tensor cannot be computed again."""
        keeping = self.keeping
        fixed = [saved for name, saved in keeping.nodes.items() if name not in keeping.repeatable]
        return {keeping.storage_of[key] for saved in fixed for key in saved.output_keys if key in keeping.forms}

    def bytes(self, keys: Iterable[Key]) -> float:
        """Return the bytes of some values."""
        return float(sum(self.keeping.storage_bytes[key] for key in keys))

    @cached_property
    def crossing_blocks(self) -> set[Key]:
        """The values that cross between blocks, those of :func:`polylane.graph.cut_points.block_positions`."""
        bounds, makers = block_positions(self.graph), self.makers
        block_of = np.searchsorted(bounds, np.arange(len(self.graph.nodes)), side="right")
        return {
            key
            for key, position in self.last_reads.items()
            if key in makers and block_of[self.graph.positions[makers[key]]] != block_of[position]
        }

    def drop(self, makers: Collection[str], staying: Collection[str] = ()) -> DroppedTensors:
        """Return what is dropped where these nodes run again: their results, unless something holds these anyway.

        Args:
            makers: names of nodes that run again.
            staying: names of nodes whose values stay, and those that they view.
        """
        kept_keys = {key for name in (*staying, *self.graph.outputs) for key in self.values_of.get(name, ())}
        repeated_names = self.repeatable.intersection(makers)
        values = set[str]()
        for key, maker in self.makers.items():
            # All results of a node are dropped, or none.
            keys = [value for value in self.values_of[maker] if self.makers.get(value) == maker]
            if maker in repeated_names and all(value not in kept_keys and value not in self.fixed for value in keys):
                values.update(self.views[key])
        return DroppedTensors(frozenset(values), repeated_names)

    def pieces(self, dropped: DroppedTensors, stage_nodes: Collection[str] | None = None) -> list[RepeatedPiece]:
        """Return the pieces that run again, in the order of the graph.

        Args:
            dropped: what forward passes drop, by names of nodes.
            stage_nodes: names of a stage's nodes; default: all.
        """
        own_names = self.graph.positions if stage_nodes is None else stage_nodes
        graph, positions = self.graph, self.graph.positions
        saved = set[Key]().union(*(self._saved_by[name] for name in own_names if name in self._saved_by))
        repeated_names = {self.makers[key] for key in saved if self.makers.get(key) in dropped.values}
        repeated_names |= {name for name in dropped.again if self.own.get(name)}
        wired = nx.Graph()
        for position in sorted(map(positions.__getitem__, own_names), reverse=True):
            node = graph.nodes[position]
            if node.name in repeated_names:
                wired.add_node(node.name)
                for name in node.inputs:
                    if name in dropped.values and name in own_names:
                        repeated_names.add(name)
                        wired.add_edge(node.name, name)
        groups = sorted(nx.connected_components(wired), key=lambda names: min(positions[name] for name in names))
        return [self._piece(frozenset(names), dropped, saved) for names in groups]

    def _piece(self, names: frozenset[str], dropped: DroppedTensors, saved: Collection[Key]) -> RepeatedPiece:
        values = {key for name in names & dropped.values for key in self._made_by.get(name, ()) if key in saved}
        inputs = {input_name for name in names for input_name in self.graph.nodes[self.graph.positions[name]].inputs}
        read = {key for input_name in inputs - dropped.values for key in self.values_of.get(input_name, ())}
        own_bytes = sum(self.own[name] for name in names)
        return RepeatedPiece(names, frozenset(values), own_bytes, frozenset(key for key in read if key in self.makers))

    def leaving(self, nodes: Collection[str], stage: Collection[str]) -> set[str]:
        """Return the names of those of some nodes whose values other nodes of the stage read."""
        read_names = set[str]()
        for name in set(stage).difference(nodes):
            read_names.update(self.graph.nodes[self.graph.positions[name]].inputs)
        return read_names.intersection(nodes)

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
        candidates = self.within(dropped, nodes, leaving)
        positions = {self.graph.positions[name] for name in nodes}
        repeated_names = set[str]()
        for piece in self.pieces(candidates, nodes):
            # Kept for the second run alone: not saved otherwise, nor held because it crosses between stages.
            extra_keys = {key for key in piece.read - sent if self.makers[key] in nodes}
            extra_keys = {key for key in extra_keys if positions.isdisjoint(self.savers.get(key, ()))}
            if is_best or self.bytes(extra_keys) < self.bytes(piece.dropped) + piece.own:
                repeated_names |= piece.names
        # A view of a value that is kept is kept with it.
        views = {name for maker in repeated_names for key in self._made_by.get(maker, ()) for name in self.views[key]}
        return DroppedTensors(candidates.values & views, frozenset(repeated_names))


def drop_in_blocks(values: SavedValues) -> DroppedTensors:
    """Return what full recomputation drops: everything but the values that cross between blocks (Chen et al., 2016)."""
    crossing = [values.makers[key] for key in values.crossing_blocks]
    return values.drop([node.name for node in values.graph.nodes], crossing)


def drop_regions(values: SavedValues, regions: Sequence[Collection[str]]) -> DroppedTensors:
    """Return what is dropped inside of regions of nodes; what nodes outside of a region read of it is kept.

    For attentions this is selective recomputation (Korthikanti et al., "Reducing Activation Recomputation in Large
    Transformer Models", 2022, section 5).
    """
    regions_of = defaultdict[str, set[int]](set)
    for number, region in enumerate(regions):
        for name in region:
            regions_of[name].add(number)
    leaving = {
        name
        for node in values.graph.nodes
        for name in node.inputs
        if not regions_of.get(name, set()) <= regions_of.get(node.name, set())
    }
    return values.drop(regions_of, leaving)


def drop_by_mode(values: SavedValues, mode: str) -> DroppedTensors:
    """Return what is dropped of a whole graph: "none", "selective" or "full".

    Whatever the mode, the user's own calls of torch.utils.checkpoint are recomputed.
    """
    if mode not in values.dropped_by_mode:
        graph, parts = values.graph, list[DroppedTensors]()
        if mode == "full":
            parts.append(drop_in_blocks(values))
        if mode == "selective":
            parts.append(drop_regions(values, find_attention_cores(graph)))
        if graph.checkpoints:
            parts.append(drop_regions(values, graph.checkpoints))
        values.dropped_by_mode[mode] = union_of(parts)
    return values.dropped_by_mode[mode]


def union_of(parts: Iterable[DroppedTensors]) -> DroppedTensors:
    """Return what is dropped in any of the parts."""
    values, repeated_names = set[str](), set[str]()
    for part in parts:
        values |= part.values
        repeated_names |= part.again
    return DroppedTensors(frozenset(values), frozenset(repeated_names)) if repeated_names else NOTHING_DROPPED
