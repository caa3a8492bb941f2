"""A training that loses workers goes on with fewer, and is the training that has lost none."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from polylane.commands.running.launch import is_lost
from polylane.errors import WorkerFailed, WorkerHung
from tests.support.workers import forked_commands

# The worker of a rank dies in the n-th step of an attempt where a file says so; or any one, since a stage that is cut
# by measured times may have no parameters.
RECIPE = """
import multiprocessing, os, signal, time
import torch
from torch import nn

class Dying(torch.optim.AdamW):
    steps, pause = 0, 0.0

    def step(self, closure=None):
        super().step(closure)
        time.sleep(Dying.pause)
        who = multiprocessing.current_process().name.removeprefix("polylane-worker-")
        who = os.environ.get("RANK", who)
        Dying.steps += who != "MainProcess"  # others are tried before workers start
        for who in (who, "any"):
            try:
                os.remove(f"kill-{who}-{Dying.steps}")
            except FileNotFoundError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

def model():
    layers = [nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 8), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()

def data(split):
    random = torch.Generator().manual_seed(0)
    points = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(40)]
    return points if split == "train" else None

def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters, pause=0.0):
    Dying.pause = pause
    return Dying([p for _, p in parameters], lr=0.01)

def scheduler(optimizer):
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
"""


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("runs")
    (place / "points.py").write_text(RECIPE)
    train(place, "--run whole-1")
    return place


def train(folder: Path, line: str, *dying: str, launcher: tuple[str, ...] = (), code: int = 0) -> str:
    for each in dying:
        (folder / each).touch()
    words = ["train", "points.py", "--batch", "12", "--steps", "10", *line.split()]
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = forked_commands.run(
        [sys.executable, *(launcher or ("-m",)), "polylane", *words], cwd=folder, env=environment, timeout=300
    )
    spared = [each.name for each in folder.glob("kill-*")]
    for name in spared:  # whoever trains next is not to die by it
        (folder / name).unlink()
    assert done.returncode == code, done.stderr
    assert not spared, done.stdout + done.stderr
    return done.stderr


def losses(folder: Path) -> dict[int, float]:
    rows: list[dict[str, Any]] = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def check_same(folder: Path, lost: str, whole: str = "whole-1") -> None:
    from safetensors.torch import load_file
    from torch.testing import assert_close

    assert list(losses(folder / whole)) == list(range(1, 11))
    assert losses(folder / lost) == pytest.approx(losses(folder / whole), rel=1e-12, abs=0)
    assert_close(
        load_file(folder / lost / "model.safetensors"),
        load_file(folder / whole / "model.safetensors"),
        rtol=0,
        atol=1e-12,
    )


def test_it_goes_on_with_one_worker_fewer(folder: Path) -> None:
    err = train(folder, "--run lost --save-every 2 --workers 1:3", "kill-2-3", "kill-0-6")
    told = [line for line in err.splitlines() if line.startswith("polylane: ")]
    assert told[0] == "polylane: if workers are lost: with 2 by data=2,microbatches=1; with 1 by data=1,microbatches=1"
    assert re.fullmatch(
        r"polylane: worker 2 failed: it was killed by SIGKILL.*; restart 1 of 2, from .*, "
        r"with 2 workers, data=2,pipeline=1",
        told[1],
    )
    assert re.search(r"restart 2 of 2, from lost/checkpoints/step-0+\d, with 1 worker, data=1,pipeline=1$", told[2])
    check_same(folder, "lost")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "dying", "by"),
    [
        (
            "pipeline=2,tensor=2,microbatches=4",
            ("kill-any-3", "kill-any-6"),
            r"with 3 by .*microbatches=4.*; with 2 by ",
        ),
        (
            "data=2,pipeline=2,microbatches=3",
            ("kill-any-5",),
            r"with 3 by .*microbatches=3.*; with 2 by pipeline=2,",
        ),
        ("data=4,shard=parameters", ("kill-3-3", "kill-2-6"), r"with 3 by data=3,.*shard=parameters"),
        ("data=4,shard=optimizer,within=2", ("kill-3-5",), r"with 3 by data=3,microbatches=1,shard=optimizer;"),
        ("data=3,servers=1,dedicated=yes", ("kill-3-5",), r"with 3 by data=2,microbatches=1,servers=1,dedicated=yes"),
        ("auto,data=4", ("kill-3-5",), r"with 3 by data=3"),
    ],
)
def test_by_every_kind_of_plan(folder: Path, plan: str, dying: tuple[str, ...], by: str) -> None:
    microbatches = re.search(r"microbatches=(\d+)", plan)
    whole = f"whole-{microbatches[1] if microbatches else 1}"
    if not (folder / whole).exists():
        train(folder, f"--run {whole} --plan microbatches={whole[-1]}")
    lost = re.sub(r"\W", "-", plan)
    err = train(folder, f"--run {lost} --save-every 2 --workers 2:4 --plan {plan}", *dying)
    assert re.search(by, err)
    check_same(folder, lost, whole)


@pytest.mark.slow
def test_torchrun_starts_as_many_again(folder: Path) -> None:
    line = "--run again --save-every 2 --resume auto --plan data=2"
    err = train(folder, line, "kill-1-6", launcher=(*TORCHRUN, "2", "--max-restarts", "1", "-m", "--"))
    assert "worker 1 failed: it was killed by SIGKILL" in err
    check_same(folder, "again")


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=4", "pipeline=2,tensor=2,microbatches=1", "auto,data=4,microbatches=1"])
def test_torchrun_starts_another_number(folder: Path, plan: str) -> None:
    name = re.sub(r"\W", "-", f"torchrun {plan}")
    line = f"--run {name} --save-every 2 --resume auto --plan {plan} --set pause=0.1"  # time for checkpoints
    train(folder, line, "kill-any-6", launcher=(*TORCHRUN, "4", "-m", "--"), code=1)
    if plan.startswith("auto"):
        line = line.replace("auto,data=4,microbatches=1", "auto")  # it keeps the microbatches of the checkpoint
    err = train(folder, line, launcher=(*TORCHRUN, "3", "-m", "--"))
    assert (
        plan != "data=4" or "--plan takes 4 workers, and there are 3 now: continues with data=3,microbatches=1" in err
    )
    check_same(folder, name)


def test_only_who_was_killed_is_left_out() -> None:
    killed, raised = WorkerFailed(1, "SIGKILL", "it was killed"), WorkerFailed(1, "ValueError", "no", "Traceback ...")
    device = WorkerFailed(1, "AcceleratorError", "CUDA error", "Traceback ...")
    hung = WorkerHung((1,), "it is stopped")
    assert [is_lost(error) for error in (killed, raised, device, hung)] == [True, False, True, False]


@pytest.mark.slow
def test_no_more_restarts_than_workers_may_be_lost(folder: Path) -> None:
    err = train(folder, "--run ended --save-every 2 --workers 2:3", "kill-1-3", "kill-1-5", code=1)
    assert err.count("restart ") == 1 and "worker 1 failed: it was killed by SIGKILL" in err.splitlines()[-1]
