"""A run that goes on by another plan keeps the checkpoint's microbatches, where the model's numbers depend on them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from polylane.commands.running.resumed_microbatches import keep_microbatches, note_other_microbatches
from polylane.compile.compiled_training import CompiledTraining
from polylane.compile.objectives import build_objectives
from polylane.plan.plan import AnyPlan
from polylane.plan.spec import parse
from polylane.runtime.job import Job
from polylane.runtime.workers.team import fork_workers
from polylane.runtime.workers.world import World
from tests.checkpoint.saved_runs import example_of, momentum, small_model
from tests.support.workers import forked_commands
from tests.support.workers.compiling import compile_training
from tests.support.workers.training import classify

RECIPE = """
import torch

def model():
    first, last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
    layers = first, torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Dropout(0.2), last
    return torch.nn.Sequential(*layers).double()

def data(split):
    generator = torch.Generator().manual_seed(len(split))
    x = torch.randn(40, 4, generator=generator, dtype=torch.float64)
    return torch.utils.data.TensorDataset(x, x[:, :1] * 3)

def loss(model, batch):
    return ((model(batch[0]) - batch[1]) ** 2).mean()

def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.05, momentum=0.9)
"""


def run(folder: Path, name: str, line: str) -> subprocess.CompletedProcess[str]:
    words = ["train", "norms.py", "--batch", "16", "--epochs", "2", "--run", name, *line.split()]
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    done = forked_commands.run([sys.executable, "-m", "polylane", *words], cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr
    return done


def on_one_device() -> dict[str, torch.Tensor]:
    """The recipe's weights in the end."""
    recipe: dict[str, Any] = {}
    exec(RECIPE, recipe)
    torch.manual_seed(0)
    model, dataset = recipe["model"](), recipe["data"]("train")
    objectives = build_objectives(recipe["loss"], recipe["optimizer"], None)
    example = torch.utils.data.default_collate(list(dataset)[:16])
    prepared = compile_training(model, objectives, example, "data=1")

    def work(_: Any) -> dict[str, torch.Tensor]:
        with Job(prepared, World.join(), example=example, seed=0) as job:
            for batch in job.batches(dataset, 16, epochs=2):
                job.step(batch)
            return job.state_dict()

    return fork_workers(work, 1)[0]


def test_another_plan_goes_on_with_the_numbers_of_one_device(tmp_path: Path) -> None:
    (tmp_path / "norms.py").write_text(RECIPE)
    run(tmp_path, "saved", "--plan data=2 --save-every 2 --keep 9")
    done = run(tmp_path, "moved", "--plan pipeline=2 --resume saved/checkpoints/step-00000002")
    assert "microbatches=1 as in the checkpoint, and not 8, the plan's default: statistics of the batch" in done.stderr
    assert "the numbers are not those" not in done.stdout + done.stderr
    found = load_file(tmp_path / "moved" / "model.safetensors")
    for name, value in on_one_device().items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-13)


def compiled(asked: AnyPlan, model: nn.Module) -> CompiledTraining:
    return compile_training(model, build_objectives(classify, momentum, None), example_of(model), asked)


def keep(asked: str, saved: str, model: nn.Module) -> tuple[CompiledTraining, list[str], list[str]]:
    """The training that goes on, what is said when it is compiled, and what is noted when it begins."""
    before, spec, said = compiled(parse(saved), model).plan, parse(asked), list[str]()
    found = keep_microbatches(compiled(spec, model), spec, before, lambda plan: compiled(plan, model), said.append)
    return found, said, note_other_microbatches(found, before)


def without_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Tanh(), nn.Linear(8, 4)).double()


def test_the_checkpoints_number_is_taken_where_none_is_said() -> None:
    found, (said,), noted = keep("pipeline=2", "data=2", small_model())
    assert found.plan.microbatches == 1 and found.plan.pipeline == 2 and not noted
    assert said.startswith("microbatches=1 as in the checkpoint, and not ")


@pytest.mark.parametrize("asked", ["pipeline=2", "pipeline=2,microbatches=4", "data=2,microbatches=2"])
def test_nothing_is_said_where_numbers_do_not_depend_on_it(asked: str) -> None:
    model = without_norm()
    found, said, noted = keep(asked, "data=2", model)
    assert found.plan.microbatches == compiled(parse(asked), model).plan.microbatches and not said and not noted


def test_a_number_that_is_said_counts_and_a_note_says_what_follows() -> None:
    found, said, (noted,) = keep("pipeline=2,microbatches=4", "data=2", small_model())
    assert found.plan.microbatches == 4 and not said
    assert "of microbatches=1: the numbers are not those" in noted
    assert noted.endswith("a plan with microbatches=1 has the same")


def test_where_it_does_not_go_with_the_plan_the_reason_is_said() -> None:
    found, (said,), (noted,) = keep("data=2,replicas=round-robin", "pipeline=2,microbatches=1", small_model())
    assert found.plan.microbatches == 2 and "a plan with microbatches=1" in noted
    assert said.startswith("the checkpoint's microbatches=1 do not go with this plan: ")


def test_asynchronous_pipelines_have_numbers_of_their_own() -> None:
    found, said, noted = keep("pipeline=2,schedule=pipedream", "pipeline=2,microbatches=4", small_model())
    assert found.plan.microbatches == 1 and not said and not noted
