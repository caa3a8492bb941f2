"""Wrong command lines, recipes and plans: one sentence and exit code 2, before anything is computed."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from tests.cli.tiny_recipe import call


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
