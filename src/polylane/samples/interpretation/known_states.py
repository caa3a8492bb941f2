"""Known states: what the interpretation knows of a graph's values so far, memory shared by views included."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from polylane.graph.graph import Graph
from polylane.graph.nodes.facts import unwrap_settings
from polylane.graph.nodes.memory import alias_groups, written_arguments
from polylane.graph.operators.sync_batch_norm import batch_norm
from polylane.graph.operators.whole_batch_counts import CombineParts, WholeBatchStatistic
from polylane.graph.symbolic_sizes import SymbolicSize
from polylane.placement.operator_view import OperatorNode, OperatorView, TensorKey, graph_tensors, tensor_key
from polylane.placement.placement import REPLICATE, Cuts, Placement, Replicate, Shard
from polylane.samples.interpretation.additivity import State, sample_order_placement
from polylane.samples.interpretation.ragged import find_masks

# States of an operator's outputs, None for unknown ones; None if all are unknown.
Derived = Sequence[State | None] | None


@dataclass(frozen=True)
class NeededStatistic:
    """An operand that must be taken of the whole batch for an operator to be provable.

    Attributes:
        user: node that reads the operand.
        value: the operand, which so far is of the part alone.
        combine: how parts combine to the whole batch's value; None for a size, which needs no communication.
    """

    user: fx.Node
    value: fx.Node
    combine: CombineParts | None


@dataclass(frozen=True)
class RescaledOperand:
    """An operand that must be scaled by a power of batch size over part size, to be additive like the others.

    Attributes:
        user: node that reads it; the graph's output for a loss.
        value: operand that is to be scaled.
        power: exponent of the ratio of the batch's samples to the part's.
    """

    user: fx.Node
    value: fx.Node
    power: int


@dataclass
class KnownStates:
    """States of the tensors of a graph, as far as they are known.

    Attributes:
        graph: the captured graph under interpretation.
        view: operator view at the samples of both replicas.
        counting: whether whole-batch statistics may be asked for.
        given: states of placeholders that are neither sharded by sample in order nor replicated; None for unknown ones.
        states: tensor -> how two replicas' values make it up; unknown tensors are missing.
        placements: tensor -> placement on two replicas if its samples are in order; None if they cannot be.
        size_cuts: tensors whose elements are row numbers, which differ between part and whole -> how the rows that they
            number are cut.
        strides: of row numbers, the distance between two.
        permutations: operator that sorts all rows -> how the rows that it numbers are cut.
        sorted_columns: sorted numbers of columns, of which none is negative -> a number that all are below.
        statistics: (reading node, operand) -> whole-batch statistic that is needed.
        rescaled: (reading node, operand) -> rescaling that is needed.
    """

    graph: Graph
    view: OperatorView
    counting: bool = False
    given: Mapping[TensorKey, State | None] = field(default_factory=dict)
    states: dict[TensorKey, State] = field(default_factory=dict)
    placements: dict[TensorKey, Placement | None] = field(default_factory=dict)
    size_cuts: dict[TensorKey, Cuts] = field(default_factory=dict)
    strides: dict[TensorKey, int] = field(default_factory=dict)
    permutations: dict[str, Cuts] = field(default_factory=dict)
    sorted_columns: dict[TensorKey, int] = field(default_factory=dict)
    statistics: dict[tuple[fx.Node, fx.Node], NeededStatistic] = field(default_factory=dict)
    rescaled: dict[tuple[fx.Node, fx.Node], RescaledOperand] = field(default_factory=dict)

    def __post_init__(self) -> None:
        code = self.graph.code.fx
        self.memory = alias_groups(code)
        self.gone: set[TensorKey] = set()  # tensors whose memory has unknown contents
        self.nodes = {str(n.meta["name"]): n for n in code.nodes if n.op == "call_function"}
        self.masks = find_masks(code)
        self.buffers: dict[str, str] = {}  # buffer that would differ between replicas -> operator
        self.placements |= {key: sample_order_placement(tensor) for key, tensor in graph_tensors(code)}
        sources = {key: self.given.get(key, self.placements[key]) for key in self.view.sources}
        self.states |= {key: state for key, state in sources.items() if state is not None}

    def key_of(self, node: fx.Node) -> TensorKey:
        """Return the key of a node's tensor; views of the same tensor share the first one's key."""
        key = tensor_key(node)
        return self.view.aliases.get(key[0], key)

    def lose(self, step: OperatorNode) -> None:
        """Forget all tensors that share the memory which an operator of unknown result writes."""
        if written := {self.memory[argument] for argument in written_arguments(self.nodes[step.name])}:
            self._forget(written)

    def _forget(self, memories: Collection[fx.Node]) -> None:
        """Forget all tensors that share one of these memories."""
        self.gone |= {tensor_key(node) for node, memory in self.memory.items() if memory in memories}
        self.states = {key: state for key, state in self.states.items() if key not in self.gone}

    def write(self, step: OperatorNode) -> None:
        """Record the writes of an operator; a buffer's new value must be replicated."""
        node = self.nodes[step.name]
        if step.call.op in ("leaf", "function"):  # its writes are unknown, and not tracked
            return
        for memory in {self.memory[argument] for argument in written_arguments(node)}:
            self._forget_mixed(memory, [self.states.get(key) for key in step.output_keys])
            if memory.op != "placeholder" or memory.meta["role"][0] != "buffer":
                continue
            if all(self.states.get(key) == REPLICATE for key in step.output_keys) and tensor_key(memory) in self.states:
                continue
            self.buffers.setdefault(str(memory.meta["role"][1]), step.name)
            self._forget([memory])

    def _forget_mixed(self, memory: fx.Node, written: Sequence[State | None]) -> None:
        """Forget memory that is written with another kind of state than its views have: every view sees the write."""
        aliases = [key for node, of in self.memory.items() if of is memory and (key := tensor_key(node)) in self.states]
        kinds = {type(state) for state in (*(self.states[key] for key in aliases), *written)}
        if not (kinds <= {Replicate} or kinds <= {Shard}):
            self._forget([memory])


def nodes_from_inputs(code: fx.Graph) -> set[fx.Node]:
    """Return nodes that depend only on inputs, constants and unwritten buffers: on no parameter or random number."""
    memory = alias_groups(code)
    written = {memory[argument] for node in code.nodes for argument in written_arguments(node)}
    for node in code.nodes:
        if unwrap_settings(node.target) is batch_norm:  # running statistics depend on parameters
            written |= {memory[argument] for argument in node.args[4:6] if isinstance(argument, fx.Node)}
    nodes: set[fx.Node] = set()
    for node in code.nodes:
        if memory[node] in written:
            continue
        if node.op == "placeholder":
            if node.meta["role"][0] in ("input", "constant", "buffer", "part"):
                nodes.add(node)
        elif node.op == "call_function" and all(n in nodes for n in node.all_input_nodes):
            target = unwrap_settings(node.target)
            sure = isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded not in target.tags
            if sure or isinstance(target, (SymbolicSize, WholeBatchStatistic)) or target is operator.getitem:
                nodes.add(node)
    return nodes
