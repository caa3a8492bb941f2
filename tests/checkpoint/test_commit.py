"""A folder that is made a checkpoint: as many of the newest are kept as was asked for, and no fewer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from polylane.checkpoint.commit import commit_folder, list_steps
from polylane.checkpoint.manifest import read_manifest
from polylane.errors import PolylaneError
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers, train

STEPS = range(1, 13)


@pytest.mark.parametrize("keep", [1, 2, 3, 4, 5, 8, len(STEPS), 99, None])
def test_the_newest_are_kept(keep: int | None, tmp_path: Path) -> None:
    for step in STEPS:
        unfinished = tmp_path / f".step-{step:08d}.{step:08x}"
        unfinished.mkdir()
        commit_folder(str(tmp_path), str(unfinished), step, "{}", keep)
        kept = [each for each, _ in list_steps(str(tmp_path))]
        assert kept == list(range(1, step + 1))[-(keep or step) :]
        assert len(list(tmp_path.iterdir())) == len(kept)


def test_each_save_says_how_many_are_kept(tmp_path: Path) -> None:
    def work(job: Job) -> list[list[int]]:
        kept = []
        for keep in (None, None, None, 2, 1):
            train(job, 1)
            job.save_checkpoint(tmp_path, keep=keep)
            kept.append([step for step, _ in list_steps(str(tmp_path))])
        return kept

    (kept,) = on_workers(compile_once("data=1"), work)
    assert kept == [[1], [1, 2], [1, 2, 3], [3, 4], [5]]


@pytest.mark.parametrize("keep", [0, -1, True, 1.5, "3"])
def test_who_keeps_none_is_refused(keep: object, tmp_path: Path) -> None:
    def work(job: Job) -> None:
        with pytest.raises(PolylaneError, match=r"job\.save_checkpoint\(keep=.*\): give a whole number from 1 on, or"):
            job.save_checkpoint(tmp_path, keep=keep)  # type: ignore[arg-type]

    on_workers(compile_once("data=1"), work)
    assert not list(tmp_path.iterdir())


def test_a_source_tree_that_is_not_installed_saves_too(tmp_path: Path) -> None:
    """A package that is on the path alone has no metadata of an installation."""
    script = (
        "import sys, importlib.metadata, torch, polylane\n"
        "def absent(name): raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = importlib.metadata.distribution = absent\n"
        "job = polylane.parallelize(torch.nn.Linear(2, 2), lambda m, b: m(b).mean(), "
        "lambda p: torch.optim.SGD([q for _, q in p], 0.1), example=torch.ones(4, 2), on_hang=None)\n"
        "print(job.save_checkpoint(sys.argv[1]))\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-1500:]
    assert read_manifest(next(tmp_path.glob("step-*"))).versions["polylane"] == "not installed"
