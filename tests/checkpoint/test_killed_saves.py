"""kill -9 at named points of a save: the newest complete checkpoint loads, bit for bit, and none is torn."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from polylane.checkpoint import commit
from polylane.checkpoint.manifest import Manifest, read_manifest
from polylane.checkpoint.read_tensors import CheckpointReader
from polylane.checkpoint.store import CheckpointStore, check_files
from polylane.diagnosis.report import ENDED_STATES
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint import save as save_module
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.checkpoint.snapshot import SnapshotWriter
from polylane.runtime.checkpoint.training_state import WorkerTrainingState
from polylane.runtime.job import Job
from polylane.runtime.progress.processes import read_state
from polylane.runtime.state.held_tensors import WorkerState, whole_region
from polylane.runtime.workers.failure import WorkerFailed
from tests.checkpoint.saved_runs import compile_once, on_workers, save_steps, train

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="kills by /proc")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


# By point: the object whose function is changed, its name, whether before or after a call of it, the number of the
# call. Those of rank 0 alone come last: only it looks at the folder.
POINTS: dict[str, tuple[Any, str, str, int]] = {
    "state to be collected": (WorkerTrainingState, "collect", "before", 1),
    "state collected": (WorkerTrainingState, "collect", "after", 1),
    "rectangles cut": (save_module, "cut_shards", "after", 1),
    "rectangles to be assigned": (CheckpointSaver, "_assign", "before", 1),
    "rectangles assigned": (CheckpointSaver, "_assign", "after", 1),
    "writer started": (SnapshotWriter, "_open", "after", 1),
    "snapshot copied": (SnapshotWriter, "_copy", "after", 1),
    "order sent": (SnapshotWriter, "start", "after", 1),
    "file awaited": (SnapshotWriter, "wait", "before", 1),
    "file written": (SnapshotWriter, "wait", "after", 1),
    "to be reported": (CheckpointSaver, "_report", "after", 1),
    "reported": (CheckpointSaver, "_act", "before", 1),
    "folder to be made": (CheckpointStore, "begin", "before", 1),
    "folder made": (CheckpointStore, "begin", "after", 1),
    "manifest made": (CheckpointSaver, "_make_manifest", "after", 1),
}
LAST_OF_RANK_1 = "reported"  # rank 0 has all that it needs then: it may make the checkpoint complete

# By point: what of the writer process's own functions is changed, when, and the number of the call. It kills the
# worker, or itself. The first file that it syncs is that of the tensors, the second the manifest.
WRITER_POINTS: dict[str, tuple[str, str, int]] = {
    "file to be opened": ("shard_file.write_shard_file", "before", 1),
    "in mid-file": ("shard_file.write_all", "after", 1),
    "file to be synced": ("shard_file.os.fsync", "before", 1),
    "file synced": ("shard_file.os.fsync", "after", 1),
    "manifest written": ("commit.os.fsync", "before", 2),
    "manifest torn": ("commit.os.fsync", "tear", 2),
    "manifest synced": ("commit.os.fsync", "after", 2),
    "folder synced": ("commit._sync_folder", "after", 1),
    "to be renamed": ("commit.os.rename", "before", 1),
    "renamed": ("commit.os.rename", "after", 1),
    "parent synced": ("commit._sync_folder", "after", 2),
    "old one renamed": ("commit.os.rename", "after", 2),
    "old one being removed": ("commit.os.unlink", "after", 2),
    "old one removed": ("commit._remove_put_aside", "after", 1),
}
COMPLETE = ("renamed", "parent synced", "old one renamed", "old one being removed", "old one removed")
PATCH = """
import os, signal, sys
if "polylane.checkpoint.writer" in " ".join(sys.orig_argv):
    from polylane.checkpoint import commit, shard_file
    open("{note}", "w").write(str(os.getpid()))
    def wrap(inside, name, when, number):
        own, calls = getattr(inside, name), [0]
        def changed(*args, **how):
            calls[0] += 1
            if calls[0] == number and when == "tear":
                os.ftruncate(args[0], os.fstat(args[0]).st_size // 2)
            if calls[0] == number and when != "after":
                os.kill({victim}, signal.SIGKILL)
            found = own(*args, **how)
            if calls[0] == number:
                os.kill({victim}, signal.SIGKILL)
            return found
        setattr(inside, name, changed)
    wrap({inside}, "{name}", "{when}", {number})
"""


def arm(point: str) -> None:
    """Change a function in this process, so that it kills the process at a point of the next save."""
    inside, name, when, number = POINTS[point]
    own, calls = getattr(inside, name), [0]

    @functools.wraps(own)
    def changed(*args: Any, **how: Any) -> Any:
        calls[0] += 1
        if calls[0] == number and when != "after":
            kill()
        found = own(*args, **how)
        if calls[0] == number:
            kill()
        return found

    setattr(inside, name, changed)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """By plan: a folder with a checkpoint of step 1, and one with that of step 2 as an unbroken run saves it."""

    @functools.cache
    def begin(plan: str) -> tuple[Path, Path]:
        folder = tmp_path_factory.mktemp("begun")
        save_steps(plan, folder / "one", 1)
        on_workers(compile_once(plan), lambda job: go_on(job, folder / "one", folder / "two"))
        return folder / "one", folder / "two"

    return begin


def go_on(job: Job, start: Path, folder: Path, before: Callable[[], None] = lambda: None) -> None:
    job.load_checkpoint(start)
    train(job, 1)
    before()
    job.save_checkpoint(folder, keep=1)


def content(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint, each checked against its checksum."""
    manifest: Manifest = read_manifest(folder)
    check_files(folder, manifest)
    reader = CheckpointReader(folder, manifest)
    return {name: reader.read_whole(name) for name in manifest.tensors}


def check_after(root: Path, begun: tuple[Path, Path], plan: str, is_complete: bool | None) -> None:
    """The newest is that of the unbroken run; leftovers do not disturb the next run, which goes on from it."""
    newest = CheckpointStore(root).find_newest()
    assert newest is not None
    if is_complete is None:
        is_complete = newest.name == "step-00000002"
    assert newest.name == ("step-00000002" if is_complete else "step-00000001")
    check_content(newest, begun)
    for _, folder in CheckpointStore(root).list_steps():
        content(folder)
    CheckpointStore(root).remove_leftovers()
    left = CheckpointStore(root).list_steps()
    check_content(left[-1][1], begun)  # one that lacked its name only is a step further now
    on_workers(compile_once(plan), lambda job: go_on(job, root, root))
    assert [each.name for each in root.iterdir()] == [f"step-{left[-1][0] + 1:08d}"]
    if left[-1][0] == 1:
        check_content(root / "step-00000002", begun)


def check_content(folder: Path, begun: tuple[Path, Path]) -> None:
    expected = content(begun[int(folder.name == "step-00000002")] / folder.name)
    found = content(folder)
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def kill_at(point: str, rank: int, plan: str, begun: tuple[Path, Path], root: Path) -> None:
    shutil.copytree(begun[0], root)

    def work(job: Job) -> None:
        go_on(job, root, root, lambda: arm(point) if job.world.rank == rank else None)

    with pytest.raises(WorkerFailed, match="SIGKILL"):
        on_workers(compile_once(plan), work)
    check_after(root, begun, plan, None if rank and point == LAST_OF_RANK_1 else False)


FAST = ("order sent", "manifest made")


@pytest.mark.parametrize("point", [p if p in FAST else pytest.param(p, marks=pytest.mark.slow) for p in POINTS])
def test_a_lone_worker_killed(point: str, begun: Any, tmp_path: Path) -> None:
    kill_at(point, 0, "data=1", begun("data=1"), tmp_path / "checkpoints")


SHARED = list(POINTS)[: list(POINTS).index(LAST_OF_RANK_1) + 1]


@pytest.mark.slow
@pytest.mark.parametrize(("point", "rank"), [*((p, 0) for p in POINTS), *((p, 1) for p in SHARED)])
def test_one_of_two_killed(point: str, rank: int, begun: Any, tmp_path: Path) -> None:
    plan = "data=2,shard=optimizer"
    kill_at(point, rank, plan, begun(plan), tmp_path / "checkpoints")


def writer_that_kills(folder: Path, point: str, victim: str) -> str:
    """A search path by which writer processes kill somebody at a point; each notes its process id in the folder."""
    path, when, number = WRITER_POINTS[point]
    inside, _, name = path.rpartition(".")
    folder.mkdir()
    words = {"victim": victim, "inside": inside, "name": name, "when": when, "number": number}
    (folder / "sitecustomize.py").write_text(PATCH.format(note=folder / "writer", **words))
    return os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])


WORKER, WRITER = "os.getppid()", "os.getpid()"
FAST_WRITERS = (
    ("in mid-file", WORKER),
    ("manifest torn", WRITER),
    ("to be renamed", WRITER),
)
ALL_WRITERS = [
    pytest.param(point, victim, marks=() if (point, victim) in FAST_WRITERS else pytest.mark.slow)
    for point in WRITER_POINTS
    for victim in (WORKER, WRITER)
    if (point, victim) != ("manifest torn", WORKER)  # half a manifest is what the writer's own end leaves
]


def kill_while_written(
    point: str, victim: str, rank: int, plan: str, begun: tuple[Path, Path], folder: Path
) -> tuple[Path, bool | None]:
    """Save with a writer that kills itself or its worker, and wait until it is gone.

    Args:
        point: see WRITER_POINTS.
        victim: WORKER or WRITER.
        rank: the worker whose writer it is.
        plan: plan of the training.
        begun: see :func:`begun`.
        folder: folder for the checkpoints and the writer's note.

    Returns:
        The folder of the checkpoints, and whether the new one is complete; None: it may be.
    """
    root = folder / "checkpoints"
    shutil.copytree(begun[0], root)
    path = writer_that_kills(folder / "site", point, victim)

    def work(job: Job) -> None:
        # Each worker starts its writer with its own environment, at its first save.
        go_on(job, root, root, lambda: os.environ.update({"PYTHONPATH": path} if job.world.rank == rank else {}))

    # A writer that died is a disk that failed: the worker says so, and may go on.
    with pytest.raises((WorkerFailed, PolylaneError), match=r"SIGKILL|writes it has died"):
        on_workers(compile_once(plan), work)
    wait_until_gone(int((folder / "site" / "writer").read_text()))
    # A writer whose worker is killed may still make the checkpoint complete, of which it has all.
    is_in_commit = WRITER_POINTS[point][0].startswith("commit")
    return root, None if victim == WORKER and is_in_commit else point in COMPLETE


@pytest.mark.parametrize(("point", "victim"), ALL_WRITERS)
def test_killed_while_the_writer_writes(point: str, victim: str, begun: Any, tmp_path: Path) -> None:
    both = begun("data=1")
    root, is_complete = kill_while_written(point, victim, 0, "data=1", both, tmp_path)
    check_after(root, both, "data=1", is_complete)


# Of two workers, each has a writer of its own part; that of rank 0 alone makes the checkpoint complete.
FAST_OF_TWO = ("in mid-file", WRITER, 1)
WRITERS_OF_TWO = [
    pytest.param(point, victim, rank, marks=() if (point, victim, rank) == FAST_OF_TWO else pytest.mark.slow)
    for point in WRITER_POINTS
    for victim in (WORKER, WRITER)
    for rank in ((0,) if WRITER_POINTS[point][0].startswith("commit") else (0, 1))
    if (point, victim) != ("manifest torn", WORKER)
]


@pytest.mark.parametrize(("point", "victim", "rank"), WRITERS_OF_TWO)
def test_killed_while_one_of_two_writers_writes(point: str, victim: str, rank: int, begun: Any, tmp_path: Path) -> None:
    plan = "data=2,shard=optimizer"
    both = begun(plan)
    root, is_complete = kill_while_written(point, victim, rank, plan, both, tmp_path)
    check_after(root, both, plan, is_complete)


def wait_until_gone(pid: int) -> None:
    for _ in range(500):
        if read_state(pid) in ENDED_STATES:
            return
        time.sleep(0.01)
    raise AssertionError("the writer goes on without its worker")


def test_a_writer_that_dies_between_saves_is_replaced(tmp_path: Path) -> None:
    saver, state = CheckpointSaver(tmp_path, None, 0, lambda value: [value]), WorkerState()
    state.add("model/weight", whole_region((4,)), torch.ones(4))
    state.plain["weights"] = {"weight": "model/weight"}
    for step in (1, 2):
        saver.begin(Position(step), lambda: state, {"plan": "", "run": {}})
        saver.finish()
        process = saver._writer._process
        assert process is not None and saver.newest is not None and saver.newest.name == f"step-{step:08d}"
        process.kill()
        process.wait()
    saver.close()


def test_what_is_removed_is_put_aside_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that outlived its worker gives a folder its name, or fails; it never names one without its files."""
    store = CheckpointStore(tmp_path)
    folder = store.begin(1)
    (folder / "rank-00000.safetensors").write_text("")

    def name_it(path: str, **how: Any) -> None:
        with pytest.raises(FileNotFoundError):
            commit.commit_folder(str(tmp_path), str(folder), 1, "{}", None)

    monkeypatch.setattr(commit.shutil, "rmtree", name_it)
    store.remove_leftovers()
    assert not store.list_steps() and not folder.exists()


def test_a_checkpoint_that_is_a_link_or_a_file_leaves_nothing(begun: Any, tmp_path: Path) -> None:
    """Somebody has moved a checkpoint to a larger disk: it is not this run's to remove, and the link is."""
    root, (_, two) = tmp_path / "checkpoints", begun("data=1")
    root.mkdir()
    elsewhere = shutil.copytree(two / "step-00000002", tmp_path / "elsewhere")
    (root / "step-00000001").symlink_to(elsewhere)
    (root / "step-00000002").write_text("")
    unfinished = shutil.copytree(elsewhere, root / ".step-00000002.01234567")
    (unfinished / "manifest.json").unlink()
    CheckpointStore(root, 1).commit(unfinished, read_manifest(elsewhere))
    assert [each.name for each in root.iterdir()] == ["step-00000002"]
    assert (root / "step-00000002").is_dir() and (elsewhere / "manifest.json").exists()


def test_the_same_step_again_is_never_without_a_checkpoint(begun: Any, tmp_path: Path) -> None:
    """The old one is put aside before the new one has its name: killed between the two, the new one is found."""
    root, (_, two) = tmp_path / "checkpoints", begun("data=1")
    shutil.copytree(two, root)
    manifest = read_manifest(root / "step-00000002")
    unfinished = root / ".step-00000002.01234567"
    shutil.copytree(root / "step-00000002", unfinished)
    (unfinished / "manifest.json").unlink()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            POINTS["again"] = (os, "rename", "after", 1)
            arm("again")
            CheckpointStore(root, 1).commit(unfinished, manifest)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    newest = CheckpointStore(root).find_newest()
    assert newest is not None
    assert content(newest).keys() == manifest.tensors.keys()
    CheckpointStore(root).remove_leftovers()
    assert [each.name for each in root.iterdir()] == ["step-00000002"]
