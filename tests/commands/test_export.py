"""``polylane export``: a checkpoint's weights as a plain file, whatever plan saved them."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from polylane.cli import main
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers, save_steps, small_model, train
from tests.support.workers import forked_commands

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


def test_a_link_stays_and_what_it_leads_to_is_replaced(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where there is nothing yet: a link that leads nowhere is there already, and no reason to write over it."""
    (tmp_path / "link").symlink_to("disk/weights")
    (tmp_path / "second").symlink_to("link")
    for number in range(2):
        assert export(run_folder, tmp_path / "second") == 2
        assert "is there already: give --force" in capsys.readouterr().err
        assert export(run_folder, tmp_path / "second", "--force") == 0
        assert len(load_file(tmp_path / "disk" / "weights")) > 2 - number
    assert (tmp_path / "link").is_symlink() and (tmp_path / "second").is_symlink()
    assert os.listdir(tmp_path / "disk") == ["weights"]


@pytest.mark.parametrize("name", ["/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", "link", "out"])
def test_weights_do_not_take_the_place_of_what_is_printed(name: str, run_folder: Path, tmp_path: Path) -> None:
    """Where stdout is a file, a device that leads to it looks like one, and root may replace the device itself."""
    (tmp_path / "link").symlink_to("/dev/stdout")
    words = ["export", str(run_folder), name, "--force"]
    with (tmp_path / "out").open("w") as out:
        done = forked_commands.start([sys.executable, "-m", "polylane", *words], stdout=out, cwd=tmp_path)
        _, err = done.communicate(timeout=60)
    assert (done.returncode, err) == (
        2,
        f"polylane: the weights cannot be written to {name}: it is the stdout of this command\n",
    )
    assert (tmp_path / "out").read_text() == "" and Path("/dev/stdout").is_symlink()
