"""``polylane export``: a checkpoint's weights as a plain file, whatever plan saved them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint.saved_runs import compile_once, on_workers, save_steps, small_model, train
from polylane.cli import main
from polylane.runtime.job import Job

LONG = "a" * 300  # no file can have this name: as of a folder without permission, nobody may say what is there


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_steps("data=2,shard=parameters", folder / "checkpoints", 1, 2)
    return folder


def export(*words: object) -> int:
    try:
        main(["export", *map(str, words)])
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def test_the_file_has_the_weights_by_the_models_own_names(run_folder: Path, tmp_path: Path) -> None:
    def work(job: Job) -> dict[str, torch.Tensor]:
        train(job, 2)
        return job.state_dict()

    state = on_workers(compile_once("data=2,shard=parameters"), work)[0]
    for number, source in enumerate((run_folder, run_folder / "checkpoints", run_folder / "checkpoints/step-00000002")):
        out = tmp_path / f"deep/{number}.safetensors"
        assert export(source, out) == 0
        found = load_file(out)
        assert found.keys() == state.keys()
        assert all(torch.equal(found[name], value) for name, value in state.items())
    small_model().load_state_dict(found)


def test_a_file_is_replaced_only_by_force(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "model.safetensors"
    out.write_text("mine")
    assert export(run_folder, out) == 2
    assert "is there already: give --force" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert export(run_folder, out, "--force", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["tensors"], told["bytes"]) == (2, len(load_file(out)), out.stat().st_size)


def test_what_is_no_file_is_not_replaced(run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As root a rename would put a file in the place of a device, such as /dev/null."""
    os.mkfifo(tmp_path / "pipe")
    assert export(run_folder, tmp_path / "pipe", "--force") == 2
    assert "pipe: it is there already, and is no file" in capsys.readouterr().err
    assert (tmp_path / "pipe").is_fifo() and [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_what_cannot_be_exported_is_one_sentence(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("")
    for words, sentence in (
        ((tmp_path, tmp_path / "x"), "there is no manifest.json"),
        ((tmp_path / "none", tmp_path / "x"), "none: there is no such folder"),
        ((run_folder, tmp_path), "is a folder"),
        ((run_folder, tmp_path / "a.txt" / "x"), "cannot be written"),
        ((tmp_path / LONG, tmp_path / "x"), "cannot be read: File name too long"),
        ((run_folder, tmp_path / LONG), "cannot be written"),
    ):
        assert export(*words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("polylane: ") and sentence in line
