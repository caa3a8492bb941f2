"""Abstract interpretation of a captured graph: the state of every value, that is how the parts of a batch make it up.

Starting from the inputs, each operator is interpreted by its placement rule
(:mod:`polylane.samples.interpretation.replica_calls`) or by the algebra of additive values
(:mod:`polylane.samples.interpretation.additivity`). Nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from polylane.errors import PolylaneError
from polylane.graph.capture.leaves import LeafCall
from polylane.graph.graph import Graph, Node
from polylane.graph.nodes.facts import base_name, bind_arguments
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.operators.whole_batch_counts import CombineParts, WholeBatchStatistic
from polylane.graph.python_state.module_paths import is_inside
from polylane.graph.symbolic_sizes import SymbolicSize, is_ragged
from polylane.placement.operator_view import OperatorNode, TensorKey, view_operators
from polylane.placement.placement import REPLICATE, Replicate, Shard
from polylane.placement.rules.registry import UnfitStrategy
from polylane.placement.strategy import OperatorCall
from polylane.samples.interpretation.additivity import (
    IN_OTHER_ORDER,
    OWN,
    REPLICAS,
    WHOLE,
    Additive,
    Proportional,
    State,
    power_of_additive,
    power_of_size,
)
from polylane.samples.interpretation.check_conditions import check_holds_by_parts
from polylane.samples.interpretation.concatenated_rows import derive_concatenated
from polylane.samples.interpretation.known_states import Derived, KnownStates, NeededStatistic, nodes_from_inputs
from polylane.samples.interpretation.regrouped_rows import derive_regrouped
from polylane.samples.interpretation.transfer_functions import derive_rows, derive_scaled, derive_sums

# Reductions to an extreme, which combine over parts by the same extreme.
_EXTREMES = {"max": CombineParts.MAX, "amax": CombineParts.MAX, "any": CombineParts.MAX}
_EXTREMES |= {"min": CombineParts.MIN, "amin": CombineParts.MIN, "all": CombineParts.MIN}


# Proof of an autograd function: its node, call and input states -> output states, or None if not proven.
Functions = Callable[[fx.Node, OperatorNode, Sequence[State]], Sequence[State] | None]


def interpret(
    graph: Graph,
    per_sample: Collection[str] = (),
    *,
    counting: bool = False,
    given: Mapping[TensorKey, State | None] | None = None,
    functions: Functions | None = None,
) -> AbstractInterpreter | None:
    """Interpret a graph to its end; None if it does not hold for the numbers of samples that are tried.

    Args:
        graph: the captured graph; none of its operators is run.
        per_sample, counting: see :func:`polylane.samples.derivation.derive_composition`.
        given: states of placeholders that are neither sharded by sample in order nor replicated; None for unknown ones.
        functions: proves custom autograd functions; default: none is proven.
    """
    try:
        # The same operators at two sizes: of the whole batch, and of one of two replicas with half the samples.
        whole_view = view_operators(graph, WHOLE, REPLICAS, ragged=True)
        replica_view = view_operators(graph, OWN, REPLICAS, ragged=True, batch=WHOLE)
    except PolylaneError:
        return None
    walk = AbstractInterpreter(graph, whole_view, counting, given or {}, per_sample=per_sample, functions=functions)
    for step, part in zip(whole_view.operators, replica_view.operators, strict=True):
        walk.interpret_operator(step, part.call)
    return walk


@dataclass
class AbstractInterpreter(KnownStates):
    """Derives the states of a graph's values, operator by operator.

    Attributes:
        per_sample: paths of modules whose own Python, as the user declares, treats samples independently.
        functions: proves custom autograd functions; see :func:`interpret`.
        unproven: nodes that run the user's own Python on samples, without a proof.
        unproven_checks: checks that may raise for a part of a batch and not for the whole, or the other way round.
    """

    per_sample: Collection[str] = ()
    functions: Functions | None = None
    unproven: list[Node] = field(default_factory=list)
    unproven_checks: list[Node] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.described = {node.name: node for node in self.graph.nodes}
        self._of_inputs = nodes_from_inputs(self.graph.code.fx)

    def interpret_operator(self, step: OperatorNode, replica_call: OperatorCall) -> None:
        """Derive the states of one operator's outputs; ``replica_call`` is the call that a replica makes."""
        if step.call.op == "check" and not check_holds_by_parts(self, self.nodes[step.name]):
            self.unproven_checks.append(self.described[step.name])
        output_states = self._derive_states(step, replica_call) if step.output_keys else None
        for index, key in enumerate(step.output_keys):
            state = None if output_states is None else output_states[index]
            if state is not None:
                self.states[key] = state
            else:
                self.lose(step)
        self.write(step)

    # ---- one operator ----

    def _derive_states(self, step: OperatorNode, replica_call: OperatorCall) -> Derived:
        """Return the states of an operator's outputs, if they can be proven."""
        node = self.nodes[step.name]
        if isinstance(node.target, WholeBatchStatistic):
            return self._counted_states(step, node.target)
        if step.call.op in ("leaf", "function"):
            return self._user_python_states(step)
        if step.call.op == "draw":
            return self._drawn_states(step)
        if any(key in self.gone for key in (*step.output_keys, *step.input_keys)):
            return None
        if any(key not in self.states for key in step.input_keys) or _has_unknown_numbers(step.call):
            return None
        sizes = [size for size in node.all_input_nodes if isinstance(size.target, SymbolicSize)]
        if any(power_of_size(size) is None for size in sizes):
            return None  # its values at two and four samples prove nothing for others
        # An in-place write of partial results is proven only by way of statistics.
        try:
            output_states = self._prove_states(step, replica_call, node)
        except UnfitStrategy:  # of a graph that holds for one number of samples alone
            return None
        if output_states is not None and not (
            written_arguments(node) and any(state != REPLICATE for state in output_states)
        ):
            return output_states
        return self._with_statistics(step, replica_call, node) or output_states

    def _prove_states(self, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
        states = [self.states[key] for key in step.input_keys]
        rows = [s for s in states if isinstance(s, (Shard, Replicate))]
        if len(rows) == len(states):
            output_states = derive_rows(self, step, replica_call, node) or derive_sums(self, step, replica_call, node)
        else:
            output_states = derive_sums(self, step, replica_call, node)
        output_states = output_states or derive_concatenated(self, step, node)
        return (
            output_states
            or derive_scaled(self, step, replica_call, node)
            or derive_regrouped(self, step, replica_call, node)
        )

    def _counted_states(self, step: OperatorNode, target: WholeBatchStatistic) -> Derived:
        """Return the state of a whole-batch statistic: replicated, if its parts combine as the statistic does."""
        (key,) = step.input_keys
        state = self.states.get(key)
        value: Any = self.nodes[step.name].args[1]
        extreme = isinstance(value, fx.Node) and _EXTREMES.get(base_name(value)) is target.combine
        extreme = extreme and self._has_extreme(self.key_of(value.all_input_nodes[0]), value)
        if target.combine is CombineParts.SAME:
            return [REPLICATE] if state == REPLICATE else None
        power = {CombineParts.SUM: 0, CombineParts.MEAN: 1}.get(target.combine)
        return [REPLICATE] if extreme or (power is not None and power_of_additive(state) == power) else None

    def _user_python_states(self, step: OperatorNode) -> Derived:
        """Return the states of the user's own Python, of which only its trace or the user's word is known."""
        described = self.described[step.name]
        is_known = all(key in self.states for key in step.input_keys)
        is_known = is_known and not any(isinstance(self.states[key], IN_OTHER_ORDER) for key in step.input_keys)
        # Equal inputs give equal outputs; but a function's gradient may not be, so a differentiable one needs a proof.
        is_equal = is_known and all(self.states[key] == REPLICATE for key in step.input_keys) and not self._grow(step)
        if is_equal and not (step.call.op == "function" and described.requires_grad):
            return [REPLICATE] * len(step.output_keys)
        if is_known and (proven := self._function_states(step)) is not None:
            return proven
        call = getattr(self.nodes[step.name].target, "own", None)
        if is_known and isinstance(call, LeafCall) and call.is_batch_norm:  # replicas share its statistics
            return [self.placements[key] for key in step.output_keys]
        self.unproven.append(described)
        if not is_known or not any(name == "model" or is_inside(described.module, name) for name in self.per_sample):
            return None
        if is_equal:
            return [REPLICATE] * len(step.output_keys)
        mean = Additive(1 if self.graph.loss_is_mean or not self.graph.is_opaque else 0)
        floating = [value.dtype.is_floating_point for value in step.call.outputs]
        return [
            p if isinstance(p, Shard) else mean if p is not None and number else None
            for p, number in zip((self.placements[key] for key in step.output_keys), floating, strict=True)
        ]

    def _drawn_states(self, step: OperatorNode) -> Derived:
        """Return the states of what a function draws: of sizes alone, it is drawn for the whole batch by every part.

        With tensors it is called with a part's own number of samples: then it must not see that number at all.
        """
        placed = [self.placements[key] for key in step.output_keys]
        if not step.input_keys:
            return placed
        is_equal = all(self.states.get(key) == REPLICATE for key in step.input_keys) and not self._grow(step)
        return placed if is_equal and not self.nodes[step.name].target.own.size_positions else None

    def _function_states(self, step: OperatorNode) -> Sequence[State] | None:
        """Return the states of a custom autograd function, if its forward and backward pass prove them."""
        reads = [(key, self.states[key]) for key in step.input_keys]
        if step.call.op != "function" or self.functions is None:
            return None
        if any(key in self.size_cuts or self.placements[key] is None for key in step.input_keys):
            return None
        if any(isinstance(state, (Shard, Replicate)) and state != self.placements[key] for key, state in reads):
            return None
        if any(key in self.gone for key in step.output_keys):
            return None
        return self.functions(self.nodes[step.name], step, [state for _, state in reads])

    def _grow(self, step: OperatorNode) -> bool:
        return any(isinstance(self.placements[key], Shard) or self.placements[key] is None for key in step.output_keys)

    # ---- what can be counted over the whole batch first ----

    def _with_statistics(self, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
        """Return the states if operands that follow from the inputs alone are replaced by whole-batch statistics."""
        if not self.counting:
            return None
        extreme = self._extreme_states(step, node)
        if extreme is not None:
            return extreme
        # Tentatively treat the statistics as replicated, prove again, and restore the states of the operands.
        old_states = dict(self.states)
        statistics: list[NeededStatistic] = []
        for value in node.all_input_nodes:
            statistic = self._statistic(node, value)
            if statistic is not None:
                statistics.append(statistic)
                if isinstance(value.meta.get("val"), Tensor):
                    self.states[self.key_of(value)] = REPLICATE
        if not statistics:
            return None
        with_sizes = (
            replica_call
            if not any(w.combine is None for w in statistics)
            else self._whole_sizes(step, replica_call, node, statistics)
        )
        output_states = self._prove_states(step, with_sizes, node)
        self.states = {**self.states, **{k: s for k, s in old_states.items() if k not in step.output_keys}}
        if output_states is not None:
            self.statistics |= {(w.user, w.value): w for w in statistics}
        return output_states

    def _statistic(self, node: fx.Node, value: fx.Node) -> NeededStatistic | None:
        if isinstance(value.target, SymbolicSize):
            return NeededStatistic(node, value, None) if power_of_size(value) == 1 else None
        if value not in self._of_inputs or not isinstance(value.meta.get("val"), Tensor):
            return None
        state = self.states.get(self.key_of(value))
        if not isinstance(state, (Additive, Proportional)):
            return None
        power = power_of_additive(state)
        combine = None if power is None else {0: CombineParts.SUM, 1: CombineParts.MEAN}.get(power)
        if combine is None or (combine is CombineParts.MEAN and not value.meta["val"].is_floating_point()):
            return None
        return NeededStatistic(node, value, combine)

    def _whole_sizes(
        self, step: OperatorNode, replica_call: OperatorCall, node: fx.Node, statistics: Sequence[NeededStatistic]
    ) -> OperatorCall:
        """Return a replica's call with sizes of the whole batch where these are wanted."""
        sizes = {w.value for w in statistics if w.combine is None}
        named = bind_arguments(node)[1]
        whole_sizes = {name: step.call.arguments[name] for name, value in named.items() if value in sizes}
        return replace(replica_call, arguments={**replica_call.arguments, **whole_sizes})

    def _extreme_states(self, step: OperatorNode, node: fx.Node) -> Derived:
        """Return the state of an extreme over all samples that follows from the inputs alone."""
        combine = _EXTREMES.get(step.call.base)
        single = len(step.input_keys) == 1 and len(step.output_keys) == 1
        if (
            combine is None
            or not single
            or node not in self._of_inputs
            or self.placements[step.output_keys[0]] != REPLICATE
        ):
            return None
        if not self._has_extreme(step.input_keys[0], node) or not node.users:
            return None
        for user in node.users:
            if not isinstance(user.target, WholeBatchStatistic):
                self.statistics[user, node] = NeededStatistic(user, node, combine)
        return [REPLICATE]

    def _has_extreme(self, key: TensorKey, node: fx.Node) -> bool:
        """Return whether the extreme of the parts' extremes is the whole's: rows of which every part has some.

        Not for row numbers, which differ in a part, nor for rows selected by a mask, which may be empty in a part.
        """
        rows = isinstance(self.states.get(key), Shard) and key not in self.size_cuts
        return rows and not any(is_ragged(n.meta.get("val")) for n in node.all_input_nodes)


def _has_unknown_numbers(call: OperatorCall) -> bool:
    """Return whether a call has a data-dependent number of unknown state among its arguments."""
    return any(isinstance(value, fx.Node) for value in tree_leaves(call.arguments))
