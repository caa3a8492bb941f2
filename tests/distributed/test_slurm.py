"""Real Slurm on two hosts: srun starts the workers, or torchrun's agents, and its signals reach them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tests.support.hosts import DATA_LINK, Hosts
from tests.support.placed_training import SCRIPT, assert_equal, train_here
from tests.support.slurm import Slurm, missing_command, running_slurm, wait_for

pytestmark = pytest.mark.slow

RECIPE = str(Path(__file__).parents[1] / "support/recipes/small_network.py")
SCRIPT_OF_PREPARE = str(Path(__file__).parents[2] / "examples/tutorial/train.py")
TRAIN = ["train", RECIPE, "--plan", "data=4", "--batch", "32", "--steps", "12"]

# A training of some seconds, in float64.
SLOW_RECIPE = """
import time

import torch
from torch import nn

class Samples(list):
    pause = 0.0
    def __getitem__(self, i):
        time.sleep(self.pause)
        return super().__getitem__(i)

def model():
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 4)).double()

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.AdamW([parameter for _, parameter in parameters], lr=0.01)

def data(split, pause=0.0):
    x = torch.randn(300, 8, generator=torch.Generator().manual_seed(1)).double()
    samples = Samples(zip(x, x[:, :4].argmax(1)))
    samples.pause = pause
    return samples if split == "train" else None
"""


@pytest.fixture
def slurm(tmp_path: Path) -> Iterator[Slurm]:
    if missing := missing_command():
        pytest.skip(f"{missing} is not installed")
    hosts = Hosts.make(2)
    if isinstance(hosts, str):
        pytest.skip(f"no hosts can be made: {hosts}")
    with closing(hosts), running_slurm(hosts, tmp_path) as made:
        made.environment.update(
            {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": DATA_LINK, "TORCH_CPP_LOG_LEVEL": "ERROR"}
        )
        yield made


def test_tasks_of_srun_are_the_workers(slurm: Slurm, tmp_path: Path) -> None:
    """Also under plans that need to know which of them are on one host."""
    out, plans = tmp_path / "out.json", ("data=4", "data=2,tensor=2", "data=4,shard=parameters,within=2")
    done = slurm.run("srun", "-N2", "--ntasks-per-node=2", sys.executable, SCRIPT, str(out), *plans)
    assert done.returncode == 0, done.stderr
    found, alone = json.loads(out.read_text()), train_here(("data=1",), 1, tmp_path)["data=1"]
    for plan in plans:
        assert_equal(found[plan], alone, 1e-12)


def test_a_script_that_srun_runs_is_audited(slurm: Slurm, tmp_path: Path) -> None:
    """The auditor is a process of its own, which must not take itself for a task."""
    words = [
        sys.executable,
        "-m",
        "polylane",
        "run",
        SCRIPT_OF_PREPARE,
        "--plan",
        "data=2",
        "--run",
        str(tmp_path / "run"),
    ]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", *words)
    assert done.returncode == 0 and "the same numbers as one device" in done.stdout + done.stderr, done.stderr


def test_a_plan_of_other_workers_is_refused_by_name(slurm: Slurm, tmp_path: Path) -> None:
    words = [sys.executable, "-m", "polylane", *TRAIN, "--run", str(tmp_path / "run")]
    done = slurm.run("srun", "-N2", "--ntasks-per-node=1", *words)
    assert done.returncode == 2 and "the plan takes 4 workers, Slurm started 2" in done.stderr


def test_a_signal_saves_and_the_next_job_goes_on(slurm: Slurm, tmp_path: Path) -> None:
    """What a job does whose time is nearly over, and the one that is queued behind it."""
    folder = tmp_path / "run"
    words = [sys.executable, "-m", "polylane", *TRAIN[:-1], "100000", "--run", str(folder), "--resume", "auto"]
    words += ["--save-every", "10m", "--requeue-code", "75"]
    with ThreadPoolExecutor() as pool:
        running = pool.submit(slurm.run, "srun", "-N2", "--ntasks-per-node=2", *words)
        metrics = folder / "metrics.jsonl"
        wait_for(lambda: running.done() or (metrics.exists() and len(metrics.read_text().splitlines()) > 3))
        (job,) = slurm.run("squeue", "-h", "-o", "%i").stdout.split()
        slurm.run("scancel", "--signal=TERM", job)
        ended = running.result()
    assert ended.returncode == 75, ended.stderr
    assert "SIGTERM: saving a checkpoint after this step" in ended.stderr
    (saved,) = (folder / "checkpoints").iterdir()
    step = int(re.sub(r"\D", "", saved.name))
    words[words.index("100000")] = str(step + 2)
    ended = slurm.run("srun", "-N2", "--ntasks-per-node=2", *words)
    assert ended.returncode == 0 and (folder / "model.safetensors").exists(), ended.stderr


def read_losses(folder: Path) -> dict[int, float]:
    try:
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    except OSError:
        return {}
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def test_the_printed_job_saves_is_requeued_and_ends_with_the_same_loss(slurm: Slurm, tmp_path: Path) -> None:
    """What ``polylane launch`` prints, on two nodes, with the signal that comes before the time is over."""
    recipe, folder, log, file = (tmp_path / name for name in ("slow.py", "run", "log", "slow.sbatch"))
    recipe.write_text(SLOW_RECIPE)
    words = [str(recipe), "--plan", "data=4", "--batch", "32", "--steps", "60"]
    polylane = [sys.executable, "-m", "polylane"]
    launch = [*polylane, "launch", *words, "--on", "slurm", "--hosts", "2", "--device", "cpu", "--run", str(folder)]
    file.write_text(subprocess.run([*launch, "--set", "pause=0.02"], capture_output=True, text=True, check=True).stdout)
    slurm.environment["PATH"] = f"{Path(sys.executable).parent}:{slurm.environment['PATH']}"
    assert slurm.run("sbatch", "--test-only", str(file)).returncode == 0
    submitted = slurm.run("sbatch", "--parsable", f"--output={log}", f"--chdir={tmp_path}", str(file))
    job, state = submitted.stdout.strip(), ""

    def is_over() -> bool:
        """Whether the job has ended for good."""
        nonlocal state
        state = "".join(re.findall(r"JobState=(\w+)", slurm.run("scontrol", "show", "job", job).stdout))
        return state in ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT")

    try:
        wait_for(lambda: len(read_losses(folder)) > 3)
        slurm.run("scancel", "--batch", "--signal=USR1", job)  # as Slurm does before the time is over
        wait_for(lambda: "restarts=1" in slurm.run("scontrol", "show", "job", job).stdout.lower())
        assert len(read_losses(folder)) < 60
        wait_for(is_over, 150)
    finally:
        print(log.read_text() if log.exists() else submitted.stderr)
    assert state == "COMPLETED" and (folder / "model.safetensors").exists()
    alone = [*polylane, "train", *words[:1], "--plan", "data=1", *words[3:], "--run", str(tmp_path / "alone")]
    subprocess.run(alone, check=True, capture_output=True)
    assert sorted(read_losses(folder)) == list(range(1, 61))
    assert read_losses(folder) == pytest.approx(read_losses(tmp_path / "alone"), rel=1e-9)
