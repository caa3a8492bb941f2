"""Sharding rules of recurrent layers and of their cells: by samples, the sequences of a batch."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.kernels.random_region import draw_locally
from polylane.placement.rules.by_dimension import DimLabels, label_inputs, strategies_by_dimension
from polylane.placement.rules.registry import rule
from polylane.placement.strategy import OperatorCall, Strategy

_STATE: DimLabels = (None, "b", None)  # (layers * directions, batch, features)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: OperatorCall) -> Iterator[Strategy]:
    """input (T, B, I), or (B, T, I) with ``batch_first``; states (layers * directions, B, H); outputs alike."""
    if not call.op.endswith(".input") or call["input"].dim != 3:
        return  # packed sequences have samples and steps in one dimension
    drops = call["dropout"] > 0 and call["train"] and call["num_layers"] > 1
    # Dropout without a key would draw other numbers on every rank.
    if drops and not call.prefix:
        return
    sequences: DimLabels = ("b", None, None) if call["batch_first"] else (None, "b", None)
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    labels: dict[int, DimLabels] = {call["input"].index: sequences, **{state.index: _STATE for state in states}}
    if "lengths" in call.arguments:  # sequences of several lengths
        labels[call["lengths"].index] = ("b",)
    inputs = label_inputs(call, labels)
    outputs = [sequences, *[_STATE] * len(states)]
    yield from strategies_by_dimension(
        call, inputs, outputs, names={"b": "batch"}, local=draw_locally if drops else None
    )


@rule("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")
def recurrent_cell(call: OperatorCall) -> Iterator[Strategy]:
    """One step of a layer: input (B, I), states (B, H); every output is a state."""
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    if any(value.dim != 2 for value in (call["input"], *states)):
        return
    rows: DimLabels = ("b", None)
    inputs = label_inputs(call, {value.index: rows for value in (call["input"], *states)})
    yield from strategies_by_dimension(call, inputs, [rows] * len(call.outputs), names={"b": "batch"})
