"""Metrics of torchmetrics in a prepared script are those of the plain script, also where torch.distributed is up."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

from tests.support.workers import forked_commands

SCRIPT = """
import json

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import polylane

torch.manual_seed(0)
x = torch.randn(75, 6, generator=torch.Generator().manual_seed(1))
y = x[:, :4].argmax(1)
train, test = DataLoader(TensorDataset(x[:48], y[:48]), 12), DataLoader(TensorDataset(x[48:], y[48:]), 8)
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
model, optimizer, train, test = polylane.prepare(model, optimizer, train, test)

from torchmetrics import MeanMetric, MetricCollection, SumMetric  # after prepare()
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassF1Score

running, losses = MulticlassAccuracy(4, average="micro"), MeanMetric()
tests = MetricCollection([MulticlassF1Score(4), MulticlassConfusionMatrix(4)])
auc, count = MulticlassAUROC(4), SumMetric()
for _ in range(2):
    for a, b in train:
        optimizer.zero_grad()
        output = model(a)
        loss = F.cross_entropy(output, b)
        loss.backward()
        optimizer.step()
        running.update(output, b)
        losses.update(loss)
    with torch.no_grad():
        for a, b in test:
            output = model(a)
            tests.update(output, b)
            auc.update(output.softmax(1), b)
            count.update(len(b))
    values = [running, losses, auc, count]
    results = [float(metric.compute()) for metric in values]
    print(json.dumps([*results, *(value.flatten().tolist() for value in tests.compute().values())]), flush=True)
    for metric in (*values, tests):
        metric.reset()
"""


def run(*command: str, **environment: str) -> list[list[object]]:
    done = forked_commands.run([sys.executable, "-m", *command], env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]


@pytest.mark.parametrize("launcher", ["polylane", "torchrun"])
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_metrics_are_those_of_the_plain_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, launcher: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    plain = forked_commands.run([sys.executable, "script.py"])
    expected = [json.loads(line) for line in plain.stdout.splitlines()]
    assert len(expected) == 2 and expected[0][3] == 27, plain.stderr
    start = () if launcher == "polylane" else ("torch.distributed.run", "--nproc-per-node", "2", "-m", "--")
    rows = run(*start, "polylane", "run", "script.py", "--plan", plan)
    assert len(rows) == 2
    for row, values in zip(rows, expected, strict=True):
        for value, reference in zip(row, values, strict=True):
            assert value == pytest.approx(reference, rel=1e-5)
