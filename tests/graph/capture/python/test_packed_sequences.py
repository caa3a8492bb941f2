"""Packed sequences are captured: padded batches and lengths, of which each sample has its own rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from polylane.graph.capture.capture import capture

WORDS = 9


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, WORDS, (5, 4), generator=draw), torch.tensor([4, 3, 3, 2, 1])


class Reader(nn.Module):
    """Words, layers over them, and an output for each time."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.layers = nn.Embedding(WORDS, 3), kind(3, 4, batch_first=True, **options)
        self.out = nn.Linear(self.layers.hidden_size * (2 if self.layers.bidirectional else 1), WORDS)

    def pack(self, text: Tensor, lengths: Tensor, **options: Any) -> PackedSequence:
        return pack_padded_sequence(self.words(text), lengths, batch_first=True, **options)


class Tagger(Reader):
    """Sequences as long as the batch's text, and the time first in between."""

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        out, last = self.layers(self.pack(text, lengths, enforce_sorted=False))
        padded, ends = pad_packed_sequence(out, total_length=text.shape[1])
        assert torch.is_tensor(ends)
        hidden: Tensor = last[0] if isinstance(last, tuple) else last
        return self.out(padded.transpose(0, 1)) + hidden[-1].sum(-1)[:, None, None]


class Shortened(Reader):
    """As long as the longest sequence, and another value beyond each one's end."""

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        state = text.new_zeros(1, len(text), 4, dtype=self.words.weight.dtype)
        out, _ = self.layers(self.pack(text, lengths), state)
        padded: Tensor = self.out(pad_packed_sequence(out, batch_first=True, padding_value=-1.0)[0])
        return F.pad(padded, (0, 0, 0, text.shape[1] - padded.shape[1]))


class Rows(Reader):
    """What lies between two layers is done on the rows of a PackedSequence."""

    def __init__(self, kind: Any) -> None:
        super().__init__(kind)
        self.second = nn.GRU(4, 4)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        out, _ = self.layers(self.pack(text, lengths))
        out = PackedSequence(torch.tanh(out.data), out.batch_sizes, out.sorted_indices, out.unsorted_indices)
        padded, _ = pad_packed_sequence(self.second(out)[0], batch_first=True, total_length=text.shape[1])
        return self.out(padded)


def loss(model: Any, given: Any) -> Tensor:
    return F.cross_entropy(model(*given).flatten(0, 1), given[0].flatten())


def loss_of_rows(model: Any, given: Any) -> Tensor:
    """As captions are learnt: of the rows of two packed sequences, one of words, one of what is said of them."""
    out, _ = model.layers(model.pack(*given))
    words = pack_padded_sequence(given[0], given[1], batch_first=True)
    return F.cross_entropy(model.out(out.data), words.data)


MODELS: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lstm": (lambda: Tagger(nn.LSTM, num_layers=2, bidirectional=True), loss),
    "gru": (lambda: Tagger(nn.GRU), loss),
    "shortened": (lambda: Shortened(nn.RNN), loss),
    "rows": (lambda: Rows(nn.LSTM), loss),
    "loss of rows": (lambda: Reader(nn.LSTM), loss_of_rows),
}


@pytest.mark.parametrize("name", MODELS)
def test_captured_whole(name: str) -> None:
    """The capture's own check compares losses and gradients with the model's; without a note it holds."""
    make, own = MODELS[name]
    given = batch()
    given = (given[0], given[1].clamp(max=3)) if name == "shortened" else given
    graph = capture(make(), own, given)
    assert graph.notes == ()
    assert bool(graph.code.readings) == (name == "shortened")


class Times(Reader):
    """Reads the rows of the first time, by their number."""

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = self.pack(text, lengths)
        first: Tensor = self.layers(packed)[0].data[: len(text)]
        return self.out(first)[:, None] * torch.ones(4, 1)


def test_what_reads_rows_by_their_times_is_no_graph() -> None:
    graph = capture(Times(nn.LSTM), loss, batch())
    assert graph.is_opaque or graph.notes


def test_torch_has_its_own_functions_again() -> None:
    before = pack_padded_sequence.__code__, pad_packed_sequence.__code__
    capture(Tagger(nn.GRU), loss, batch())
    assert (pack_padded_sequence.__code__, pad_packed_sequence.__code__) == before
    assert not hasattr(torch.nn.modules.rnn, "int")
