"""Sharding rules of keyed random operators: a rank draws exactly the numbers of its part of the value."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.kernels.random_region import draw_locally
from polylane.placement.rules.by_dimension import (
    broadcast_input_labels,
    label_dimensions,
    partial_sums,
    strategies_by_dimension,
)
from polylane.placement.rules.pointwise import pointwise
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, RankCall, Strategy

# One number per sample and channel: later dimensions do not enter the drawn value's shape.
_OF_CHANNELS = frozenset(("feature_dropout", "feature_alpha_dropout"))


@rule("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout")
def dropout(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; all ranks drop the same elements of their partial sums, so that plain dropout is linear."""
    if call.prefix:
        yield from drawn(call)
    elif not (call["train"] and call["p"] > 0):
        yield from pointwise(call)  # evaluation, or p = 0: the identity
    else:
        return
    if "alpha" not in call.base and not call.written_inputs:
        yield from partial_sums(call, call["input"])


@rule("rrelu")
def rrelu(call: OperatorCall) -> Iterator[Strategy]:
    """Any dimension; in evaluation a leaky relu."""
    yield from drawn(call) if call.prefix else () if call["training"] else pointwise(call)


@rule("multinomial")
def multinomial(call: OperatorCall) -> Iterator[Strategy]:
    """Rows; a draw depends on all probabilities of its row."""
    rows = ["r"] if call["self"].dim == 2 else []
    if call.prefix and not call.written_inputs:
        yield from strategies_by_dimension(
            call, [[*rows, None]], [[*rows, None]], names={"r": "rows"}, local=draw_locally
        )


@rule(
    "bernoulli", "exponential", "normal", "normal_functional", "rand_like", "randint_like", "randn_like", "uniform"
)  # fmt: skip
def drawn(call: OperatorCall) -> Iterator[Strategy]:
    """Random values in the shape of the inputs: any dimension."""
    if call.prefix and not call.written_inputs:
        dim_labels = label_dimensions(call.outputs[0])
        yield from strategies_by_dimension(
            call, broadcast_input_labels(call, dim_labels), [dim_labels], local=_draw_part
        )


def _draw_part(edit: RankCall) -> None:
    if not (edit.call.base in _OF_CHANNELS and edit.output_shard().dim > 1):
        draw_locally(edit)
