"""A GPT with tied embeddings, a character model of the Python standard library's own source files.

polylane train examples/gpt.py --workers 2 --plan pipeline=2,schedule=1f1b,microbatches=8 --set layers=6 --steps 200
"""

import math
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


class Attention(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, sequence, hidden) -> (batch, heads, sequence, hidden / heads)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(hidden)
        self.attention = Attention(hidden, heads, dropout)
        self.norm2 = nn.LayerNorm(hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, seq_len: int, vocab: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(vocab, hidden)
        self.position = nn.Embedding(seq_len, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(hidden, heads, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.apply(self.initialize)
        self.head.weight = self.token.weight  # tied: one parameter, used at both ends

    @staticmethod
    def initialize(module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows(Dataset):
    """A text, cut into windows of ``seq_len`` tokens; the targets are the same window, one token on."""

    def __init__(self, tokens: Tensor, seq_len: int) -> None:
        self.tokens, self.seq_len = tokens, seq_len

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.seq_len

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = range(len(self))[index] * self.seq_len
        window = self.tokens[start : start + self.seq_len + 1].long()
        return window[:-1], window[1:]


def model(
    layers: int = 4, hidden: int = 128, heads: int = 4, seq_len: int = 128, vocab: int = 96, dropout: float = 0.1
) -> nn.Module:
    return GPT(layers, hidden, heads, seq_len, vocab, dropout)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def metrics(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    tokens, targets = batch
    return {"accuracy": model(tokens).argmax(dim=-1) == targets}


def optimizer(parameters, lr: float = 1e-3, weight_decay: float = 0.1):
    """AdamW, which decays the matrices; not the biases and norms, nor the positions."""
    decayed, kept = [], []
    for name, parameter in parameters:
        group = decayed if parameter.ndim >= 2 and "position" not in name else kept
        group.append(parameter)
    groups = [{"params": decayed}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), weight_decay=weight_decay)


def scheduler(optimizer: torch.optim.Optimizer, warmup: int = 20, steps: int = 1000, floor: float = 0.1):
    """Linear warm-up, then half a cosine down to ``floor`` of the learning rate at step ``steps``."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min((step - warmup) / max(steps - warmup, 1), 1.0)
        return floor + (1 - floor) * (1 + math.cos(math.pi * progress)) / 2

    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)


def data(split: str, seq_len: int = 128, vocab: int = 96, files: int = 64) -> Windows:
    """The first files of the running interpreter's standard library: nine tenths to train on, one tenth to test."""
    paths = sorted(Path(os.__file__).parent.glob("*.py"))[:files]
    text = torch.frombuffer(bytearray(b"\n".join(path.read_bytes() for path in paths)), dtype=torch.uint8)
    # A byte's token is its rank by frequency; the rare ones share the last.
    ranks = torch.bincount(text, minlength=256).argsort(descending=True, stable=True).argsort()
    tokens = ranks.clamp(max=vocab - 1)[text.int()].short()
    cut = len(tokens) * 9 // 10
    return Windows(tokens[:cut] if split == "train" else tokens[cut:], seq_len)
