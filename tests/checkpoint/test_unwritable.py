"""A checkpoint that cannot be written: one sentence on every worker, the earlier one stays, all can train on."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from polylane.checkpoint.store import CheckpointStore, open_checkpoint
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.snapshot import SnapshotWriter
from polylane.runtime.job import Job
from tests.checkpoint.saved_runs import compile_once, on_workers, train

PLAN = "data=2,shard=optimizer"


def try_to_save(job: Job, folder: Path) -> str:
    try:
        job.save_checkpoint(folder)
    except PolylaneError as error:
        return str(error)
    return ""


def read_only(job: Job, root: Path) -> None:
    """Of root nothing is kept from writing: the system's answer is made up."""

    def mkdir(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    Path.mkdir = mkdir  # type: ignore[method-assign]


def gone(job: Job, root: Path) -> None:
    if job.world.rank == 0:
        shutil.rmtree(root)
        root.write_text("a file")


def other_host_without_the_disk(job: Job, root: Path) -> None:
    """Only one worker cannot write its file."""
    if job.world.rank == 1:
        start = SnapshotWriter.start

        def elsewhere(self: SnapshotWriter, folder: str, *rest: Any) -> None:
            start(self, f"{folder}/missing", *rest)

        SnapshotWriter.start = elsewhere  # type: ignore[method-assign]


def folder_removed_while_it_is_written(job: Job, root: Path) -> None:
    if job.world.rank == 0:
        start = SnapshotWriter.start_commit

        def late(self: Any, store: CheckpointStore, unfinished: str, manifest: Any) -> None:
            shutil.rmtree(unfinished)
            start(self, store, unfinished, manifest)

        SnapshotWriter.start_commit = late  # type: ignore[method-assign]


_CHANGED = ((Path, "mkdir"), (SnapshotWriter, "start"), (SnapshotWriter, "start_commit"))
TROUBLES: dict[Callable[[Job, Path], None], str] = {
    read_only: r"the checkpoint was not begun: rank 0: .*/root cannot be written: Read-only file system",
    gone: r"the checkpoint was not begun: rank 0: .*/root cannot be written: (File exists|Not a directory)",
    other_host_without_the_disk: r"the checkpoint was not written: rank 1: rank-00001.safetensors: No such file",
    folder_removed_while_it_is_written: r"the checkpoint was not written: rank 0: .*cannot be written: No such file",
}


@pytest.mark.parametrize("trouble", TROUBLES, ids=lambda trouble: trouble.__name__)
def test_every_worker_says_the_same_and_trains_on(trouble: Callable[[Job, Path], None], tmp_path: Path) -> None:
    root, other = tmp_path / "root", tmp_path / "other"

    def work(job: Job) -> tuple[str, list[float]]:
        losses = train(job, 1)
        job.save_checkpoint(root)
        changed = {(owner, name): getattr(owner, name) for owner, name in _CHANGED}
        losses += train(job, 1)
        trouble(job, root)
        said = try_to_save(job, root)
        for (owner, name), function in changed.items():
            setattr(owner, name, function)
        losses += train(job, 1)
        job.save_checkpoint(other)
        return said, losses

    (first, losses), (second, _) = on_workers(compile_once(PLAN), work)
    assert first == second and re.match(TROUBLES[trouble], first), first
    assert losses == on_workers(compile_once(PLAN), lambda job: train(job, 3))[0]
    assert open_checkpoint(other)[1].step == 3
    if trouble is not gone:
        assert [each.name for each in root.iterdir()] == ["step-00000001"]
        assert open_checkpoint(root)[1].step == 1


def test_only_rank_0_looks_at_the_folder(tmp_path: Path) -> None:
    """The others write into the folder that they are told, and read from it: they look for none."""

    def work(job: Job) -> int:
        if job.world.rank:
            for name in ("begin", "list_steps", "find_newest", "commit", "remove_leftovers"):
                setattr(CheckpointStore, name, None)
        train(job, 1)
        job.save_checkpoint(tmp_path, keep=1)
        train(job, 1)
        job.save_checkpoint(tmp_path, keep=1)
        return job.load_checkpoint(tmp_path).position.step

    assert on_workers(compile_once(PLAN), work) == [2, 2]
