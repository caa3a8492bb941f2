"""Transfer functions of the interpretation: the states of an operator's outputs, from those of its inputs.

Three kinds of operands have functions of their own: rows and replicated values (are the rows of a batch's parts those
of the whole batch, in order?), sums over samples, and rows that are scaled by a part's share of the samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from polylane.graph.capture.assign_keys import DrawnPerSlice
from polylane.graph.nodes.facts import bind_arguments, functional_name, unwrap_settings
from polylane.graph.nodes.memory import written_arguments
from polylane.graph.symbolic_sizes import SymbolicSize, is_ragged
from polylane.placement.operator_view import OperatorNode, with_neighbour_cuts
from polylane.placement.placement import PARTIAL, REPLICATE, Partial, Placement, Replicate, Shard
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import OperatorCall, Strategy
from polylane.samples.interpretation.additivity import (
    Additive,
    Proportional,
    ScaledRows,
    State,
    multiply_states,
    power_of_additive,
    power_of_proportional,
    power_of_size,
    proportional,
)
from polylane.samples.interpretation.known_states import Derived, KnownStates, RescaledOperand
from polylane.samples.interpretation.ragged import share_one_mask
from polylane.samples.interpretation.replica_calls import (
    EXPANDING,
    REFORMING,
    compare_rank_calls,
    computes_as_replicas,
    has_same_numbers,
    input_cuts,
    preserves_numbers,
    returns_own_values,
    selects_by_mask,
    strip_gradient_placements,
)
from polylane.samples.interpretation.row_numbers import (
    WRITING_ROWS,
    finds_own_rows,
    numbers_blocks,
    reads_own_bags,
    reads_own_rows,
    selects_own_rows,
    writes_own_rows,
)

# They make numbers of blocks of rows from row numbers.
_NUMBERING = {"mul", "multiply", "add"}
# They return the indices at which a mask is true.
_FINDING = {"nonzero", "nonzero_numpy"}
# They return elements of their input, rearranged.
MOVING = {*REFORMING, *EXPANDING, "alias", "clone", "contiguous", "detach", "permute", "slice", "to", "transpose"}
# One value, or uninitialized memory, in any size.
_FILLED = {"empty", "full", "ones", "zeros"}
# Their result has nothing of their input but its shape.
LIKE_SHAPED = {"empty_like", "ones_like", "zeros_like"}
# Of "other" they read nothing but the dtype and the device.
_LENT_DTYPE = {"to", "type_as"}
# Keyed random numbers: each sample has its own, or all have the same.
_DRAWN = {"rand", "randint", "randn", "randperm"}

_ADDING = {"add", "sub", "subtract", "rsub"}
_MULTIPLYING = {"mul", "multiply"}
_PRODUCTS = {"matmul", "mm", "bmm"}
_SUMMING = {"neg", "negative", "sum", "mean", "t"}
_DIVIDING = {"div", "divide", "true_divide"}


# ---- rows and replicated values ----


def derive_rows(known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
    """Return the output states of an operator whose inputs are all sharded by sample or replicated."""
    if not share_one_mask(node.all_input_nodes, known_states.masks):
        return None  # two masks may select different numbers of rows in a part
    base, in_order = step.call.base, [known_states.placements.get(key) for key in step.output_keys]
    if base == "embedding_bag" and reads_own_bags(known_states, step, in_order[0]):
        return in_order
    if any(placement is None for placement in in_order):
        return None
    if base in REFORMING and step.call.inputs[0].count != step.call.outputs[0].count:
        return None  # a size fixed for another number of samples
    if not step.input_keys and base in _FILLED:
        return _filled(step, replica_call, node, in_order)
    if not step.input_keys and base in _DRAWN:
        return in_order if _draws_alike(step, replica_call, node, in_order[0]) else None
    if not step.input_keys and base == "arange" and step.call.arguments != replica_call.arguments:
        (rows,) = in_order
        start, stride = step.call.arguments.get("start", 0), step.call.arguments.get("step", 1)
        if not isinstance(rows, Shard) or start != 0 or stride != replica_call.arguments.get("step", 1):
            return None
        known_states.size_cuts |= dict.fromkeys(step.output_keys, rows.cuts)
        known_states.strides |= dict.fromkeys(step.output_keys, stride)
        return in_order
    # Row numbers (arange) differ between part and whole. They may be moved around, and may index their own rows;
    # nothing else.
    numbered = [key in known_states.size_cuts for key in step.input_keys]
    if any(numbered) and base in _NUMBERING and numbers_blocks(known_states, step, node, in_order[0]):
        return in_order
    if any(known_states.strides.get(key, 1) != 1 for key in step.input_keys):
        if base not in MOVING or len(numbered) > 1:
            return None  # the first numbers of bags, which name no rows
        known_states.strides |= dict.fromkeys(step.output_keys, known_states.strides[step.input_keys[0]])
    if base == "index" and any(numbered):
        return in_order if reads_own_rows(known_states, step, in_order[0]) else None
    if base in WRITING_ROWS and any(numbered):
        return in_order if writes_own_rows(known_states, step, in_order[0]) else None
    if base in LIKE_SHAPED and has_same_numbers(step.call, replica_call):
        return in_order
    if any(numbered):
        if len(numbered) == 1:
            known_states.size_cuts |= dict.fromkeys(step.output_keys, known_states.size_cuts[step.input_keys[0]])
        if base not in MOVING or len(numbered) > 1:
            return None
    if base in _FINDING or step.call.op == "aten.where.default":
        return in_order if finds_own_rows(known_states, step) else None
    if selects_by_mask(step.call):
        return in_order if selects_own_rows(known_states, step, in_order[0]) else None
    return derive_by_rules(known_states, step, replica_call, node)


def _filled(
    step: OperatorNode, replica_call: OperatorCall, node: fx.Node, in_order: Sequence[Placement | None]
) -> Derived:
    if {**step.call.arguments, "size": ()} == {**replica_call.arguments, "size": ()}:
        return in_order
    # full(size, n) with n a number of samples is proportional, provided that the tensor itself does not grow.
    value = bind_arguments(node)[1].get("fill_value")
    is_same = {**step.call.arguments, "size": (), "fill_value": 0} == {
        **replica_call.arguments,
        "size": (),
        "fill_value": 0,
    }
    power = power_of_size(value) if isinstance(value, fx.Node) and isinstance(value.target, SymbolicSize) else None
    return [proportional(power)] if power is not None and is_same and in_order == [REPLICATE] else None


def _draws_alike(step: OperatorNode, replica_call: OperatorCall, node: fx.Node, placement: Placement | None) -> bool:
    """Return whether a part draws the random numbers of its own samples, or all parts draw the same."""
    if not step.call.prefix or isinstance(unwrap_settings(node.target), DrawnPerSlice):
        return False
    is_same = {**step.call.arguments, "size": ()} == {**replica_call.arguments, "size": ()}
    return is_same and node.args[2] == (placement.dim if isinstance(placement, Shard) else None)


def derive_by_rules(
    known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node
) -> Derived:
    states = [known_states.states[key] for key in step.input_keys]
    call = as_functional(known_states, step, node)
    lender = call.arguments.get("other") if call.base in _LENT_DTYPE else None
    # The first strategy whose input placements are the states, and whose rank calls are a replica's, proves the
    # outputs.
    for strategy in strategies(call):
        read = strip_gradient_placements(strategy.inputs)
        if lender is not None:  # of which nothing but its dtype is read
            read[lender.index] = states[lender.index]
        if read != states:
            continue
        if any(isinstance(p, Partial) for p in strategy.outputs):
            if all(isinstance(p, Partial) for p in strategy.outputs):
                power = _power_of_sum(node, call, replica_call, strategy)
                if power is not None:
                    return [Additive(power)] * len(step.output_keys)
        elif returns_own_values(strategy, call, replica_call) and computes_as_replicas(
            node, call, replica_call, strategy
        ):
            return strip_gradient_placements(strategy.outputs)
    return None


def as_functional(known_states: KnownStates, step: OperatorNode, node: fx.Node) -> OperatorCall:
    call = with_neighbour_cuts(step.call, input_cuts(step, known_states.states))
    if written_arguments(node):
        call = replace(call, op=functional_name(node) or call.op, written_inputs=frozenset())
    return call


def _power_of_sum(node: fx.Node, call: OperatorCall, replica_call: OperatorCall, strategy: Strategy) -> int | None:
    """Return the power with which parts are additive where a rule gives two ranks a partial sum; None if unknown."""
    if any(a.shape != b.shape for a, b in zip(call.outputs, replica_call.outputs, strict=True)):
        return None
    if isinstance(unwrap_settings(node.target), DrawnPerSlice) or not call.op.startswith("aten."):
        return None
    if call.prefix and any(isinstance(p, Shard) for p in strategy.inputs) and node.args[2] is None:
        return None  # random numbers not bound to samples
    comparison = compare_rank_calls(node, call, replica_call, strategy)
    if comparison.is_same:
        return 0
    ragged = any(is_ragged(n.meta.get("val")) for n in node.all_input_nodes)
    return 1 if comparison.is_share_of_mean and not ragged else None


# ---- additive and proportional values ----


def derive_sums(known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
    """Return the output states of an operator on additive, proportional and replicated values."""
    base, placements = step.call.base, [known_states.placements.get(key) for key in step.output_keys]
    if any(placement is None or isinstance(placement, Shard) for placement in placements):
        return None
    if base in LIKE_SHAPED and has_same_numbers(step.call, replica_call):
        return placements
    if base in _ADDING | _MULTIPLYING | _DIVIDING and not written_arguments(node):
        names = bind_arguments(node)[1]
        left, right = (_operand(known_states, names[name]) for name in ("self", "other"))
        if left is None or right is None or isinstance(left, Shard) or isinstance(right, Shard):
            return None
        if base in _ADDING:
            return _sum(known_states, step, replica_call, node, left, right)
        if base in _DIVIDING and step.call.arguments.get("rounding_mode") is not None:
            return None
        return multiply_states(left, right, -1 if base in _DIVIDING else 1)
    return _linear(known_states, step, replica_call, node)


def _operand(known_states: KnownStates, value: Any) -> State | None:
    """Return the state of an argument, which may be a number or a size."""
    if isinstance(value, fx.Node):
        if isinstance(value.target, SymbolicSize):
            power = power_of_size(value)
            return None if power is None else proportional(power)
        return (
            known_states.states.get(known_states.key_of(value)) if isinstance(value.meta.get("val"), Tensor) else None
        )
    return REPLICATE if isinstance(value, (int, float, complex)) else None


def _sum(
    known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node, left: State, right: State
) -> Derived:
    if step.call.arguments.get("alpha") != replica_call.arguments.get("alpha"):
        return None
    a, b = power_of_proportional(left), power_of_proportional(right)
    if a is not None and a == b:
        return [left]
    powers = power_of_additive(left), power_of_additive(right)
    if None in powers:
        return None
    if powers[0] == powers[1]:
        return [Additive(powers[0] or 0)]
    # A sum is added to a mean.
    arguments = bind_arguments(node)[1]
    return (
        [Additive(1)]
        if _rescale_to_means(known_states, node, [arguments["self"], arguments["other"]], powers)
        else None
    )


def _rescale_to_means(
    known_states: KnownStates, node: fx.Node, values: Sequence[Any], powers: Sequence[int | None]
) -> bool:
    """Ask that all additive operands of an operator be made means; return whether they can be."""
    rescalings = [(value, 1 - power) for value, power in zip(values, powers, strict=True) if power not in (None, 1)]
    tensors = all(isinstance(value, fx.Node) and isinstance(value.meta.get("val"), Tensor) for value, _ in rescalings)
    if not known_states.counting or not tensors:
        return False
    known_states.rescaled |= {(node, value): RescaledOperand(node, value, power) for value, power in rescalings}
    return True


def _linear(known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
    """Return the states of an operator that is linear in its additive operands, all others being replicated."""
    if step.call.arguments.keys() != replica_call.arguments.keys() or not has_same_numbers(step.call, replica_call):
        return None
    states = [known_states.states[key] for key in step.input_keys]
    if preserves_numbers(step.call):
        return [states[0]]
    for power in {p for s in states if s != REPLICATE and (p := power_of_additive(s)) is not None}:
        # Replicated operands may be taken as constants (exact), or, for power 1, as means like the others
        # (every).
        exact = [PARTIAL if s != REPLICATE and power_of_additive(s) == power else s for s in states]
        every = [PARTIAL if power_of_additive(s) == power else s for s in states]
        for placements in (exact, every):
            if _is_linear(known_states, step, replica_call, node, placements):
                scaled = {power_of_proportional(s) for s, p in zip(states, placements, strict=True) if p == PARTIAL}
                only = next(iter(scaled)) if len(scaled) == 1 else None
                return [Additive(power) if only is None else proportional(only)] * len(step.output_keys)
    # Sums and means side by side, as in stack([a sum, a mean]).
    values = [value for value in node.all_input_nodes if isinstance(value.meta.get("val"), Tensor)]
    powers = [power_of_additive(known_states.states.get(known_states.key_of(value))) for value in values]
    placements = [s if power_of_additive(s) is None else PARTIAL for s in states]
    if (
        known_states.counting
        and PARTIAL in placements
        and _is_linear(known_states, step, replica_call, node, placements)
    ):
        return [Additive(1)] * len(step.output_keys) if _rescale_to_means(known_states, node, values, powers) else None
    return None


def _is_linear(
    known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node, placements: Sequence[Any]
) -> bool:
    call = as_functional(known_states, step, node)
    fitting = (s for s in strategies(call) if strip_gradient_placements(s.inputs) == list(placements))
    partial = (s for s in fitting if s.outputs and all(isinstance(p, Partial) for p in s.outputs))
    return any(compare_rank_calls(node, call, replica_call, strategy).is_same for strategy in partial)


# ---- rows scaled by a power of the share ----


def derive_scaled(known_states: KnownStates, step: OperatorNode, replica_call: OperatorCall, node: fx.Node) -> Derived:
    """Return the states of an operator that is linear in its scaled operands: as unscaled, times all scales."""
    if (
        known_states.counting
        or written_arguments(node)
        or any(key in known_states.size_cuts for key in step.input_keys)
    ):
        return None  # whole-batch counts make scales unnecessary
    names = bind_arguments(node)[1]
    power = _scale_of(known_states, step.call, {name: v for name, v in names.items() if isinstance(v, fx.Node)})
    if power is None:
        return None
    sizes = {name: step.call.arguments[name] for name, v in names.items() if _is_size(v)}
    # Tentatively remove the scales from the operands, derive, and put them back.
    old_states = dict(known_states.states)
    known_states.states |= {key: _remove_scale(known_states.states[key]) for key in step.input_keys}
    output_states = derive_by_rules(
        known_states, step, replace(replica_call, arguments={**replica_call.arguments, **sizes}), node
    )
    known_states.states = old_states
    return (
        None
        if output_states is None
        else [None if state is None else _multiply_by_share(state, power) for state in output_states]
    )


def _scale_of(known_states: KnownStates, call: OperatorCall, operands: Mapping[str, fx.Node]) -> int | None:
    """Return the power of the share that scales an operator's value; None if it has none, or is unknown."""
    powers = {name: _scale(known_states, value) for name, value in operands.items()}
    if None in powers.values() or not any(powers.values()):
        return None
    scales = {name: power or 0 for name, power in powers.items()}
    if call.base in _MULTIPLYING | _PRODUCTS:
        return sum(scales.values())
    if call.base in _DIVIDING and call.arguments.get("rounding_mode") is None:
        return scales.get("self", 0) - scales.get("other", 0)
    if call.base in _ADDING:
        is_equal = scales.keys() == {"self", "other"} and scales["self"] == scales["other"]
        return scales["self"] if is_equal else None
    linear = call.base in MOVING | _SUMMING and not any(p for name, p in scales.items() if name != "self")
    return scales.get("self") if linear else None


def _scale(known_states: KnownStates, value: fx.Node) -> int | None:
    if isinstance(value.target, SymbolicSize):
        return power_of_size(value)
    state = known_states.states.get(known_states.key_of(value)) if isinstance(value.meta.get("val"), Tensor) else None
    if isinstance(state, (ScaledRows, Proportional)):
        return state.power
    return 0 if isinstance(state, (Shard, Replicate)) else None


def _is_size(value: Any) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.target, SymbolicSize)


def _remove_scale(state: State) -> State:
    if isinstance(state, ScaledRows):
        return state.rows
    return REPLICATE if isinstance(state, Proportional) else state


def _multiply_by_share(state: State, power: int) -> State | None:
    """Return the state of a value times a power of the part's share."""
    if isinstance(state, Shard):
        return ScaledRows(state, power) if power else state
    if isinstance(state, Additive):
        return Additive(state.power - power)
    return proportional(power) if state == REPLICATE else None
