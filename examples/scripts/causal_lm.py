"""A causal language model of characters on the standard library's text: warm-up, clipped gradients, perplexity.

python examples/scripts/causal_lm.py
polylane run examples/scripts/causal_lm.py --workers 2 --plan tensor=2
"""

import argparse
import inspect
import math
import textwrap

import torch
import torch.nn as nn
from torch.nn import functional as F

import polylane

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--eval-interval", type=int, default=50)
parser.add_argument("--batch-size", type=int, default=16)
parser.add_argument("--block-size", type=int, default=32)
parser.add_argument("--dim", type=int, default=64)
args = parser.parse_args()

torch.manual_seed(1337)
text = inspect.getsource(textwrap)
chars = sorted(set(text))
data = torch.tensor([chars.index(c) for c in text])
train_data, val_data = data[: int(0.9 * len(data))], data[int(0.9 * len(data)) :]


def get_batch(split):
    source = train_data if split == "train" else val_data
    ix = torch.randint(len(source) - args.block_size, (args.batch_size,))
    x = torch.stack([source[i : i + args.block_size] for i in ix])
    y = torch.stack([source[i + 1 : i + args.block_size + 1] for i in ix])
    return x, y


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        B, T, C = x.shape
        q, k, v = (
            t.view(B, T, self.heads, C // self.heads).transpose(1, 2) for t in self.qkv(self.ln1(x)).split(C, dim=2)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(B, T, C))
        return x + self.mlp(self.ln2(x))


class GPT(nn.Module):
    def __init__(self, vocab, dim, layers=2, heads=4):
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, dim), nn.Embedding(args.block_size, dim)
        self.blocks = nn.Sequential(*[Block(dim, heads) for _ in range(layers)])
        self.ln, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)
        self.head.weight = self.token.weight

    def forward(self, idx, targets=None):
        x = self.token(idx) + self.position(torch.arange(idx.shape[1], device=idx.device))
        logits = self.head(self.ln(self.blocks(x)))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


@torch.no_grad()
def estimate_perplexity(model, batches=4):
    model.eval()
    losses = torch.zeros(batches)
    for k in range(batches):
        _, loss = model(*get_batch("val"))
        losses[k] = loss.item()
    model.train()
    return math.exp(losses.mean())


model = GPT(len(chars), args.dim)
decay = [p for p in model.parameters() if p.dim() >= 2]
no_decay = [p for p in model.parameters() if p.dim() < 2]
groups = [{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=3e-3, betas=(0.9, 0.95))
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 20))
model, optimizer, scheduler = polylane.prepare(model, optimizer, scheduler)

for step in range(args.steps):
    x, y = get_batch("train")
    logits, loss = model(x, y)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    if (step + 1) % args.eval_interval == 0:
        print(f"step {step + 1}: loss {loss.item():.4f}, gradient norm {norm:.4f}, ", end="")
        print(f"lr {scheduler.get_last_lr()[0]:.5f}, val perplexity {estimate_perplexity(model):.3f}")
