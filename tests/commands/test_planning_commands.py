"""simulate, plan, and --plan auto from the command line: what they say, write and refuse."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from polylane.cli import app
from polylane.commands import planning
from polylane.commands.requests import WorkersRequest
from polylane.commands.user_inputs import choose_plan
from polylane.compile.training_problem import TrainingProblem
from polylane.graph.graph import Graph
from polylane.plan.plan import Plan
from polylane.plan.plan_file import load
from polylane.probe import machine
from polylane.recipe import Recipe
from polylane.schedule.schedules import ASYNCHRONOUS
from tests.support import subsets
from tests.support.workers import forked_commands

RECIPE = """
import torch
from torch import nn

def model(width=64, depth=4):
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))

def loss(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()

def optimizer(parameters):
    return torch.optim.AdamW(parameters)

def data(split, width=64):
    return [(torch.ones(width), torch.ones(width)) for _ in range(32)]
"""


@pytest.fixture(scope="module", autouse=True)
def _captured_once() -> Iterator[None]:
    """The recipe is captured once for each of its settings: what commands make of a capture is under test here."""
    capture = planning._capture
    known = dict[tuple[tuple[str, str], ...], tuple[TrainingProblem, Graph]]()

    def capture_once(recipe: Recipe, batch: int) -> tuple[TrainingProblem, Graph]:
        if recipe.name != "layers":
            return capture(recipe, batch)
        settings = tuple(recipe.settings.items())
        if settings not in known:
            known[settings] = capture(recipe, batch)
        problem, graph = known[settings]
        return replace(problem, batch_size=batch), graph

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(planning, "_capture", capture_once)
        yield


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    file = tmp_path / "layers.py"
    file.write_text(RECIPE)
    yield file
    sys.modules.pop("layers", None)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_simulate_says_what_a_step_takes(recipe: Path) -> None:
    result = call(
        "simulate", "layers.py", "--cluster", "4:a100-80g", "--plan", "data=2,pipeline=2", "--json", "--breakdown"
    )
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["workers"] == 4 and len(found["stages"]) == 2
    assert found["samples_per_second"] == pytest.approx(64 / found["step_seconds"])
    # Forward: a multiplication and an addition for each weight and sample, in four layers; three times that for a step.
    linear = 3 * 2 * 64 * 64 * 4 * 64
    assert linear <= found["model_flops"] <= 1.1 * linear
    parts = [found[name] for name in ("utilization", "moving", "waiting", "bubble")]
    assert sum(parts) == pytest.approx(1, abs=1e-6)
    memory = [stage["memory"] for stage in found["stages"]]
    # Four layers of 64 x 64 + 64 float32 numbers; Adam keeps two more of each, and a count.
    assert sum(each["parameters"] for each in memory) == 4 * 4160 * 4
    for each in memory:
        assert each["gradients"] <= each["parameters"] and each["optimizer"] >= 2 * each["parameters"]
    assert {row["operator"] for row in found["breakdown"]} >= {"linear"}
    assert {row["traffic"] for row in found["bytes"]} == {"pipeline", "data"}


def test_simulate_draws(recipe: Path) -> None:
    result = call("simulate", "layers.py", "--cluster", "2:a100-80g", "--plan", "pipeline=2", "--svg", "lanes.svg")
    assert result.exit_code == 0, result.output
    assert "predicted" in Path("lanes.svg").read_text()
    assert "TFLOP/s per device" in result.stdout


def test_chunks_of_a_stage_are_interleaved(recipe: Path) -> None:
    line = "simulate layers.py --set depth=16 --cluster 4:a100-80g --plan pipeline=4,microbatches=8 --breakdown"
    whole, halves = (call(*line.split(), "--json", *more) for more in ((), ("--chunks", "2", "--html", "lanes.html")))
    assert halves.exit_code == 0, halves.output
    plain, found = json.loads(whole.stdout), json.loads(halves.stdout)
    assert (plain["chunks"], found["chunks"]) == (1, 2) and len(found["stages"]) == 4
    parameters = [sum(stage["memory"]["parameters"] for stage in each["stages"]) for each in (plain, found)]
    assert parameters[0] == parameters[1] == 16 * 4160 * 4
    for each in (plain, found):
        assert sum(row["nodes"] for row in each["breakdown"] if row["operator"] == "linear") == 16
    sent = [row["bytes"] for each in (plain, found) for row in each["bytes"] if row["traffic"] == "pipeline"]
    assert sent[0] < sent[1]
    assert "chunks=2" in Path("lanes.html").read_text()


def test_replicas_may_sum_parameters_every_so_many_steps(recipe: Path) -> None:
    Path("sites.yaml").write_text(
        "hosts:\n"
        "  - {devices: 2, device: a100-80g, link: nvlink-3, site: paris}\n"
        "  - {devices: 2, device: a100-80g, link: nvlink-3, site: rome}\n"
        "links: {sites: {bandwidth: 1 Gb/s, latency: 10 ms}}\n"
    )
    line = "simulate layers.py --set width=512 --cluster sites.yaml --plan data=4"
    often, seldom = (call(*line.split(), "--json", "--every", every) for every in ("1", "32"))
    assert seldom.exit_code == 0, seldom.output
    synchronous, local = json.loads(often.stdout), json.loads(seldom.stdout)
    assert local["every"] == 32 and local["step_seconds"] < synchronous["step_seconds"] / 8
    assert sum(local[name] for name in ("utilization", "moving", "waiting", "bubble")) == pytest.approx(1)
    (most,), (mean,) = synchronous["bytes"], local["bytes"]
    assert most["level"] == mean["level"] == "cluster"
    assert mean["bytes"] == pytest.approx(most["bytes"] / 32, rel=1e-3)
    shown = call(*line.split(), "--every", "32", "--svg", "lanes.svg")
    assert "on average" in shown.stdout and "between sites" in shown.stdout
    assert "the last of 32 steps" in Path("lanes.svg").read_text()


def test_a_plan_that_says_its_cuts_is_not_interleaved(recipe: Path) -> None:
    call("inspect", "layers.py", "--plan", "pipeline=2", "--write", "plan.yaml")
    result = call("simulate", "layers.py", "--cluster", "2:a100-80g", "--plan", "plan.yaml", "--chunks", "2")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "plan plan.yaml says where its stages begin" in result.stderr


def test_the_schedule_of_a_plan_file_is_not_exchanged(recipe: Path) -> None:
    """Also where it is the default: only a file without the key leaves the schedule open."""
    call("inspect", "layers.py", "--plan", "pipeline=2,microbatches=4", "--write", "plan.yaml")
    text = Path("plan.yaml").read_text()
    Path("open.yaml").write_text(text.replace("schedule: 1f1b\n", ""))
    line = "simulate layers.py --cluster 2:a100-80g --schedule afab --json --plan"
    result = call(*line.split(), "plan.yaml")
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert "--schedule afab, but the plan says schedule=1f1b: leave one of them out" in result.stderr
    assert "schedule=afab" in json.loads(call(*line.split(), "open.yaml").stdout)["plan"]


@pytest.mark.parametrize("key", ["servers=1", "every=4"])
def test_a_plan_with_keys_of_replicas_has_replicas(recipe: Path, key: str) -> None:
    """On these slow links one worker is faster, which has nobody to synchronize with."""
    line = "plan layers.py --cluster 2x1:a100-80g,hosts=internet-1g --json"
    assert json.loads(call(*line.split()).stdout)["plans"][0]["workers"] == 1
    result = call(*line.split(), "--plan", key)
    plans = [row["plan"] for row in json.loads(result.stdout)["plans"]]
    assert plans and all(plan.startswith("data=2,") and key in plan for plan in plans)


def test_plans_that_were_passed_over_are_not_counted_as_too_large(recipe: Path) -> None:
    shown = call("plan", "layers.py", "--cluster", "4:a100-80g,link=pcie-3", "--top", "1").stdout
    title = re.search(r"Of (\d+) plans, (\d+) fit \((\d+) more cannot be the fastest\)", " ".join(shown.split()))
    assert title is not None and title[1] == title[2]  # all of them fit into 80 GB


def test_a_straggler_is_slower(recipe: Path) -> None:
    plain = call("simulate", "layers.py", "--cluster", "2:a100-80g", "--plan", "data=2", "--json")
    late = call("simulate", "layers.py", "--cluster", "2:a100-80g", "--plan", "data=2", "--json", "--slow", "1=0.5")
    assert json.loads(late.stdout)["step_seconds"] > 1.2 * json.loads(plain.stdout)["step_seconds"]


@pytest.mark.parametrize("shard, times", [("none", 2), ("optimizer", 2), ("gradients", 2), ("parameters", 3)])
def test_what_replicas_send_is_told_apart_from_what_split_operators_send(recipe: Path, shard: str, times: int) -> None:
    line = f"simulate layers.py --cluster 4:a100-80g --plan data=2 --json --shard {shard}"
    (row,) = json.loads(call(*line.split()).stdout)["bytes"]
    assert row == {"traffic": "data", "level": "host", "bytes": times * 4 * 4160 * 4 / 2}
    split = json.loads(call(*line.replace("data=2", "data=2,tensor=2").split()).stdout)["bytes"]
    plain = json.loads(call(*f"{line} --plan data=2,tensor=2 --shard none".split()).stdout)["bytes"]
    assert [row["traffic"] for row in split] == ["operators", "data"]
    assert split[0]["bytes"] == pytest.approx(plain[0]["bytes"], abs=4)
    assert split[1]["bytes"] == pytest.approx(times / 2 * plain[1]["bytes"], abs=4)


def test_one_microbatch_fills_a_pipeline_without_a_flush(recipe: Path) -> None:
    """Steps follow each other: a pipeline needs no microbatches of its own, which take longer for their samples."""
    line = "--cluster 2:a100-80g --plan pipeline=2,schedule=pipedream"
    free, fixed = (
        json.loads(call("plan", "layers.py", *f"{line}{more} --json".split()).stdout)["plans"][0]
        for more in ("", ",microbatches=1")
    )
    assert free["plan"] == fixed["plan"] and free["plan"].endswith("schedule=pipedream,microbatches=1")


def _written(line: str) -> Plan:
    assert call(*line.split(), "-o", "plan.yaml").exit_code == 0
    return load("plan.yaml")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_precision_that_is_said_in_keys_needs_no_option(recipe: Path, dtype: str) -> None:
    line = "plan layers.py --cluster 2:a100-80g --json --plan data=2"
    said, given = (call(*words.split()) for words in (f"{line},precision={dtype}", f"{line} --dtype {dtype}"))
    assert said.exit_code == 0 and json.loads(said.stdout)["plans"] == json.loads(given.stdout)["plans"]
    assert _written(f"{line} --dtype {dtype}").precision == dtype


def test_devices_that_have_units_for_float16_alone(recipe: Path) -> None:
    """A V100 is faster in float16 only, on which bfloat16 may not even have a figure."""
    line = "simulate layers.py --cluster 1:v100 --plan data=1 --batch 65536 --set width=1024 --json --dtype"
    seconds, memory = {}, {}
    for dtype in ("float32", "bfloat16", "float16"):
        found = json.loads(call(*line.split(), dtype).stdout)
        seconds[dtype], memory[dtype] = found["step_seconds"], found["stages"][0]["memory"]["total"]
    assert seconds["float16"] < 0.5 * seconds["bfloat16"] and memory["float16"] == memory["bfloat16"]
    Path("only.yaml").write_text(
        "hosts: [{device: {memory: 16 GiB, bandwidth: 300 GB/s, flops: {float32: 8 TFLOP/s, float16: 65 TFLOP/s}}}]\n"
    )
    line = "plan layers.py --cluster only.yaml --json --dtype"
    found = json.loads(call(*line.split(), "float16").stdout)
    assert all("precision=float16" in row["plan"] for row in found["plans"])
    refused = call(*line.split(), "bfloat16")
    assert refused.exit_code == 2 and "flops.bfloat16 is missing, known are float32, float16" in refused.stderr


def test_halves_of_backward_passes_send_what_whole_ones_do(recipe: Path) -> None:
    sent = []
    for schedule in ("1f1b", "zb-h1"):
        plan = f"data=2,pipeline=2,tensor=2,microbatches=4,schedule={schedule}"
        result = call("simulate", "layers.py", "--cluster", "8:a100-80g", "--plan", plan, "--json")
        sent.append(json.loads(result.stdout)["bytes"])
    assert sent[0] == sent[1] and {each["traffic"] for each in sent[0]} == {"operators", "pipeline", "data"}


def test_selective_recomputation_is_priced(recipe: Path) -> None:
    line = "simulate layers.py --cluster 2:a100-80g --plan data=2 --json --recompute"
    result = call(*line.split(), "selective")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["method"]["recompute"] == "selective"


def test_plan_ranks_explains_and_writes(recipe: Path) -> None:
    result = call("plan", "layers.py", "--cluster", "2:a100-80g", "-o", "plan.yaml", "--top", "3", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    times = [row["step_seconds"] for row in found["plans"]]
    assert 1 <= len(times) <= 3
    assert times[0] <= 1.01 * min(times), "of plans as fast within a percent the one with fewer workers comes first"
    assert found["words"] and found["words"][0].startswith("Bound by")
    plan = load("plan.yaml")
    assert plan.workers == found["plans"][0]["workers"] and plan.spec == found["plans"][0]["plan"]
    verified = call("verify", "layers.py", "--plan", "plan.yaml", "--steps", "1", "--batch", "8")
    assert verified.exit_code == 0, verified.output


@pytest.mark.parametrize(
    ("option", "dtype"),
    subsets.one_in(
        3,
        subsets.pairs(
            ["shard none", "shard optimizer", "shard gradients", "shard parameters", "every 8", "plan every=8,data=4"],
            ["float32", "bfloat16"],
        ),
        first=1,
        several=True,
    ),
)
def test_the_plan_that_is_written_is_the_one_that_was_priced(recipe: Path, option: str, dtype: str) -> None:
    """And the one that is trained: what options say are keys of the plan, in its file and in what train reads."""
    what = ["layers.py", "--cluster", "4:a100-80g", "--batch", "65536", "--set", "width=1024", "--json"]
    planned = call("plan", *what, *f"--{option}".split(), "--dtype", dtype, "-o", "plan.yaml")
    assert planned.exit_code == 0, planned.output
    first, plan = json.loads(planned.stdout)["plans"][0], load("plan.yaml")
    key, value = option.split()[-1].split(",")[0].split("=") if "=" in option else option.split()
    assert plan.data > 1 and str(getattr(plan.sync, key)) == value and plan.precision == dtype
    assert plan.spec == first["plan"]
    trained = choose_plan(WorkersRequest(recipe="layers.py", batch=65536, plan="plan.yaml"))
    assert (trained.sync, trained.precision, trained.meshes) == (plan.sync, plan.precision, plan.meshes)
    simulated = call("simulate", *what, "--plan", "plan.yaml")
    assert simulated.exit_code == 0, simulated.output
    found = json.loads(simulated.stdout)
    assert found["plan"] == first["plan"]
    assert max(stage["memory"]["total"] for stage in found["stages"]) == first["memory"]
    assert found["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-9)


@pytest.mark.parametrize(
    "option", subsets.one_in(2, ["--plan pipeline=4,microbatches=8", "--plan pipeline=4 --chunks 2"])
)
def test_the_schedule_that_is_chosen_is_written_and_simulated_alike(recipe: Path, option: str) -> None:
    cluster = ["--cluster", "4:a100-80g", "--batch", "65536", "--set", "width=1024", "--set", "depth=16", "--json"]
    planned = call("plan", "layers.py", *cluster, *option.split(), "-o", "plan.yaml")
    assert planned.exit_code == 0, planned.output
    found, plan = json.loads(planned.stdout), load("plan.yaml")
    first, told = found["plans"][0], found["advice"]["schedule"]
    assert plan.schedule not in ("1f1b", *ASYNCHRONOUS) and len(plan.first_chunks) == 4
    assert plan.most_chunks == 2 or "--chunks" not in option
    assert told["name"].split()[0] == plan.schedule and told["runner_up"] != told["name"]
    assert any(line.startswith(f"Schedule {told['name']}, under which workers wait") for line in found["words"])
    result = call("simulate", "layers.py", *cluster, "--plan", "plan.yaml")
    assert result.exit_code == 0, result.output
    simulated = json.loads(result.stdout)
    assert simulated["plan"] == first["plan"]
    assert simulated["step_seconds"] == pytest.approx(first["step_seconds"], rel=1e-9)


def test_a_schedule_that_the_user_fixes_is_kept(recipe: Path) -> None:
    line = "layers.py --cluster 4:a100-80g --batch 4096 --set depth=8 --json"
    for option, schedule in (
        ("--plan pipeline=4,schedule=afab", "afab"),
        ("--plan pipeline=4,schedule=pipedream", "pipedream"),
    ):
        planned = call("plan", *line.split(), *option.split())
        assert planned.exit_code == 0, planned.output
        assert all(f"schedule={schedule}" in row["plan"] for row in json.loads(planned.stdout)["plans"])
    result = call("simulate", *line.split(), "--plan", "auto,pipeline=4", "--schedule", "zb-h1")
    assert result.exit_code == 0 and "schedule=zb-h1" in json.loads(result.stdout)["plan"], result.output
    result = call("simulate", *line.split(), "--plan", "pipeline=4", "--schedule", "zb-v")
    assert result.exit_code == 0 and json.loads(result.stdout)["chunks"] == 2, result.output


def test_a_plan_that_is_written_with_parts_instead_of_copies_is_trained_so(recipe: Path) -> None:
    what = [
        "layers.py",
        "--cluster",
        "2:a100-80g",
        "--batch",
        "65536",
        "--set",
        "width=1024",
        "--shard",
        "parameters",
        "-o",
        "plan.yaml",
    ]
    assert call("plan", *what).exit_code == 0
    result = call("inspect", "layers.py", "--plan", "plan.yaml", "--set", "width=1024", "--batch", "8")
    assert result.exit_code == 0, result.output
    assert "shard=parameters" in result.stdout


def test_plan_auto(recipe: Path) -> None:
    result = call("inspect", "layers.py", "--plan", "auto", "--json", "--batch", "16")
    assert result.exit_code == 0, result.output
    assert result.stderr.startswith("plan auto: ")
    assert json.loads(result.stdout)["plan"] in result.stderr


def test_train_plan_auto_under_torchrun(recipe: Path) -> None:
    """The plan of all of torchrun's workers, found once; the run's own plan file trains the same again."""
    line = "train layers.py --steps 3 --batch 16 --json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "--"]
    command = [*torchrun, "polylane", *line.split(), "--plan", "auto", "--run", "run/together"]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "MASTER_PORT")}
    done = forked_commands.run(command, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    assert result["workers"] == 2 and done.stderr.count(f"plan auto: {result['plan']} (") == 1
    again = call(*line.split(), "--plan", "run/together/plan.yaml", "--run", "run/again")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout)["loss"] == pytest.approx(result["loss"], rel=1e-5)


def test_plan_auto_and_torchrun(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert (
        "--workers 3, but torchrun started 2" in call("train", "layers.py", "--plan", "auto", "--workers", "3").stderr
    )
    assert "run this command without torchrun" in call("inspect", "layers.py", "--plan", "auto").stderr


@pytest.mark.parametrize(
    "searched, simulated",
    [
        ("--cluster 2:a100-80g --dtype bfloat16", "--cluster 2:a100-80g --dtype bfloat16"),
        ("--cluster slow.yaml", "--cluster 2:a100-80g --slow 0=0.5"),  # the same machines
    ],
)
def test_simulate_plan_auto_takes_the_first_of_plan(recipe: Path, searched: str, simulated: str) -> None:
    Path("slow.yaml").write_text("hosts: [{devices: 2, device: a100-80g, link: nvlink-3}]\nspeeds: {0: 0.5}\n")
    planned = call("plan", "layers.py", *searched.split(), "--top", "1", "-o", "plan.yaml", "--json")
    assert planned.exit_code == 0, planned.output
    given = call("simulate", "layers.py", *simulated.split(), "--plan", "plan.yaml", "--json")
    result = call("simulate", "layers.py", *simulated.split(), "--plan", "auto", "--json")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(given.stdout)
    (row,) = json.loads(planned.stdout)["plans"]
    assert result.stderr.startswith(f"plan auto: {row['plan']} (") and result.stderr.count("\n") == 1


def test_simulate_plan_auto_says_that_nothing_fits_as_plan_does(recipe: Path) -> None:
    Path("tiny.yaml").write_text("hosts: [{devices: 2, device: {preset: a100-80g, memory: 1 MB}, link: nvlink-3}]")
    planned, simulated = (
        call(*line.split(), "--cluster", "tiny.yaml") for line in ("plan layers.py", "simulate layers.py --plan auto")
    )
    assert planned.exit_code == simulated.exit_code == 2
    assert "nothing fits on 2 workers" in planned.stderr and simulated.stderr == planned.stderr


@pytest.mark.parametrize(
    "line, sentence",
    [
        ("simulate layers.py --cluster 4:a100 --plan data=4", "a100"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=4",
            "the plan takes 4 workers, but the cluster has 2 devices",
        ),
        ("simulate layers.py --cluster none.yaml --plan data=4", "none.yaml"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan pipeline=2,microbatches=999",
            "cannot be divided into so many",
        ),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --slow 1:2", "--slow takes RANK=SPEED"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --slow 7=0.5", "speeds.7: there is no such device"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --dtype int8", "dtype 'int8': choose one of"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2 --recompute some",
            "--recompute=some must be none, selective, full",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2 --recompute 9:full",
            "recompute.9: the model runs no operator in a module of this name",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2,recompute=0:full --recompute full",
            "--recompute full, but the plan says recompute=0:full",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2 --shard all",
            "--shard 'all' must be none, opt",
        ),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2,every=2 --every 4", "but the plan says every=2"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2,shard=gradients --shard none", "says shard=gradients"),
        ("simulate layers.py --cluster 2:a100-80g --plan auto,data=two", "data=two must be a whole number"),
        ("plan layers.py --cluster 2:a100-80g --plan slow=1:0.5", "unknown key 'slow', known are data"),
        (
            "plan layers.py --cluster 2:a100-80g --plan shard=gradients --shard optimizer",
            "the plan says shard=gradients",
        ),
        ("simulate layers.py --cluster 2:a100-80g --plan pipeline=2,chunks=2 --chunks 3", "the plan says chunks=2"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2,precision=bfloat16 --dtype float32",
            "the plan says precision=bfloat16",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan data=2 --reserve 5%",
            "--reserve is for plans that are search",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan pipeline=2,schedule=1f1b --schedule afab",
            "--schedule afab, but the plan says schedule=1f1b: leave one of them out",
        ),
        ("plan layers.py --cluster 2:a100-80g --reserve 90GiB", "--reserve 90.0 GiB takes all of a device's memory"),
        ("simulate layers.py --cluster 2:a100-80g --plan auto --reserve 90GiB", "which is 80.0 GiB: keep less free"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --chunks 0", "--chunks must be at least 1, not 0"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --chunks 2", "there is one stage: add pipeline=2"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan pipeline=2 --chunks 99",
            "are 198 stages, and the graph",
        ),
        ("simulate layers.py --cluster 2:a100-80g --plan pipeline=2,schedule=afab --chunks 2", "afab has one stage"),
        (
            "simulate layers.py --cluster 2:a100-80g --plan auto,chunks=3 --chunks 2",
            "--chunks 2, but the plan says chunks=3",
        ),
        ("plan layers.py --cluster 2:a100-80g --schedule zb-x", "schedule=zb-x is not known, known are naive"),
        ("plan layers.py --cluster 2:a100-80g --schedule zb-v --chunks 3", "zb-v has exactly 2 chunks on a worker"),
        (
            "plan layers.py --cluster 2:a100-80g --plan schedule=afab --schedule zb-h1",
            "but the plan says schedule=afab",
        ),
        (
            "simulate layers.py --cluster 2:a100-80g --plan pipeline=2,schedule=afab --schedule zb-h1",
            "leave one of them",
        ),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --every 0", "--every must be at least 1, not 0"),
        ("simulate layers.py --cluster 2:a100-80g --plan data=2 --every 2 --shard gradients", "replicas that are"),
        ("plan layers.py --cluster 2:a100-80g --dtype float16 --every 2", "precision=float16 and every=2 exclude each"),
        ("plan layers.py --cluster 2:a100-80g --workers 3", "--workers 3: the cluster has 2 devices"),
        ("plan layers.py --cluster 2:a100-80g --memory lots", "--memory takes a size"),
        ("plan layers.py --cluster 2:a100-80g --memory 10kB", "nothing fits on 2 workers"),
    ],
)
def test_bad_input(recipe: Path, line: str, sentence: str) -> None:
    result = call(*line.split())
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("polylane: ") and result.stderr.count("\n") == 1
    assert sentence in result.stderr


@pytest.mark.parametrize(
    "way",
    [
        "wire=bfloat16",
        "compress=powersgd:4:0",
        "compress=top_k:0.01",
        "shard=parameters,within=2",
        "every=4,warmup=10,outer=0.7:0.9",
        "servers=2",
        "servers=1,dedicated=yes,staleness=3",
    ],
)
def test_nothing_that_runs_is_refused(recipe: Path, way: str) -> None:
    result = call("simulate", "layers.py", "--cluster", "5:a100-80g", "--plan", f"data=4,{way}", "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["step_seconds"] > 0 and [row["traffic"] for row in found["bytes"]] == ["data"]


@pytest.mark.parametrize(
    ("plan", "option"), [("data=4", "shard=optimizer"), ("data=2,pipeline=2,microbatches=4", "every=4")]
)
def test_an_option_says_what_a_key_of_the_plan_says(recipe: Path, plan: str, option: str) -> None:
    line = "simulate layers.py --cluster 4:a100-80g --json --plan"
    said, given = call(*line.split(), f"{plan},{option}"), call(*line.split(), plan, *f"--{option}".split("="))
    assert said.exit_code == given.exit_code == 0, (said.output, given.output)
    assert json.loads(said.stdout) == json.loads(given.stdout)
    assert option in json.loads(said.stdout)["plan"]


def test_auto_keeps_what_it_is_told(recipe: Path) -> None:
    result = call("inspect", "layers.py", "--plan", "auto,data=2,every=4", "--json", "--batch", "16")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["plan"].startswith("data=2,") and "every=4" in json.loads(result.stdout)["plan"]


def test_plans_leave_a_reserve_and_say_so(recipe: Path) -> None:
    line = "plan layers.py --cluster 2:a100-80g"
    usual, more = (json.loads(call(*line.split(), "--json", *o).stdout) for o in ((), ("--reserve", "8 GiB")))
    assert usual["reserve"] + usual["memory_limit"] == pytest.approx(80 * 2**30)
    assert (more["reserve"], more["memory_limit"]) == (8 * 2**30, 72 * 2**30)
    assert "and leave 4.00 GiB of it free (--reserve)" in call(*line.split()).stdout.replace("\n", " ")
    bad = call(*line.split(), "--reserve", "much")
    assert bad.exit_code == 2 and bad.stderr.startswith("polylane: --reserve takes a share of the memory or a size")


KEYS = ["data=2", "tensor=2", "pipeline=2,tensor=2,microbatches=2", "data=2,pipeline=2,shard=parameters"]


@pytest.mark.parametrize("keys", KEYS)
def test_the_first_plan_has_as_many_communicators_as_inspect_says(recipe: Path, keys: str) -> None:
    line = "plan layers.py --cluster 4:a100-80g --batch 16 --top 1 --json --plan"
    found = json.loads(call(*line.split(), keys).stdout)
    inspected = call("inspect", "layers.py", "--batch", "16", "--json", "--plan", found["plans"][0]["plan"])
    assert found["communicators"] == json.loads(inspected.stdout)["communicators"]
    assert len(found["communicators"]) == found["plans"][0]["workers"] and max(found["communicators"]) > 0


def test_communicators_are_counted_on_gpus_alone(recipe: Path) -> None:
    on_gpus, on_cpus = (["plan", "layers.py", "--plan", "data=2", "--cluster", c] for c in ("2:a100-80g", "2:cpu"))
    assert "Communicators of a worker by the first plan" in call(*on_gpus).stdout
    assert "ommunicators" not in call(*on_cpus).stdout
    assert json.loads(call(*on_cpus, "--json").stdout)["communicators"] is None


MASKS = """
import torch
from torch import nn

class Inner(nn.Linear):
    def forward(self, x):
        return super().forward(CHOSEN).sum(0) + x

def model():
    return nn.Sequential(nn.Linear(4, 4), Inner(4, 4))

def loss(model, batch):
    return model(batch).square().mean()

def optimizer(parameters):
    return torch.optim.SGD(parameters)

def data(split):
    return [torch.ones(4) for _ in range(32)]
"""


@pytest.mark.parametrize(
    ("chosen", "unknown"),
    [
        ("x[x[:, 0] > 0]", "how many elements a boolean mask chooses"),
        ("x.unique(dim=0)", "the size of what unique returns"),
        ("x if x[0, 0].item() > 0 else -x", "a value of a tensor"),
    ],
)
def test_what_depends_on_the_data_is_not_predicted_of_a_model_too_large_for_weights(
    recipe: Path, chosen: str, unknown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence names the module and the user's line, and says what to do."""
    monkeypatch.setattr(machine, "available_memory", lambda: 100)
    file = recipe.with_name("masks.py")
    file.write_text(MASKS.replace("CHOSEN", chosen))
    for command in ("plan", "simulate"):
        options = ("--plan", "data=2") if command == "simulate" else ()
        result = call(command, "masks.py", "--cluster", "2:a100-80g", "--batch", "16", *options)
        assert result.exit_code == 2
        assert f"1 depends on {unknown} (" in result.stderr
        assert "masks.py:7), and predictions are made without data: keep the sizes" in result.stderr
    sys.modules.pop("masks", None)


@pytest.mark.parametrize("chosen", ["x * (2 if not (x > 0).all() else 1)", "x[x[:, 0] > 0]"])
def test_what_depends_on_the_data_is_predicted_with_weights(recipe: Path, chosen: str) -> None:
    recipe.with_name("masks.py").write_text(MASKS.replace("CHOSEN", chosen))
    result = call("simulate", "masks.py", "--cluster", "2:a100-80g", "--batch", "16", "--plan", "data=2")
    assert result.exit_code == 0, result.stderr
    sys.modules.pop("masks", None)
