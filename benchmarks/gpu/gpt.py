"""A GPT as a recipe: tied embeddings, without dropout; 350 million parameters with the figures of ``LARGE``."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

LARGE = {"layers": 24, "hidden": 1024, "heads": 16, "length": 1024, "vocabulary": 50304}
SMALL = {"layers": 2, "hidden": 64, "heads": 4, "length": 32, "vocabulary": 97}


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.norm2, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, length: int, vocabulary: int, tied: bool) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, hidden), nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocabulary, bias=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def model(
    layers: int = 2, hidden: int = 64, heads: int = 4, length: int = 32, vocabulary: int = 97, tied: bool = True
) -> nn.Module:
    return GPT(layers, hidden, heads, length, vocabulary, tied)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def optimizer(parameters: list[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters], lr=1e-3)


def tokens(samples: int, length: int, vocabulary: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random tokens and targets, the same on every machine."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randint(0, vocabulary, (2, samples, length), generator=generator)
    return found[0], found[1]


def data(split: str, length: int = 32, vocabulary: int = 97) -> TensorDataset:
    return TensorDataset(*tokens(64, length, vocabulary))
