"""Metrics are part of the proof: equal ones pass, and a plan that counts a sample twice does not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torchmetrics.classification import MulticlassAUROC, MulticlassF1Score
from torchmetrics.text import Perplexity

from polylane.compile.objectives import Objective
from polylane.recipe import Mean
from polylane.runtime.evaluation.metric_states import MetricStates
from polylane.verify.verify import verify

F1, AUC, PERPLEXITY = MulticlassF1Score(4), MulticlassAUROC(4), Perplexity()  # the last with float32 sums


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.3), nn.Linear(12, 4))


def compute_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def compute_metrics(model: nn.Module, batch: Any) -> dict[str, Any]:
    logits, labels = model(batch[0]), batch[1]
    return {
        "hits": logits.argmax(-1) == labels,
        "entropy": Mean(F.cross_entropy(logits, labels, reduction="sum"), len(labels)),
        "f1": (F1, logits.argmax(-1), labels),
        "auc": (AUC, logits.softmax(-1), labels),
        "perplexity": (PERPLEXITY, logits.unsqueeze(1), labels.unsqueeze(1)),
    }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([parameter for _, parameter in parameters], lr=0.1)


def batch_of(seed: int) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(9, 6, generator=random), torch.randint(0, 4, (9,), generator=random)


def prove(plan: str) -> Any:
    objective = Objective("loss", compute_loss, sgd, metrics=compute_metrics)
    return verify(network(), objective, [batch_of(0), batch_of(1)], plan)


@pytest.mark.parametrize("plan", ["data=3,microbatches=1", "pipeline=2,microbatches=2", "data=2,servers=1"])
def test_metrics_of_a_plan_are_those_of_a_plain_loop(plan: str) -> None:
    verdict = prove(plan)
    assert verdict.passed, verdict.culprit
    assert {metric.name for metric in verdict.metrics} == {"hits", "entropy", "f1", "auc", "perplexity"}
    assert all(metric.error < 1e-9 and metric.reference == metric.reference for metric in verdict.metrics)


def test_a_sample_that_counts_twice_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    update = MetricStates.update

    def count_some_twice(states: MetricStates, outputs: Any) -> list[float]:
        outputs.parts = [*outputs.parts, *(part for part in outputs.parts if part[0].first == 0)]
        return update(states, outputs)

    monkeypatch.setattr(MetricStates, "update", count_some_twice)
    verdict = prove("data=3,microbatches=1")
    assert not verdict.passed and verdict.worst > 1e-3
