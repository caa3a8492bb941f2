"""How a training ends before it is done: a worker that leaves it, signals, and what torchrun does on the way."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polylane.commands.why import read_report
from polylane.errors import PolylaneError
from tests.support.workers import child_processes, forked_commands

RECIPE = """
import multiprocessing, os, sys, time
import torch

class Points(torch.utils.data.Dataset):
    def __init__(self, fault, pause):
        self.fault, self.pause = fault, pause

    def __len__(self):
        return 48

    def __getitem__(self, i):
        time.sleep(self.pause)
        if self.fault == "print":
            print("a sample", flush=True)
        if i == 40 and (multiprocessing.parent_process() is not None or os.environ.get("RANK") == "1"):
            leave(self.fault)
        x = torch.full((4,), i / 48)
        return x, x[:1]

def leave(fault):
    if fault == "sys.exit":
        sys.exit(0)
    if fault == "os._exit":
        os._exit(0)

class Leaving(torch.optim.SGD):
    def step(self, closure=None):
        if multiprocessing.current_process().name == "polylane-worker-1" or os.environ.get("RANK") == "1":
            sys.exit(0)
        return super().step(closure)

def model():
    return torch.nn.Linear(4, 1)

def data(split, fault="", pause=0.0):
    return Points(fault, pause) if split == "train" else None

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters, leaves=False):
    return (Leaving if leaves else torch.optim.SGD)([p for _, p in parameters], lr=0.01)
"""

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "points.py").write_text(RECIPE)
    return tmp_path


def start(folder: Path, line: str, torchrun: tuple[str, ...] | None = None, **options: Any) -> subprocess.Popen[str]:
    program = ("-m", "polylane") if torchrun is None else (*TORCHRUN, *torchrun, "-m", "--", "polylane")
    words = ["train", "points.py", "--batch", "8", "--plan", "data=2", "--run", "run/x", *line.split()]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return forked_commands.start([sys.executable, *program, *words], cwd=folder, env=environment, **options)


def steps(folder: Path) -> list[int]:
    try:
        lines = (folder / "run/x/metrics.jsonl").read_text().splitlines()
    except OSError:
        return []
    return [row["step"] for row in map(json.loads, lines) if "loss" in row]


@pytest.fixture
def training(folder: Path, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A training under torchrun that goes on for ever, at its third step."""
    process = start(folder, "--epochs 100000 --set pause=0.002", request.param)
    deadline = time.monotonic() + 60
    while len(steps(folder)) < 3 and time.monotonic() < deadline:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    yield process
    process.kill()
    process.communicate()


def workers_of(agent: int) -> list[int]:
    """The workers of torchrun's agent, in the order of their start."""
    return sorted(child_processes.children(agent))


TOLD = {
    "fault=sys.exit": r"batch 3 of epoch 1: sample 40 of the dataset raised SystemExit: 0 \(.*points.py:23\)",
    "fault=os._exit": r"worker [01] failed: it ended without a result \(exit code 0\), as by os._exit\(0\) in your .*",
    "leaves=yes": r"worker 1 failed: sys.exit\(0\) at .*points.py:\d+ ended it before its work was done",
}


@pytest.mark.parametrize("fault", TOLD)
def test_a_worker_that_leaves_is_named(folder: Path, fault: str) -> None:
    """Not the one that waits for it; whatever the code that it leaves with."""
    _, err = start(folder, f"--set {fault}").communicate(timeout=60)
    assert re.fullmatch(f"polylane: {TOLD[fault]}\n", err)


def read_one_line(process: subprocess.Popen[str]) -> str:
    """What `| head -1` does: read a line, and leave."""
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    line = process.stdout.readline()
    process.stdout.close()
    return line


@pytest.mark.parametrize("stdout", ["full", "head", "closed"])
def test_output_that_cannot_be_written_ends_no_training(folder: Path, stdout: str) -> None:
    """Lines of the launcher, and the recipe's own in its workers: said once, and the weights are those of the end."""
    where = {"full": "/dev/full", "closed": os.devnull, "head": os.devnull}[stdout]
    with open(where, "w") as file:
        options = {} if stdout == "head" else {"stdout": file}
        options |= {"preexec_fn": lambda: os.close(1)} if stdout == "closed" else {}
        process = start(folder, "--steps 12 --set fault=print --set pause=0.005", **options)
        if stdout == "head":
            assert read_one_line(process)
            process.stdout = None
        _, err = process.communicate(timeout=60)
    reason = {"full": "No space left on device", "head": "Broken pipe", "closed": ""}[stdout]
    said = f"polylane: stdout cannot be written: {reason}; training continues without it\n"
    assert (process.returncode, err) == (0, said if reason else "")
    assert steps(folder) == list(range(1, 13)) and (folder / "run/x/model.safetensors").exists()


@pytest.mark.parametrize(("stdout", "code"), [("full", 2), ("head", 0)])
def test_a_command_whose_output_is_its_result_says_that_it_is_lost(stdout: str, code: int) -> None:
    words = ["lanes", "1f1b", "--stages", "4", "--microbatches", "8"]
    with open("/dev/full", "w") as file:
        options = {"stdout": file} if stdout == "full" else {}
        process = forked_commands.start([sys.executable, "-m", "polylane", *words], **options)
        if stdout == "head" and process.stdout is not None:
            process.stdout.close()
            process.stdout = None
        _, err = process.communicate(timeout=60)
    said = "polylane: stdout cannot be written: No space left on device\n"
    assert (process.returncode, err) == (code, said if code else "")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143)])
def test_a_signal_without_checkpoints(folder: Path, number: signal.Signals, code: int) -> None:
    process = start(folder, "--epochs 100000 --set pause=0.002")
    while len(steps(folder)) < 2:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(number)
    _, err = process.communicate(timeout=10)
    kept = "run/x/ keeps what was written so far, no weights among it: no checkpoints were requested"
    assert (process.returncode, err) == (code, f"polylane: ended by {number.name}: {kept}\n")
    with pytest.raises(PolylaneError, match=f"has no report: it was ended by {number.name}, and none of its workers"):
        read_report(folder / "run/x")


@pytest.mark.parametrize("training", [("--max-restarts", "1")], indirect=True)
@pytest.mark.slow
def test_a_killed_worker_is_named_and_the_training_restarted(folder: Path, training: subprocess.Popen[str]) -> None:
    before = (folder / "run/x/metrics.jsonl").read_text()
    os.kill(workers_of(training.pid)[1], signal.SIGKILL)
    while steps(folder).count(3) < 2:
        assert training.poll() is None, training.communicate()
        time.sleep(0.05)
    assert (folder / "run/x/metrics.jsonl").read_text().startswith(before)
    training.send_signal(signal.SIGTERM)
    _, err = training.communicate(timeout=20)
    assert "polylane: worker 1 failed: it was killed by SIGKILL" in err


@pytest.mark.parametrize("training", [()], indirect=True)
def test_torchrun_tells_its_workers_to_end(folder: Path, training: subprocess.Popen[str]) -> None:
    training.send_signal(signal.SIGTERM)
    _, err = training.communicate(timeout=20)
    kept = "run/x/ keeps what was written so far, no weights among it: no checkpoints were requested"
    assert [line for line in err.splitlines() if "polylane:" in line] == [f"polylane: ended by SIGTERM: {kept}"]
    assert err.count("Traceback") == 1  # torchrun's own
    assert err.index("polylane: ended") < err.index("Traceback")


@pytest.mark.slow
def test_under_torchrun_a_signal_waits_for_a_checkpoint(folder: Path) -> None:
    """Of the step after which all workers have heard of it, from which torchrun's workers or others go on."""
    line = "--save-every 1h --set pause=0.002"
    process = start(folder, f"--epochs 100000 {line}", ())
    while len(steps(folder)) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=60)
    assert "polylane: SIGTERM: saving a checkpoint after this step, then the training ends" in err
    found = re.search(r"ended after (\d+) steps; run/x/checkpoints/step-0+\1 has all", out)
    assert found is not None and steps(folder) == list(range(1, int(found[1]) + 1)), out + err
    more = int(found[1]) + 2
    assert start(folder, f"--steps {more} --resume auto {line}").wait(60) == 0
    assert steps(folder) == list(range(1, more + 1))


@pytest.mark.parametrize("training", [()], indirect=True)
@pytest.mark.slow
def test_workers_end_with_their_agent(folder: Path, training: subprocess.Popen[str]) -> None:
    workers = workers_of(training.pid)
    training.kill()
    training.wait()
    deadline = time.monotonic() + 5
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any("State:\tZ" not in status for status in map(status_of, workers))


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return "State:\tZ"


@pytest.mark.parametrize("fault", TOLD)
@pytest.mark.slow
def test_a_worker_that_leaves_is_named_under_torchrun(folder: Path, fault: str) -> None:
    _, err = start(folder, f"--set {fault}", ()).communicate(timeout=60)
    (line,) = [line for line in err.splitlines() if line.startswith("polylane: ")]
    assert re.fullmatch(f"polylane: {TOLD[fault]}", line)
    assert err.index(line) < err.index("ChildFailedError")
