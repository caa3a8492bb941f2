"""What is known of a graph's values while it is walked: how the samples of two replicas make up each of them."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, fx

from polylane.graph.capture.aliasing import alias_groups, written_arguments
from polylane.graph.graph import Graph
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.operators.whole_batch_counts import CombineParts, WholeBatchStatistic
from polylane.graph.precision import unwrap_settings
from polylane.graph.symbolic_sizes import SymbolicSize
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey, tensor_key
from polylane.placement.placement import REPLICATE, Cuts, Placement, Replicate, Shard
from polylane.samples.interpretation.additivity import State, sample_order_placement
from polylane.samples.interpretation.ragged import find_masks

# How an operator's values are made up, each None where that is not known; None where it is of none of them.
Derived = Sequence[State | None] | None


@dataclass(frozen=True)
class NeededStatistic:
    """A value that one operator needs of the whole batch.

    Attributes:
        user: the node that reads it.
        value: what is read: of the part alone so far.
        combine: how the whole batch's is made of the parts'; None for a size, which is known without asking anybody.
    """

    user: fx.Node
    value: fx.Node
    combine: CombineParts | None


@dataclass(frozen=True)
class RescaledOperand:
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
        placements: of all tensors, how they are placed on two replicas if they are in order; None where they cannot be.
        size_cuts: those that have in each row the number of a row, which in a part is another one than in the whole;
            with how the rows that they number are cut.
        statistics: what must be known of the whole batch, by the node that reads it and what is read.
        rescaled: what must be multiplied by the batch's share, likewise.
    """

    graph: Graph
    view: OperatorView
    counting: bool = False
    given: Mapping[TensorKey, State | None] = field(default_factory=dict)
    states: dict[TensorKey, State] = field(default_factory=dict)
    placements: dict[TensorKey, Placement | None] = field(default_factory=dict)
    size_cuts: dict[TensorKey, Cuts] = field(default_factory=dict)
    statistics: dict[tuple[fx.Node, fx.Node], NeededStatistic] = field(default_factory=dict)
    rescaled: dict[tuple[fx.Node, fx.Node], RescaledOperand] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self.memory = alias_groups(code)
        self.gone: set[TensorKey] = set()  # tensors in memory to which something unknown was written
        self.nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        self.masks = find_masks(code)
        self.buffers: dict[str, str] = {}  # a buffer of which replicas would have different values -> who writes it
        for node in code.nodes:
            vals = node.meta.get("val")
            for number, val in enumerate(vals if isinstance(vals, (list, tuple)) else [vals]):
                if isinstance(val, Tensor):
                    self.placements[tensor_key(node)[0], tensor_key(node)[1] + number] = sample_order_placement(val)
        sources = {key: self.given.get(key, self.placements[key]) for key in self.view.sources}
        self.states |= {key: state for key, state in sources.items() if state is not None}

    def key_of(self, node: fx.Node) -> TensorKey:
        """The key of the tensor that a node gives; of views that are one tensor, the first's."""
        key = tensor_key(node)
        return self.view.aliases.get(key[0], key)

    def lose(self, step: OperatorNode) -> None:
        """Whatever shares memory to which something unknown is written is unknown from then on."""
        if written := {self.memory[each] for each in written_arguments(self.nodes[step.name])}:
            self.gone |= {tensor_key(node) for node, memory in self.memory.items() if memory in written}
            self.states = {key: state for key, state in self.states.items() if key not in self.gone}

    def write(self, step: OperatorNode) -> None:
        """What is written to a buffer must be alike for all parts."""
        node = self.nodes[step.name]
        if step.call.op in ("leaf", "function"):  # of which only the user knows what it writes
            return
        for memory in {self.memory[each] for each in written_arguments(node)}:
            self._forget_mixed(memory, [self.states.get(key) for key in step.output_keys])
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            if all(self.states.get(key) == REPLICATE for key in step.output_keys) and tensor_key(memory) in self.states:
                continue
            self.buffers.setdefault(str(memory.meta["role"][1]), step.name)
            self.gone |= {tensor_key(other) for other, of in self.memory.items() if of is memory}
            self.states = {key: state for key, state in self.states.items() if key not in self.gone}

    def _forget_mixed(self, memory: fx.Node, written: Sequence[State | None]) -> None:
        """Memory that is alike, or rows, stays known only where the same is written to it; every view sees what is."""
        aliases = [key for node, of in self.memory.items() if of is memory and (key := tensor_key(node)) in self.states]
        kinds = {type(state) for state in (*(self.states[key] for key in aliases), *written)}
        if kinds <= {Replicate} or kinds <= {Shard}:
            return
        self.gone |= {tensor_key(node) for node, of in self.memory.items() if of is memory}
        self.states = {key: state for key, state in self.states.items() if key not in self.gone}


def nodes_from_inputs(code: fx.Graph) -> set[fx.Node]:
    """Nodes that the batch alone decides, with constants and buffers that nobody writes: no parameter, no chance."""
    memory = alias_groups(code)
    written = {memory[each] for node in code.nodes for each in written_arguments(node)}
    for node in code.nodes:
        if unwrap_settings(node.target) is batch_norm:  # running mean and variance move with what the model computes
            written |= {memory[each] for each in node.args[4:6] if isinstance(each, fx.Node)}
    found: set[fx.Node] = set()
    for node in code.nodes:
        if memory[node] in written:
            continue
        if node.op == "placeholder":
            if node.meta["role"][0] in ("input", "constant", "buffer", "part"):
                found.add(node)
        elif node.op == "call_function" and all(n in found for n in node.all_input_nodes):
            target = unwrap_settings(node.target)
            sure = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
            if sure or isinstance(target, (SymbolicSize, WholeBatchStatistic)) or target is operator.getitem:
                found.add(node)
    return found
