"""A host that takes twice as long is named; with fewer samples the next run is faster, and the same."""

from __future__ import annotations

import json
import re
import statistics
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.hosts import HostRun, Hosts

# What a sample takes does not depend on what else the machine does: passes sleep, on the second host for twice as long.
RECIPE = """
import socket, time
import torch
from torch import nn

SECONDS = 0.002 if socket.gethostname() == "host-b" else 0.001

class Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        time.sleep(SECONDS * len(x))
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clone()

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    def forward(self, x):
        return Sleep.apply(self.body(x))

def model():
    return Model()

def data(split):
    random = torch.Generator().manual_seed(0)
    points = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(192)]
    return points if split == "train" else None

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.01)
"""
STEPS = 130


def train(hosts: Hosts, folder: Path, plan: str) -> tuple[str, list[float], float]:
    """Train on two hosts, the second slow; return what was said, the losses, and the seconds of the usual step."""
    name = re.sub(r"\W", "-", plan)
    words = ["-m", "--", "polylane", "train", "recipe.py", "--plan", plan, "--run", name, "--steps", str(STEPS)]
    with HostRun(hosts, [*words, "--batch", "96", "--audit", "off"], 1, [folder, folder]) as run:
        for number in range(2):
            run.start(number)
        first, _ = run.wait(180)
        assert not first.code, first.stderr
    rows = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "loss" in row]
    seconds = statistics.median(row["seconds"] for row in steps[STEPS // 4 :])
    return first.stderr + first.stdout, [row["loss"] for row in steps], seconds


@pytest.mark.slow
def test_a_slow_host_is_named_and_gets_fewer_samples(tmp_path: Path) -> None:
    hosts = Hosts.make(2)
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    (tmp_path / "recipe.py").write_text(RECIPE)
    with closing(hosts):
        said, losses, seconds = train(hosts, tmp_path, "data=2,per_sample=model")
        pattern = r"host-b \(rank 1\) computes at (0.\d+) times the speed of .*; --plan (\S+) gives it fewer"
        found = re.search(pattern, said)
        assert found, said
        assert 0.4 < float(found[1]) < 0.6
        again, same, faster = train(hosts, tmp_path, found[2])
    print(f"{found[0]}: {seconds / faster:.2f} times as fast")
    assert "the plan's shares allow for that" in again
    assert same == pytest.approx(losses, rel=1e-12) and seconds / faster > 1.2
