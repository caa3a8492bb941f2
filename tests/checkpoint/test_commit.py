"""A folder that is made a checkpoint: as many of the newest are kept as was asked for, and no fewer."""

from __future__ import annotations

from pathlib import Path

import pytest

from checkpoint.saved_runs import compile_once, on_workers, train
from polylane.checkpoint.commit import commit_folder, list_steps
from polylane.errors import PolylaneError
from polylane.runtime.job import Job

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
