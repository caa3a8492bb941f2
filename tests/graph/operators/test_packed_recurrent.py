"""Recurrent layers on padded batches give what torch gives on packed ones, of every part of the samples alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polylane.graph.nodes.sample_slice import SampleSlice
from polylane.graph.operators.packed_recurrent import PackedRecurrent

KINDS: dict[str, Any] = {"lstm": nn.LSTM, "gru": nn.GRU, "rnn_tanh": nn.RNN}
LENGTHS = torch.tensor([2, 5, 1, 4, 5])


def padded() -> Tensor:
    return torch.randn(5, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def layers(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    return KINDS[kind](3, 4, num_layers=2, batch_first=True, **options).double()


def run(own: Any, kind: str, x: Tensor, lengths: Tensor, part: Any = None, salt: Any = None, **more: Any) -> Any:
    zeros = x.new_zeros(4 if own.bidirectional else 2, len(x), 4)
    states = [zeros[..., : own.proj_size or 4], zeros] if kind == "lstm" else zeros
    settings = (True, 2, own.dropout, True, own.bidirectional, True)
    given = {"lengths": lengths, "in_order": False, **more}
    return PackedRecurrent(kind)(part, salt, 0, x, states, own._flat_weights, *settings, **given)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bidirectional", [False, True])
def test_equal_to_torch(kind: str, bidirectional: bool) -> None:
    own = layers(kind, bidirectional=bidirectional, **({"proj_size": 2} if kind == "lstm" else {}))
    x, other = padded().requires_grad_(), padded().requires_grad_()
    packed, last = own(pack_padded_sequence(other, LENGTHS, batch_first=True, enforce_sorted=False))
    expected = [pad_packed_sequence(packed, batch_first=True, total_length=6)[0], *(last if kind == "lstm" else [last])]
    found = run(own, kind, x, LENGTHS)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)
    torch.autograd.backward(found, [torch.ones_like(each) for each in found])
    torch.autograd.backward(expected, [torch.ones_like(each) for each in expected])
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("drop", [0.0, 0.5])
def test_the_samples_of_a_part_come_out_as_in_the_whole(drop: float) -> None:
    own, x = layers("lstm", dropout=drop, bidirectional=True), padded()
    whole = run(own, "lstm", x, LENGTHS, SampleSlice(5, batch=5, seed=1), 7)
    for first, stop in ((0, 2), (2, 5)):
        part = SampleSlice(stop - first, first=first, batch=5, seed=1)
        own_rows = run(own, "lstm", x[first:stop], LENGTHS[first:stop], part, 7)
        for one, two, dim in zip(own_rows, whole, (0, 1, 1), strict=True):
            torch.testing.assert_close(one, two.narrow(dim, first, stop - first), rtol=1e-12, atol=1e-12)


def test_samples_out_of_order_are_refused_where_torch_refuses_them() -> None:
    own = layers("gru")
    with pytest.raises(RuntimeError, match="sorted in decreasing order"):
        run(own, "gru", padded(), LENGTHS, in_order=True)
    run(own, "gru", padded(), LENGTHS.sort(descending=True).values, in_order=True)
