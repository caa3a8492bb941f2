"""Workers of torchrun, or of a launcher of the user's own: who hangs is named and ended, also where a script trains."""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

import pytest

from tests.support.recipes.hanging_worker import RECIPE, SCRIPT
from tests.support.workers.forked_commands import run, start

LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


@pytest.mark.slow
def test_a_stopped_worker_of_the_command_is_named(tmp_path: Path) -> None:
    (tmp_path / "stops.py").write_text(RECIPE)
    train = ["polylane", "train", "stops.py", "--plan", "data=2", "--batch", "8", "--run", "run", "--hang-after", "1.5"]
    done = run([*LAUNCH, "-m", "--", *train], cwd=tmp_path)
    assert done.returncode == 1
    assert "the training hangs: rank 1 (process " in done.stderr
    assert "it is stopped (SIGSTOP, or Ctrl-Z)" in done.stderr and "rank 0 waits for it" in done.stderr
    kept = json.loads((tmp_path / "run" / "why.json").read_text())
    assert kept["culprits"] == [1] and kept["ranks"][1]["phase"] == "loading"


def test_a_script_is_told_who_takes_long_and_raises_who_hangs(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {**os.environ, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "script.py", "data=2"]
    ranks = [start(command, cwd=tmp_path, env={**world, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in (0, 1)]
    try:
        out, err = ranks[0].communicate(timeout=60)
        assert ranks[0].returncode == 3 and ranks[1].wait(10) == -9, err
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    line = next(number for number, text in enumerate(SCRIPT.splitlines(), 1) if "the line" in text)
    start_line, between, hangs = [each for each in err.splitlines() if each.startswith("polylane: ")]
    assert start_line.startswith("polylane: 2 workers on "), err
    assert between.startswith("polylane: rank 1 ") and f"after step 5, at <module> (script.py:{line}): " in between
    assert "it is between steps, in your code; rank 0 waits for it in job.step (script.py line " in between
    assert between.endswith(
        " (this takes long, and is no hang yet: the run ends after 9.5 min of it (--hang-after, hang_after=))"
    )
    assert hangs.startswith("polylane: the training hangs: rank 1 ") and "it is stopped" in hangs
    assert out == f"raised: (1,) {hangs.removeprefix('polylane: the training hangs: ')}\n"


@pytest.mark.parametrize("plan", ["pipeline=2", "data=2,servers=2"])
@pytest.mark.slow
def test_a_stopped_worker_of_a_script_is_named_under_torchrun(tmp_path: Path, plan: str) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = run([*LAUNCH, "script.py", plan], cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout.startswith("raised: (1,) rank 1 ")
    assert "polylane: the training hangs: rank 1 " in done.stderr and "rank 0 waits for it" in done.stderr


APART = """
import sys, torch, polylane
from torch import nn

torch.set_num_threads(1)
batch = torch.ones(8, 4)
job = polylane.parallelize(
    nn.Linear(4, 2),
    lambda model, batch: model(batch).square().mean(),
    lambda parameters: torch.optim.SGD(parameters, 0.1),
    example=batch,
    plan=sys.argv[1],
)
for step in range(3):
    job.step(batch)
if job.world.rank == 0:
    job.save("run.safetensors")
job.close()
"""


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["data=2", "pipeline=2"])
def test_a_script_that_saves_on_one_rank_is_told_so_by_every_rank(tmp_path: Path, plan: str) -> None:
    (tmp_path / "train.py").write_text(APART)
    done = run([*LAUNCH, "train.py", plan], cwd=tmp_path)
    assert done.returncode == 1
    lines = [number for number, text in enumerate(APART.splitlines(), 1) if "job.save" in text or "job.close" in text]
    sentence = (
        f"rank 0 is in job.save (train.py line {lines[0]}), rank 1 in job.close (train.py line {lines[1]}): every rank "
        "must call job.save"
    )
    assert f"polylane: {sentence}\n" in done.stderr
    assert f"polylane.errors.CallsDiffer: {sentence}" in done.stderr
