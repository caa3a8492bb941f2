"""Registry of sharding rules: the rule of each operator, and the strategies of a call: the rule's and two defaults."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import TypeVar

import torch

from polylane.errors import PolylaneError
from polylane.graph.nodes.facts import find_operator
from polylane.placement import rules
from polylane.placement.placement import REPLICATE, REPLICATE_PARTIAL_GRAD, Replicate, Shard, is_valid_placement
from polylane.placement.strategy import OperatorCall, Strategy

Rule = Callable[[OperatorCall], Iterable[Strategy]]
R = TypeVar("R", bound=Rule)

_RULES: dict[str, Rule] = {}
_COMPOSING: set[str] = set()


def rule(*operators: str, composes: bool = False) -> Callable[[R], R]:
    """Register a rule for operators by their names without library and overload ("linear").

    Args:
        operators: names of torch's operators that the rule is for.
        composes: whether its strategies can be combined on two axes even where one of them communicates inside; set it
            only for operators that tests/placement/rules/test_two_axes.py tries.
    """

    def register(function: R) -> R:
        for name in operators:
            if name in _RULES:
                raise ValueError(f"{name} has a rule already")
            _RULES[name] = function
        _COMPOSING.update(operators if composes else ())
        return function

    return register


@cache
def _load() -> None:
    for module in pkgutil.iter_modules(rules.__path__):
        importlib.import_module(f"{rules.__name__}.{module.name}")


def rule_of(op: str) -> Rule | None:
    """Return the rule of an operator ("aten.linear.default"); operators that torch tags as pointwise share one."""
    _load()
    if not op.startswith("aten."):
        return None
    base = op.split(".")[1]
    if base in _RULES:
        return _RULES[base]
    return _RULES["pointwise"] if is_pointwise(op) else None


def composable_operators() -> frozenset[str]:
    """Return the operators whose strategies combine on two axes even where one of them communicates inside."""
    _load()
    return frozenset(_COMPOSING)


@cache
def is_pointwise(op: str) -> bool:
    """Return whether torch tags an operator as pointwise."""
    function = find_operator(op)
    return function is not None and torch.Tag.pointwise in function.tags


def strategies(call: OperatorCall) -> tuple[Strategy, ...]:
    """Return every way to compute a call on the ranks of an axis; the first computes it whole on each of them."""
    return tuple(iterate_strategies(call))


def iterate_strategies(call: OperatorCall) -> Iterator[Strategy]:
    """Yield the strategies of :func:`strategies`; the rule runs only as far as these are taken."""
    # Rules may reach the same placements in two ways: keep the first, so that the solver has no duplicates.
    distinct = set[object]()
    for strategy in _offered_strategies(call):
        _check(call, strategy)
        placements = strategy.inputs, strategy.outputs
        if placements not in distinct:
            distinct.add(placements)
            yield strategy


def _offered_strategies(call: OperatorCall) -> Iterator[Strategy]:
    operator_rule = rule_of(call.op)
    yield call.strategy("replicate", {}, REPLICATE, default=REPLICATE)
    # In-place writes and the user's own Python may not be linear in the gradient.
    if call.op.startswith("aten.") and not call.written_inputs:
        # A backward pass is linear in the gradient: from partial gradients it makes partial gradients.
        yield call.strategy("replicate, with partial gradients", {}, REPLICATE_PARTIAL_GRAD)
    if operator_rule is not None:
        # A size that depends on data is another one in the next step: no cut of the example's would fit it.
        offered = (strategy for strategy in operator_rule(call) if not _cuts_unknown_size(call, strategy))
        yield from (strategy for strategy in offered if not _divides_sparse(call, strategy))


def _divides_sparse(call: OperatorCall, strategy: Strategy) -> bool:
    """Return whether a strategy has ranks hold parts, or summands, of a sparse tensor."""
    pairs = [*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)]
    return any(value.is_sparse and not isinstance(placement, Replicate) for value, placement in pairs)


def _cuts_unknown_size(call: OperatorCall, strategy: Strategy) -> bool:
    """Return whether a strategy cuts a dimension whose size depends on data, or writes such a size into a call."""
    pairs = [*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)]
    if strategy.local is not None and any(value.ragged for value, _ in pairs):
        return True
    return any(isinstance(placement, Shard) and placement.dim in value.ragged for value, placement in pairs)


def _check(call: OperatorCall, strategy: Strategy) -> None:
    pairs = [*zip(call.inputs, strategy.inputs, strict=True), *zip(call.outputs, strategy.outputs, strict=True)]
    for value, placement in pairs:
        if not is_valid_placement(placement, value.shape, call.degree):
            raise UnfitStrategy(
                f"{call.op} has tensors whose lengths do not go together: by its rule ({strategy.name}) {value.shape} "
                f"would be {placement}, {placement!r}"
            )


class UnfitStrategy(PolylaneError, ValueError):
    """A strategy does not fit the shapes of a call: they are not those of a call that can be made."""
