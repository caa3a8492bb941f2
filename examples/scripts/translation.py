"""Spelled numbers translated into digits ("forty two" into "42") by an encoder and a decoder with padding masks.

python examples/scripts/translation.py
polylane run examples/scripts/translation.py --workers 2 --plan data=2
"""

import argparse
import random

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

import polylane

ONES = """zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen
seventeen eighteen nineteen""".split()  # noqa: SIM905
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()  # noqa: SIM905
PAD, BOS, EOS = 0, 1, 2
WORDS = {word: i + 3 for i, word in enumerate([*ONES, *TENS, "hundred", "and"])}


def spell(n):
    if n < 20:
        return [ONES[n]]
    if n < 100:
        return [TENS[n // 10 - 2], *([ONES[n % 10]] if n % 10 else [])]
    return [ONES[n // 100], "hundred", *(["and", *spell(n % 100)] if n % 100 else [])]


def collate(numbers):
    source = pad_sequence([torch.tensor([WORDS[w] for w in spell(n)]) for n in numbers], True, PAD)
    target = pad_sequence([torch.tensor([BOS, *(int(c) + 3 for c in str(n)), EOS]) for n in numbers], True, PAD)
    return source, target


class Translator(nn.Module):
    def __init__(self, dim=32, dropout=0.0):
        super().__init__()
        self.source, self.target = nn.Embedding(len(WORDS) + 3, dim), nn.Embedding(13, dim)
        self.position = nn.Embedding(16, dim)
        self.transformer = nn.Transformer(dim, 4, 1, 1, 2 * dim, dropout, batch_first=True)
        self.generator = nn.Linear(dim, 13)

    def embed(self, embedding, tokens):
        return embedding(tokens) + self.position(torch.arange(tokens.shape[1]))

    def encode(self, source):
        return self.transformer.encoder(self.embed(self.source, source), src_key_padding_mask=source == PAD)

    def decode(self, memory, source, target):
        causal = torch.ones(target.shape[1], target.shape[1], dtype=torch.bool).triu(1)
        out = self.transformer.decoder(
            self.embed(self.target, target),
            memory,
            tgt_mask=causal,
            tgt_key_padding_mask=target == PAD,
            memory_key_padding_mask=source == PAD,
        )
        return self.generator(out)

    def forward(self, source, target):
        return self.decode(self.encode(source), source, target)


@torch.no_grad()
def greedy_decode(model, source, max_length=5):
    memory = model.encode(source)
    target = torch.full((len(source), 1), BOS)
    for _ in range(max_length - 1):
        logits = model.decode(memory, source, target)
        target = torch.cat([target, logits[:, -1].argmax(dim=-1, keepdim=True)], dim=1)
    return ["".join(str(t - 3) for t in row if t > EOS) for row in target.tolist()]


parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--numbers", type=int, default=1000)
args = parser.parse_args()

torch.manual_seed(0)
random.seed(0)
numbers = random.sample(range(1000), args.numbers)
split = int(0.9 * len(numbers))
train_loader = DataLoader(numbers[:split], batch_size=32, shuffle=True, collate_fn=collate)
val_loader = DataLoader(numbers[split:], batch_size=50, collate_fn=collate)
model = Translator()
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3, betas=(0.9, 0.98), eps=1e-9)
criterion = nn.CrossEntropyLoss(ignore_index=PAD)
model, optimizer, train_loader, val_loader = polylane.prepare(model, optimizer, train_loader, val_loader)

for epoch in range(1, args.epochs + 1):
    model.train()
    losses = 0
    for source, target in train_loader:
        target_input, target_output = target[:, :-1], target[:, 1:]
        logits = model(source, target_input)
        optimizer.zero_grad()
        loss = criterion(logits.reshape(-1, logits.shape[-1]), target_output.reshape(-1))
        loss.backward()
        optimizer.step()
        losses += loss.item()
    model.eval()
    val_loss = 0
    for source, target in val_loader:
        logits = model(source, target[:, :-1])
        val_loss += criterion(logits.reshape(-1, logits.shape[-1]), target[:, 1:].reshape(-1)).item()
    print(f"epoch {epoch}: train loss {losses / len(train_loader):.4f}, val loss {val_loss / len(val_loader):.4f}")

source, _ = collate([7, 42, 365, 900])
print("7, 42, 365 and 900 are read as:", ", ".join(greedy_decode(model, source)))
