"""A user's own script under plain torchrun: the same as alone, with whatever group and weights it comes with."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support import subsets
from tests.support.workers import forked_commands

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import polylane
from polylane.errors import PolylaneError

plan, made_before, out = sys.argv[1], sys.argv[2] == "yes", sys.argv[3]
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
if made_before:
    dist.init_process_group("gloo")

torch.manual_seed(rank)  # other weights on every rank: those of rank 0 count


def network():
    return nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.25), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4)
    ).double()


model = network()
random = torch.Generator().manual_seed(0)
dataset = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(22)]
example = torch.utils.data.default_collate(dataset[:8])


def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


job = polylane.parallelize(model, loss, optimizer, example=example, plan=plan, clip_norm=0.5)
losses = [job.step(batch).loss for batch in job.batches(dataset, 8, epochs=2)]
evaluation = job.evaluate(example)
job.save(f"{out}.safetensors")
told = {"rank": job.world.rank, "losses": losses, "evaluation": evaluation, "workers": job.plan.workers}
job.close()
told["group"] = dist.is_initialized()
with open(f"{out}.{rank}.json", "w") as file:
    json.dump(told, file)

if made_before and job.plan.workers > 1:
    # Bad input is refused by every worker alike, and none is left waiting.
    refusals = []
    for wrong in ("data=3", "data=1,pipeline=2,microbatches=99", "data=2,schedule=none"):
        try:
            polylane.parallelize(network(), loss, optimizer, example=example, plan=wrong)
        except PolylaneError as error:
            refusals.append(str(error))
    other = nn.Linear(6, 4 + rank).double()  # not the same model everywhere
    try:
        polylane.parallelize(other, loss, optimizer, example=example, plan="pipeline=1,data=2")
    except PolylaneError as error:
        refusals.append(str(error))
    told["refusals"] = refusals
    with open(f"{out}.{rank}.json", "w") as file:
        json.dump(told, file)
    dist.barrier()
    dist.destroy_process_group()
"""


def run(tmp_path: Path, plan: str, workers: int, made_before: bool) -> list[dict[str, Any]]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    out = tmp_path / f"{plan}-{made_before}"
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"] if workers > 1 else []
    command = [sys.executable, *launcher, str(script), plan, "yes" if made_before else "no", str(out)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = forked_commands.run(command, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(workers)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """`python script.py` is the reference."""
    (told,) = run(tmp_path_factory.mktemp("alone"), "microbatches=2", 1, False)
    assert told["group"] is False
    return told


@pytest.mark.parametrize(
    ("plan", "made_before"),
    subsets.one_in(2, [("data=2,microbatches=2", False), ("pipeline=2,microbatches=2", True)], first=1, several=True),
)
def test_the_same_script(plan: str, made_before: bool, alone: dict[str, Any], tmp_path: Path) -> None:
    results = run(tmp_path, plan, 2, made_before)
    for rank, told in enumerate(results):
        assert told["rank"] == rank and told["workers"] == 2
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-9)
        assert told["evaluation"] == pytest.approx(alone["evaluation"], rel=1e-9)
        assert told["group"] is made_before  # the user's own group is left to the user
    if made_before:
        for told in results:
            workers, microbatches, schedule, model = told["refusals"]
            assert "the plan takes 3 workers" in workers
            assert "microbatches=99: a batch of 8 samples cannot be divided" in microbatches
            assert "schedule=none is not known" in schedule
            assert model.startswith("on rank 1: the plan is for another model")
