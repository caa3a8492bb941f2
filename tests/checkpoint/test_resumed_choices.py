"""A training that goes on with other trained parameters, or another bound on gradients, says so; and calls of a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.resumed_choices import describe_choices, note_changed_choices
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.checkpoint.saved_runs import compile_once, example_of, momentum, on_workers, save_steps
from tests.support.workers import forked_commands
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import classify

RECIPE = """
import torch

def model(frozen=""):
    torch.manual_seed(0)
    found = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    for index in frozen.split("+") if frozen else []:
        found[int(index)].requires_grad_(False)
    return found

def data(split):
    x = torch.arange(160.0).reshape(40, 4) / 160
    return torch.utils.data.TensorDataset(x, x[:, :1] * 3) if split == "train" else None

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.05, momentum=0.9)
"""


def train(folder: Path, line: str) -> str:
    """What a run prints, which ends well."""
    words = ["train", "choices.py", "--batch", "8", *line.split()]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = forked_commands.run([sys.executable, "-m", "polylane", *words], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def test_a_run_that_goes_on_says_what_is_frozen_now_and_what_is_trained(tmp_path: Path) -> None:
    (tmp_path / "choices.py").write_text(RECIPE)
    line = "--run a --save-every 1 --resume auto"
    first = train(tmp_path, f"{line} --plan data=2 --steps 2 --clip-norm 2")
    frozen = train(tmp_path, f"{line} --plan data=2 --steps 4 --clip-norm 1 --set frozen=0")
    thawed = train(tmp_path, f"{line} --plan pipeline=2 --steps 6 --set frozen=2")
    same = train(tmp_path, f"{line} --plan data=2 --steps 8 --set frozen=2")
    assert "note: 0.weight, 0.bias were trained in the checkpoint's run and are frozen now\n" in frozen
    assert "note: clip_norm=1, and the checkpoint's run had clip_norm=2: the numbers are not those of" in frozen
    assert "note: 2.weight, 2.bias were trained in the checkpoint's run and are frozen now" in thawed
    assert "note: 0.weight, 0.bias were frozen in the checkpoint's run and are trained now\n" in thawed
    assert "note: no clip_norm, and the checkpoint's run had clip_norm=1" in thawed
    assert not any(word in told for told in (first, same) for word in ("frozen", "clip_norm"))


@pytest.mark.parametrize("plan", ["data=2,every=2,outer=0.7", "data=2,shard=parameters", "data=1,servers=1"])
@pytest.mark.slow
def test_so_under_every_kind_of_synchronization(tmp_path: Path, plan: str) -> None:
    (tmp_path / "choices.py").write_text(RECIPE)
    line = f"--plan {plan} --run a --save-every 1 --resume auto"
    train(tmp_path, f"{line} --steps 2 --set frozen=2")
    assert "2.weight, 2.bias were frozen in" in train(tmp_path, f"{line} --steps 4")
    assert "0.weight, 0.bias were trained in" in train(tmp_path, f"{line} --steps 6 --set frozen=0")


def deep(frozen: int) -> CompiledTraining:
    model = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))).double()
    for layer in list(model)[:frozen]:
        layer.requires_grad_(False)
    return compile_training(model, build_objectives(classify, momentum, None), example_of(model), "data=1")


def test_a_few_names_are_told_and_the_number_of_the_others() -> None:
    (note,) = note_changed_choices(describe_choices(deep(0), None), describe_choices(deep(3), None))
    assert note.startswith("0.weight, 0.bias, 1.weight and 3 others were trained in the checkpoint's run and are ")


ODD = [{}, {"trained": None}, {"trained": {"loss": 3}}, {"trained": [1]}, {"clip_norm": "x"}, {"clip_norm": 10**400}]


@pytest.mark.parametrize("saved", ODD)
def test_of_a_checkpoint_that_does_not_say_it_nothing_is_said(saved: dict[str, Any]) -> None:
    assert not note_changed_choices(saved, describe_choices(deep(1), None))


def test_names_that_no_checkpoint_has_are_passed_over() -> None:
    """A file may say anything."""
    own = describe_choices(deep(0), None)
    ((objective, trained),) = own["trained"].items()
    assert not note_changed_choices({"trained": {objective: [*trained, 3, [1], {}, None]}}, own)


def test_a_script_is_warned_once(tmp_path: Path) -> None:
    save_steps("data=2", tmp_path, 1)
    prepared, said = compile_once("data=2"), list[str]()

    def work(_: Any) -> list[str]:
        with Job(prepared, World.join(), example=example_of(prepared.model), clip_norm=0.5) as job:
            job.load_checkpoint(tmp_path, warn=said.append)
        return said

    (first, other) = fork_workers(work, 2)
    assert [each.partition(":")[0] for each in first] == ["clip_norm=0.5, and the checkpoint's run had no clip_norm"]
    assert not other


def test_calls_that_cannot_be_are_one_sentence(tmp_path: Path) -> None:
    def work(job: Job) -> list[str]:
        calls = [
            lambda: job.load_checkpoint(None),  # type: ignore[arg-type]
            lambda: job.save_checkpoint(b"x"),  # type: ignore[arg-type]
            lambda: job.load_checkpoint(""),
            lambda: job.save_checkpoint(tmp_path),
            lambda: job.load_checkpoint(tmp_path),
        ]
        said = []
        for number, call in enumerate(calls):
            if number == 3:
                job.close()
            with pytest.raises(PolylaneError) as raised:
                call()
            said.append(str(raised.value))
        return said

    for said in on_workers(compile_once("data=2"), work):
        assert said[0] == "job.load_checkpoint(empty): give the path of a folder, as a text or a Path"
        assert said[1].startswith("job.save_checkpoint(b'x'): ") and said[2].startswith("job.load_checkpoint(''): ")
        assert said[3].startswith("job.save_checkpoint: the job is closed, and ")
        assert said[4].startswith("job.load_checkpoint: the job is closed, and ")
        assert all("\n" not in each for each in said) and torch.is_grad_enabled()
