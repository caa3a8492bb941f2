"""Recurrent layers over sequences of several lengths, as operators on padded batches: each sample has its own rows.

torch packs such a batch into one tensor without the padding, one point in time after the other, each for all samples:

    lengths 3, 1      padded  a b c   packed  a d b c      its sizes depend on the data, and no row is a sample's own
                              d . .

Here the layer takes the padded batch and the lengths, packs and unpacks inside, and gives a padded batch: what it
computes of a sample depends on that sample alone, so that it is divided as ``aten.lstm.input`` is.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from polylane.graph.operators.keyed_random import dropout

RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")


class PackedRecurrent:
    """``aten.lstm.input`` (or gru, rnn_tanh, rnn_relu), batch first, of which each sample ends after its own length.

    Results beyond a sample's end are zeros; its last states are those at its own end.

    Args:
        kind: name of torch's operator, one of RECURRENT.
    """

    __module__ = "polylane"

    def __init__(self, kind: str) -> None:
        self.kind = self.__name__ = kind

    def __call__(
        self, part: Any, salt: int | None, batch_dim: int | None, x: Tensor, hx: Any, weights: Sequence[Tensor],
        biases: bool, layers: int, p: float, train: bool, bidirectional: bool, batch_first: bool, *,
        lengths: Tensor, in_order: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        """Run the layers, as torch does on packed sequences, with keyed dropout between them.

        Args:
            part, salt, batch_dim: as of every keyed operator; without a salt torch's own generator draws.
            x: padded batch, (samples, times, features).
            lengths: number of times of each sample.
            in_order: whether the samples must come longest first, as torch then requires.
        """
        function: Any = getattr(torch, self.kind)
        if isinstance(x, FakeTensor) or x.is_meta:  # the lengths are not known: as if all were the longest
            return tuple(function(x, hx, weights, biases, layers, p, train, bidirectional, True))
        ends, order, back = lengths.cpu(), None, None
        if not in_order:
            ends, order = torch.sort(ends, descending=True)  # as torch's own function does
            back = torch.argsort(order).to(x.device)
            order = order.to(x.device)
        states = [hx] if isinstance(hx, Tensor) else list(hx)
        if order is not None:
            x, states = x.index_select(0, order), [state.index_select(1, order) for state in states]
        keyed = salt is not None and train and p > 0
        runs, own_p = (layers, 0.0) if keyed else (1, p)
        weight_count, wide = len(weights) // runs, states[0].shape[0] // runs
        final_states: list[list[Tensor]] = []
        for run in range(runs):
            data, sizes, *_ = pack_padded_sequence(x, ends, batch_first=True)
            run_states = [state[run * wide : (run + 1) * wide] for state in states]
            run_hx = run_states[0] if isinstance(hx, Tensor) else run_states
            of_run = weights[run * weight_count : (run + 1) * weight_count]
            data, *result = function(data, sizes, run_hx, of_run, biases, layers // runs, own_p, train, bidirectional)
            final_states.append(result)
            x, _ = pad_packed_sequence(PackedSequence(data, sizes), batch_first=True, total_length=x.shape[1])
            if run < runs - 1:
                # In the batch's own order: the numbers belong to samples.
                x = x if back is None else x.index_select(0, back)
                x = dropout(part, (salt or 0) + run, 0, x, p, train)
                x = x if order is None else x.index_select(0, order)
        states = [torch.cat(of_layers) for of_layers in zip(*final_states, strict=True)]
        if back is not None:
            x, states = x.index_select(0, back), [state.index_select(1, back) for state in states]
        return (x, *states)

    @staticmethod
    def draws(args: Sequence[Any]) -> bool:
        """Return whether a call with these arguments drops something and has no key yet."""
        layers, p, train = args[7:10]
        return args[1] is None and bool(train) and p > 0 and layers > 1
