"""The models that others measured, as ordinary modules: decoders with scores in memory, or with fused attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class ScoredAttention(nn.Module):
    """Causal attention as a product, a softmax, dropout and a product, as Megatron-LM computed it.

    The mask is added within the first product, or, where ``steps``, by operators of their own.
    """

    mask: Tensor

    def __init__(self, hidden: int, heads: int, length: int, dropout: float, steps: bool) -> None:
        super().__init__()
        self.heads, self.dropout, self.steps = heads, dropout, steps
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)
        self.register_buffer("mask", torch.full((1, length, length), -1e4).triu(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, hidden) -> the same."""
        samples, length, hidden = x.shape
        split = (samples, length, self.heads, 3, hidden // self.heads)
        q, k, v = (part.transpose(1, 2).flatten(0, 1) for part in self.qkv(x).view(split).unbind(3))
        scale = 1 / math.sqrt(q.shape[-1])
        if self.steps:
            scores = torch.bmm(q, k.transpose(1, 2)).mul(scale).masked_fill(self.mask < 0, -1e4).clone()
        else:
            scores = torch.baddbmm(self.mask, q, k.transpose(1, 2), alpha=scale)
        weights = F.dropout(torch.softmax(scores, -1), self.dropout)
        mixed = torch.bmm(weights, v).unflatten(0, (samples, self.heads)).transpose(1, 2).contiguous()
        given: Tensor = self.out(mixed.flatten(2))
        return given


class FusedAttention(nn.Module):
    """Causal attention in one operator."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.out = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, hidden) -> the same."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, dim=-1))
        mixed: Tensor = self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return mixed


class Block(nn.Module):
    """Attention and a two-layer perceptron, each normalized before and added after."""

    def __init__(self, hidden: int, ffn: int, attention: nn.Module, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.attention = attention
        self.up, self.down = nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        """(samples, length, hidden) -> the same."""
        x = x + self.dropout(self.attention(self.norm1(x)))
        given: Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return given


class Decoder(nn.Module):
    """Embeddings, blocks and a head, tied to the embeddings or not.

    Args:
        vocab, length, hidden, ffn, heads, layers: sizes.
        fused: whether attention is one operator.
        steps: whether scores are scaled, masked and converted by operators of their own, where it is not.
        dropout: of scores, of what blocks add, and of the embeddings.
        tied: whether the head has the weights of the embeddings.
    """

    def __init__(
        self,
        vocab: int,
        length: int,
        hidden: int,
        ffn: int,
        heads: int,
        layers: int,
        fused: bool,
        dropout: float,
        steps: bool = False,
        tied: bool = True,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocab, hidden), nn.Embedding(length, hidden)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(
                hidden,
                ffn,
                FusedAttention(hidden, heads) if fused else ScoredAttention(hidden, heads, length, dropout, steps),
                dropout,
            )
            for _ in range(layers)
        )
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocab, bias=False)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """(samples, length) -> logits (samples, length, vocab)."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of (tokens, targets)."""
    tokens, targets = batch
    return F.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
