"""A disk without room for a checkpoint: its writer answers so and lives on; each time that it fills up is said once.

And how long one with room took is what a checkpoint says.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from polylane.checkpoint.manifest import read_manifest
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.checkpoint.save_attempts import SaveAttempts
from polylane.runtime.state.held_tensors import WorkerState, whole_region

LARGE = 100_000  # elements, of more than one block of the disk


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[CheckpointSaver]:
    """Of one worker, whose writer is there."""
    saver = CheckpointSaver(tmp_path, None, 0, lambda value: [value])
    save(saver, 1)
    yield saver
    saver.close()


def save(saver: CheckpointSaver, step: int) -> None:
    begin(saver, step)
    saver.finish()


def begin(saver: CheckpointSaver, step: int) -> None:
    state = WorkerState()
    state.add("model/weight", whole_region((LARGE,)), torch.ones(LARGE))
    state.plain["weights"] = {}
    saver.begin(Position(step), lambda: state, {"plan": "data=1", "run": {}})


@pytest.mark.skipif(sys.platform != "linux", reason="limits another process")
@pytest.mark.parametrize("size", [0, 100, 4 * LARGE])
def test_the_writer_answers_and_goes_on(saver: CheckpointSaver, size: int, capfd: pytest.CaptureFixture[str]) -> None:
    """Wherever in the file, or at the manifest, the room ends; the process is the same one afterwards."""
    process = saver._writer._process
    assert process is not None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    with pytest.raises(PolylaneError, match=r"rank-00000.safetensors: File too large \(raise the limit on the size"):
        save(saver, 2)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    save(saver, 3)
    assert saver.newest is not None and saver.newest.name == "step-00000003"
    assert saver._writer._process is process and process.poll() is None
    assert capfd.readouterr().err == ""


def test_steps_do_not_count_as_writing(saver: CheckpointSaver, tmp_path: Path) -> None:
    """Workers look at step 2 whether the file is there, which it was long before."""
    began = time.perf_counter()
    begin(saver, 2)
    time.sleep(1)
    saver.finish()
    seconds = read_manifest(tmp_path / "step-00000002").write_seconds
    assert seconds is not None and 0 < seconds < time.perf_counter() - began - 0.9


def test_each_time_that_a_disk_fills_up_is_said_once() -> None:
    said, saver = list[str](), SimpleNamespace(newest=None)
    attempts = SaveAttempts(Path("x/checkpoints"), saver, said.append)  # type: ignore[arg-type]

    def fail() -> None:
        raise PolylaneError("no room")

    def save_one() -> Any:
        saver.newest = Path(f"x/checkpoints/step-{len(said)}")
        return saver.newest

    for act in (fail, fail, fail, save_one, fail, fail, save_one):
        attempts.attempt(act)
    attempts.tell_failed()
    outage = "x/checkpoints: no room; training continues, and tries again when the next one is due"
    assert said == [outage] * 2 + [
        "x/checkpoints: 5 checkpoints could not be written; the newest is x/checkpoints/step-2"
    ]


def test_where_a_training_ends_for_it_nothing_is_held_back() -> None:
    attempts = SaveAttempts(Path("x"), SimpleNamespace(newest=None), None)  # type: ignore[arg-type]

    def fail() -> None:
        raise PolylaneError("no room")

    with pytest.raises(PolylaneError, match="no room"):
        attempts.attempt(fail)
    attempts.tell_failed()
