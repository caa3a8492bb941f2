"""What torch.export refuses of ordinary models is captured whole, and divided exactly."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from polylane.graph.capture.capture import capture
from polylane.samples.derivation import derive_composition

LETTERS = 5


class CastsItself(nn.Module):
    """Casts a part of itself to the dtype that it has, and draws with an absent generator."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.router = self.router.to(torch.float32)
        y: Tensor = self.router(x)
        return y + torch.randn(y.shape, generator=None, device=x.device, dtype=y.dtype, layout=torch.strided)


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def test_casts_and_absent_generators() -> None:
    model = CastsItself()
    weight = model.router.weight
    graph = capture(model, mean, torch.randn(5, 4))
    assert not graph.is_opaque and not graph.notes and model.router.weight is weight
    assert derive_composition(graph).is_proven


class Recognizer(nn.Module):
    """Labels of several lengths, put one after the other by their own mask, or by another one."""

    def __init__(self, reduction: str, own: bool) -> None:
        super().__init__()
        self.linear, self.reduction, self.own = nn.Linear(3, LETTERS), reduction, own

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        scores = self.linear(x).log_softmax(-1).transpose(0, 1)
        mask = labels > 0
        counted = mask.sum(-1) if self.own else (labels != 0).sum(-1)
        frames = torch.full_like(counted, x.shape[1])
        loss = F.ctc_loss(scores, labels.masked_select(mask), frames, counted, reduction=self.reduction)
        return loss if self.reduction == "mean" else loss.mean() if self.reduction == "none" else loss / len(x)


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("own", [True, False])
def test_ctc_of_concatenated_targets(reduction: str, own: bool) -> None:
    torch.manual_seed(0)
    labels = torch.randint(1, LETTERS, (5, 4)) * (torch.arange(4) < torch.tensor([[4], [2], [1], [3], [4]]))

    def call(model: nn.Module, batch: Any) -> Any:
        return model(*batch)

    graph = capture(Recognizer(reduction, own), call, (torch.randn(5, 12, 3), labels))
    assert not graph.is_opaque and not graph.notes
    assert derive_composition(graph).is_proven == own  # nothing shows that another mask counts alike
