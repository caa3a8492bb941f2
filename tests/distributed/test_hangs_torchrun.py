"""Under torchrun a process of each host watches its workers: who does not go on is named and killed, and all end."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from commands_run import run

RECIPE = """
import os, signal, torch
from torch import nn

def model():
    return nn.Linear(4, 2)

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters, 0.1)

class Data:
    def __len__(self):
        return 100_000

    def __getitem__(self, index):
        self.count = getattr(self, "count", 0) + 1
        if self.count == 300 and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        return torch.full((4,), index / 1e5)

def data(split):
    return Data() if split == "train" else None
"""


@pytest.mark.slow
def test_a_stopped_worker_is_named(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(RECIPE)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "--"]
    train = ["polylane", "train", "stops.py", "--plan", "data=2", "--batch", "8", "--run", "run", "--hang-after", "1.5"]
    done = run([*launch, *train], cwd=tmp_path)
    assert done.returncode == 1
    assert "the training hangs: rank 1 (process " in done.stderr
    assert "it is stopped (SIGSTOP, or Ctrl-Z)" in done.stderr and "rank 0 waits for it" in done.stderr
    kept = json.loads((tmp_path / "run" / "why.json").read_text())
    assert kept["culprits"] == [1] and kept["ranks"][1]["phase"] == "loading"
