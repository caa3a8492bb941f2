"""Pointwise operators: every dimension may be cut, and linear ones may run on summands."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.call import Call, Strategy, by_letters
from polylane.placement.placement import PARTIAL, SHARED
from polylane.placement.rules.registry import rule

_ANY = "abcdefghijklmnopqrstuvwxyz"


@rule("pointwise", "clone", "contiguous", "detach", "alias", "to", "type_as")
def pointwise(call: Call) -> Iterator[Strategy]:
    """Cut one dimension of the output, and of every input that has it and does not broadcast along it."""
    out = call.outputs[0]
    letters = [None if n == 1 else _ANY[d] for d, n in enumerate(out.shape)]
    inputs = []
    for value in call.inputs:
        own = letters[out.dim - value.dim :]
        inputs.append([None if n == 1 else letter for n, letter in zip(value.shape, own, strict=True)])
    yield from by_letters(call, inputs, [letters for _ in call.outputs])
    yield from _of_summands(call)


_LINEAR = frozenset(("neg", "clone", "contiguous", "detach", "alias", "to", "type_as"))
_ADDING = frozenset(("add", "sub"))


def _of_summands(call: Call) -> Iterator[Strategy]:
    if not call.outputs[0].dtype.is_floating_point or any(not v.dtype.is_floating_point for v in call.inputs):
        return
    first = call.inputs[0]
    if call.base in _LINEAR:
        yield call.strategy("summands", {first.index: PARTIAL}, PARTIAL)
    elif call.base in _ADDING and len(call.inputs) == 2:
        yield call.strategy("summands", {}, PARTIAL, default=PARTIAL)
    elif call.base in ("mul", "div"):
        yield call.strategy("summands", {first.index: PARTIAL}, PARTIAL, default=SHARED)
        if call.base == "mul" and len(call.inputs) == 2:
            yield call.strategy("summands", {1: PARTIAL}, PARTIAL, default=SHARED)
