"""Sharding rules of recurrent layers: by samples, the sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.kernels.random_region import draw_locally
from polylane.placement.rules.by_dimension import Letters, label_inputs, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Strategy

_STATE: Letters = (None, "b", None)  # (layers * directions, batch, features)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: OperatorCall) -> Iterator[Strategy]:
    """input (T, B, I), or (B, T, I) with ``batch_first``; states (layers * directions, B, H); outputs alike."""
    if not call.op.endswith(".input") or call["input"].dim != 3:
        return  # packed sequences have samples and steps in one dimension
    drops = call["dropout"] > 0 and call["train"] and call["num_layers"] > 1
    # Dropout without a key would draw other numbers on every rank.
    if drops and not call.prefix:
        return
    sequences: Letters = ("b", None, None) if call["batch_first"] else (None, "b", None)
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    inputs = label_inputs(call, {call["input"].index: sequences, **{state.index: _STATE for state in states}})
    outputs = [sequences, *[_STATE] * len(states)]
    yield from strategies_by_dimension(
        call, inputs, outputs, names={"b": "batch"}, local=draw_locally if drops else None
    )
