"""Recurrent layers on packed sequences train by every plan as on one device, also where layers drop between them."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from polylane.compile.objectives import build_objectives
from polylane.verify.verify import verify
from tests.support.workers.training import assert_same, plainly, sgd, trained

WORDS = 9


class Tagger(nn.Module):
    def __init__(self, drop: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.out = nn.Embedding(WORDS, 3), nn.Linear(4, WORDS)
        self.layers = nn.LSTM(3, 4, num_layers=2 if drop else 1, batch_first=True, dropout=drop)
        self.double()

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.words(text), lengths, batch_first=True, enforce_sorted=False)
        packed, (last, _) = self.layers(packed)
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        y: Tensor = self.out(padded + last[-1][:, None])
        return y


def loss(model: nn.Module, batch: Any) -> Tensor:
    tags = model(batch[0], batch[1])
    return F.cross_entropy(tags.flatten(0, 1), batch[0][:, : tags.shape[1]].flatten())


def texts(samples: int, seed: int, longest: int = 5) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (samples,), generator=draw)
    lengths[samples // 2] = longest
    return torch.randint(0, WORDS, (samples, 5), generator=draw), lengths


def test_equal_to_one_device() -> None:
    """The last batch has no sequence as long as its text: all workers pad to the whole batch's longest."""
    batches, plan = [texts(7, 0), texts(6, 2, longest=3)], "data=2,pipeline=2,microbatches=2"
    assert_same(trained(Tagger(), plan, batches, loss=loss)[0], plainly(Tagger(), batches, loss=loss))


def test_a_few_samples_that_are_shorter_than_their_batch() -> None:
    """Labels are padded to the longest sequence of the whole batch, which is not among the first few."""

    def of_all(model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[0].flatten())

    batches = [texts(12, 0), texts(12, 1, longest=3)]
    for batch, longest in zip(batches, (5, 3), strict=True):
        batch[1][:4] = 2
        assert batch[1].max() == longest
    batches[1] = batches[1][0][:, :3].contiguous(), batches[1][1]
    assert_same(trained(Tagger(), "data=2", batches, loss=of_all)[0], plainly(Tagger(), batches, loss=of_all))


def test_dropout_between_the_layers_is_each_samples_own() -> None:
    objective = build_objectives(loss, sgd, None)["loss"]
    assert verify(Tagger(0.5), objective, [texts(6, 0), texts(6, 1)], "data=2,microbatches=3").passed
