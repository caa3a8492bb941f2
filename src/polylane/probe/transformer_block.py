"""Transformer block: what copies run to measure how much the workers of a host slow each other."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Small, with matmuls, and with operators that only move bytes.
SAMPLES, LENGTH, HIDDEN, HEADS = 8, 64, 256, 4


class TransformerBlock(nn.Module):
    """One block with causal attention, on samples of (LENGTH, HIDDEN)."""

    def __init__(self) -> None:
        super().__init__()
        shapes = ((3 * HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (4 * HIDDEN, HIDDEN), (HIDDEN, 4 * HIDDEN))
        self.weights = nn.ParameterList(torch.randn(shape) / shape[1] ** 0.5 for shape in shapes)

    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_()  # a gradient of the input, too, as a layer in the middle of a model has one
        mixed = F.linear(F.layer_norm(x, [HIDDEN]), self.weights[0])
        query, key, value = mixed.unflatten(2, (3 * HEADS, -1)).transpose(1, 2).chunk(3, 1)
        attention = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = x + F.linear(attention.transpose(1, 2).reshape(x.shape), self.weights[1])
        return y + F.linear(F.gelu(F.linear(F.layer_norm(y, [HIDDEN]), self.weights[2])), self.weights[3])
