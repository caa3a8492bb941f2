"""Files that a prepared script saves: written once, and whole for whoever loads them next."""

from __future__ import annotations

import io
import os
from functools import partial
from pathlib import Path

import torch

from polylane.runtime.workers.team import WorkerContext, fork_workers
from polylane.script.resuming.shared_saves import share_saves


def save_and_load(folder: Path, context: WorkerContext) -> tuple[int, list[int], bytes]:
    share_saves(context.world)
    share_saves(context.world)
    seen, path = list[int](), folder / "state.pt"
    for number in range(20):
        torch.save({"number": number, "weights": torch.full((5000,), number)}, path)
        state = torch.load(path)
        assert torch.equal(state["weights"], torch.full((5000,), state["number"]))
        seen.append(state["number"])
        context.world.all_gather_object(None)
    if context.rank == 1:
        torch.save(context.rank, folder / "mine.pt")
    buffer = io.BytesIO()
    torch.save(7, buffer)
    torch.save(7, os.devnull)
    return path.stat().st_ino, seen, buffer.getvalue()


def test_what_all_save_is_whole_for_all(tmp_path: Path) -> None:
    results = fork_workers(partial(save_and_load, tmp_path), 2)
    assert [result[1] for result in results] == [list(range(20))] * 2
    assert torch.load(tmp_path / "mine.pt") == 1 and torch.load(io.BytesIO(results[0][2])) == 7
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine.pt", "state.pt"]


def save_in_vain(folder: Path, context: WorkerContext) -> str:
    share_saves(context.world)
    try:
        torch.save(1, folder / "missing" / "state.pt")
    except RuntimeError as error:
        return str(error)
    return ""


def test_every_worker_raises_where_the_file_cannot_be_written(tmp_path: Path) -> None:
    assert all("missing" in sentence for sentence in fork_workers(partial(save_in_vain, tmp_path), 2))


def save_alone_first(folder: Path, context: WorkerContext) -> list[int]:
    share_saves(context.world)
    path, seen = folder / "state.pt", list[int]()
    if context.rank == 0:
        torch.save(0, path)
    for number in (1, 2):
        context.world.all_gather_object(None)
        torch.save(number, path)
        seen.append(torch.load(path))
    return seen


def test_a_file_that_one_worker_has_saved_alone_before_is_saved_by_all(tmp_path: Path) -> None:
    assert fork_workers(partial(save_alone_first, tmp_path), 2) == [[1, 2], [1, 2]]
