"""What a long sequence keeps for its backward pass falls in proportion to the ranks that share it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.runtime.job import Job
from tests.support import subsets
from tests.support.workers.training import sgd, workers

LENGTH, HIDDEN = 256, 16


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm and around a shortcut."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2).chunk(3, 1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def model(heads: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, HIDDEN), Block(heads), Block(heads), nn.Linear(HIDDEN, 32)).double()


def next_token(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def batch() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(0)
    text = torch.randint(0, 32, (2, LENGTH + 1), generator=random)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def kept_bytes(job: Job) -> tuple[int, float]:
    """Of what autograd keeps of a step's forward pass, each piece of memory once, without parameters; and the loss."""
    weights = {p.untyped_storage().data_ptr() for p in job.model.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = job.step(batch()).loss
    return sum(kept.values()), loss


# With one head there is nothing for all-to-all: the sequence stays cut.
@pytest.mark.parametrize(("heads", "degree"), subsets.one_in(2, subsets.pairs([4, 1], [4, 2]), several=True))
def test_activations_fall_in_proportion(heads: int, degree: int) -> None:
    options: dict[str, Any] = {"loss": next_token, "optimizer": sgd, "example": batch()}
    ((whole, expected),) = workers(kept_bytes, model(heads), "data=1", **options)
    results = workers(kept_bytes, model(heads), f"sequence={degree}", **options)
    for part, loss in results:
        assert loss == pytest.approx(expected, rel=1e-9)
        assert part < 1.15 * whole / degree, (part, whole)
