"""The command line: what it prints and writes, its exit codes, and one sentence for everything that can be wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import commands_run
import polylane
from polylane.cli import app
from polylane.commands import user_inputs as inputs
from polylane.commands.printing import format_ranges
from polylane.commands.requests import RecipeRequest
from polylane.compile import training_problem
from polylane.compile.compiled_training import compile_training
from polylane.cost.integer_program import IntegerProgram
from polylane.graph.batch import flatten
from polylane.graph.graph import Graph
from polylane.observe.timeline import Timeline
from polylane.plan import plan_file as plans
from polylane.samples.counts import capture_with_counts
from polylane.verify import verify as verification

RECIPE = """
import os

import torch
import torch.nn.functional as F
from torch import nn

LAUNCHER = os.getpid()

class BreaksInWorkers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if os.getpid() != LAUNCHER:
            raise OSError("no such device")
        return gradient

class Net(nn.Module):
    def __init__(self, width, depth, fault):
        super().__init__()
        self.inward = nn.Linear(4, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(depth))
        self.outward = nn.Linear(width, 2)
        self.fault = fault

    def forward(self, x):
        x = first = F.relu(self.inward(x))
        for layer in self.layers:
            x = layer(x)
        if self.fault == "forward":
            raise ValueError("forward is broken")
        if self.fault == "worker":
            x = BreaksInWorkers.apply(x)
        if self.fault == "memory":
            x = x + torch.empty(1 << 46)
        return self.outward(x + first)

def model(width=8, depth=3, fault=""):
    if fault == "model":
        raise ValueError("no model\\ntoday")
    return 3 if fault == "no module" else Net(width, depth, fault).requires_grad_(fault != "frozen")

def loss(model, batch, fault=""):
    x, y = batch
    return F.cross_entropy(model(x), y) if fault != "argmax" else model(x).argmax(1).float().mean()

def optimizer(parameters, lr=0.1, fault=""):
    if fault == "optimizer":
        raise KeyError("momentum")
    return torch.optim.SGD(parameters, lr=lr, momentum=0.9)

def scheduler(optimizer, decay=0.9, fault=""):
    if fault == "scheduler":
        raise RuntimeError("no schedule")
    return decay if fault == "rate" else torch.optim.lr_scheduler.ExponentialLR(optimizer, decay)

def collate(samples, fault=""):
    if fault == "collate":
        raise RuntimeError("no batch")
    return torch.stack([x for x, _ in samples]), torch.tensor([y for _, y in samples])

class Samples(list):
    broken = None
    def __getitem__(self, i):
        if i == self.broken:
            raise OSError("bad sector")
        return super().__getitem__(i)

def data(split, samples=22, fault=""):
    if fault == "data":
        raise FileNotFoundError("no such data")
    if fault == "empty":
        return []
    if fault == "no data":
        return 3
    if split == "test" and fault == "no test":
        return None
    x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(int(split == "test")))
    rows = Samples((row, int(row.sum() > 0)) for row in x)
    if split == "train" and fault == "nan":
        rows = Samples((row * float("nan") if i == 3 else row, y) for i, (row, y) in enumerate(rows))
    if split == "train" and fault == "sample":
        rows.broken = samples - 1
    if fault == "dtype":
        rows = Samples((row.half(), y) for row, y in rows)
    if fault == "loader":
        return torch.utils.data.DataLoader(rows, batch_size=4)
    return iter(rows) if fault == "iterator" else rows
"""
FILES = {"plan.yaml", "metrics.jsonl", "timeline.json", "swimlane.html", "trace.json", "model.safetensors"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the recipe, to run in."""
    path = tmp_path_factory.mktemp("cli")
    (path / "tiny.py").write_text(RECIPE)
    return path


@pytest.fixture(scope="module", autouse=True)
def _captured_once() -> Iterator[None]:
    """In this process, the recipe's model of each size is captured once for every form of a batch."""
    process, known = os.getpid(), dict[str, Graph]()

    def capture_once(model: Any, loss: Any, batch: Any, **how: Any) -> Graph:
        if os.getpid() != process or type(model).__module__ != "tiny" or model.fault:
            return capture_with_counts(model, loss, batch, **how)
        tensors = [*model.parameters(), *flatten(batch)[0]]
        key = repr((model, model.training, [(each.shape, each.dtype, each.device) for each in tensors], how))
        if key not in known:
            known[key] = capture_with_counts(model, loss, batch, **how)
        return known[key]

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training_problem, "capture_with_counts", capture_once)
        yield


@pytest.fixture
def here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The same folder, for commands in this process: recipes are imported, and go when the test ends."""
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield folder
    sys.modules.pop("tiny", None)


def call(*arguments: str | Path) -> Any:
    """A command in this process: what starts no worker."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="polylane")


def start(folder: Path, line: str, program: tuple[str, ...] = ("-m", "polylane")) -> subprocess.Popen[str]:
    return commands_run.start([sys.executable, *program, *shlex.split(line)], cwd=folder, start_new_session=True)


def execute(folder: Path, line: str, code: int = 0, **options: Any) -> tuple[str, str]:
    """A command in a process of its own; what it printed on stdout and stderr."""
    process = start(folder, line, **options)
    out, err = process.communicate(timeout=120)
    assert process.returncode == code, err
    wait_for(lambda: not alive(process.pid))
    return out, err


def alive(group: int) -> bool:
    """Whether a process of the group is left."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True


def metrics(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The lines of the steps, and those of the epochs."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], [line for line in lines if "train_loss" in line]


# The surface ---------------------------------------------------------------------------------------------------------


def test_help_and_lanes_do_not_import_torch() -> None:
    code = """
import sys
import polylane.cli
for line in (["--help"], ["train", "--help"], ["lanes", "1f1b", "--stages", "2", "--microbatches", "2"]):
    try:
        polylane.cli.main(line)
    except SystemExit as leaving:
        assert not leaving.code
assert not {"torch", "numpy", "sklearn"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


def test_many_numbers_are_ranges() -> None:
    assert format_ranges([0, 3, 1]) == "0, 3, 1" and format_ranges([]) == ""
    assert format_ranges(range(12)) == "0-11 (12)"
    assert format_ranges([*range(8), 20, 21, 23]) == "0-7, 20-21, 23 (11)"
    assert format_ranges([n for start in range(0, 4000, 100) for n in range(start, start + 50)]) == (
        "0-49, 100-149, ..., 3900-3949 (2,000)"
    )


@pytest.mark.parametrize("command", ["train", "verify", "inspect", "lanes"])
def test_help_of_every_command_has_an_example(command: str) -> None:
    assert f"  {command} " in call("--help").stdout
    assert call("-h").stdout == call("--help").stdout == call().stdout
    told = call(command, "--help")
    assert told.exit_code == 0
    assert f"polylane {command} " in told.stdout
    assert "--json" in told.stdout


def test_version() -> None:
    assert call("--version").stdout == f"{polylane.__version__}\n"


# What is wrong with a command line, before anything is computed -------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("bogus", "No such command 'bogus'"),
        ("--bogus", "No such option"),
        ("train", "Missing argument 'RECIPE'"),
        ("train tiny.py --bogus", "No such option"),
        ("train tiny.py --workers 0", "'--workers'"),
        ("train tiny.py --workers two", "'--workers'"),
        ("train tiny.py --steps 0", "'--steps'"),
        ("train tiny.py --epochs 0", "'--epochs'"),
        ("train tiny.py --batch 0", "'--batch'"),
        ("train tiny.py --seed -1", "'--seed'"),
        ("verify tiny.py --steps 0", "'--steps'"),
        ("inspect tiny.py --batch -3", "'--batch'"),
        ("train tiny.py --epochs 1 --steps 2", "--epochs and --steps exclude each other"),
        ("train tiny.py --clip-norm 0", "--clip-norm must be above 0, not 0"),
        ("verify tiny.py --clip-norm nan", "--clip-norm must be above 0"),
        (
            "train tiny.py --workers 4 --plan '[data=2 | 1]'",
            "--workers 4, but the plan takes 3 ([data=2 | 1]): they must be",
        ),
        ("train tiny.py --workers 3 --plan data=2", "--workers 3, but the plan takes 2 (data=2 times pipeline=1)"),
        ("verify tiny.py --workers 1 --plan pipeline=2", "--workers 1, but the plan takes 2"),
        (
            "train tiny.py --workers 3 --plan tensor=2,sequence=3",
            "--workers 3, but the plan takes 6 (data=1 times pipeline=1 times sequence=3 times tensor=2)",
        ),
        ("train tiny.py --plan dta=2", "unknown key 'dta'"),
        ("inspect tiny.py --plan tensor=0", "tensor=0 must be a whole number of at least 1"),
        ("inspect tiny.py --plan ,", "plan ',': nothing is said: give degrees"),
        ("inspect tiny.py --plan=", "plan '': nothing is said: give degrees"),
        (f"inspect tiny.py --plan data=2,{'x' * 300}=1", "unknown key 'xxx"),
        ("inspect tiny.py --plan .", "plan .: Is a directory"),
        ("inspect tiny.py --plan tensor=99999999999", "tensor=99999999999 is more than 1,048,576, the most"),
        ("train tiny.py --workers 99999999999", "Invalid value for '--workers': "),
        ("verify tiny.py --plan tensor=100000", "the plan takes 100,000 workers, and at most "),
        ("train tiny.py --workers 100000", "are started on one host: use fewer, or let torchrun start them"),
        ("inspect tiny.py --write plan.yaml", "--write plan.yaml writes a plan: say which one with --plan"),
        ("lanes 1f1b --stages 99999 --microbatches 99999", "are more than 262,144 passes, too many to draw"),
        ("lanes zb-v --stages 128 --microbatches 2048", "times --chunks 2 are more than 262,144 passes, too many to"),
        ("lanes 1f1b --stages 100000 --microbatches 2", "--stages 100000 are more than 32,768 workers, too many to"),
        (
            "lanes --compare --stages 64 --microbatches 257",
            "more than 16,384 passes, too many to compare all",
        ),
        ("inspect tiny.py --plan none.yaml", "plan none.yaml: No such file"),
        ("train tiny.py --plan tiny.py", "plan tiny.py: this is not"),
        ("train none.py", "There is no recipe at none.py"),
        ("train tiny.py --set bogus=1", "has no setting 'bogus'; it has model.width = 8"),
        ("verify tiny.py --set width", "--set takes name=value"),
        ("inspect tiny.py --set width=wide", "takes a whole number"),
        ("train tiny.py --run tiny.py", "--run tiny.py: "),
        ("train tiny.py --run tiny.py/run", "tiny.py is not a folder"),
        ("lanes 1f1b --stages 2", "Missing option '--microbatches'"),
        ("lanes bogus --stages 2 --microbatches 2", "'1f1b'"),
        ("lanes afab --stages 0 --microbatches 2", "--stages 0 must be a whole number from 1 to 262,144, or a file of"),
        ("lanes afab --stages none.yaml --microbatches 2", "stages none.yaml: No such file"),
        ("lanes afab --stages 2 --microbatches 2 --forward fast", "--forward takes a number of ticks"),
        ("lanes afab --stages 2 --microbatches 2 --forward 1,2,3", "3 durations for 2 stages"),
        ("lanes afab --stages 2 --microbatches 2 --backward=-1", "at least 0 ticks"),
        ("lanes afab --stages 2 --microbatches 2 --hop=-1", "hop must be a duration of at least 0 ticks, not -1"),
        ("lanes afab --stages 2 --microbatches 2 --hop far", "--hop takes a number of ticks"),
        (
            "lanes zb-h1 --stages 2 --microbatches 2 --weight 3",
            "weight half of stage 0 takes 3 ticks, its whole backward",
        ),
        ("lanes zb-v --stages 2 --chunks 3 --microbatches 2", "zb-v has exactly 2 chunks on a worker, not 3"),
        (
            "lanes 1f1b --stages 2 --chunks 2 --microbatches 2",
            "1f1b has one stage on a worker, not 2 chunks: try interle",
        ),
        (
            "lanes interleaved --stages 2 --chunks 0 --microbatches 2",
            "Invalid value for '--chunks': must be at least 1",
        ),
        ("lanes pipedream-2bw --stages 4 --microbatches 2", "needs at least 3 microbatches in a batch for 4 stages"),
        (
            "lanes 1f1b --stages 4 --microbatches 2 --vertical-sync",
            "vertical sync is an option of pipedream, not of 1f1b",
        ),
        (
            "lanes pipedream --stages 4 --microbatches 2 --batches 3",
            "several batches are drawn of pipedream-2bw, not of",
        ),
        ("lanes --stages 2 --microbatches 2", "name the schedule to draw, or give --compare for all of them"),
        ("lanes afab --compare --stages 2 --microbatches 2", "name the schedule to draw, or give --compare for all of"),
        (
            "lanes --compare --stages 2 --microbatches 2 --svg a.svg",
            "--svg is for one schedule: with --compare, --htm",
        ),
        ("lanes --compare --stages 2 --microbatches 2 --forward 1,2,3", "3 durations for 2 stages"),
        (
            "lanes 1f1b --stages 2 --microbatches 2 --live 1",
            "a bound on live microbatches is for auto: 1f1b holds what",
        ),
        ("lanes auto --stages 99 --microbatches 99", "auto searches orders of at most 2,048 forward passes, not 9,801"),
        ("lanes afab --stages 2 --microbatches 2 --svg tiny.py/a.svg", "tiny.py/a.svg cannot be written"),
    ],
)
def test_bad_command_lines(here: Path, line: str, sentence: str) -> None:
    result = call(*shlex.split(line))
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith("polylane: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert "Input should" not in result.stderr and "Value error" not in result.stderr, "a library's words, not ours"


def test_a_folder_without_a_name_is_not_the_current_one(here: Path) -> None:
    before = sorted(here.iterdir())
    result = call("train", "tiny.py", "--run", "")
    assert result.exit_code == 2 and "give the name of a folder" in result.stderr
    assert result.stderr.count("\n") == 1 and sorted(here.iterdir()) == before


def test_a_folder_that_cannot_be_written(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write anywhere
    result = call("train", "tiny.py", "--run", "locked/run")
    assert result.exit_code == 2
    assert "cannot be written to" in result.stderr
    assert not Path("locked").exists()


# What is wrong with a recipe or a plan, found before workers start ----------------------------------------------------


@pytest.mark.parametrize("command", ["train", "verify", "inspect"])
@pytest.mark.parametrize(
    ("fault", "sentence"),
    [
        ("model", "tiny.py:43: model() raised ValueError: no model today"),
        ("no module", "model() must return a torch.nn.Module, not a int"),
        ("optimizer", "tiny.py:52: optimizer(parameters) raised KeyError: 'momentum'"),
        ("scheduler", "tiny.py:57: scheduler(optimizer) raised RuntimeError: no schedule"),
        ("collate", "tiny.py:62: collate(samples) raised RuntimeError: no batch"),
        ("data", "tiny.py:74: data('train') raised FileNotFoundError: no such data"),
        ("no data", "data('train') must return a dataset"),
        ("empty", "data('train') has no samples"),
        ("forward", "forward is broken"),
        ("dtype", "loss(model, batch) fails on the example batch in inward: RuntimeError: mat1 and mat2 must have the"),
        (
            "memory",
            "this process ran out of memory, asking for 256 TiB more: `polylane plan --memory SIZE`",
        ),
        ("loader", "data('train'): a DataLoader makes batches already, and a dataset of samples is wanted"),
        ("argmax", "the loss does not depend on any parameter that requires a gradient"),
        ("frozen", "no parameter of the model requires a gradient, so that there is nothing to train"),
        (
            "rate",
            "scheduler(optimizer) must return a learning-rate scheduler, with a step(), or a list of them, not a float",
        ),
    ],
)
def test_bad_recipes(here: Path, command: str, fault: str, sentence: str) -> None:
    told = {("verify", fault) for fault in ("forward", "dtype", "memory", "argmax", "frozen")}
    result = call(command, "tiny.py", "--set", f"fault={fault}")
    assert result.exit_code == 2, result.exception
    assert (result.stdout == "") or (command, fault) in told  # it has said what it is about to do
    assert result.stderr.startswith("polylane: ")
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        ("--batch 8 --plan pipeline=2,microbatches=16", "a batch of 8 samples cannot be divided"),
        ("--plan pipeline=99", "at most"),
    ],
)
@pytest.mark.parametrize("command", ["train", "verify", "inspect"])
def test_plans_that_do_not_fit(here: Path, command: str, line: str, sentence: str) -> None:
    result = call(command, "tiny.py", *line.split())
    assert result.exit_code == 2, result.exception
    assert result.stderr.count("\n") == 1
    assert sentence in result.stderr


# lanes ---------------------------------------------------------------------------------------------------------------


def test_inspect_draws_the_stages(tmp_path: Path) -> None:
    svg = tmp_path / "lanes.svg"
    branches = Path(__file__).parent.parent / "examples" / "plans" / "branches_in_pipeline.yaml"
    recipe = branches.parent.parent / "inception.py"
    tiny = ("--set", "width=4", "--set", "blocks=1", "--batch", "16")
    told = json.loads(call("inspect", recipe, "--plan", branches, "--svg", svg, "--json", *tiny).stdout)
    assert [stage["after"] for stage in told["stages"]] == [[], [0], [0], [0], [0], [1, 2, 3, 4]]
    assert [stage["mesh"] for stage in told["stages"]] == ["1"] * 5 + ["data=2"]
    assert [stage["live"] for stage in told["stages"]] == [3, 2, 2, 2, 2, 1]
    assert {(edge["from"], edge["to"]) for edge in told["edges"]} == {(0, s) for s in range(1, 5)} | {
        (s, 5) for s in range(1, 5)
    }
    assert 0 < told["utilization"] < 1 and svg.read_text().startswith("<svg")
    done = call("inspect", recipe, "--svg", svg)
    assert done.exit_code == 2 and "--svg" in done.stderr and "say which one with --plan" in done.stderr


def test_lanes_as_json_and_pictures(tmp_path: Path) -> None:
    svg, html = tmp_path / "pictures" / "lanes.svg", tmp_path / "lanes.html"
    line = ("lanes", "1f1b", "--stages", "4", "--microbatches", "8")
    result = json.loads(call(*line, "--json", "--svg", svg, "--html", html).stdout)
    assert (result["busy"], result["area"], result["makespan"]) == (96, 132, 33)
    assert result["utilization"] == pytest.approx(96 / 132)
    assert result["peak_live_microbatches"] == [4, 3, 2, 1]
    assert svg.read_text().startswith("<svg")
    assert "<html" in html.read_text()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("stages: [a, b]", "stages must be a mapping from a stage's name to what it comes after"),
        ("stages: {a: , b: {after: [c]}}", "stages.b.after: there is no stage 'c', known are a, b"),
        ("stages: {a: {after: [b]}, b: {after: [a]}}", "stages a -> b -> a wait for each other"),
        ("stages: {a: {ticks: 2}}", "stages.a: a stage may say after: [names of stages], forward: ticks, backward"),
        ("stages: {a: {weight: 3}}", "the weight half of stage 0 takes 3 ticks, its whole backward only 2"),
        ("stages: {a: {forward: -1}}", "forward must be a duration of at least 0 ticks"),
        ("stages: {a: , a: }", "a is there twice"),
    ],
)
def test_wrong_stages_for_lanes(text: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "stages.yaml").write_text(text)
    done = call("lanes", "1f1b", "--stages", str(tmp_path / "stages.yaml"), "--microbatches", "2")
    assert done.exit_code == 2 and says in done.stderr


def test_lanes_of_branches() -> None:
    file = Path(__file__).parent.parent / "examples" / "lanes" / "branches.yaml"
    told = json.loads(call("lanes", "1f1b", "--stages", str(file), "--microbatches", "4", "--json").stdout)
    assert told["stages"] == 4 and told["peak_live_microbatches"] == [3, 2, 2, 1] and told["busy"] == 4 * (3 * 3 + 6)
    shown = call("lanes", "afab", "--stages", str(file), "--microbatches", "2").stdout
    assert "stages: 0 stem, 1 near, 2 far, 3 head" in shown


@pytest.mark.parametrize(
    ("line", "busy", "area", "live"),
    [
        ("zb-h1 --stages 4 --microbatches 8", 96, 108, [4, 4, 4, 4]),
        ("zb-h2 --stages 4 --microbatches 8", 96, 108, [7, 7, 7, 7]),
        ("zb-v --stages 4 --microbatches 8", 192, 204, [4, 4, 4, 4]),
        ("interleaved --stages 4 --microbatches 8", 192, 228, [5.5, 4.5, 3.5, 2.5]),
        ("interleaved --stages 4 --chunks 1 --microbatches 8", 96, 132, [4, 3, 2, 1]),
        ("afab --stages 4 --microbatches 8 --hop 1", 96, 156, [8, 8, 8, 8]),
        ("1f1b --stages 4 --microbatches 8 --hop 1", 96, 196, [4, 3, 2, 1]),
        ("auto --stages 4 --microbatches 8 --hop 1 --live 4", 96, 156, [4, 4, 3, 2]),
        ("auto --stages 4 --microbatches 8 --chunks 2", 192, 204, [4, 4, 4, 4]),
        ("zb-h1 --stages 4 --microbatches 8 --backward 3 --weight 1", 128, 152, [4, 4, 4, 4]),
    ],
)
def test_lanes_of_every_schedule(line: str, busy: int, area: int, live: list[float]) -> None:
    told = json.loads(call("lanes", *line.split(), "--json").stdout)
    assert (told["busy"], told["area"], told["peak_live_microbatches"]) == (busy, area, live)


def test_lanes_compared(tmp_path: Path) -> None:
    page = tmp_path / "schedules.html"
    line = ("lanes", "--compare", "--stages", "4", "--microbatches", "8")
    told = json.loads(call(*line, "--json", "--html", page).stdout)
    by_title = {each["title"]: each for each in told["schedules"]}
    assert {title: each["makespan"] for title, each in by_title.items()} == {
        "naive": 96,
        "afab": 33,
        "1f1b": 33,
        "interleaved, 2 chunks": 28.5,
        "zb-h1": 27,
        "zb-h2": 27,
        "zb-v, 2 chunks": 25.5,
        "auto, 4 live": 27,
        "auto": 27,
        "pipedream": 33,
        "pipedream, vertical sync": 33,
        "pipedream-2bw, 2 batches": 57,
    }
    assert [round(each["messages_over_1f1b"] * 3) for each in told["schedules"]] == [3] * 3 + [7, 3, 3, 6] + [3] * 5
    assert [max(each["peak_live_microbatches"]) for each in told["schedules"]] == [1, 8, 4, 5.5, 4, 7] + [4] * 6
    assert by_title["zb-h2"]["worker_utilization"] == [1] * 4 and told["left_out"] == {}
    assert page.read_text().count("<svg") == 12 and "pipedream-2bw" in page.read_text()
    shown = call(*line).stdout
    assert re.search(r"zb-v, 2 chunks +25.5 +94.1 % +100.0 % +- +4 +1 +0 +2 x", shown)


def test_what_is_left_out_of_a_comparison_is_said() -> None:
    file = Path(__file__).parent.parent / "examples" / "lanes" / "branches.yaml"
    told = json.loads(call("lanes", "--compare", "--stages", file, "--microbatches", "1", "--json").stdout)
    assert set(told["left_out"]) == {"interleaved, 2 chunks", "zb-v, 2 chunks", "pipedream-2bw, 2 batches"}
    assert "needs at least 2 microbatches" in told["left_out"]["pipedream-2bw, 2 batches"]


def test_chunks_need_stages_that_they_divide() -> None:
    file = Path(__file__).parent.parent / "examples" / "lanes" / "branches.yaml"
    done = call("lanes", "interleaved", "--stages", file, "--chunks", "3", "--microbatches", "4")
    assert done.exit_code == 2 and "4 stages cannot be dealt to workers in chunks of 3" in done.stderr


def test_lanes_as_text() -> None:
    shown = call("lanes", "afab", "--stages", "2", "--microbatches", "2", "--forward", "1,2", "--backward", "2").stdout
    assert "utilization" in shown
    assert "stage 1 │" in shown
    assert "peak live microbatches: 2 on stage 0, 2 on stage 1" in shown
    assert "\x1b" not in shown


# inspect -------------------------------------------------------------------------------------------------------------


def test_inspect_as_json(here: Path) -> None:
    result = json.loads(call("inspect", "tiny.py", "--batch", "6", "--json").stdout)
    assert result["samples"] == 6
    assert result["parameters"] == result["trainable"] == 4 * 8 + 8 + 3 * (8 * 8 + 8) + 8 * 2 + 2
    modules = {row["module"]: row for row in result["modules"]}
    assert modules["layers.1.0"]["parameters"] == 72
    assert modules["layers.1.0"]["flops"] == 2 * 6 * 8 * 8
    assert sum(row["nodes"] for row in result["modules"]) == result["nodes"]
    assert result["notes"] == []
    assert "stages" not in result


def test_inspect_with_a_plan(here: Path) -> None:
    line = ("inspect", "tiny.py", "--set", "depth=12", "--plan", "data=2,pipeline=3,microbatches=4")
    result = json.loads(call(*line, "--json").stdout)
    assert [stage["devices"] for stage in result["stages"]] == [[0, 3], [1, 4], [2, 5]]
    assert sum(stage["time_share"] for stage in result["stages"]) == pytest.approx(1)
    skip = next(crossing for crossing in result["crossings"] if crossing["value"] == "relu")
    assert skip["to"][-1] == 2  # straight from its producer, past the stage between
    assert skip["shape"] == [result["samples"], 8]
    assert skip["bytes"] == result["samples"] * 8 * 4
    assert skip["gradient"]
    shown = call("inspect", "tiny.py", "--plan", "pipeline=3").stdout
    assert "relu" in shown
    assert "comes back" in shown


def test_inspect_explains_how_operators_are_split(here: Path) -> None:
    result = json.loads(call("inspect", "tiny.py", "--plan", "sequence=2,tensor=2", "--json").stdout)
    assert result["plan"].startswith("data=1,pipeline=1,sequence=2,tensor=2,") and result["workers"] == 4
    assert [stage["devices"] for stage in result["stages"]] == [[0, 1, 2, 3]]
    assert list(result["splits"]) == ["sequence", "tensor"]
    tensor = result["splits"]["tensor"]
    assert tensor["degree"] == 2 and tensor["parameters"] < 0.75 * tensor["whole"]
    assert any(module["module"].startswith("layers.") for module in tensor["modules"])
    shown = call("inspect", "tiny.py", "--plan", "tensor=2").stdout
    assert "How operators are split along tensor, by data=1,pipeline=1,tensor=2" in shown
    assert "on each of 2 ranks" in shown and "along sequence" not in shown


def test_inspect_holds_to_a_plans_placements(here: Path) -> None:
    request = RecipeRequest(recipe="tiny.py", batch=64)
    problem = inputs.open_problem(inputs.open_recipe(request), request).problem
    made = compile_training(replace(problem, batch_size=None), "tensor=2").plan
    pins = {"layers.1.0.weight": {"tensor": "replicate"}}
    written = made.model_copy(update={"stages": (made.stages[0].model_copy(update={"placements": pins}),)})
    Path("pinned.yaml").write_text(plans.dump(written))
    lines = json.loads(call("inspect", "tiny.py", "--plan", "pinned.yaml", "--json").stdout)["splits"]["tensor"][
        "lines"
    ]
    assert any("layers.1.0.weight" in line and line.endswith(": pinned") for line in lines)
    Path("pinned.yaml").write_text(plans.dump(written).replace("layers.1.0.weight", "layers.1.0.wait"))
    refused = call("inspect", "tiny.py", "--plan", "pinned.yaml")
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    says = "plan pinned.yaml: stages.0.placements.layers.1.0.wait: the model has no parameter and no node of this name"
    assert says in refused.stderr


def test_inspect_writes_the_plan(here: Path) -> None:
    line = ("inspect", "tiny.py", "--plan", "data=2,pipeline=2,tensor=2,microbatches=4")
    shown = call(*line, "--write", "made/plan.yaml")
    assert "made/plan.yaml has this plan" in shown.stdout
    plan = plans.load("made/plan.yaml")
    assert plan.spec == "data=2,pipeline=2,tensor=2,schedule=1f1b,microbatches=4" and plan.graph is not None
    again = json.loads(call("inspect", "tiny.py", "--plan", "made/plan.yaml", "--write", "b.yaml", "--json").stdout)
    assert again["plan"] == plan.spec and again["file"] == "b.yaml" and plans.load("b.yaml") == plan
    assert "tiny.py/b.yaml cannot be written" in call(*line, "--write", "tiny.py/b.yaml").stderr


WRITTEN = """
stages:
- nodes: [inward, layers.1]
  devices: [0, 1]
  mesh: {tensor: 2}
  placements:
    inward.weight: {tensor: shard(0)}
- nodes: [layers.2.0/linear, loss]
  devices: [2, 3]
  mesh: {tensor: 2}
microbatches: 2
"""


def test_a_plan_that_a_person_writes(here: Path) -> None:
    Path("mine.yaml").write_text(WRITTEN)
    result = json.loads(call("inspect", "tiny.py", "--plan", "mine.yaml", "--write", "full.yaml", "--json").stdout)
    assert [stage["last"] for stage in result["stages"]] == ["layers.1.1/tanh", "loss/mul"]
    assert plans.load("mine.yaml").graph is None and plans.load("full.yaml").graph is not None
    Path("mine.yaml").write_text(WRITTEN.replace("layers.1]", "layers.7]"))
    refused = call("inspect", "tiny.py", "--plan", "mine.yaml")
    assert "plan mine.yaml: stages.0.nodes: the model has no node and no module 'layers.7'" in refused.stderr
    for placement, says in (
        ("{tensor: shard(0), tensor: shard(1)}", "tensor is there twice"),
        ("{tensor: partial}", ""),
    ):
        Path("mine.yaml").write_text(WRITTEN.replace("{tensor: shard(0)}", placement))
        refused = call("inspect", "tiny.py", "--plan", "mine.yaml")
        assert refused.exit_code == 2 and refused.stderr.startswith("polylane: plan mine.yaml: ")
        assert (says or "placements.inward.weight.tensor: partial: not possible here") in refused.stderr


def test_plans_of_thousands_of_workers_are_looked_at(here: Path) -> None:
    line = ("inspect", "tiny.py", "--set", "samples=8192", "--batch", "8192", "--plan", "data=4096,pipeline=2,tensor=2")
    shown = call(*line).stdout
    assert "0-1, 4-5, ..., 16380-16381 (8,192)" in shown and len(shown) < 9000
    refused = call("inspect", "tiny.py", "--plan", "tensor=4096")
    assert "tensor=4096: nothing in the model can be cut into so many parts, its longest dimension is" in refused.stderr


@pytest.mark.parametrize(
    ("plan", "share"),
    [
        ("data=1", "for 12 samples: the batch"),
        ("microbatches=3", "for 4 samples: a microbatch"),
        ("data=2", "for 6 samples: a replica's part of the batch"),
        ("data=2,microbatches=3", "for 2 samples: a replica's part of a microbatch"),
        ("data=12", "for 2 samples: no fewer are looked at, though the plan gives a worker fewer at a time"),
    ],
)
def test_inspect_says_for_how_many_samples(here: Path, plan: str, share: str) -> None:
    shown = call("inspect", "tiny.py", "--batch", "12", "--plan", plan).stdout
    assert f"forward, {share}" in " ".join(shown.split())


def test_inspect_says_that_replicas_compute_a_batch_together(here: Path) -> None:
    recipe = (
        Path("tiny.py")
        .read_text()
        .replace("F.cross_entropy(model(x), y)", "(model(x) @ model(x).T).softmax(1).diag().mean()")
    )
    Path("meeting.py").write_text(recipe)
    shown = call("inspect", "meeting.py", "--batch", "8", "--plan", "data=2").stdout
    share = "for 4 samples: as many as each replica has of a batch; samples meet, so 2 replicas compute it together"
    assert share in " ".join(shown.split()) and "How operators are split along data" in shown


def test_inspect_says_what_an_optimizer_kept_whole(here: Path) -> None:
    """Whose optimizer runs on these weights alone, and not on the larger values of a trial."""
    picky = (
        "if max(p.abs().max() for _, p in parameters) > 1: raise ValueError('too large')\n    return torch.optim.SGD"
    )
    recipe = Path("tiny.py").read_text().replace("return torch.optim.SGD", picky)
    Path("picky.py").write_text(recipe)
    with pytest.warns(UserWarning, match="10 parameters stay whole on every rank of tensor=2, .*ValueError: too large"):
        shown = call("inspect", "picky.py", "--plan", "tensor=2").stdout
    why = "its optimizer does not run on small parameters (picky.py:53: optimizer(parameters) raised ValueError: too"
    assert "whole on every rank: inward.weight (128 B): " + why in shown


def test_inspect_says_where_a_search_stopped_early(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    solve = IntegerProgram.solve
    stopped = {"status": "stopped early", "gap": 0.031}
    monkeypatch.setattr(IntegerProgram, "solve", lambda *args, **more: replace(solve(*args, **more), **stopped))
    shown = call("inspect", "tiny.py", "--plan", "tensor=2").stdout
    assert "the search for the best split stopped early after 0 s: by the model it is within 3.1 % of it" in shown
    found = json.loads(call("inspect", "tiny.py", "--plan", "tensor=2", "--json").stdout)["splits"]["tensor"]
    assert found["report"]["status"] == "stopped early" and found["report"]["gap"] == 0.031


def test_inspect_sums_up_deep_models(here: Path) -> None:
    shown = call("inspect", "tiny.py", "--set", "depth=30").stdout
    assert "layers.*.0  x 30" in shown
    assert "layers.7.0" not in shown


# train ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(folder: Path) -> tuple[dict[str, Any], str, Path]:
    """One training on four workers: the JSON that it printed, what it said meanwhile, and its folder."""
    line = "train tiny.py --workers 4 --plan data=2,pipeline=2,microbatches=4 --epochs 2 --batch 9 --run run/four"
    out, err = execute(folder, f"{line} --set width=12 --json")
    return json.loads(out), err, folder / "run/four"


def test_train_says_how_it_went(trained: tuple[dict[str, Any], str, Path]) -> None:
    result, said, run = trained
    assert result["steps"] == 6
    assert result["samples"] == 44
    assert result["workers"] == 4
    assert 0 < result["utilization"] <= 1
    assert result["samples_per_second"] > 0
    assert {Path(file).name for file in result["files"].values()} == FILES
    assert "epoch 2/2: mean loss" in said
    steps, epochs = metrics(run)
    assert result["loss"] == steps[-1]["loss"]
    assert result["test_loss"] == epochs[-1]["test_loss"]


def test_train_writes_a_line_a_step(trained: tuple[dict[str, Any], str, Path]) -> None:
    _, _, run = trained
    steps, epochs = metrics(run)
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2, 2, 2]
    assert [line["samples"] for line in steps] == [9, 9, 4, 9, 9, 4]
    assert steps[1]["learning_rate"] == pytest.approx(0.09)
    assert steps[0]["samples_per_second"] == pytest.approx(9 / steps[0]["seconds"])
    assert [line["epoch"] for line in epochs] == [1, 2]
    mean = sum(line["loss"] * line["samples"] for line in steps[:3]) / 22
    assert epochs[0]["train_loss"] == pytest.approx(mean)


def test_trained_weights_load_into_the_plain_model(trained: tuple[dict[str, Any], str, Path], here: Path) -> None:
    recipe = polylane_recipe("tiny.py", {"width": "12"})
    model = recipe.model()
    model.load_state_dict(load_file(trained[2] / "model.safetensors"), strict=True)
    test = recipe.collate(list(recipe.data("test")))
    with torch.no_grad():
        assert float(recipe.loss(model, test)) == pytest.approx(trained[0]["test_loss"], rel=1e-5)


def polylane_recipe(path: str, settings: dict[str, str]) -> Any:
    from polylane.recipe import load

    return load(path, settings)


def test_the_timeline_is_of_a_late_full_step(trained: tuple[dict[str, Any], str, Path]) -> None:
    run = trained[2]
    timeline = Timeline.from_dict(json.loads((run / "timeline.json").read_text()))
    assert timeline.ranks == 4
    assert timeline.utilization() == trained[0]["utilization"]
    assert list(timeline.sent()) == trained[0]["sent_bytes"] and min(timeline.sent()) > 0
    assert int(timeline.notes["step"]) in (1, 2, 4, 5)
    assert json.loads((run / "trace.json").read_text())["traceEvents"]
    assert "<html" in (run / "swimlane.html").read_text()


def test_a_written_plan_is_a_plan_to_use(trained: tuple[dict[str, Any], str, Path], here: Path) -> None:
    file = trained[2] / "plan.yaml"
    plan = plans.load(file)
    assert plan.spec == trained[0]["plan"] == "data=2,pipeline=2,schedule=1f1b,microbatches=4"
    result = call("inspect", "tiny.py", "--set", "width=12", "--plan", file, "--json")
    assert [stage["first"] for stage in json.loads(result.stdout)["stages"]] == [
        stage.nodes[0] for stage in plan.stages
    ]
    other = call("train", "tiny.py", "--set", "width=12", "--set", "depth=2", "--plan", file)
    assert other.exit_code == 2
    assert f"plan {file} is for another model: it " in other.stderr
    fewer = call("train", "tiny.py", "--set", "width=12", "--workers", "2", "--plan", file)
    assert "--workers 2, but the plan takes 4" in fewer.stderr


def test_one_worker_trains_to_the_same_weights(trained: tuple[dict[str, Any], str, Path], folder: Path) -> None:
    line = "train tiny.py --set width=12 --epochs 2 --batch 9 --run run/one --plan microbatches=4"
    out, err = execute(folder, line)
    assert "final loss" in out
    assert "samples/s" in out
    assert "run/one/swimlane.html" in out
    assert err == ""
    one, four = (load_file(run / "model.safetensors") for run in (folder / "run/one", trained[2]))
    for name, value in one.items():
        torch.testing.assert_close(value, four[name])


def test_steps_go_through_as_many_epochs_as_they_need(folder: Path) -> None:
    """And iterators are asked for anew, a missing test split is none, and the folder is one that was not there."""
    line = "train tiny.py --steps 4 --batch 8 --workers 2 --json"
    for fault, name in (("iterator", "tiny"), ("no test", "tiny-2")):
        result = json.loads(execute(folder, f"{line} --set 'fault={fault}'")[0])
        assert result["run"] == f"run/{name}"
        assert (result["steps"], result["samples"]) == (4, 8 + 8 + 6 + 8)
        steps, epochs = metrics(folder / "run" / name)
        assert [line["epoch"] for line in steps] == [1, 1, 1, 2]
        assert [line["epoch"] for line in epochs] == [1, 2]
        assert (result["test_loss"] is None) == (fault == "no test")


NORMED = """
import torch
from tiny import collate, data, loss, optimizer

def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
"""


def test_a_last_batch_that_cannot_be_trained_on(folder: Path) -> None:
    """It is refused before the first step; not where it is dropped, nor where training ends before it comes."""
    (folder / "normed.py").write_text(NORMED)
    line = "train normed.py --set samples=17 --batch 8 --plan pipeline=2,microbatches=2 --run run/normed"
    for way in ("", "--steps 3", "--set fault=iterator --steps 3"):
        stream = "iterator" in way
        _, err = execute(folder, f"{line} {way}", code=2)
        known = "the last batch of an epoch (17 samples in batches of 8) has 1 sample, but 1/batch_norm"
        assert ("this batch has 1 sample" if stream else f"polylane: {known}") in err
        assert stream or "leave it out with --drop-last, or take another --batch" in err
        assert (folder / "run/normed").exists() == stream
    for way, steps, samples in (("--drop-last --epochs 2", 4, 32), ("--steps 2", 2, 16)):
        result = json.loads(execute(folder, f"{line} {way} --json")[0])
        assert (result["steps"], result["samples"]) == (steps, samples)
    short = execute(folder, "train normed.py --set samples=5 --batch 8 --drop-last --plan data=1", code=2)[1]
    assert "the dataset has 5 samples, no batch of 8, and a shorter one is to be dropped" in short


def test_a_batch_larger_than_the_data_is_remarked_on(folder: Path) -> None:
    _, told = execute(folder, "train tiny.py --steps 1 --batch 1000 --json")
    assert "--batch 1000: data('train') has 22 samples, so that an epoch is one batch of 22" in " ".join(told.split())
    _, told = execute(folder, "train tiny.py --steps 1 --batch 22 --json")
    assert "--batch" not in told


def test_on_nan_stop(folder: Path) -> None:
    line = "train tiny.py --set fault=nan --on-nan stop --batch 4 --workers 2 --epochs 9 --run run/nan"
    _, err = execute(folder, line, code=2)
    steps, epochs = metrics(folder / "run/nan")
    bad = next(line["step"] for line in steps if line["loss"] is None)
    assert f"polylane: the loss was nan at step {bad} (epoch 1): training stopped" in err
    assert len(steps) <= bad + 1
    assert epochs == []
    assert not (folder / "run/nan/model.safetensors").exists()


def test_a_worker_that_raises(folder: Path) -> None:
    _, err = execute(folder, "train tiny.py --set fault=worker --batch 8 --workers 2 --run run/raises", code=1)
    assert err.startswith("polylane: worker ")
    assert "no such device" in err
    assert err.count("Traceback") == 1


def test_a_sample_that_raises(folder: Path) -> None:
    _, err = execute(folder, "train tiny.py --set fault=sample --batch 8 --workers 2 --run run/sample", code=2)
    assert re.match(r"polylane: batch 3 of epoch 1: sample 21 of the dataset raised OSError: bad sector \(.*\)\n$", err)


def test_ctrl_c_ends_all_and_keeps_what_was_written(folder: Path) -> None:
    run = folder / "run/interrupted"
    process = start(folder, "train tiny.py --workers 2 --epochs 100000 --run run/interrupted")
    file = run / "metrics.jsonl"
    wait_for(lambda: file.exists() and file.read_text().count("\n") > 3, process)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert process.returncode == 130
    kept = "run/interrupted/ keeps what was written so far, no weights among it: no checkpoints were requested"
    assert err == f"polylane: interrupted: {kept}\n"
    wait_for(lambda: not alive(process.pid))
    assert len(metrics(run)[0]) >= 2
    plans.load(run / "plan.yaml")


def wait_for(condition: Any, process: subprocess.Popen[str] | None = None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.05)


def test_the_same_command_under_torchrun(folder: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "--", "polylane")
    line = "train tiny.py --plan pipeline=2,microbatches=4 --steps 3 --batch 9 --run run/torchrun --json"
    out, _ = execute(folder, line, program=torchrun)
    result = json.loads(out)
    assert (result["steps"], result["workers"]) == (3, 2)
    assert {file.name for file in (folder / "run/torchrun").iterdir()} == FILES
    again, _ = execute(folder, line.replace("torchrun", "forked"))
    assert json.loads(again)["loss"] == pytest.approx(result["loss"], rel=1e-5)


ACCELERATED = """
import multiprocessing.util
import sys
import commands_run
from polylane.cli import main
from polylane.runtime.workers import world

if __name__ == "__main__":
    world.found, world.accelerator_type = world.accelerator_type, lambda: "pretended"
    multiprocessing.util.spawnv_passfds = commands_run.spawn
    main(sys.argv[1:])
else:  # new processes import this file again, and find no accelerator
    world.accelerator_type = world.found
"""


def test_new_processes_where_there_are_accelerators(folder: Path) -> None:
    (folder / "accelerated.py").write_text(ACCELERATED)
    line = "train tiny.py --plan data=2,microbatches=2 --steps 3 --batch 9 --run run/spawned --json"
    result = json.loads(execute(folder, line, program=("accelerated.py",))[0])
    again = json.loads(execute(folder, line.replace("spawned", "as_forked"))[0])
    assert {file.name for file in (folder / "run/spawned").iterdir()} == FILES
    assert again["loss"] == pytest.approx(result["loss"], rel=1e-5)


# verify --------------------------------------------------------------------------------------------------------------


def test_verify(folder: Path) -> None:
    line = "verify tiny.py --workers 2 --plan pipeline=2 --batch 9 --steps 4 --clip-norm 0.1 --json"
    result = json.loads(execute(folder, line)[0])
    assert result["passed"]
    assert len(result["losses"]) == 4  # one more than an epoch has
    assert result["worst"] < 1e-9
    assert {one["name"] for one in result["deviations"]} >= {"inward.weight", "layers.2.0.bias"}


@pytest.mark.parametrize("passed", [True, False])
def test_verdicts_are_told(here: Path, monkeypatch: pytest.MonkeyPatch, passed: bool) -> None:
    names = [f"layer{number}.weight" for number in range(30)]
    deviations = [verification.Deviation(name, 1e-16, 1e-16) for name in names]
    verdict = verification.Verdict(
        passed=True,
        plan="pipeline=2",
        workers=2,
        steps=1,
        tolerance=1e-9,
        reference="the plain model",
        losses=((1.0, 1.0),),
        loss_error=0.0,
        deviations=tuple(deviations),
        worst=1e-16,
        replicas_equal=True,
        culprit=None,
    )
    if not passed:
        wrong = (*deviations[:-1], verification.Deviation("layer29.weight", None, float("nan")))
        verdict = replace(verdict, passed=False, deviations=wrong, worst=float("nan"), culprit="layer29/linear")
    monkeypatch.setattr(verification, "verify", lambda *args, **kwargs: verdict)
    told = call("verify", "tiny.py", "--plan", "pipeline=2")
    assert told.exit_code == (0 if passed else 1)
    assert ("Equal:" in told.stdout, "NOT equal:" in told.stdout) == (passed, not passed)
    assert ("layer29/linear" in told.stdout) == (not passed)
    first = told.stdout.index("layer29.weight" if not passed else "layer0.weight")
    assert first < told.stdout.index("layer1.weight")  # the worst first
    assert "and 10 more" in told.stdout
    as_json = call("verify", "tiny.py", "--plan", "pipeline=2", "--json")
    assert as_json.exit_code == told.exit_code
    assert len(json.loads(as_json.stdout)["deviations"]) == 30


def test_verify_starts_its_own_workers(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "run it without torchrun" in call("verify", "tiny.py").stderr
