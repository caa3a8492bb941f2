"""Requests to end that come while no steps are made, and what the user's own processes do to a run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.cli.tiny_recipe import NUMBERS
from tests.support.workers import forked_commands

RECIPE = """
import os, sys, time
import torch

class Points(torch.utils.data.Dataset):
    def __init__(self, length, pause, leaves=""):
        self.length, self.pause, self.leaves = length, pause, leaves

    def __len__(self):
        return self.length

    def __getitem__(self, i):
        if self.pause:
            open("testing", "w").close()
            time.sleep(self.pause)
        if self.leaves and i == 3:
            child = os.fork()
            if not child:
                raise SystemExit(3) if self.leaves == "exit" else ValueError("the child's own")
            print("the child's code:", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        x = torch.full((4,), i / 48)
        return x, x[:1]

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 1))

def data(split, pause=0.0, leaves=""):
    return Points(24, 0.0, leaves) if split == "train" else Points(160, pause)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.01, momentum=0.9)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(RECIPE)
    return tmp_path


def start(folder: Path, line: str) -> subprocess.Popen[str]:
    words = ["train", "points.py", "--batch", "8", "--plan", "data=2", "--epochs", "2", *line.split()]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    return forked_commands.start([sys.executable, "-m", "polylane", *words], cwd=folder, env=environment)


def finish(process: subprocess.Popen[str]) -> tuple[str, str, int]:
    out, err = process.communicate(timeout=100)
    return out, err, process.returncode


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    every = [each for line in lines if "audit" not in (each := json.loads(line))]
    return [{k: v for k, v in each.items() if k in NUMBERS} for each in every]


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_a_test_that_outlasts_the_grace_is_given_up_for_a_checkpoint(folder: Path, number: signal.Signals) -> None:
    """It takes 40 s to test here; the run that goes on tests again, and says what the unbroken one says."""
    process = start(folder, "--run broken --save-every 1h --grace 15 --set pause=0.5")
    while not (folder / "testing").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    began = time.monotonic()
    process.send_signal(number)
    out, err, code = finish(process)
    assert code == (130 if number == signal.SIGINT else 0), err
    assert time.monotonic() - began < 15 and "no checkpoint was complete" not in err
    assert "ended after 3 steps; broken/checkpoints/step-00000003 has all" in out
    assert not any("test_loss" in each for each in metrics(folder, "broken"))
    out, err, code = finish(start(folder, "--run broken --save-every 1h --resume auto"))
    assert code == 0 and "note: resumes from" in out, err
    assert finish(start(folder, "--run unbroken"))[2] == 0
    assert metrics(folder, "broken") == metrics(folder, "unbroken")


@pytest.mark.parametrize(("leaves", "code"), [("exit", 3), ("raise", 1)])
def test_what_a_process_of_the_dataset_raises_is_no_workers_failure(folder: Path, leaves: str, code: int) -> None:
    out, err, ended = finish(start(folder, f"--run run --set leaves={leaves}"))
    assert ended == 0, err
    assert f"the child's code: {code}\n" in out and ("the child's own" in err) == (leaves == "raise")


@pytest.mark.parametrize("line", ["--resume="])
def test_an_empty_checkpoint_is_said_to_be_none(folder: Path, line: str) -> None:
    out, err, code = finish(start(folder, f"--run run {line}"))
    assert (out, err, code) == ("", "polylane: --resume '': give auto, or the path of a checkpoint\n", 2)


def test_why_names_the_folder_once(folder: Path) -> None:
    command = [sys.executable, "-m", "polylane", "why", "nothing"]
    done = forked_commands.run(command, cwd=folder)
    assert (done.returncode, done.stderr) == (2, "polylane: nothing is no folder\n")
    (folder / "loop").symlink_to("loop")  # which nobody can read, as a folder without the permission
    done = forked_commands.run([*command[:-1], "loop"], cwd=folder)
    assert (done.returncode, done.stderr) == (2, "polylane: loop cannot be read: Too many levels of symbolic links\n")
    (folder / "points.d").mkdir()
    (folder / "points.d" / "why.json").write_text("{")
    done = forked_commands.run([*command[:-1], "points.d"], cwd=folder)
    assert re.fullmatch(r"polylane: points.d/why.json cannot be read: .*\n", done.stderr)
