"""Test data that are a stream: `polylane train` reads them from their beginning at each evaluation, resumed or not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.tiny_recipe import NUMBERS
from tests.support.workers import forked_commands

RECIPE = """
import torch

class Plain(torch.utils.data.IterableDataset):
    def __init__(self, split, count):
        self.split, self.count, self.at = split, count, 0

    def __iter__(self):
        self.at = 0
        return self._rest()

    def _rest(self):
        while self.at < self.count:
            self.at += 1
            with open("read.txt", "a") as file:
                file.write(f"{self.split} {self.at}\\n")
            yield torch.randn(3) + self.at / 20, torch.ones(1)

class Stateful(Plain):
    start = 0

    def __iter__(self):
        self.at, self.start = self.start, 0
        return self._rest()

    def state_dict(self):
        return {"split": self.split, "at": self.at}

    def load_state_dict(self, state):
        assert state["split"] == self.split, "that is the state of another stream"
        self.start = state["at"]

def model():
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Dropout(0.2), torch.nn.Linear(4, 1))

def data(split, kind="Plain"):
    return globals()[kind](split, 20 if split == "train" else 12)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.05, momentum=0.9)
"""


def train(folder: Path, name: str, line: str) -> list[dict[str, object]]:
    """The lines of a run's metrics, without its times."""
    words = [
        "train",
        "streams.py",
        "--plan",
        "data=1",
        "--batch",
        "8",
        "--epochs",
        "3",
        "--run",
        name,
        *line.split(),
        "--audit",
        "off",
    ]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done: subprocess.CompletedProcess[str] = forked_commands.run(
        [sys.executable, "-m", "polylane", *words], cwd=folder, env=environment
    )
    assert done.returncode == 0, done.stderr
    lines = map(json.loads, (folder / name / "metrics.jsonl").read_text().splitlines())
    return [{key: value for key, value in each.items() if key in NUMBERS} for each in lines]


@pytest.mark.parametrize("kind", ["Plain", "Stateful"])
def test_a_test_stream_begins_anew_at_each_evaluation(kind: str, tmp_path: Path) -> None:
    (tmp_path / "streams.py").write_text(RECIPE.replace('"Plain"', f'"{kind}"'))
    unbroken = train(tmp_path, "unbroken", "--save-every 1 --keep 99")
    tests = [each["test_loss"] for each in unbroken if "test_loss" in each]
    assert len(tests) == 3
    # Three batches an epoch: amid the second, with an evaluation between the first save and this one.
    (tmp_path / "read.txt").unlink()
    resumed = train(tmp_path, "resumed", "--resume unbroken/checkpoints/step-00000004")
    assert resumed == [each for each in unbroken if each["step"] > 4]
    assert [each["test_loss"] for each in resumed if "test_loss" in each] == tests[1:]
    read = [each.split() for each in (tmp_path / "read.txt").read_text().splitlines()]
    assert [int(at) for split, at in read if split == "test"] == [*range(1, 13)] * 2
    # Of the training's stream one that says its state reads nothing twice: 8 samples of the epoch were trained on.
    trained = [int(at) for split, at in read if split == "train"]
    assert trained[-32:] == [*range(9, 21), *range(1, 21)]
