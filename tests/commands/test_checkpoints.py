"""Runs that are saved, killed and asked to end go on: their metrics are those of a run that nothing happened to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.tiny_recipe import NUMBERS
from tests.support.workers import forked_commands

RECIPE = """
import time
import torch

class Points(torch.utils.data.Dataset):
    def __init__(self, pause):
        self.pause = pause

    def __len__(self):
        return 44

    def __getitem__(self, i):
        time.sleep(self.pause)
        x = torch.full((4,), i / 48) + torch.randn(4) / 8
        return x, x[:1]

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

def data(split, pause=0.0):
    return Points(pause) if split == "train" else Points(0.0)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    return torch.optim.AdamW([p for _, p in parameters], lr=0.01)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
"""
STEPS = 18  # six batches an epoch, the last one short
SLOW = "--set pause=0.01"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "points.py").write_text(RECIPE)
    return place


@pytest.fixture(scope="module")
def unbroken(folder: Path) -> list[dict[str, object]]:
    done = finish(start(folder, "unbroken", "--save-every 5 --keep 2"))
    assert done.returncode == 0, done.stderr
    assert "checkpoint stall: " in done.stdout and not done.stderr, done.stderr
    kept = sorted(each.name for each in (folder / "run" / "unbroken" / "checkpoints").iterdir())
    assert kept == ["step-00000015", "step-00000018"]
    return metrics(folder, "unbroken")


def start(folder: Path, name: str, line: str = "") -> subprocess.Popen[str]:
    words = ["train", "points.py", "--batch", "8", "--plan", "data=2", "--epochs", "3", "--run", f"run/{name}"]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return forked_commands.start([sys.executable, "-m", "polylane", *words, *line.split()], cwd=folder, env=environment)


def finish(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def metrics(folder: Path, name: str) -> list[dict[str, object]]:
    """The lines of a run without its times; which steps are audited depends on these."""
    try:
        lines = (folder / "run" / name / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return []
    every = [each for line in lines if "audit" not in (each := json.loads(line))]
    return [{k: v for k, v in each.items() if k in NUMBERS} for each in every]


def wait_for_step(folder: Path, name: str, step: int) -> None:
    for _ in range(3000):
        if any(line.get("step") == step for line in metrics(folder, name)):
            return
        time.sleep(0.01)
    raise AssertionError(f"{name} did not come to step {step}")


def check_goodput(folder: Path, name: str) -> None:
    """Two attempts, whose causes add up to the wall time of both and of what was between them."""
    ledger = json.loads((folder / "run" / name / "goodput.json").read_text())
    first, second = ledger["attempts"]
    assert first["resumed_at"] is None and 0 < second["resumed_at"] <= first["last_step"]
    assert ledger["wall_seconds"] == pytest.approx(second["last_seen"] - first["began"])
    assert sum(ledger["seconds"].values()) == pytest.approx(ledger["wall_seconds"], rel=0.01)
    assert 0 < ledger["share"] < 1


def workers_of(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_worker_that_is_killed_is_started_again(folder: Path, unbroken: list[dict[str, object]]) -> None:
    process = start(folder, "killed", f"--save-every 2 --max-restarts 1 {SLOW}")
    wait_for_step(folder, "killed", 8)
    os.kill(workers_of(process.pid)[1], signal.SIGKILL)
    done = finish(process)
    assert done.returncode == 0, done.stderr
    assert "worker 1 failed: it was killed by SIGKILL" in done.stderr and "restart 1 of 1, from " in done.stderr
    assert metrics(folder, "killed") == unbroken
    check_goodput(folder, "killed")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 75), pytest.param(signal.SIGUSR1, 0, marks=pytest.mark.slow)]
)
def test_a_signal_saves_and_the_run_goes_on(
    folder: Path, unbroken: list[dict[str, object]], number: signal.Signals, code: int
) -> None:
    name, requeue = number.name, f"--requeue-code {code}" if code else ""
    process = start(folder, name, f"--save-every 1h {requeue} {SLOW}")
    wait_for_step(folder, name, 4)
    process.send_signal(number)
    done = finish(process)
    assert done.returncode == code and "resume with --resume auto" in done.stdout, done.stderr
    assert len(metrics(folder, name)) < len(unbroken)
    done = finish(start(folder, name, f"--save-every 1h --resume auto {requeue}"))
    assert done.returncode == 0 and "note: resumes from" in done.stdout, done.stderr
    assert metrics(folder, name) == unbroken
    check_goodput(folder, name)
    again = finish(start(folder, name, "--save-every 1h --resume auto"))
    assert again.returncode == 0 and "there is nothing left to train" in again.stderr


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("--save-every 5", "has checkpoints of an earlier run, up to step 18: resume from them with --resume auto"),
        ("--resume auto --seed 1 --epochs 4", "was trained with --seed 0, and this run has --seed 1"),
        ("--resume auto --batch 4 --epochs 4", "was trained with --batch 8, and this run has --batch 4"),
        ("--resume run/nothing", "checkpoint run/nothing: there is no such folder"),
    ],
)
def test_what_does_not_go_on_is_one_sentence(folder: Path, unbroken: object, line: str, says: str) -> None:
    done = finish(start(folder, "unbroken", line))
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
