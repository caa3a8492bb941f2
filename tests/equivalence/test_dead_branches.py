"""A branch that the loss does not read gives no gradients: an optimizer leaves its weights alone, on every plan."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polylane.compile.objectives import Objective
from polylane.graph.capture.capture import capture
from polylane.verify.verify import verify


class DeadBranch(nn.Module):
    """A network with a branch that nobody reads; a BatchNorm's running statistics keep it in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dead, self.norm, self.last = (
            nn.Linear(4, 8),
            nn.Linear(8, 8),
            nn.BatchNorm1d(8),
            nn.Linear(8, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.relu(self.first(x))
        self.norm(self.dead(hidden))
        out: Tensor = self.last(hidden)
        return out


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def make_batches(count: int) -> list[tuple[Tensor, Tensor]]:
    random = torch.Generator().manual_seed(0)
    return [(torch.randn(7, 4, generator=random), torch.randint(0, 3, (7,), generator=random)) for _ in range(count)]


def test_gradients_flow_only_where_the_loss_reads() -> None:
    graph = capture(DeadBranch().train(), loss, make_batches(1)[0])
    flows = {name for node in graph.nodes if node.requires_grad for name in node.parameters}
    assert flows == {"first.weight", "first.bias", "last.weight", "last.bias"}
    assert "dead.weight" in {name for node in graph.nodes for name in node.parameters}


@pytest.mark.parametrize("plan", ["data=2", "data=2,shard=parameters", "pipeline=2,microbatches=3"])
def test_weight_decay_leaves_a_dead_branch_alone(plan: str) -> None:
    """As one device does: a weight without a gradient is not decayed, where one with a zero gradient would be."""
    torch.manual_seed(0)
    objective = Objective("loss", loss, lambda named: torch.optim.AdamW(list(named), lr=0.1, weight_decay=0.5))
    verdict = verify(DeadBranch().train(), objective, make_batches(2), plan)
    assert verdict.passed, verdict.culprit
