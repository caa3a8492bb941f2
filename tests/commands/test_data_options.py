"""Options of the data: accumulated batches are one of all their samples, and a training may have only a few."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch.utils.data import IterableDataset
from typer.testing import CliRunner

from polylane.cli import app
from polylane.commands import train
from polylane.commands.requests import TrainRequest
from polylane.commands.running.option_groups import DataOptions
from polylane.commands.running.recipe_data import limit_batches
from tests.cli.tiny_recipe import execute

RECIPE = """
import torch
from torch import nn
from torch.utils.data import WeightedRandomSampler

steps = {}


def model():
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4)).double()


def loss(model, batch):
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def optimizer(parameters):
    return torch.optim.SGD([p for _, p in parameters], lr=0.1, momentum=0.9)


def scheduler(optimizer, total_steps=7, steps_per_epoch=1):
    print(f"told {total_steps} {steps_per_epoch}", flush=True)
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


def data(split):
    g = torch.Generator().manual_seed(0 if split == "train" else 1)
    count = 48 if split == "train" else 20
    return [(torch.randn(6, generator=g).double(), torch.randint(0, 4, (), generator=g)) for _ in range(count)]


def metrics(model, batch):
    return {"accuracy": (model(batch[0]).argmax(1) == batch[1]).double()}
"""


CALLBACKS = """
import polylane


class Ends(polylane.Callback):
    def on_train_end(self, *_):
        raise KeyError("x")


def callbacks():
    return [Ends()]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data_options")
    (folder / "points.py").write_text(RECIPE)
    return folder


def metrics(run: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines())


@pytest.mark.parametrize("plan", ["data=2", "pipeline=2,microbatches=2", "data=1"])
def test_accumulated_batches_are_one_of_all_their_samples(folder: Path, plan: str) -> None:
    name = plan.replace(",", "-")
    execute(folder, f"train points.py --plan {plan} --batch 8 --accumulate 3 --epochs 2 --run run/{name} --audit off")
    execute(folder, f"train points.py --plan data=1 --batch 24 --epochs 2 --run run/whole-{name} --audit off")
    steps, whole = (
        [line for line in metrics(folder / "run" / run) if "loss" in line] for run in (name, f"whole-{name}")
    )
    assert [step["samples"] for step in steps] == [24] * 4
    assert [step["loss"] for step in steps] == pytest.approx([step["loss"] for step in whole], rel=1e-12)
    weights, expected = (load_file(folder / f"run/{run}/model.safetensors") for run in (name, f"whole-{name}"))
    assert all(torch.allclose(weights[key], expected[key], rtol=1e-12, atol=1e-14) for key in expected)
    microbatches = 6 if "pipeline" in plan else 3
    assert f"microbatches: {microbatches}" in (folder / f"run/{name}/plan.yaml").read_text()


def test_the_first_batches_are_overfitted(folder: Path) -> None:
    line = "train points.py --plan data=2 --batch 8 --overfit-batches 1 --epochs 200 --run run/over --json --audit off"
    result = json.loads(execute(folder, line)[0].splitlines()[-1])
    assert result["steps"] == 200 and result["samples"] == 1600
    lines = [line for line in metrics(folder / "run/over") if "test_loss" in line]
    assert lines[-1]["metrics"]["accuracy"] == 1 and lines[-1]["test_loss"] < lines[0]["test_loss"] / 10


def test_one_batch_of_each_split_finds_mistakes(folder: Path) -> None:
    line = "train points.py --plan data=2 --batch 8 --fast-dev-run --epochs 50 --save-every 1 --run run/fast"
    execute(folder, line)
    steps = [line for line in metrics(folder / "run/fast") if "loss" in line]
    assert len(steps) == 1 and not (folder / "run/fast/checkpoints").exists()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ("--batch 8 --epochs 3", "told 18 6"),
        ("--batch 8 --steps 5", "told 5 6"),
        ("--batch 9 --drop-last", "told 5 5"),
        ("--batch 8 --epochs 3 --accumulate 2", "told 9 3"),
        ("--batch 8 --epochs 3 --set total_steps=100", "told 100 6"),
        ("--batch 8 --epochs 3 --overfit-batches 2", "told 6 2"),
        ("--batch 8 --epochs 3 --fast-dev-run", "told 1 1"),
    ],
)
def test_a_scheduler_is_told_how_many_steps_there_are(folder: Path, options: str, told: str) -> None:
    out, _ = execute(folder, f"train points.py --plan data=1 {options} --run run/told --audit off")
    assert told in out


def test_averages_are_gone_on_with_as_averages(folder: Path) -> None:
    line = "train points.py --plan data=1 --batch 8 --audit off --save-every 3"
    execute(folder, f"{line} --ema 0.9 --steps 3 --run run/begun")
    checkpoint = next((folder / "run/begun/checkpoints").iterdir())
    for option, words in (("", "none"), ("--ema 0.5", "averages with 0.5")):
        _, err = execute(folder, f"{line} --steps 6 {option} --run run/other --resume {checkpoint}", code=2)
        assert f"with a decay of 0.9, and this training's optimizer keeps {words}: give --ema 0.9" in err


def test_tests_have_batches_of_the_size_that_was_asked_for(folder: Path) -> None:
    masked = "cross_entropy(model(batch[0]), batch[1], ignore_index=1)"  # a mean over what counts of each batch
    (folder / "masked.py").write_text(RECIPE.replace("cross_entropy(model(batch[0]), batch[1])", masked))
    execute(folder, "train masked.py --plan data=1 --batch 4 --accumulate 2 --run run/masked --audit off")
    recipe: dict[str, Any] = {}
    exec(RECIPE, recipe)
    model, samples = recipe["model"](), recipe["data"]("test")
    model.load_state_dict(load_file(folder / "run/masked/model.safetensors"))

    def mean_loss(size: int) -> float:
        total = 0.0
        for start in range(0, len(samples), size):
            inputs, labels = (torch.stack(column) for column in zip(*samples[start : start + size], strict=True))
            total += F.cross_entropy(model(inputs), labels, ignore_index=1).item() * len(labels)
        return total / len(samples)

    (tested,) = [line["test_loss"] for line in metrics(folder / "run/masked") if "test_loss" in line]
    assert tested == pytest.approx(mean_loss(4), rel=1e-12) and abs(tested - mean_loss(8)) > 1e-6


def test_an_option_that_is_given_twice_is_refused(folder: Path) -> None:
    _, err = execute(folder, "train points.py --stop-at accuracy:0.9 --stop-at test_loss:0.1", code=2)
    assert "--stop-at is given 2 times, and follows one result: give it once" in err


def test_a_metric_cannot_have_the_name_of_a_loss(folder: Path) -> None:
    (folder / "named.py").write_text(RECIPE.replace('"accuracy"', '"test_loss"'))
    _, err = execute(folder, "train named.py --plan data=1 --run run/named", code=2)
    assert "test_loss is the name of two values, or of a loss: rename one" in err


def test_a_callback_that_fails_at_the_end_loses_no_weights(folder: Path) -> None:
    (folder / "ends.py").write_text(RECIPE + CALLBACKS)
    _, err = execute(folder, "train ends.py --plan data=2 --run run/ends --audit off", code=2)
    assert (
        re.search(r"on_train_end raised KeyError: .x. \(.*ends.py:\d+\)", err)
        and (folder / "run/ends/model.safetensors").exists()
    )


def test_averages_are_tested_and_saved(folder: Path) -> None:
    for name, option in (("average", "--ema 0.9"), ("last", "")):
        execute(folder, f"train points.py --plan data=2 --batch 8 --epochs 2 {option} --run run/{name} --audit off")
    average, last = (list(metrics(folder / "run" / name)) for name in ("average", "last"))
    assert [line["loss"] for line in average if "loss" in line] == [line["loss"] for line in last if "loss" in line]
    assert average[-1]["test_loss"] != last[-1]["test_loss"]
    weights, others = (load_file(folder / f"run/{name}/model.safetensors") for name in ("average", "last"))
    assert all(not torch.equal(weights[key], others[key]) for key in weights)


@pytest.mark.parametrize(
    ("text", "sizes"), [("8", (32, None)), ("auto:8", (32, 0)), ("auto:8:64", (32, 256)), ("auto", (256, 0))]
)
def test_a_step_that_grows_has_several_batches_at_first_and_at_most(
    monkeypatch: pytest.MonkeyPatch, text: str, sizes: tuple[int, int | None]
) -> None:
    requests = list[TrainRequest]()
    monkeypatch.setattr(train, "run", requests.append)
    result = CliRunner().invoke(app, ["train", "any.py", "--batch", text, "--accumulate", "4"])
    assert result.exit_code == 0, result.output
    assert (requests[0].rates.batch, requests[0].rates.largest_batch) == sizes


class Stream(IterableDataset[int]):
    """Numbers from 0 on, anew in each epoch."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(20))


@pytest.mark.parametrize(("batches", "expected"), [(1, 8), (2, 16), (9, 20)])
def test_the_first_batches_are_those_of_any_kind_of_data(batches: int, expected: int) -> None:
    request = SimpleNamespace(data=DataOptions(overfit_batches=batches), batch=8)
    for data in (list(range(20)), Stream()):
        limited = limit_batches(data, request)  # type: ignore[arg-type]
        assert [list(limited), list(limited)] == [list(range(expected))] * 2  # in each epoch
    assert list(limit_batches(iter(range(20)), request)) == list(range(expected))  # type: ignore[arg-type]
    assert limit_batches(data, SimpleNamespace(data=DataOptions(), batch=8)) is data  # type: ignore[arg-type]
