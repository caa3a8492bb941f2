"""A small recipe with every part of one, each of which a setting breaks, and command lines that tests run on it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from polylane.cli import app
from tests.support.workers import forked_commands

RECIPE = """
import os

import torch
import torch.nn.functional as F
from torch import nn

LAUNCHER = os.getpid()

class BreaksInWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if os.getpid() != LAUNCHER:
            raise OSError("no such device")
        return gradient

class Net(nn.Module):
    def __init__(self, width, depth, fault):
        super().__init__()
        self.inward = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.outward = nn.Linear(width, 2)
        self.fault = fault

    def forward(self, x):
        x = first = F.relu(self.inward(x))
        for layer in self.layers:
            x = layer(x)
        if self.fault == "forward":
            raise ValueError("forward is broken")
        if self.fault == "worker":
            x = BreaksInWorkers.apply(x)
        if self.fault == "memory":
            x = x + torch.empty(1 << 46)
        return self.outward(x + first)

def model(width=8, depth=3, fault=""):
    if fault == "model":
        raise ValueError("no model\\ntoday")
    return 3 if fault == "no module" else Net(width, depth, fault).requires_grad_(fault != "frozen")

def loss(model, batch, fault=""):
    x, y = batch
    return F.cross_entropy(model(x), y) if fault != "argmax" else model(x).argmax(1).float().mean()

def optimizer(parameters, lr=0.1, fault=""):
    if fault == "optimizer":
        raise KeyError("momentum")
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

def scheduler(optimizer, decay=0.9, fault=""):
    if fault == "scheduler":
        raise RuntimeError("no schedule")
    return decay if fault == "rate" else torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)

def collate(samples, fault=""):
    if fault == "collate":
        raise RuntimeError("no batch")
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

class Samples(list):
    broken = None
    def __getitem__(self, i):
        if i == self.broken:
            raise OSError("bad sector")
        return super().__getitem__(i)

def data(split, samples=22, fault=""):
    if fault == "data":
        raise FileNotFoundError("no such data")
    if fault == "empty":
        return []
    if fault == "no data":
        return 3
    if split == "test" and fault == "no test":
        return None
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(int(split == "test")))
    rows = Samples((row, int(row.sum() > 0)) for row in x)
    if split == "train" and fault == "nan":
        rows = Samples((row * float("nan") if i == 3 else row, y) for i, (row, y) in enumerate(rows))
    if split == "train" and fault == "sample":
        rows.broken = samples - 1
    if fault == "dtype":
        rows = Samples((row.half(), y) for row, y in rows)
    if fault == "loader":
        return torch.utils.data.DataLoader(rows, batch_size=4)
    return iter(rows) if fault == "iterator" else rows
"""
FILES = {
    "plan.yaml",
    "run.json",
    "metrics.jsonl",
    "goodput.json",
    "predicted.json",
    "timeline.json",
    "timelines.json",
    "swimlane.html",
    "report.html",
    "trace.json",
    "model.safetensors",
}


def call(*arguments: str | Path) -> Any:
    """A command in this process: what starts no worker."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="polylane")


def start(folder: Path, line: str, program: tuple[str, ...] = ("-m", "polylane")) -> subprocess.Popen[str]:
    return forked_commands.start([sys.executable, *program, *shlex.split(line)], cwd=folder, start_new_session=True)


def execute(folder: Path, line: str, code: int = 0, **options: Any) -> tuple[str, str]:
    """A command in a process of its own; what it printed on stdout and stderr."""
    process = start(folder, line, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    wait_for(lambda: not alive(process.pid))
    return out, err


def alive(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the steps, and those of the epochs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "train_loss" in line]


def wait_for(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


# Of a line of metrics what does not depend on time.
NUMBERS = {"step", "epoch", "loss", "samples", "learning_rate", "train_loss", "test_loss"}
