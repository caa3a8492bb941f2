"""What is known of a graph's values while it is walked: how the samples of two replicas make up each of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from polylane.graph.graph import Graph
from polylane.graph.inplace import alias_groups, writes
from polylane.graph.precision import innermost
from polylane.graph.sizes import Size
from polylane.graph.statistics import batch_norm
from polylane.graph.whole_batch import Combine, WholeBatch
from polylane.placement.placement import REPLICATE, Cuts, Placement, Replicate, Shard
from polylane.placement.view import Key, Step, View, key_of
from polylane.samples.additivity import State, in_order
from polylane.samples.ragged import masks

# How an operator's values are made up, each None where that is not known; None where it is of none of them.
Derived = Sequence[State | None] | None


@dataclass(frozen=True)
class Statistic:
    """A value that one operator needs of the whole batch.

    Attributes:
        user: the node that reads it.
        value: what is read: of the part alone so far.
        combine: how the whole batch's is made of the parts'; None for a size, which is known without asking anybody.
    """

    user: fx.Node
    value: fx.Node
    combine: Combine | None


@dataclass(frozen=True)
class Rescale:
    """An operand that must be multiplied by the batch's share, to some power, to be additive like the others.

    Attributes:
        user: the node that reads it; the graph's output for a loss.
        value: what is read.
        power: of how many times as many samples the whole batch has.
    """

    user: fx.Node
    value: fx.Node
    power: int


@dataclass
class KnownStates:
    """What is known of the tensors of a graph.

    Attributes:
        graph: of which the tensors are.
        view: the graph at the samples of both replicas.
        counting: whether statistics of the whole batch may be asked for.
        given: how placeholders are made up that are neither rows in order nor alike; None for one of which that is
            not known.
        states: how the samples of two replicas make up every tensor of which that is known.
        lies: of all tensors, how they are placed on two replicas if they are in order; None where they cannot be.
        numbers: those that have in each row the number of a row, which in a part is another one than in the whole; with
            how the rows that they number are cut.
        statistics: what must be known of the whole batch, by the node that reads it and what is read.
        rescaled: what must be multiplied by the batch's share, likewise.
    """

    graph: Graph
    view: View
    counting: bool = False
    given: Mapping[Key, State | None] = field(default_factory=dict)
    states: dict[Key, State] = field(default_factory=dict)
    lies: dict[Key, Placement | None] = field(default_factory=dict)
    numbers: dict[Key, Cuts] = field(default_factory=dict)
    statistics: dict[tuple[fx.Node, fx.Node], Statistic] = field(default_factory=dict)
    rescaled: dict[tuple[fx.Node, fx.Node], Rescale] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self.memory = alias_groups(code)
        self.gone: set[Key] = set()  # tensors in memory to which something unknown was written
        self.nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        self.masks = masks(code)
        self.buffers: dict[str, str] = {}  # a buffer of which replicas would have different values -> who writes it
        for node in code.nodes:
            vals = node.meta.get("val")
            for number, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals]):
                if isinstance(val, Tensor):
                    self.lies[key_of(node)[0], key_of(node)[1] + number] = in_order(val)
        sources = {key: self.given.get(key, self.lies[key]) for key in self.view.sources}
        self.states |= {key: state for key, state in sources.items() if state is not None}

    def key(self, node: fx.Node) -> Key:
        """The key of the tensor that a node gives; of views that are one tensor, the first's."""
        key = key_of(node)
        return self.view.aliases.get(key[0], key)

    def lose(self, step: Step) -> None:
        """Whatever shares memory to which something unknown is written is unknown from then on."""
        if written := {self.memory[each] for each in writes(self.nodes[step.name])}:
            self.gone |= {key_of(node) for node, memory in self.memory.items() if memory in written}
            self.states = {key: state for key, state in self.states.items() if key not in self.gone}

    def write(self, step: Step) -> None:
        """What is written to a buffer must be alike for all parts."""
        node = self.nodes[step.name]
        if step.call.op in ("leaf", "function"):  # of which only the user knows what it writes
            return
        for memory in {self.memory[each] for each in writes(node)}:
            self._lose_mixed(memory, [self.states.get(key) for key in step.gives])
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            if all(self.states.get(key) == REPLICATE for key in step.gives) and key_of(memory) in self.states:
                continue
            self.buffers.setdefault(str(memory.meta["role"][1]), step.name)
            self.gone |= {key_of(other) for other, of in self.memory.items() if of is memory}
            self.states = {key: state for key, state in self.states.items() if key not in self.gone}

    def _lose_mixed(self, memory: fx.Node, written: Sequence[State | None]) -> None:
        """Memory that is alike, or rows, stays known only where the same is written to it; every view sees what is."""
        aliases = [key for node, of in self.memory.items() if of is memory and (key := key_of(node)) in self.states]
        kinds = {type(state) for state in (*(self.states[key] for key in aliases), *written)}
        if kinds <= {Replicate} or kinds <= {Shard}:
            return
        self.gone |= {key_of(node) for node, of in self.memory.items() if of is memory}
        self.states = {key: state for key, state in self.states.items() if key not in self.gone}


def given_by_inputs(code: fx.Graph) -> set[fx.Node]:
    """Nodes that the batch alone decides, with constants and buffers that nobody writes: no parameter, no chance."""
    memory = alias_groups(code)
    written = {memory[each] for node in code.nodes for each in writes(node)}
    for node in code.nodes:
        if innermost(node.target) is batch_norm:  # running mean and variance move with what the model computes
            written |= {memory[each] for each in node.args[4:6] if isinstance(each, fx.Node)}
    found: set[fx.Node] = set()
    for node in code.nodes:
        if memory[node] in written:
            continue
        if node.op == "placeholder":
            if node.meta["role"][0] in ("input", "constant", "buffer", "part"):
                found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            target = innermost(node.target)
            sure = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
            if sure or isinstance(target, (Size, WholeBatch)) or target is operator.getitem:
                found.add(node)
    return found
