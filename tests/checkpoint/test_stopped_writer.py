"""A writer of checkpoints that is stopped is ended within bounds, whatever it is waited for, and outlives no worker."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

from polylane.errors import PolylaneError
from polylane.runtime.checkpoint import snapshot
from polylane.runtime.checkpoint.save import CheckpointSaver, Position
from polylane.runtime.progress.processes import read_state
from polylane.runtime.state.held_tensors import WorkerState, whole_region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads the state of processes in /proc")
SAID = r"the process that writes it \(\d+\) was stopped for 0.2 s, and was ended"


@pytest.fixture
def saver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CheckpointSaver]:
    """Of one worker, whose writer is there."""
    monkeypatch.setattr(snapshot, "STOPPED_SECONDS", 0.2)
    monkeypatch.setattr(snapshot, "LOOK_SECONDS", 0.02)
    saver = CheckpointSaver(tmp_path, None, 0, lambda value: [value])
    begin(saver, 1)
    saver.finish()
    yield saver
    saver.close()


def begin(saver: CheckpointSaver, step: int, tensors: int = 1) -> None:
    state = WorkerState()
    for number in range(tensors):
        state.add(f"model/weight{number}{'x' * 60}", whole_region((4,)), torch.ones(4))
    facts = {"plan": "data=1", "run": {}}
    state.plain["weights"] = {}
    saver.begin(Position(step), lambda: state, facts)


def stop_writer(saver: CheckpointSaver) -> int:
    process = saver._writer._process
    assert process is not None
    os.kill(process.pid, signal.SIGSTOP)
    while read_state(process.pid) != "T":
        time.sleep(0.001)
    return process.pid


def check_that_the_next_one_is_whole(saver: CheckpointSaver, pid: int, step: int) -> None:
    assert read_state(pid) in ("", "Z", "X")
    begin(saver, step)
    saver.finish()
    assert saver.newest is not None and saver.newest.name == f"step-{step:08d}"


def test_while_a_file_is_waited_for(saver: CheckpointSaver) -> None:
    pid = stop_writer(saver)
    begin(saver, 2)
    with pytest.raises(PolylaneError, match=f"the checkpoint was not written: rank 0: rank-00000.safetensors: {SAID}"):
        saver.finish()
    check_that_the_next_one_is_whole(saver, pid, 3)


def test_while_workers_only_look_whether_it_is_done(saver: CheckpointSaver) -> None:
    """Between steps, as long as nobody waits for it: the next save need not find out."""
    pid = stop_writer(saver)
    begin(saver, 2)
    started = time.monotonic()
    with pytest.raises(PolylaneError, match=SAID):
        while time.monotonic() < started + 10:
            saver.advance()
            time.sleep(0.01)
    check_that_the_next_one_is_whole(saver, pid, 3)


def test_while_it_is_given_an_order_that_no_pipe_holds(saver: CheckpointSaver) -> None:
    pid = stop_writer(saver)
    begin(saver, 2, tensors=2000)
    with pytest.raises(PolylaneError, match="rank 0: no writer of checkpoints can be had: it was stopped"):
        saver.finish()
    check_that_the_next_one_is_whole(saver, pid, 3)


def test_while_the_folder_gets_its_name(saver: CheckpointSaver) -> None:
    begin(saver, 2)
    while not saver._writer.is_committing:
        saver.advance(wait=not saver._writer.is_committing)
    pid = stop_writer(saver)
    if saver._writer.wait_committed(0.0) is None:  # else it was quick
        with pytest.raises(PolylaneError, match=f"the manifest: {SAID}"):
            saver.finish()
    check_that_the_next_one_is_whole(saver, pid, 3)


def test_one_that_goes_on_in_time_is_left_alone(saver: CheckpointSaver) -> None:
    pid = stop_writer(saver)
    begin(saver, 2)
    saver.advance()
    os.kill(pid, signal.SIGCONT)
    saver.finish()
    assert saver.newest is not None and saver.newest.name == "step-00000002" and read_state(pid) not in ("", "Z")


def test_a_stopped_writer_ends_with_its_worker(saver: CheckpointSaver, tmp_path: Path) -> None:
    """Also with one that is killed: nobody else would ever end it."""
    reader, writer = get_context("fork").Pipe(duplex=False)

    def work() -> None:
        own = CheckpointSaver(tmp_path / "own", None, 0, lambda value: [value])
        begin(own, 1)
        own.finish()
        writer.send(stop_writer(own))
        os.kill(os.getpid(), signal.SIGKILL)

    worker = get_context("fork").Process(target=work)
    worker.start()
    assert reader.poll(20)
    pid = reader.recv()
    worker.join(20)
    deadline = time.monotonic() + 10
    while read_state(pid) not in ("", "Z", "X"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
