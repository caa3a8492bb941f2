"""Recurrent layers: the sequences of a batch are independent of each other."""

from __future__ import annotations

from collections.abc import Iterator

from polylane.placement.call import Call, Edit, Strategy, Value
from polylane.placement.letters import Letters, by_letters
from polylane.placement.placement import Shard
from polylane.placement.region import Regional
from polylane.placement.rules.registry import rule

_STATE: Letters = (None, "b", None)  # (layers * directions, batch, features)


@rule("lstm", "gru", "rnn_tanh", "rnn_relu")
def recurrent(call: Call) -> Iterator[Strategy]:
    """input (T, B, I), or (B, T, I) where ``batch_first``; states (layers * directions, B, H); outputs alike."""
    if not call.op.endswith(".input") or call["input"].dim != 3:
        return  # packed sequences are in one dimension with their steps
    drops = call["dropout"] > 0 and call["train"] and call["num_layers"] > 1
    if drops and not call.prefix:
        return
    sequences: Letters = ("b", None, None) if call["batch_first"] else (None, "b", None)
    states = call["hx"] if isinstance(call["hx"], (list, tuple)) else [call["hx"]]
    inputs: list[Letters] = [(None,) * value.dim for value in call.inputs]
    inputs[call["input"].index] = sequences
    for state in states:
        assert isinstance(state, Value)
        inputs[state.index] = _STATE
    outputs = [sequences, *[_STATE] * len(states)]
    yield from by_letters(call, inputs, outputs, names={"b": "batch"}, local=_drawn if drops else None)


def _drawn(edit: Edit) -> None:
    """Dropout between layers draws the numbers of the sequences in hand."""
    assert edit.strategy is not None
    cut = edit.strategy.outputs[0]
    assert isinstance(cut, Shard)
    edit.target = Regional(edit.target, cut.dim, cut.ranges(edit.index), cut.size)
