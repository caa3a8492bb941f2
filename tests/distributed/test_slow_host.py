"""A host whose workers get half of the time is named; with fewer samples the next run is faster, and the same."""

from __future__ import annotations

import json
import os
import re
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.hosts import HostRun, Hosts

RECIPE = """
import torch
from torch import nn

def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 768), nn.Tanh(), nn.Linear(768, 768), nn.Tanh(), nn.Linear(768, 4)).double()

def data(split):
    random = torch.Generator().manual_seed(0)
    points = [(torch.randn(64, generator=random, dtype=torch.float64), i % 4) for i in range(960)]
    return points if split == "train" else None

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.01)
"""
PERIOD = 0.02  # seconds, after which a worker that gets half of the time stops, or goes on
STEPS = 120


@contextmanager
def halved(pid: int) -> Iterator[None]:
    """Let a process have half of the time meanwhile."""
    ends = threading.Event()

    def run() -> None:
        with suppress(ProcessLookupError):
            while not ends.is_set():
                for number in (signal.SIGSTOP, signal.SIGCONT):
                    os.kill(pid, number)
                    time.sleep(PERIOD)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def train(hosts: Hosts, folder: Path, plan: str) -> tuple[str, list[float], float]:
    """Train on two hosts, the second slow; return what was said, the losses, and the seconds of the usual step."""
    name = re.sub(r"\W", "-", plan)
    words = ["-m", "--", "polylane", "train", "recipe.py", "--plan", plan, "--run", name, "--steps", str(STEPS)]
    with HostRun(hosts, [*words, "--batch", "480", "--audit", "off"], 1, [folder, folder]) as run:
        for number in range(2):
            run.start(number)
        metrics, deadline = folder / name / "metrics.jsonl", time.monotonic() + 90
        while not metrics.exists() or not metrics.read_text():
            assert time.monotonic() < deadline, run.read(0)
            time.sleep(0.1)
        (pid,) = run.list_workers(1)
        with halved(pid):
            first, _ = run.wait(120)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
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
        said, losses, seconds = train(hosts, tmp_path, "data=2")
        pattern = r"host-b \(rank 1\) computes at (0.\d+) times the speed of .*; --plan (\S+) gives it fewer"
        found = re.search(pattern, said)
        assert found, said
        assert 0.35 < float(found[1]) < 0.65
        again, same, faster = train(hosts, tmp_path, found[2])
    print(f"{found[0]}: {seconds / faster:.2f} times as fast")
    assert "the plan's shares allow for that" in again
    assert same == pytest.approx(losses, rel=1e-12)  # how much faster it is, a busy machine does not show
