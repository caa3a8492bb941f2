"""Parameter servers under the command and torchrun; and when they, or their workers, fail: soon, with one message."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.speed.stragglers import Straggler, slow_down
from polylane.commands.running import worker as running_worker
from polylane.commands.running.resume import NothingLeft
from polylane.errors import PolylaneError, WorkerFailed
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.schedule.action import ActionKind
from tests.support import subsets
from tests.support.workers import forked_commands
from tests.support.workers.child_processes import children
from tests.support.workers.training import batch_of, mlp, workers

SECONDS = 10  # the promise; it takes about one
SHARED, DEDICATED = "data=2,servers=2", "data=2,servers=2,dedicated=yes"
PLANS = [SHARED, DEDICATED, f"{DEDICATED},staleness=1"]


@pytest.fixture
def nothing_is_left() -> Iterator[None]:
    fork_workers(lambda context: None, 1)
    before, others = len(os.listdir("/proc/self/fd")), children()
    start = time.monotonic()
    yield
    assert time.monotonic() - start < SECONDS
    assert children() <= others
    assert len(os.listdir("/proc/self/fd")) <= before


def failure_of(work: Callable[[Job], Any], plan: str, **options: Any) -> WorkerFailed:
    with pytest.raises(WorkerFailed) as caught:
        workers(work, mlp(6, 8, 4), plan, **options)
    return caught.value


def steps(job: Job, at: Callable[[int], None] = lambda step: None) -> None:
    for step in range(6):
        at(step)
        job.step(batch_of(8, seed=step))
    job.state_dict()


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_that_raises_on_a_server(plan: str) -> None:
    class Refusing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            self.times = getattr(self, "times", 0) + 1
            if self.times == 3 and any(p.shape == (4, 8) for group in self.param_groups for p in group["params"]):
                raise ArithmeticError("not this weight")
            return super().step(closure)

    sentence = r"optimizer\.step\(\) raised ArithmeticError: not this weight \(.*test_servers\.py:\d+\)"
    with pytest.raises(PolylaneError, match=sentence):
        workers(steps, mlp(6, 8, 4), plan, optimizer=lambda named: Refusing(list(named), lr=0.1))


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("plan", PLANS)
def test_a_worker_that_raises(plan: str) -> None:
    def work(job: Job) -> None:
        def at(step: int) -> None:
            if step == 3 and job.world.rank == 1:
                raise KeyError("gone")

        steps(job, at)

    error = failure_of(work, plan)
    assert (error.rank, error.error_type) == (1, "KeyError")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("plan", "rank"),
    subsets.one_in(2, [(SHARED, 1), (DEDICATED, 1), (DEDICATED, 3), (PLANS[2], 2)], first=1, several=True),
)
def test_a_worker_or_a_server_that_is_killed(plan: str, rank: int) -> None:
    def work(job: Job) -> None:
        if job.world.rank == rank and rank >= job.plan.workers:
            threading.Timer(0.3, os.kill, (os.getpid(), 9)).start()
            job.state_dict()

        def at(step: int) -> None:
            if job.world.rank == rank and step == 3:
                os.kill(os.getpid(), 9)
            time.sleep(0.1)

        steps(job, at)

    error = failure_of(work, plan)
    assert (error.rank, error.error_type) == (rank, "SIGKILL")


@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize("plan", PLANS)
def test_a_failed_worker_waits_for_nobody_when_it_ends(plan: str, tmp_path: Path) -> None:
    """A checkpoint is under way; the other one goes on with its steps, and would not report of its file."""

    def work(job: Job) -> None:
        job.save_checkpoint(tmp_path, wait=False)
        job.step(batch_of(8))
        if job.world.rank == 1:
            job.abandon()
            atexit._run_exitfuncs()  # as the interpreter does: the newest first, which is the job's
        steps(job)

    error = failure_of(work, plan)
    assert error.rank == 1 and "exit code 1" in str(error)


@pytest.mark.parametrize(("error", "abandons"), [(ValueError, True), (SystemExit, True), (NothingLeft, False)])
def test_a_worker_that_torchrun_started_abandons_what_failed(
    error: type[BaseException], abandons: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(*_: Any) -> None:
        raise error(Path(), 1)

    training: Any = mock.Mock()
    monkeypatch.setattr(running_worker, "RecipeLoop", begin)
    with pytest.raises(error):
        running_worker.TrainingWorker(training, mock.Mock(), mock.Mock()).train(lambda message: None)
    assert training.job.return_value.abandon.called == abandons


@pytest.mark.usefixtures("nothing_is_left")
def test_no_thread_serves_a_closed_job() -> None:
    def names(job: Job) -> list[str]:
        job.step(batch_of(8))
        serving = [t.name for t in threading.enumerate() if t.name.startswith("polylane-server")]
        job.gathered(None)  # all have looked: a thread ends with the job of its worker
        job.close()
        left = [t.name for t in threading.enumerate() if t.name.startswith("polylane-server")]
        job.close = lambda: None  # type: ignore[method-assign]  # it is
        assert not left
        return serving

    first, second = workers(names, mlp(6, 8, 4), SHARED)
    assert sorted([*first, *second]) == [f"polylane-server-{server}-{rank}" for server in (0, 1) for rank in (0, 1)]
    assert len(workers(names, mlp(6, 8, 4), DEDICATED)[2]) == 2


def test_the_time_that_a_server_takes_is_waiting_not_work() -> None:
    """Rank 1 is slow: the update of rank 0 waits for it, and its lane shows that."""

    def work(job: Job) -> Any:
        for step in range(3):
            job.step(batch_of(8, seed=step))
        return job.timeline(1)

    with slow_down({1: Straggler(40)}):
        timeline = workers(work, mlp(6, 8, 4), "data=2,servers=1")[0]
    (quick,) = [s for s in timeline.spans if s.rank == 0 and s.action.kind is ActionKind.STEP]
    assert quick.waited > 0.5 * (quick.end - quick.start)
    assert quick.bytes == sum(p.nbytes for p in mlp(6, 8, 4).parameters())


# A user's own script -------------------------------------------------------------------------------------------------

SCRIPT = """
import json, os, sys
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
import polylane

plan, out, fault = sys.argv[1:]
torch.set_num_threads(1)
rank = int(os.environ.get("RANK", 0))
if fault == "own group":
    dist.init_process_group("gloo")
torch.manual_seed(rank)  # other weights on every rank: those of rank 0 count
model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4)).double()
random = torch.Generator().manual_seed(0)
dataset = [(torch.randn(6, generator=random, dtype=torch.float64), i % 4) for i in range(22)]
example = torch.utils.data.default_collate(dataset[:8])

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)

job = polylane.parallelize(model, loss, optimizer, example=example, plan=plan, clip_norm=0.5, alone=True)
losses, evaluations = [], []
for epoch in range(2):
    for batch in job.batches(dataset, 8, first_epoch=epoch):
        losses.append(job.step(batch).loss)
        if fault == "raises" and len(losses) == 4 and rank == 1:
            raise KeyError("gone")
    evaluations.append(job.evaluate(example))
state = {name: value.tolist() for name, value in job.state_dict().items()}
job.save(f"{out}.safetensors")
assert os.path.exists(f"{out}.safetensors")
if fault != "stays open":
    job.close()
with open(f"{out}.{rank}.json", "w") as file:
    json.dump({"losses": losses, "evaluations": evaluations, "state": state}, file)
if fault == "own group":
    dist.barrier()
    dist.destroy_process_group()
"""


def run(tmp_path: Path, plan: str, count: int, fault: str = "", cold: bool = False) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}"] if count > 1 else []
    command = [sys.executable, *launcher, str(script), plan, str(tmp_path / plan), fault]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    if cold:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    return forked_commands.run(command, env=environment)


def told(tmp_path: Path, plan: str, count: int, fault: str = "") -> list[dict[str, Any]]:
    done = run(tmp_path, plan, count, fault)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((tmp_path / f"{plan}.{rank}.json").read_text()) for rank in range(count)]


def test_the_same_script_with_a_dedicated_server(tmp_path: Path) -> None:
    (alone,) = told(tmp_path, "data=1,servers=1,dedicated=yes", 1)
    *training, server = told(tmp_path, "data=2,servers=1,dedicated=yes", 3, "own group")
    for worker in training:
        assert worker["losses"] == pytest.approx(alone["losses"], rel=1e-9)
    assert len(server["losses"]) == len(alone["losses"]) and all(loss != loss for loss in server["losses"])
    for worker in (*training, server):
        assert worker["evaluations"] == pytest.approx(alone["evaluations"], rel=1e-9)
        for name, value in worker["state"].items():
            torch.testing.assert_close(torch.tensor(value), torch.tensor(alone["state"][name]))


@pytest.mark.parametrize(
    ("plan", "count", "cold"),
    [
        pytest.param("data=2,servers=1,dedicated=yes", 3, False, marks=pytest.mark.slow),
        pytest.param("data=2,servers=2,staleness=any", 2, True, marks=pytest.mark.slow),
        pytest.param("data=2,servers=1,dedicated=yes", 3, True, marks=pytest.mark.slow),
    ],
)
def test_a_script_that_never_closes_its_job(plan: str, count: int, cold: bool, tmp_path: Path) -> None:
    """Cold, interpreters come to their very end, which threads of servers must not see."""
    done = run(tmp_path, plan, count, "stays open", cold)
    assert done.returncode == 0 and "terminate" not in done.stderr, done.stderr[-4000:]


def test_a_script_that_raises_ends(tmp_path: Path) -> None:
    done = run(tmp_path, "data=2,servers=2,staleness=any", 2, "raises")
    assert done.returncode != 0 and "KeyError: 'gone'" in done.stderr


RECIPE = """
import torch
import torch.nn.functional as F
from torch import nn

def model():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

def loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])

def optimizer(parameters):
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)

def data(split, fault="no"):
    random = torch.Generator().manual_seed(0)
    rows = [(torch.randn(6, generator=random), i % 4) for i in range(40)]
    if split == "train" and fault == "yes":
        rows[7] = (rows[7][0] * float("nan"), 1)
    return rows
"""


def train(tmp_path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "tiny.py").write_text(RECIPE)
    command = [sys.executable, "-m", "polylane", "train", "tiny.py", *words]
    return forked_commands.run(command, cwd=tmp_path)


def test_train_with_a_server_of_its_own(tmp_path: Path) -> None:
    plan = ["--workers", "5", "--plan", "data=4,servers=1,dedicated=yes,staleness=2"]
    done = train(tmp_path, *plan, "--batch", "8", "--epochs", "3", "--run", "run", "--json")
    assert done.returncode == 0, done.stderr[-4000:]
    summary = json.loads(done.stdout)
    assert summary["workers"] == 5 and summary["steps"] == 15
    assert sum(summary["staleness"].values()) == 4 * 15
    assert (tmp_path / "run" / "model.safetensors").exists()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert sum("staleness" in row for row in rows) == 15


@pytest.mark.parametrize(
    "plan", subsets.one_in(2, ["data=2,servers=1,dedicated=yes", "data=2,servers=1,staleness=any,dedicated=yes"])
)
def test_a_loss_that_is_no_number_stops_all(plan: str, tmp_path: Path) -> None:
    words = ["--batch", "8", "--epochs", "3", "--run", "run", "--on-nan", "stop", "--set", "fault=yes"]
    done = train(tmp_path, "--plan", plan, *words)
    assert done.returncode == 2 and "the loss was nan at step" in done.stderr
    assert not (tmp_path / "run" / "model.safetensors").exists()


def test_how_many_workers_a_plan_takes(tmp_path: Path) -> None:
    done = train(tmp_path, "--workers", "4", "--plan", "data=4,servers=1,dedicated=yes")
    assert done.returncode == 2
    assert (
        "--workers 4, but the plan takes 5 (data=4 times pipeline=1, and servers=1): they must be equal" in done.stderr
    )
