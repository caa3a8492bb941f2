"""Trainings that recompute what others keep compute what one device computes, by every schedule and on every mesh."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polylane.compile.objectives import Objective
from polylane.verify.verify import batch_in_float64, verify_compiled
from tests.support import subsets
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import adamw


class Block(nn.Module):
    """Attention, dropout, statistics of the batch, and a part that the user recomputes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(16), nn.Linear(16, 48), nn.Linear(16, 16)
        self.batch_norm, self.up, self.down = nn.BatchNorm1d(5), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)
        x = x + F.dropout(self.out(y.transpose(1, 2).flatten(2)), 0.1, self.training)
        y = self.down(checkpoint(self._widen, self.batch_norm(x), use_reentrant=False))
        return x + y

    def _widen(self, x: Tensor) -> Tensor:
        return F.gelu(self.up(x))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(6, 16), nn.Sequential(*(Block() for _ in range(4)))
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.last(self.blocks(self.first(x)).mean(1))
        return logits


@cache
def blocks() -> nn.Module:
    """One model for all plans, captured once; workers are forked, so that it never changes here."""
    return Blocks().double()


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def batches() -> list[tuple[Tensor, Tensor]]:
    torch.manual_seed(1)
    return [(torch.randn(8, 5, 6), torch.randint(4, (8,))) for _ in range(2)]


PLANS = [
    "pipeline=2,microbatches=4,recompute=full",
    "pipeline=2,microbatches=4,recompute=budget:9KB",
    "pipeline=2,microbatches=4",  # the user's own checkpoints alone
    "pipeline=2,microbatches=4,schedule=zb-h1,recompute=full",
    "pipeline=2,chunks=2,microbatches=4,schedule=interleaved,recompute=selective",
    "pipeline=2,chunks=2,microbatches=4,schedule=zb-v,recompute=full",
    "data=2,shard=parameters,microbatches=2,recompute=full",
    "data=2,pipeline=2,microbatches=2,recompute=selective",
    "tensor=2,microbatches=2,recompute=full",
    "pipeline=2,microbatches=4,recompute=blocks.0:full+blocks.2:selective",
    "pipeline=2,microbatches=4,schedule=zb-h1,recompute=default:full+blocks.1:none+blocks.3:budget:9KB",
    "tensor=2,microbatches=2,recompute=blocks.1:full+blocks.3:selective",
]


@pytest.mark.parametrize("plan", subsets.one_in(3, subsets.except_slow(PLANS, [PLANS[3]]), first=1))
def test_recomputed_trainings_are_those_of_one_device(plan: str) -> None:
    objectives, example = {"loss": Objective("loss", loss, adamw)}, batch_in_float64(batches()[0])
    prepared = compile_training(blocks(), objectives, example, plan, in_float64=True, shared=True)
    verdict = verify_compiled(prepared, batches())
    assert verdict.passed and verdict.worst <= 1e-9, verdict.culprit
