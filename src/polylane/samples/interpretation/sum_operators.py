"""Operators on additive and proportional values, and on rows scaled by them: the algebra of sums over samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, fx

from polylane.graph.capture.aliasing import written_arguments
from polylane.graph.symbolic_sizes import SymbolicSize
from polylane.placement.operator_view import OperatorNode, bind_arguments
from polylane.placement.placement import PARTIAL, REPLICATE, Partial, Replicate, Shard
from polylane.placement.rules.registry import strategies
from polylane.placement.strategy import OperatorCall
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
from polylane.samples.interpretation.replica_calls import (
    compare_rank_calls,
    has_same_numbers,
    preserves_numbers,
    strip_gradient_placements,
)
from polylane.samples.interpretation.row_operators import MOVING, as_functional, derive_by_rules

_ADDING = {"add", "sub", "subtract", "rsub"}
_MULTIPLYING = {"mul", "multiply"}
_PRODUCTS = {"matmul", "mm", "bmm"}
_SUMMING = {"neg", "negative", "sum", "mean", "t"}
_DIVIDING = {"div", "divide", "true_divide"}


def derive_sums(known: KnownStates, step: OperatorNode, own: OperatorCall, node: fx.Node) -> Derived:
    """Return the output states of an operator on additive, proportional and replicated values."""
    base, placements = step.call.base, [known.placements.get(key) for key in step.output_keys]
    if any(placement is None or isinstance(placement, Shard) for placement in placements):
        return None
    if base in _ADDING | _MULTIPLYING | _DIVIDING and not written_arguments(node):
        names = bind_arguments(node, node.args, node.kwargs)[1]
        left, right = (_operand(known, names[name]) for name in ("self", "other"))
        if left is None or right is None or isinstance(left, Shard) or isinstance(right, Shard):
            return None
        if base in _ADDING:
            return _sum(known, step, own, node, left, right)
        if base in _DIVIDING and step.call.arguments.get("rounding_mode") is not None:
            return None
        return multiply_states(left, right, -1 if base in _DIVIDING else 1)
    return _linear(known, step, own, node)


def _operand(known: KnownStates, value: Any) -> State | None:
    """Return the state of an argument, which may be a number or a size."""
    if isinstance(value, fx.Node):
        if isinstance(value.target, SymbolicSize):
            power = power_of_size(value)
            return None if power is None else proportional(power)
        return known.states.get(known.key_of(value)) if isinstance(value.meta.get("val"), Tensor) else None
    return REPLICATE if isinstance(value, (int, float, complex)) else None


def _sum(
    known: KnownStates, step: OperatorNode, own: OperatorCall, node: fx.Node, left: State, right: State
) -> Derived:
    if step.call.arguments.get("alpha") != own.arguments.get("alpha"):
        return None
    a, b = power_of_proportional(left), power_of_proportional(right)
    if a is not None and a == b:
        return [left]
    powers = power_of_additive(left), power_of_additive(right)
    if None in powers:
        return None
    if powers[0] == powers[1]:
        return [Additive(powers[0] or 0)]
    if not known.counting:
        return None
    # A sum is added to a mean: rescale the operands that are not a mean.
    arguments = bind_arguments(node, node.args, node.kwargs)[1]
    for name, power in zip(("self", "other"), powers, strict=True):
        if power != 1:
            value = arguments[name]
            if not isinstance(value, fx.Node) or not isinstance(value.meta.get("val"), Tensor):
                return None
            known.rescaled[node, value] = RescaledOperand(node, value, 1 - (power or 0))
    return [Additive(1)]


def _linear(known: KnownStates, step: OperatorNode, own: OperatorCall, node: fx.Node) -> Derived:
    """Return the states of an operator that is linear in its additive operands, all others being replicated."""
    if step.call.arguments.keys() != own.arguments.keys() or not has_same_numbers(step.call, own):
        return None
    states = [known.states[key] for key in step.input_keys]
    if preserves_numbers(step.call):
        return [states[0]]
    for power in {p for s in states if s != REPLICATE and (p := power_of_additive(s)) is not None}:
        # Replicated operands may be taken as constants (exact), or, for power 1, as means like the others
        # (every).
        exact = [PARTIAL if s != REPLICATE and power_of_additive(s) == power else s for s in states]
        every = [PARTIAL if power_of_additive(s) == power else s for s in states]
        for given in (exact, every):
            if _is_linear(known, step, own, node, given):
                scaled = {power_of_proportional(s) for s, p in zip(states, given, strict=True) if p == PARTIAL}
                only = next(iter(scaled)) if len(scaled) == 1 else None
                return [Additive(power) if only is None else proportional(only)] * len(step.output_keys)
    return None


def _is_linear(known: KnownStates, step: OperatorNode, own: OperatorCall, node: fx.Node, given: Sequence[Any]) -> bool:
    call = as_functional(known, step, node)
    fitting = (s for s in strategies(call) if strip_gradient_placements(s.inputs) == list(given))
    partial = (s for s in fitting if s.outputs and all(isinstance(p, Partial) for p in s.outputs))
    return any(compare_rank_calls(node, call, own, strategy).is_same for strategy in partial)


# ---- rows scaled by a power of the share ----


def derive_scaled(known: KnownStates, step: OperatorNode, own: OperatorCall, node: fx.Node) -> Derived:
    """Return the states of an operator that is linear in its scaled operands: as unscaled, times all scales."""
    if known.counting or written_arguments(node) or any(key in known.size_cuts for key in step.input_keys):
        return None  # whole-batch counts make scales unnecessary
    names = bind_arguments(node, node.args, node.kwargs)[1]
    power = _scale_of(known, step.call, {name: v for name, v in names.items() if isinstance(v, fx.Node)})
    if power is None:
        return None
    sizes = {name: step.call.arguments[name] for name, v in names.items() if _is_size(v)}
    # Tentatively remove the scales from the operands, derive, and put them back.
    before = dict(known.states)
    known.states |= {key: _remove_scale(known.states[key]) for key in step.input_keys}
    found = derive_by_rules(known, step, replace(own, arguments={**own.arguments, **sizes}), node)
    known.states = before
    return None if found is None else [None if state is None else _multiply_by_share(state, power) for state in found]


def _scale_of(known: KnownStates, call: OperatorCall, operands: Mapping[str, fx.Node]) -> int | None:
    """Return the power of the share that scales an operator's value; None if it has none, or is unknown."""
    powers = {name: _scale(known, value) for name, value in operands.items()}
    if None in powers.values() or not any(powers.values()):
        return None
    scales = {name: power or 0 for name, power in powers.items()}
    if call.base in _MULTIPLYING | _PRODUCTS:
        return sum(scales.values())
    if call.base in _DIVIDING and call.arguments.get("rounding_mode") is None:
        return scales.get("self", 0) - scales.get("other", 0)
    if call.base in _ADDING:
        alike = scales.keys() == {"self", "other"} and scales["self"] == scales["other"]
        return scales["self"] if alike else None
    linear = call.base in MOVING | _SUMMING and not any(p for name, p in scales.items() if name != "self")
    return scales.get("self") if linear else None


def _scale(known: KnownStates, value: fx.Node) -> int | None:
    if isinstance(value.target, SymbolicSize):
        return power_of_size(value)
    state = known.states.get(known.key_of(value)) if isinstance(value.meta.get("val"), Tensor) else None
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
