"""Several GPUs, each of a worker of its own, and NCCL between them: what could hang, die or idle there.

python -m benchmarks.gpu.several [CASE ...]                       on two GPUs or more (make gpus), under ten minutes
python -m benchmarks.gpu.several --device cpu --quick             the same cases, small, on the CPU

Each case has a time limit of its own, and stands beside what it should find. NCCL's log of each is in the run folder.

    case            should find
    connections     under 2 s and 300 MiB for each communicator; none is made behind the first step
    order           a pipeline of 8 microbatches with tied weights ends, with the numbers of one device, also where
                    kernels are loaded at their first use (CUDA_MODULE_LOADING=LAZY)
    full memory     the same within 4% more memory than it needs: it ends, or says that memory is short; no hang
    failure         a worker that raises: the run ends in half of its limit with that worker's error
    visible         processes that see one GPU each have NCCL, not gloo
    beside torch    a step of data=2 beside DDP, and of shard=parameters beside FSDP2
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import polylane
from benchmarks.gpu import gpt, report
from benchmarks.gpu.setting import Row, Setting, format_figure, relative_difference, synchronize
from benchmarks.gpu.speed import time_in_turns
from benchmarks.gpu.trainings import batch_of, build, sgd, train_plainly, trainings
from benchmarks.harness import make_parser
from polylane.errors import PolylaneError, WorkerFailed
from polylane.runtime.workers.started_worker import WorkerContext
from polylane.runtime.workers.team import start_workers

STEPS, SECONDS = 3, 60.0
PIPELINE = "pipeline=2,schedule=1f1b,microbatches=8"
CONNECTED = ("data=2", "tensor=2", "pipeline=2,microbatches=2", "data=2,shard=parameters")
MOST_SECONDS, MOST_MIB = 2.0, 300.0  # of a communicator


def connect(plan: str, setting: Setting, context: WorkerContext) -> dict[str, Any]:
    """Open the connections of a plan, and make a step: what they take."""
    device, before, start = context.device, _free_bytes(context.device), time.perf_counter()
    threads = threading.active_count()
    job = polylane.parallelize(
        build("gpt, untied", torch.float32),
        trainings()["gpt, untied"][1],
        sgd,
        example=batch_of("gpt, untied", 0, torch.float32),
        plan=plan,
        audit="off",
        alone=False,
    )
    seconds, taken = time.perf_counter() - start, before - _free_bytes(device)
    with job:
        job.step(batch_of("gpt, untied", 0, torch.float32))
    groups = max(1, len(dist.distributed_c10d._world.pg_names) if dist.is_initialized() else 1)
    return {
        "groups": groups,
        "seconds": seconds,
        "MiB": taken / 2**20,
        "threads": threading.active_count() - threads,
        "holds": setting.device == "cpu" or (seconds / groups < MOST_SECONDS and taken / 2**20 / groups < MOST_MIB),
    }


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device) if device.type == "cuda" else 0


def run_pipeline(name: str, context: WorkerContext) -> dict[str, Any]:
    """Train by a pipeline, and compare with one device."""
    state = _train(name, PIPELINE, torch.float64)
    plain = train_plainly(name, STEPS, torch.device("cpu"))
    difference = relative_difference(state, plain)
    return {"to one device": difference, "holds": difference < 1e-9}


def _train(name: str, plan: str, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    example = batch_of(name, 0, dtype)
    job = polylane.parallelize(
        build(name, dtype), trainings()[name][1], sgd, example=example, plan=plan, audit="off", alone=False
    )
    with job:
        for step in range(STEPS):
            job.step(batch_of(name, step, dtype))
        return job.state_dict()


def fill_memory(setting: Setting, context: WorkerContext) -> dict[str, Any]:
    """Train a larger GPT by a pipeline, then once more with hardly more memory than it took."""
    figures = gpt.SMALL if setting.quick or setting.device == "cpu" else {**gpt.LARGE, "layers": 8}
    batch = gpt.tokens(16, figures["length"], figures["vocabulary"])
    job = polylane.parallelize(
        gpt.model(**figures, tied=False), gpt.loss, gpt.optimizer, example=batch, plan=PIPELINE, audit="off"
    )
    with job:
        for step in range(STEPS * 2):
            if step == STEPS and context.device.type == "cuda":
                total = torch.cuda.get_device_properties(context.device).total_memory
                torch.cuda.empty_cache()
                peak = torch.cuda.max_memory_allocated(context.device)
                torch.cuda.set_per_process_memory_fraction(min(1.0, 1.04 * peak / total), context.device)
            job.step(batch)
        synchronize(context.device)
    return {"how": "it ends", "holds": True}


def fail(context: WorkerContext) -> dict[str, Any]:
    """Raise on one worker in the middle of a training, while the other one goes on."""
    name, dtype = "gpt, untied", torch.float32
    job = polylane.parallelize(
        build(name, dtype), trainings()[name][1], sgd, example=batch_of(name, 0, dtype), plan=PIPELINE, audit="off"
    )
    with job:
        for step in range(STEPS):
            if context.rank == 1 and step == STEPS - 1:
                raise ValueError("this worker's own mistake")
            job.step(batch_of(name, step, dtype))
    return {"holds": False}


def compare_with_torch(setting: Setting, context: WorkerContext) -> dict[str, Any]:
    """Time a step of replicas beside torch's, in turns: whole ones, and those that hold parts of the parameters."""
    small = setting.quick or setting.device == "cpu"
    figures, device = gpt.SMALL if small else {**gpt.LARGE, "layers": 12}, context.device
    batch = gpt.tokens(16, figures["length"], figures["vocabulary"])
    own = tuple(part[context.rank * 8 : context.rank * 8 + 8].to(device) for part in batch)
    context.world.connect()

    def make_torch_step(wrap: Callable[[torch.nn.Module], torch.nn.Module]) -> Callable[[], Any]:
        torch.manual_seed(0)
        model = wrap(gpt.model(**figures, tied=False).to(device))
        optimizer = gpt.optimizer(list(model.named_parameters()))

        def step() -> None:
            optimizer.zero_grad()
            with torch.autocast(device.type, dtype=torch.bfloat16):
                loss = gpt.loss(model, own)
            loss.backward()
            optimizer.step()

        return step

    def wrap_fully(model: torch.nn.Module) -> torch.nn.Module:
        for block in model.blocks:
            fully_shard(block)
        return fully_shard(model)

    figures_of_steps: dict[str, Any] = {"holds": True}
    pairs: dict[str, Callable[[torch.nn.Module], torch.nn.Module]] = {
        "data=2": DistributedDataParallel,
        "data=2,shard=parameters": wrap_fully,
    }
    for plan, wrap in pairs.items():
        torch.manual_seed(0)
        job = polylane.parallelize(
            gpt.model(**figures, tied=False),
            gpt.loss,
            gpt.optimizer,
            example=batch,
            plan=f"{plan},precision=bfloat16",
            audit="off",
        )
        contenders = {"torch": make_torch_step(wrap), "polylane": partial(job.step, batch)}
        seconds = time_in_turns(contenders, device, 2 if small else 5, 2 if small else 10)
        job.close()
        figures_of_steps[f"{plan}: ms"] = seconds["polylane"] * 1e3
        figures_of_steps[f"{plan}: of torch's"] = seconds["polylane"] / seconds["torch"]
    return figures_of_steps


@dataclass(frozen=True)
class Case:
    """A case, run by two workers in new processes.

    Attributes:
        work: runs in each worker; rank 0's figures are the row, with "holds".
        environment: variables of its processes.
        seconds: its time limit.
        error: what the run must end with; None: it must end well.
    """

    work: Callable[[WorkerContext], dict[str, Any]]
    environment: dict[str, str]
    seconds: float = SECONDS
    error: str | None = None


def list_cases(setting: Setting) -> dict[str, Case]:
    """Return the cases by name; the first word chooses them on the command line."""
    cases = {f"connections {plan}": Case(partial(connect, plan, setting), {}) for plan in CONNECTED}
    for loading in ("LAZY", "EAGER"):
        for name in ("gpt", "gpt, untied"):
            how = {"CUDA_MODULE_LOADING": loading}
            cases[f"order {name}, {loading.lower()} kernels"] = Case(partial(run_pipeline, name), how)
    cases["memory"] = Case(partial(fill_memory, setting), {}, 2 * SECONDS, "")
    cases["failure"] = Case(fail, {}, error="this worker's own mistake")
    cases["torch"] = Case(partial(compare_with_torch, setting), {}, 2 * SECONDS)
    return cases


def run_case(name: str, case: Case, folder: Path) -> Row:
    """Run a case under its time limit, and judge it."""
    log, start = folder / f"nccl-{re.sub(r'[^a-z0-9]+', '-', name)}.%h.%p.log", time.monotonic()
    variables = {**case.environment, "NCCL_DEBUG": "INFO", "NCCL_DEBUG_FILE": str(log)}
    before = dict(os.environ)
    os.environ.update(variables)

    def watch() -> None:
        if time.monotonic() - start > case.seconds:
            raise TimeoutError(f"not ended within {case.seconds:.0f} s: it hangs")

    try:
        figures = start_workers(case.work, 2, watch=watch, start_method="spawn")[0]
        holds = figures.pop("holds") and not case.error  # an error was to be raised
    except (WorkerFailed, PolylaneError, TimeoutError, RuntimeError) as error:
        seconds = time.monotonic() - start
        said = str(error).strip().splitlines() or [type(error).__name__]
        figures = {"said": said[-1][:100], "seconds": seconds}
        is_short = case.error == "" and "memory" in str(error)
        holds = is_short or bool(case.error and case.error in str(error) and seconds < case.seconds / 2)
    finally:
        os.environ.clear()
        os.environ.update(before)
    found = ", ".join(f"{what} {format_figure(figure)}" for what, figure in figures.items())
    return Row("several GPUs", name, {"found": found}, bool(holds))


VISIBLE = """
import os
if os.environ["DEVICES"] == "cuda":
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["LOCAL_RANK"]
from polylane.runtime.workers.world import World
world = World.join()
print("backend", world.backend, world.device, flush=True)
world.leave()
"""


def check_visible(setting: Setting, folder: Path) -> Row:
    """Start two processes that see one device each, as Slurm's --gpus-per-task=1 does, and ask for their backend."""
    script = folder / "visible.py"
    script.write_text(VISIBLE)
    line = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {**os.environ, "DEVICES": setting.device}
    if setting.device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=2 * SECONDS, check=False)
    backends = re.findall(r"backend (\w+)", done.stdout)
    return Row("several GPUs", "visible", {"found": ", ".join(backends)}, backends == [_backend(setting)] * 2)


def _backend(setting: Setting) -> str:
    return "nccl" if setting.device == "cuda" else "gloo"


def main(words: list[str] | None = None) -> int:
    """Run the cases, print and write the table; return the exit status."""
    parser = make_parser("benchmarks.gpu.several", __doc__)
    parser.add_argument("cases", nargs="*", help="first words of cases; default: all")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="devices of the workers")
    parser.add_argument("--run", type=Path, default=Path("run/gpus"), help="folder of report.json and report.md")
    given = parser.parse_args(words)
    if given.device == "cuda" and torch.cuda.device_count() < 2:
        print("make gpus: torch sees fewer than two CUDA devices here; make gpu measures one", file=sys.stderr)
        return 2
    setting, folder = Setting(given.device, given.quick), given.run
    folder.mkdir(parents=True, exist_ok=True)
    if given.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    rows = list[Row]()
    for name, case in list_cases(setting).items():
        if not given.cases or name.split()[0] in given.cases:
            rows.append(run_case(name, case, folder))
            print(f"  {name}: {rows[-1].figures['found']}", flush=True)
    if not given.cases or "visible" in given.cases:
        rows.append(check_visible(setting, folder))
    machine = {"device": f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"} if _is_gpu(given) else {}
    report.show(rows, machine)
    report.write(rows, machine, folder)
    failed = [row.name for row in rows if row.holds is False]
    print("Everything holds." if not failed else f"Not so: {'; '.join(failed)}")
    return 1 if failed else 0


def _is_gpu(given: Any) -> bool:
    return bool(given.device == "cuda")


if __name__ == "__main__":
    sys.exit(main())
