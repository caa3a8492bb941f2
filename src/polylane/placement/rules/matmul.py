"""Matrix products: by rows of the left matrix, by columns of the right one, or by what is summed over."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.call import Call, Strategy, by_letters
from polylane.placement.rules.registry import rule

_ANY = "abcdefghijlmopqrstuvwxyz"  # without n and k

NAMES = {"n": "columns", "k": "rows"}


@rule("linear")
def linear(call: Call) -> Iterator[Strategy]:
    """x (..., k) W (n, k) + b (n) (Shoeybi et al., Megatron-LM, section 3: columns, then rows)."""
    rows = list(_ANY[: call["input"].dim - 1])
    inputs = [[*rows, "k"], ["n", "k"], *([["n"]] if call["bias"] is not None else [])]
    yield from by_letters(call, inputs, [[*rows, "n"]], names=NAMES, summed="k", added=[2])
