"""python -m benchmarks.speed.hosts [--rate 1gbit]: what pays between two hosts of one worker each, as a user finds out.

Two hosts are network namespaces of this machine with a link at a rate; root is needed. In turn: polylane probe over the
hosts writes the cluster file; plan finds the fastest plan that keeps the numbers; simulate predicts each strategy; all
train, for the same time, from the same weights.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import default_collate

import polylane
from benchmarks.harness import make_parser
from polylane.recipe import load
from polylane.runtime.workers.launch_environment import Launch
from tests.support.hosts import HostRun, Hosts

# The first ones have the numbers of one device, the others a rule of their own.
ALONE = "data=1"
KEEPING = (ALONE, "data=2", "data=2,shard=parameters", "pipeline=2,microbatches=4", "tensor=2")
CHANGING = (
    "data=2,wire=bfloat16",
    "data=2,compress=powersgd:4",
    "data=2,every=8",
    "data=2,every=8,outer=0.7:0.9",
)
# By plan: seconds of a step, samples a second, bytes that are sent in a step, and the loss of the test set.
Measured = dict[str, dict[str, float]]
ROUND_TO = 8  # steps of a turn are a multiple of those between two averages
LEAD = 3  # steps that do not count
TEST_SAMPLES = 128


@dataclass(frozen=True)
class Task:
    """A recipe with settings, and the samples of a batch."""

    recipe: str
    settings: tuple[str, ...]
    batch: int

    @property
    def words(self) -> list[str]:
        """As the command line takes it, without the recipe."""
        return [*(word for setting in self.settings for word in ("--set", setting)), "--batch", str(self.batch)]


TASKS = {
    "gpt": Task("examples/gpt.py", ("layers=4", "hidden=256", "dropout=0.0"), 16),
    "mlp": Task("examples/mlp.py", (), 128),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Probe, plan, predict, train, and print the table of each task."""
    parser = make_parser("benchmarks.speed.hosts", __doc__)
    parser.add_argument("--rate", default="1gbit", help="of the link, as tc takes it (default 1gbit)")
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS), help="default: all")
    parser.add_argument("--seconds", type=float, default=12.0, help="that each plan trains in a round (default 12)")
    parser.add_argument("--rounds", type=int, default=3, help="default 3")
    options = parser.parse_args(arguments)
    if options.quick:
        options.seconds, options.rounds = 1.0, 1
    hosts = Hosts.make(2, options.rate)
    if isinstance(hosts, str):
        sys.exit(f"no hosts can be made: {hosts}")
    with closing(hosts), tempfile.TemporaryDirectory() as folder:
        cluster = Path(folder) / "cluster.yaml"
        words = ["-m", "--", "polylane", "probe", "-o", str(cluster)]
        print(run_on_hosts(hosts, words, 300.0), flush=True)
        for name in options.tasks:
            print(f"\n{name}, {options.rate}\n{measure(hosts, TASKS[name], cluster, options)}", flush=True)


def measure(hosts: Hosts, task: Task, cluster: Path, options: Any) -> str:
    """Return the table of a task: what each plan is predicted to take, takes, sends, and learns in the same time."""
    call("probe", "--profile", task.recipe, "--workers", "2", *task.words)
    common = [task.recipe, *task.words, "--cluster", str(cluster), "--profile"]
    file = cluster.parent / "plan.yaml"
    chosen = json.loads(call("plan", *common, "--json", "-o", str(file)))["plans"][0]
    predicted = {"auto": chosen["step_seconds"]}
    for plan in (*KEEPING, *CHANGING):
        predicted[plan] = json.loads(call("simulate", *common, "--plan", plan, "--json"))["step_seconds"]
    request = {"recipe": task.recipe, "settings": task.settings, "batch": task.batch}
    request |= {"seconds": options.seconds, "rounds": options.rounds, "out": str(cluster.parent / "measured.json")}
    measured = measure_alone(hosts, {**request, "plans": {ALONE: ALONE}})
    plans = {plan: str(file) if plan == "auto" else plan for plan in predicted if plan != ALONE}
    measured |= measure_on_hosts(hosts, {**request, "plans": plans})
    return table(predicted, measured, chosen["plan"])


def measure_alone(hosts: Hosts, request: dict[str, Any]) -> Measured:
    """Return what is measured in one worker on the first host."""
    with hosts.hosts[0].enter():
        subprocess.run([sys.executable, "-m", "benchmarks.speed.hosts", "--worker", json.dumps(request)], check=True)
    return dict(json.loads(Path(request["out"]).read_text()))


def measure_on_hosts(hosts: Hosts, request: dict[str, Any]) -> Measured:
    """Return what is measured in one worker on each host."""
    limit = 120.0 + len(request["plans"]) * request["rounds"] * (request["seconds"] + 15)
    run_on_hosts(hosts, ["-m", "benchmarks.speed.hosts", "--worker", json.dumps(request)], limit)
    return dict(json.loads(Path(request["out"]).read_text()))


def run_on_hosts(hosts: Hosts, words: list[str], seconds: float) -> str:
    """Run a command in a worker on each host; return what the first one prints. A host has a core of its own."""
    all_cores = os.sched_getaffinity(0)
    with HostRun(hosts, words, 1) as run:
        for number in range(len(hosts.hosts)):
            os.sched_setaffinity(0, {sorted(all_cores)[number % len(all_cores)]})  # what is started inherits it
            run.start(number)
        os.sched_setaffinity(0, all_cores)
        outputs = run.wait(seconds)
    if any(output.code for output in outputs):
        sys.exit("\n".join(output.stderr for output in outputs))
    return outputs[0].stdout.strip()


def call(*words: str) -> str:
    """Run a command of polylane and return what it prints."""
    process = subprocess.run([sys.executable, "-m", "polylane", *words], capture_output=True, text=True)
    if process.returncode:
        sys.exit(process.stderr)
    return process.stdout


def table(predicted: dict[str, float], measured: Measured, chosen: str) -> str:
    """Return a table of all plans, and a line on the errors of predictions and the regret of the chosen plan."""
    lines = ["| plan | predicted, ms | measured, ms | error | samples/s | sent, MB | test loss |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    errors = []
    for plan, row in measured.items():
        error = predicted[plan] / row["seconds"] - 1
        errors.append(abs(error))
        times = f"{predicted[plan] * 1e3:.0f} | {row['seconds'] * 1e3:.0f} | {error:+.0%}"
        shown = f"auto: `{chosen}`" if plan == "auto" else f"`{plan}`"
        lines.append(f"| {shown} | {times} | {row['rate']:.0f} | {row['sent'] / 1e6:.2f} | {row['loss']:.3f} |")
    best = min(measured[plan]["seconds"] for plan in ("auto", *KEEPING))
    regret = measured["auto"]["seconds"] / best - 1
    summary = f"{len(errors)} plans: median error {statistics.median(errors):.1%}, worst {max(errors):.1%}; "
    return "\n".join([*lines, f"{summary}auto is {regret:.1%} slower than the best that keeps the numbers"])


# ---- a worker of the hosts -------------------------------------------------------------------------------------------


def work(request: dict[str, Any]) -> None:
    """Train under each plan in turn, as often as there are rounds; rank 0 writes what was measured."""
    torch.set_num_threads(1)
    turns: dict[str, list[dict[str, float]]] = {plan: [] for plan in request["plans"]}
    for _ in range(request["rounds"]):
        for plan, written in request["plans"].items():
            turns[plan].append(train(request, written))
    if Launch.of_process().is_first:
        medians = {
            plan: {key: statistics.median(turn[key] for turn in rows) for key in rows[0]}
            for plan, rows in turns.items()
        }
        Path(request["out"]).write_text(json.dumps(medians))


def train(request: dict[str, Any], plan: str) -> dict[str, float]:
    """Train for the seconds that are asked for; return a step's seconds, its bytes, samples a second and the loss."""
    recipe, batch_size = load(request["recipe"], dict(s.split("=", 1) for s in request["settings"])), request["batch"]
    collate = recipe.collate or default_collate
    torch.manual_seed(0)
    model, samples = recipe.model(), recipe.data("train")
    example = collate([samples[i] for i in range(batch_size)])
    job = polylane.parallelize(model, recipe.loss, recipe.optimizer, example=example, plan=plan, audit="off")
    batches = iter(job.batches(samples, batch_size, epochs=10_000))

    def run(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            job.step(next(batches))
        return max(job.world.all_gather_object(time.perf_counter() - start)) / count

    run(LEAD)
    count = max(1, round(request["seconds"] / run(ROUND_TO) / ROUND_TO)) * ROUND_TO
    seconds = run(count)
    sent = sum(worker["agreement"] + worker["operators"] + worker["stages"] for worker in job.traffic())
    state = job.state_dict()
    job.close()
    torch.manual_seed(0)
    plain, test = recipe.model(), recipe.data("test")
    plain.load_state_dict(state)
    with torch.no_grad():
        loss = float(recipe.loss(plain.eval(), collate([test[i] for i in range(min(TEST_SAMPLES, len(test)))])))
    return {"seconds": seconds, "rate": batch_size / seconds, "sent": sent, "loss": loss}


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(json.loads(sys.argv[2]))
    else:
        main()
