"""What polylane refuses in a script names the script's line."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import polylane
from polylane.errors import PolylaneError
from polylane.script.session import ScriptSession, running_session


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        ("the model was replaced: build it first", "train.py:4: the model was replaced: build it first"),
        ("train.py line 3: a choice by rank", "train.py line 3: a choice by rank"),
        ("what was computed (train.py:2) is gone", "what was computed (train.py:2) is gone"),
    ],
)
def test_a_refusal_names_a_line_of_the_script(tmp_path: Path, sentence: str, expected: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "from polylane.errors import PolylaneError\n"
        "def step():\n    # the innermost line of the script's own\n"
        f"    raise PolylaneError({sentence!r})\nstep()\n"
    )
    with pytest.raises(PolylaneError) as raised, running_session(ScriptSession()):
        runpy.run_path(str(script), run_name="__main__")
    assert str(raised.value).removeprefix(f"{tmp_path}/") == expected


GROUPS = {
    "dist.init_process_group('gloo')": "environment variable RANK expected, but not set",
    "dist.destroy_process_group()": "Process group cannot be None",
    "rank = dist.get_rank()": "has not been initialized",
    "nn.parallel.DistributedDataParallel(nn.Linear(2, 1))": "has not been initialized",
    "torch.utils.data.DistributedSampler([1, 2])": "has not been initialized",
}


@pytest.mark.parametrize("line", GROUPS)
def test_lines_of_a_script_for_several_processes_are_named_with_what_to_take_out(tmp_path: Path, line: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"import torch\nimport torch.distributed as dist\nfrom torch import nn\n{line}\n")
    with pytest.raises(PolylaneError) as raised, running_session(ScriptSession()):
        runpy.run_path(str(script), run_name="__main__")
    assert str(raised.value).startswith(f"{script}:4: ") and GROUPS[line] in str(raised.value)
    assert "take out init_process_group" in str(raised.value)


def test_other_errors_of_a_script_stay_what_they_are(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise ValueError('the process group of the script')\n")
    with pytest.raises(ValueError, match="of the script"), running_session(ScriptSession()):
        runpy.run_path(str(script), run_name="__main__")


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def prepared_twice() -> None:
    model = net()
    polylane.prepare(polylane.prepare(model, sgd(model), plan="data=1")[0], sgd(model), plan="data=1")


def given_twice() -> None:
    model = net()
    for _ in range(2):
        polylane.prepare(model, sgd(model), plan="data=1")


def with_another_layer() -> None:
    model = net()
    prepared, _ = polylane.prepare(model, sgd(model), plan="data=1")
    prepared[0].weight.sum()
    setattr(prepared, "1", nn.Linear(3, 5))


def in_a_list() -> None:
    polylane.prepare(net(), [DataLoader([1]), DataLoader([2])])


def with_a_distributed_sampler() -> None:
    model = net()
    loader = DataLoader([1, 2], sampler=DistributedSampler([1, 2], num_replicas=2, rank=0))
    polylane.prepare(model, sgd(model), loader, plan="data=1")


MISTAKES = [
    (prepared_twice, "prepare() was given a Sequential that it has prepared before: call it once"),
    (given_twice, "prepare() was given a Sequential that it has prepared before: call it once"),
    (with_another_layer, "1 of a prepared model is replaced by a module with other parameters"),
    (in_a_list, "prepare() was given a list: give what is in it one by one"),
    (with_a_distributed_sampler, "a loader has a DistributedSampler"),
    (lambda: polylane.prepare(sgd(net()), plan="data=1"), "prepare() was given no model"),
    (lambda: polylane.prepare(nn.DataParallel(net()), plan="data=1"), "the model is wrapped in DataParallel"),
    (lambda: polylane.prepare(net(), plan="dta=1"), "unknown key 'dta'"),
    (lambda: polylane.prepare(net(), plan="data=2"), "the plan takes 2 workers, and this script runs on 1: start it"),
    (lambda: polylane.prepare(net(), plan="data=1,servers=1"), "servers= updates weights at other times"),
]


@pytest.mark.parametrize(("mistake", "sentence"), MISTAKES, ids=[sentence[:40] for _, sentence in MISTAKES])
def test_what_prepare_cannot_take_is_refused_where_it_is_called(mistake: Any, sentence: str) -> None:
    with pytest.raises(PolylaneError, match=re.escape(sentence)):
        mistake()


@pytest.mark.parametrize(("rank", "size", "said"), [(0, 2, True), (1, 2, False), (0, 1, False)])
def test_processes_that_train_apart_are_told_so_once(
    rank: int, size: int, said: bool, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """As torchrun starts them, without polylane run and without POLYLANE_PLAN."""
    for name, value in {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}.items():
        monkeypatch.setenv(name, str(value))
    model = net()
    assert polylane.prepare(model) is model
    assert ("2 processes without a plan train each by itself" in capfd.readouterr().err) == said


def test_a_plain_script_does_not_heed_half_of_a_launchers_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    model = net()
    assert polylane.prepare(model) is model
