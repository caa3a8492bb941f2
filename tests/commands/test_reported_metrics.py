"""polylane train and verify with a recipe that has metrics: what they print and write of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.support.recipes.binary import BINARY
from tests.support.workers import forked_commands

RECIPE = (
    BINARY
    + """
from torchmetrics.classification import BinaryF1Score

F1 = BinaryF1Score()


def metrics(model, batch, bound=0.0):
    logits = model(batch[0]).flatten()
    hits = (logits > bound) == (batch[1] > 0.5)
    recall = polylane.Mean((hits * batch[1]).sum(), batch[1].sum())
    return {"accuracy": hits, "recall": recall, "f1": (F1, logits.sigmoid(), batch[1])}
"""
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "binary.py").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_epochs_have_the_metrics_of_the_test_data(folder: Path) -> None:
    line = "train binary.py --workers 2 --plan {plan} --epochs 3 --batch 8 --run {run} --json"
    epochs = {}
    for plan in ("data=1", "data=2", "pipeline=2"):
        command = line.format(plan=plan, run=plan).replace("--workers 2", f"--workers {1 if plan == 'data=1' else 2}")
        done = forked_commands.run([sys.executable, "-m", "polylane", *command.split()])
        assert done.returncode == 0, done.stderr
        rows = [json.loads(row) for row in (folder / plan / "metrics.jsonl").read_text().splitlines()]
        epochs[plan] = [row for row in rows if "train_loss" in row]
        assert json.loads(done.stdout)["metrics"] == epochs[plan][-1]["metrics"]
        assert f"accuracy {epochs[plan][-1]['metrics']['accuracy']:.4f}" in done.stderr
    for plan, rows in epochs.items():
        assert [list(row["metrics"]) for row in rows] == [["accuracy", "recall", "f1"]] * 3
        assert all(row["evaluation_seconds"] > 0 for row in rows)
        for row, alone in zip(rows, epochs["data=1"], strict=True):
            assert row["metrics"] == pytest.approx(alone["metrics"], rel=1e-5), plan


def test_steps_have_the_learning_rates_of_all_groups(folder: Path) -> None:
    groups = "[{'params': parameters[:2], 'lr': lr / 10}, {'params': parameters[2:]}]"
    recipe = RECIPE.replace("torch.optim.SGD(parameters, lr=lr)", f"torch.optim.SGD({groups}, lr=lr)")
    (folder / "binary.py").write_text(recipe)
    command = "train binary.py --workers 2 --plan data=2 --steps 2 --batch 8 --run run --set lr=0.3"
    done = forked_commands.run([sys.executable, "-m", "polylane", *command.split()])
    assert done.returncode == 0, done.stderr
    rows = [json.loads(row) for row in (folder / "run/metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row and "train_loss" not in row]
    assert [row["learning_rates"] for row in steps] == [pytest.approx([0.03, 0.3])] * 2
    assert [row["learning_rate"] for row in steps] == [pytest.approx(0.03)] * 2
