"""Recurrent networks, torch's own transformers, and networks for time series."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from benchmarks.zoo.entry import SAMPLES, Family, numbers, own_loss, tokens
from benchmarks.zoo.models.language import from_transformers

RECURRENT = Family("recurrent", "Recurrent networks, torch's transformers, time series")
VOCABULARY, LENGTH, HIDDEN = 32, 8, 16


def texts(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of tokens, [samples, LENGTH], and of those that come next."""

    def batch(step: int) -> tuple[Tensor, Tensor]:
        text = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH + 1), generator=numbers(step))
        return text[:, :-1], text[:, 1:]

    return [batch(step) for step in range(steps)]


# Of pytorch/examples, word_language_model -----------------------------------------------------------------------------


class RNNModel(nn.Module):
    """An encoder, a recurrent network and a decoder, tied, of pytorch/examples; sequences are along dimension 0."""

    def __init__(self, rnn_type: str, dropout: float = 0.2) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(VOCABULARY, HIDDEN)
        self.rnn = getattr(nn, rnn_type)(HIDDEN, HIDDEN, 2, dropout=dropout)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)
        self.decoder.weight = self.encoder.weight
        self.rnn_type = rnn_type

    def forward(self, inputs: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        emb = self.drop(self.encoder(inputs))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output).view(-1, VOCABULARY)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz: int) -> Any:
        weight = next(self.parameters())
        if self.rnn_type == "LSTM":
            return (weight.new_zeros(2, bsz, HIDDEN), weight.new_zeros(2, bsz, HIDDEN))
        return weight.new_zeros(2, bsz, HIDDEN)


def repackage_hidden(h: Any) -> Any:
    """Hidden states in new tensors, detached from their history."""
    return h.detach() if isinstance(h, Tensor) else tuple(repackage_hidden(v) for v in h)


def next_words(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The example's loop over one text; the hidden state starts at zero."""
    data, targets = batch[0].t().contiguous(), batch[1].t().reshape(-1)
    output, _ = model(data, model.init_hidden(data.size(1)))
    return F.nll_loss(output, targets)


def truncated(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Backpropagation through time, truncated: the second half of the text starts from the first's detached state."""
    data, targets = batch[0].t().contiguous(), batch[1].t().contiguous()
    half = LENGTH // 2
    first, hidden = model(data[:half], model.init_hidden(data.size(1)))
    second, _ = model(data[half:], repackage_hidden(hidden))
    return (F.nll_loss(first, targets[:half].reshape(-1)) + F.nll_loss(second, targets[half:].reshape(-1))) / 2


class PositionalEncoding(nn.Module):
    def __init__(self, d_model: int, dropout: float = 0.1, max_len: int = 50) -> None:
        super().__init__()
        self.dropout = nn.Dropout(p=dropout)
        pe = torch.zeros(max_len, d_model)
        position = torch.arange(0, max_len, dtype=torch.float).unsqueeze(1)
        div_term = torch.exp(torch.arange(0, d_model, 2).float() * (-math.log(10000.0) / d_model))
        pe[:, 0::2] = torch.sin(position * div_term)
        pe[:, 1::2] = torch.cos(position * div_term)
        self.register_buffer("pe", pe.unsqueeze(0).transpose(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.pe[: x.size(0), :]  # type: ignore[index]
        encoded: Tensor = self.dropout(x)
        return encoded


class TransformerModel(nn.Transformer):
    """The language model of pytorch/examples, which is an nn.Transformer whose decoder is a linear layer."""

    def __init__(self) -> None:
        super().__init__(d_model=HIDDEN, nhead=2, dim_feedforward=32, num_encoder_layers=2, dropout=0.1)
        self.src_mask: Tensor | None = None
        self.pos_encoder = PositionalEncoding(HIDDEN)
        self.input_emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.decoder = nn.Linear(HIDDEN, VOCABULARY)  # type: ignore[assignment]

    def _generate_square_subsequent_mask(self, sz: int) -> Tensor:
        return torch.log(torch.tril(torch.ones(sz, sz)))

    def forward(self, src: Tensor, has_mask: bool = True) -> Tensor:  # type: ignore[override]
        if has_mask:
            if self.src_mask is None or self.src_mask.size(0) != len(src):
                self.src_mask = self._generate_square_subsequent_mask(len(src)).to(src.device)
        else:
            self.src_mask = None
        src = self.pos_encoder(self.input_emb(src) * math.sqrt(HIDDEN))
        output = self.decoder(self.encoder(src, mask=self.src_mask))
        return F.log_softmax(output, dim=-1)


def next_words_by_transformer(model: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
    output = model(batch[0].t())
    return F.nll_loss(output.view(-1, VOCABULARY), batch[1].t().reshape(-1))


RECURRENT.add("LSTM language model", "pytorch/examples", lambda: RNNModel("LSTM"), next_words, texts)
RECURRENT.add("GRU language model", "pytorch/examples", lambda: RNNModel("GRU"), truncated, texts)
RECURRENT.add("Transformer language model", "pytorch/examples", TransformerModel, next_words_by_transformer, texts)


# Sequences of several lengths -----------------------------------------------------------------------------------------


class PackedTagger(nn.Module):
    """A bidirectional LSTM over packed sequences, as taggers are written."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN, padding_idx=0)
        self.lstm = nn.LSTM(HIDDEN, HIDDEN, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * HIDDEN, 5)

    def forward(self, text: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.embedding(text), lengths, batch_first=True, enforce_sorted=False)
        output, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=text.size(1))
        tags: Tensor = self.out(output)
        return tags


def tagged(steps: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Batches of padded texts, their lengths, and the tags of their words, -100 beyond the end."""

    def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
        draw = numbers(step)
        lengths = torch.randint(1, LENGTH + 1, (SAMPLES,), generator=draw)
        lengths[0] = LENGTH
        beyond = torch.arange(LENGTH) >= lengths[:, None]
        text = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH), generator=draw).masked_fill(beyond, 0)
        tags = torch.randint(0, 5, (SAMPLES, LENGTH), generator=draw).masked_fill(beyond, -100)
        return text, lengths, tags

    return [batch(step) for step in range(steps)]


RECURRENT.add(
    "LSTM tagger (packed)",
    "torch",
    PackedTagger,
    lambda model, batch: F.cross_entropy(model(batch[0], batch[1]).flatten(0, 1), batch[2].flatten()),
    tagged,
)


# From one sequence to another -----------------------------------------------------------------------------------------


class BahdanauAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.Wa = nn.Linear(HIDDEN, HIDDEN)
        self.Ua = nn.Linear(HIDDEN, HIDDEN)
        self.Va = nn.Linear(HIDDEN, 1)

    def forward(self, query: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(keys)))
        scores = scores.squeeze(2).unsqueeze(1)
        weights = F.softmax(scores, dim=-1)
        return torch.bmm(weights, keys), weights


class SequenceToSequence(nn.Module):
    """The encoder and the decoder with attention of torch's translation tutorial, taught by the target."""

    def __init__(self) -> None:
        super().__init__()
        self.source = nn.Embedding(VOCABULARY, HIDDEN)
        self.encoder = nn.GRU(HIDDEN, HIDDEN, batch_first=True)
        self.target = nn.Embedding(VOCABULARY, HIDDEN)
        self.attention = BahdanauAttention()
        self.gru = nn.GRU(2 * HIDDEN, HIDDEN, batch_first=True)
        self.out = nn.Linear(HIDDEN, VOCABULARY)
        self.dropout = nn.Dropout(0.1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        encoder_outputs, hidden = self.encoder(self.dropout(self.source(source)))
        decoder_input = torch.empty(source.size(0), 1, dtype=torch.long).fill_(0)
        outputs = []
        for i in range(target.size(1)):
            embedded = self.dropout(self.target(decoder_input))
            context, _ = self.attention(hidden.permute(1, 0, 2), encoder_outputs)
            output, hidden = self.gru(torch.cat((embedded, context), dim=2), hidden)
            outputs.append(self.out(output))
            decoder_input = target[:, i].unsqueeze(1)
        return F.log_softmax(torch.cat(outputs, dim=1), dim=-1)


RECURRENT.add(
    "Seq2seq with attention",
    "torch's tutorials",
    SequenceToSequence,
    lambda model, batch: F.nll_loss(model(*batch).view(-1, VOCABULARY), batch[1].reshape(-1)),
    texts,
)


class Seq2SeqTransformer(nn.Module):
    """The translator of torch's tutorial: nn.Transformer with masks of the future and of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(HIDDEN, 2, 2, 2, 32, dropout=0.1, batch_first=True)
        self.generator = nn.Linear(HIDDEN, VOCABULARY)
        self.src_tok_emb = nn.Embedding(VOCABULARY, HIDDEN)
        self.tgt_tok_emb = nn.Embedding(VOCABULARY, HIDDEN)

    def forward(self, src: Tensor, tgt: Tensor) -> Tensor:
        outs = self.transformer(
            self.src_tok_emb(src) * math.sqrt(HIDDEN),
            self.tgt_tok_emb(tgt) * math.sqrt(HIDDEN),
            tgt_mask=nn.Transformer.generate_square_subsequent_mask(tgt.size(1)).isinf(),
            src_key_padding_mask=src == 0,
            tgt_key_padding_mask=tgt == 0,
            memory_key_padding_mask=src == 0,
        )
        scores: Tensor = self.generator(outs)
        return scores


def translations(steps: int) -> list[dict[str, Tensor]]:
    """Batches of padded texts in two languages."""
    pairs = zip(tokens(LENGTH, VOCABULARY)(steps), tokens(LENGTH, VOCABULARY)(steps + 5)[5:], strict=True)
    return [{"source": source["input_ids"], "target": target["input_ids"]} for source, target in pairs]


def translate(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"][:, :-1])
    wanted = batch["target"][:, 1:].reshape(-1)
    return F.cross_entropy(logits.reshape(-1, logits.shape[-1]), wanted, ignore_index=0)


RECURRENT.add("nn.Transformer", "torch", Seq2SeqTransformer, translate, translations)


# Time series ----------------------------------------------------------------------------------------------------------


def tcn() -> nn.Module:
    from pytorch_tcn import TCN

    model: nn.Module = TCN(3, [8, 8], kernel_size=3, output_projection=1)
    return model


def series(steps: int) -> list[tuple[Tensor, Tensor]]:
    """Batches of series, [samples, 3 channels, 16], and of one to be predicted, [samples, 1, 16]."""
    return [
        (
            torch.randn(SAMPLES, 3, 16, generator=numbers(step)),
            torch.randn(SAMPLES, 1, 16, generator=numbers(50 + step)),
        )
        for step in range(steps)
    ]


def of_patches(steps: int) -> list[dict[str, Tensor]]:
    """Batches of past values, [samples, 32, 2], and future ones, [samples, 4, 2]."""

    def batch(step: int) -> dict[str, Tensor]:
        values = torch.randn(SAMPLES, 36, 2, generator=numbers(step))
        return {"past_values": values[:, :32], "future_values": values[:, 32:]}

    return [batch(step) for step in range(steps)]


def of_history(steps: int) -> list[dict[str, Tensor]]:
    """Batches of past values, [samples, 23], and future ones, [samples, 4], with their features of time."""

    def batch(step: int) -> dict[str, Tensor]:
        draw = numbers(step)
        return {
            "past_values": torch.randn(SAMPLES, 23, generator=draw),
            "past_time_features": torch.randn(SAMPLES, 23, 2, generator=draw),
            "past_observed_mask": (torch.rand(SAMPLES, 23, generator=draw) < 0.9).float(),
            "future_values": torch.randn(SAMPLES, 4, generator=draw),
            "future_time_features": torch.randn(SAMPLES, 4, 2, generator=draw),
        }

    return [batch(step) for step in range(steps)]


def forecaster(name: str, **how: Any) -> Callable[[], nn.Module]:
    return from_transformers(
        f"{name}ForPrediction",
        f"{name}Config",
        prediction_length=4,
        context_length=16,
        num_time_features=2,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        **how,
    )


RECURRENT.add("TCN", "pytorch-tcn", tcn, lambda model, batch: F.mse_loss(model(batch[0]), batch[1]), series)
RECURRENT.add(
    "PatchTST",
    "transformers",
    from_transformers(
        "PatchTSTForPrediction",
        "PatchTSTConfig",
        num_input_channels=2,
        context_length=32,
        prediction_length=4,
        patch_length=8,
        patch_stride=8,
        num_hidden_layers=2,
        d_model=16,
        num_attention_heads=2,
        ffn_dim=32,
    ),
    own_loss,
    of_patches,
)
RECURRENT.add("Autoformer", "transformers", forecaster("Autoformer"), own_loss, of_history)
RECURRENT.add("Informer", "transformers", forecaster("Informer"), own_loss, of_history)
