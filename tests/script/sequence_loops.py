"""Training loops over sequences as people write them: (length, batch) layouts, carried states, flat targets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.script.loops import Prepare, sums_of

TOKENS, WIDTH, LENGTH, BATCH = 11, 6, 5, 4


class RecurrentModel(nn.Module):
    """Word embeddings, a recurrent network, and scores of the next word, flat."""

    def __init__(self, kind: str, layers: int = 2, batch_first: bool = False, directions: int = 1) -> None:
        super().__init__()
        self.layers, self.directions, self.kind = layers, directions, kind
        self.encoder = nn.Embedding(TOKENS, WIDTH)
        self.rnn: nn.RNNBase = getattr(nn, kind)(
            WIDTH, WIDTH, layers, batch_first=batch_first, bidirectional=directions == 2
        )
        self.decoder = nn.Linear(WIDTH * directions, TOKENS)

    def forward(self, words: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        output, hidden = self.rnn(self.encoder(words), hidden)
        scores = self.decoder(output).view(-1, TOKENS)
        return F.log_softmax(scores, dim=1), hidden

    def init_hidden(self, batch: int) -> Any:
        weight = next(self.parameters())
        shape = self.layers * self.directions, batch, WIDTH
        if self.kind == "LSTM":
            return weight.new_zeros(shape), weight.new_zeros(shape)
        return weight.new_zeros(shape)


def batchify(words: Tensor, batch: int) -> Tensor:
    """Return columns of consecutive words, (steps, batch)."""
    steps = words.size(0) // batch
    return words.narrow(0, 0, steps * batch).view(batch, -1).t().contiguous()


def get_batch(source: Tensor, start: int) -> tuple[Tensor, Tensor]:
    length = min(LENGTH, len(source) - 1 - start)
    return source[start : start + length], source[start + 1 : start + 1 + length].view(-1)


def repackage_hidden(hidden: Any) -> Any:
    if isinstance(hidden, Tensor):
        return hidden.detach()
    return tuple(repackage_hidden(value) for value in hidden)


def words_of(count: int, seed: int = 3) -> Tensor:
    return torch.randint(0, TOKENS, (count,), generator=torch.Generator().manual_seed(seed))


def train_language_model(
    prepare: Prepare, model: Any, batch: int = BATCH, batch_dim: Any = None, words: int = 3 * LENGTH + 1
) -> list[float]:
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = prepare(model, optimizer, **({} if batch_dim is None else {"batch_dim": batch_dim}))
    criterion = nn.NLLLoss()
    numbers, train_data, eval_data = (
        list[float](),
        batchify(words_of(words * batch), batch),
        batchify(words_of(3 * (LENGTH + 1)), 3),
    )
    for _ in range(2):
        model.train()
        total, hidden = 0.0, model.init_hidden(batch)
        for start in range(0, train_data.size(0) - 1, LENGTH):
            data, targets = get_batch(train_data, start)
            model.zero_grad()
            hidden = repackage_hidden(hidden)
            output, hidden = model(data, hidden)
            loss = criterion(output, targets)
            loss.backward()
            optimizer.step()
            total += loss.item()
        numbers.append(total)
        model.eval()
        total, hidden = 0.0, model.init_hidden(3)
        with torch.no_grad():
            for start in range(0, eval_data.size(0) - 1, LENGTH):
                data, targets = get_batch(eval_data, start)
                output, hidden = model(data, hidden)
                hidden = repackage_hidden(hidden)
                total += len(data) * criterion(output, targets).item()
        numbers.append(total / (len(eval_data) - 1))
    return numbers + sums_of(model)


def lstm(prepare: Prepare) -> list[float]:
    """Word language model: an LSTM whose state is carried over steps, and evaluated with another batch size."""
    torch.manual_seed(0)
    return train_language_model(prepare, RecurrentModel("LSTM").double())


def gru(prepare: Prepare) -> list[float]:
    """The same with a state of one tensor, in as many layers as there are samples; the last sequence is shorter."""
    torch.manual_seed(0)
    return train_language_model(prepare, RecurrentModel("GRU", layers=4).double(), words=3 * LENGTH - 1)


def square_lstm(prepare: Prepare) -> list[float]:
    """As many samples as words in a sequence."""
    torch.manual_seed(0)
    return train_language_model(prepare, RecurrentModel("LSTM").double(), batch=LENGTH)


def said_lstm(prepare: Prepare) -> list[float]:
    """The dimension of the samples is said."""
    torch.manual_seed(0)
    return train_language_model(prepare, RecurrentModel("LSTM", layers=1).double(), batch_dim=1)


class Classifier(nn.Module):
    """A class for each sequence, read in both directions; of padded ones with their lengths."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.packed = packed
        self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * WIDTH, 3)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        if not self.packed:
            output, _ = self.rnn(x)
            return self.head(output.mean(dim=1))
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        _, (hidden, _) = self.rnn(packed)
        return self.head(torch.cat([hidden[0], hidden[1]], dim=1))


def train_classifier(prepare: Prepare, packed: bool) -> list[float]:
    torch.manual_seed(0)
    model: Any = Classifier(packed).double()
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    model, optimizer = prepare(model, optimizer)
    numbers = list[float]()
    for number in range(3):
        random = torch.Generator().manual_seed(number)
        x, y = torch.randn(6, LENGTH, WIDTH, generator=random).double(), torch.arange(6) % 3
        lengths = torch.randint(1, LENGTH + 1, (6,), generator=random)
        output = model(x, lengths)
        loss = F.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), (output.argmax(1) == y).sum().item()]
    return numbers + sums_of(model)


def both_directions(prepare: Prepare) -> list[float]:
    """A bidirectional network, batch first."""
    return train_classifier(prepare, False)


def packed_sequences(prepare: Prepare) -> list[float]:
    """Sequences of several lengths, packed inside of the model."""
    return train_classifier(prepare, True)


class Transformer(nn.Module):
    """A causal language model on (length, batch), with the mask as an argument."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Embedding(TOKENS, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.Linear(8, TOKENS)

    def forward(self, words: Tensor, mask: Tensor) -> Tensor:
        return F.log_softmax(self.decoder(self.layers(self.encoder(words), mask)), dim=-1)


def transformer(prepare: Prepare) -> list[float]:
    """A Transformer on (length, batch) with a square mask, as long as there are samples; flat targets."""
    torch.manual_seed(0)
    model: Any = Transformer().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    numbers, source = list[float](), batchify(words_of(16 * LENGTH), LENGTH)
    for start in range(0, source.size(0) - 1, LENGTH):
        data, targets = get_batch(source, start)
        mask = torch.log(torch.tril(torch.ones(len(data), len(data)))).double()
        optimizer.zero_grad()
        output = model(data, mask).view(-1, TOKENS)
        loss = F.nll_loss(output, targets)
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), output.exp().max().item()]
    return numbers + sums_of(model)


def batch_first_states(prepare: Prepare) -> list[float]:
    """(batch, length), states of (layers, batch, width) in as many layers as samples, targets flat."""
    torch.manual_seed(0)
    model: Any = RecurrentModel("LSTM", layers=4, batch_first=True).double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = prepare(model, optimizer)
    numbers, hidden = list[float](), model.init_hidden(BATCH)
    source = words_of(BATCH * 16).view(BATCH, 16)
    for start in range(0, 15, LENGTH):
        data, targets = source[:, start : start + LENGTH], source[:, start + 1 : start + 1 + LENGTH].reshape(-1)
        hidden = tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers += [loss.item(), (output.argmax(1) == targets).double().mean().item(), hidden[0].sum().item()]
    return numbers + sums_of(model)


def mixed_samples(prepare: Prepare) -> list[float]:
    """Samples that meet each other in the model: no dimension divides them."""
    torch.manual_seed(0)
    model: Any = Mixer().double()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = prepare(model, optimizer)
    numbers = list[float]()
    for step in range(3):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).double()
        loss = model(x, x.t() @ x)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        numbers.append(loss.item())
    return numbers + sums_of(model)


class Mixer(nn.Module):
    """A loss over all rows and columns of two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.layer(x)
        return torch.linalg.matrix_norm(z @ y @ z.t(), ord="fro") + torch.logsumexp(z.flatten(), 0)


SEQUENCE_LOOPS: dict[str, Callable[[Prepare], list[float]]] = {
    loop.__name__: loop
    for loop in (
        lstm,
        gru,
        square_lstm,
        said_lstm,
        both_directions,
        packed_sequences,
        transformer,
        batch_first_states,
        mixed_samples,
    )
}
