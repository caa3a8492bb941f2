"""A masked language model of the standard library's words, as BERT is trained: 15% of the words are guessed.

python examples/scripts/masked_lm.py
polylane run examples/scripts/masked_lm.py --workers 2 --plan data=2
"""

import argparse
import collections
import inspect
import re
import textwrap

import torch
from torch import nn
from torch.utils.data import DataLoader

import polylane

PAD, MASK, UNKNOWN = 0, 1, 2


class Encoder(nn.Module):
    def __init__(self, vocab_size, length, dim=48, layers=2):
        super().__init__()
        self.embed = nn.Embedding(vocab_size, dim, padding_idx=PAD)
        self.position = nn.Parameter(0.02 * torch.randn(length, dim))
        layer = nn.TransformerEncoderLayer(dim, 4, 2 * dim, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocab_size)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        return self.head(self.encoder(x, src_key_padding_mask=tokens == PAD))


def load_sentences(length):
    lines = [re.findall(r"\w+|[^\w\s]", line) for line in inspect.getsource(textwrap).splitlines()]
    lines = [line[:length] for line in lines if len(line) > 3]
    counts = collections.Counter(word for line in lines for word in line)
    vocab = {word: i + 3 for i, (word, _) in enumerate(counts.most_common(300))}
    tokens = torch.full((len(lines), length), PAD)
    for i, line in enumerate(lines):
        tokens[i, : len(line)] = torch.tensor([vocab.get(word, UNKNOWN) for word in line])
    return tokens, len(vocab) + 3


def mask_tokens(tokens, vocab_size, probability=0.15):
    labels, tokens = tokens.clone(), tokens.clone()
    chosen = (torch.rand(tokens.shape) < probability) & (tokens != PAD)
    labels[~chosen] = -100
    action = torch.rand(tokens.shape)
    tokens[chosen & (action < 0.8)] = MASK
    swapped = chosen & (action > 0.9)
    tokens[swapped] = torch.randint(3, vocab_size, (int(swapped.sum()),))
    return tokens, labels


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--length", type=int, default=16)
    args = parser.parse_args()

    torch.manual_seed(0)
    sentences, vocab_size = load_sentences(args.length)
    loader = DataLoader(sentences, batch_size=args.batch_size, shuffle=True)
    model = Encoder(vocab_size, args.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    criterion = nn.CrossEntropyLoss(ignore_index=-100)
    model, optimizer, loader = polylane.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        total_loss, right, guessed = 0.0, 0, 0
        for tokens in loader:
            inputs, labels = mask_tokens(tokens, vocab_size)
            logits = model(inputs)
            loss = criterion(logits.view(-1, vocab_size), labels.view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total_loss += loss.item()
            chosen = labels != -100
            right += (logits.argmax(-1)[chosen] == labels[chosen]).sum().item()
            guessed += chosen.sum().item()
        print(f"epoch {epoch + 1:3d}  loss {total_loss / len(loader):.4f}  accuracy {right / guessed:.4f}")


if __name__ == "__main__":
    main()
