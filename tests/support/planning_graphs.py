"""Jobs to plan: graphs of small code and any size, captured without weights, once for all tests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.cluster.spec import parse
from polylane.cost.operators.training_options import TrainingOptions
from polylane.cost.predict import CostModel
from polylane.graph.capture.capture import capture
from polylane.graph.graph import Graph
from polylane.plan.sync import SUM
from polylane.planner import problem as setup
from polylane.planner.stage_curves import CurveCache
from tests.support import models


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(hidden),
            nn.Linear(hidden, 4 * hidden),
            nn.Linear(4 * hidden, hidden),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """A residual block of attention, written out: it makes the scores of all pairs of places, or hides them."""

    def __init__(self, hidden: int, heads: int, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.heads, self.fused, self.dropout = heads, fused, dropout

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout)
        else:
            y = (q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5).softmax(-1) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


def adam(parameters: Sequence[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for _, p in parameters])


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


@cache
def blocks(count: int, hidden: int) -> Graph:
    """A deep residual network of any width."""
    with torch.device("meta"):
        model = nn.Sequential(*(Block(hidden) for _ in range(count)))
    return capture(model, mean_square, torch.zeros(2, hidden), trainable=[n for n, _ in model.named_parameters()])


@cache
def attending(count: int, hidden: int, length: int, fused: bool = False, dropout: float = 0.0) -> Graph:
    """Blocks of attention over long sequences and of layers, in turn."""
    with torch.device("meta"):
        pairs = [(Attention(hidden, 4, fused, dropout), Block(hidden)) for _ in range(count)]
        model = nn.Sequential(*(block for pair in pairs for block in pair))
    named = [n for n, _ in model.named_parameters()]
    return capture(model, mean_square, torch.zeros(2, length, hidden), trainable=named)


@cache
def example(name: str) -> Graph:
    """One of the examples at its smallest."""
    case = models.example_case(name)
    model = case.model()
    return capture(model, case.loss, case.batch(2, 0), trainable=[n for n, _ in model.named_parameters()])


def basis(graph: Graph, cluster: str, method: TrainingOptions | None = None) -> CostModel:
    return setup.build_cost_model(setup.CapturedProblem(graph, adam), parse(cluster), method or TrainingOptions())


def estimates(
    graph: Graph, cluster: str, batch: int, method: TrainingOptions | None = None, shard: str = "none"
) -> CurveCache:
    return CurveCache(basis(graph, cluster, method), batch, sync=SUM.changed(shard=shard))
