"""Workers are started again after a death, and after a hang where that was asked for; from the newest checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import TrainRequest
from polylane.commands.running.launch import train_with_restarts
from polylane.commands.running.option_groups import SavingOptions, TroubleOptions
from polylane.errors import WorkerFailed, WorkerHung
from polylane.runtime.workers.stop_request import StopRequest
from tests.checkpoint.saved_runs import save_steps

KILLED = WorkerFailed(1, "SIGKILL", "it was killed by SIGKILL")
RAISED = WorkerFailed(1, "ValueError", "no", "Traceback ...")
HUNG = WorkerHung((1,), "rank 1 is stopped")

PASSED_OVER = ": this checkpoint is passed over"


class Failing:
    """Workers that end by one error after the other, and well in the end; fewer of them may be taken once."""

    def __init__(self, *errors: Exception) -> None:
        self.errors, self.starts, self.fewer = list(errors), list[Path | None](), ["with 1 worker"]

    def run(self, request: TrainRequest) -> Any:
        self.starts.append(request.resume_from)
        if self.errors:
            raise self.errors.pop(0)
        return "trained"

    def take_fewer(self) -> str:
        return self.fewer.pop() if self.fewer else ""


def train(folder: Path, starter: Failing, on_hang: Any = "stop", restarts: int = 2, stopped: int = 0) -> list[str]:
    """What is said of the restarts."""
    request = TrainRequest(
        recipe="any.py",
        batch=8,
        rates=LearningRateOptions(8),
        saving=SavingOptions("1", max_restarts=restarts),
        trouble=TroubleOptions(on_hang=on_hang),
    )
    stop, said = StopRequest(), list[str]()
    if stopped:
        stop.set(stopped)
    request = replace(request, checkpoints=folder)
    assert train_with_restarts(request, starter.run, starter.take_fewer, stop, lambda: None, said.append) == "trained"
    return said


def test_who_is_lost_is_left_out_and_others_are_started_again(tmp_path: Path) -> None:
    starter = Failing(RAISED, KILLED)
    first, second = train(tmp_path, starter)
    assert first.endswith("restart 1 of 2, from the beginning")
    assert second.endswith("restart 2 of 2, from the beginning, with 1 worker")
    assert starter.starts == [None] * 3


def test_it_goes_on_from_the_newest_that_is_whole_and_says_which_is_not(tmp_path: Path) -> None:
    save_steps("data=1", tmp_path, 1, 2)
    first, second = (tmp_path / f"step-{step:08d}" for step in (1, 2))
    starter = Failing(RAISED)
    assert train(tmp_path, starter)[-1].endswith(f"restart 1 of 2, from {second}")
    (second / "rank-00000.safetensors").unlink()
    starter = Failing(RAISED)
    damaged, restarted = train(tmp_path, starter)
    assert "rank-00000.safetensors: cannot be read (No such file" in damaged and damaged.endswith(
        "this checkpoint is passed over"
    )
    assert restarted.endswith(f"from {first}") and starter.starts == [None, first]


def test_a_damaged_newest_one_is_passed_over_for_an_earlier_one(tmp_path: Path) -> None:
    """A byte that has another value leaves sizes as they are: nobody is there who could name an earlier checkpoint."""
    save_steps("data=1", tmp_path, 1, 2)
    first, second = (tmp_path / f"step-{step:08d}" for step in (1, 2))
    shard = second / "rank-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-3] ^= 1
    shard.write_bytes(content)
    starter = Failing(RAISED)
    damaged, restarted = train(tmp_path, starter)
    assert (
        f"{shard}: " in damaged and "its checksum is" in damaged and damaged.endswith("this checkpoint is passed over")
    )
    assert restarted.endswith(f"from {first}") and starter.starts == [None, first]


def test_after_a_hang_only_where_that_is_asked_for(tmp_path: Path) -> None:
    (said,) = train(tmp_path, Failing(HUNG), on_hang="restart")
    assert "rank 1 is stopped" in said and said.endswith("restart 1 of 2, from the beginning")
    with pytest.raises(WorkerHung):
        train(tmp_path, Failing(HUNG))


@pytest.mark.parametrize(("restarts", "stopped"), [(1, 0), (0, 0), (2, 15)])
def test_no_more_often_than_asked_for_and_not_after_a_signal(tmp_path: Path, restarts: int, stopped: int) -> None:
    starter = Failing(KILLED, KILLED)
    with pytest.raises(WorkerFailed, match="SIGKILL"):
        train(tmp_path, starter, restarts=restarts, stopped=stopped)
    assert len(starter.starts) == (1 if stopped else restarts + 1)
