"""What a run may go on from: its own newest checkpoint, of the same model, with something left to train."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from checkpoint.saved_runs import save_steps, small_model
from polylane.commands import train as command
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.requests import SavingOptions, TrainRequest, TroubleOptions
from polylane.commands.running.resume import (
    FOLDER,
    NothingLeft,
    check_same_model,
    prepare_checkpoints,
    refuse_if_done,
)
from polylane.commands.running.run_folder import RunFolder
from polylane.commands.running.step_log import StepLog
from polylane.commands.running.training_loop import resume_log
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.load import LoadedCheckpoint
from polylane.runtime.checkpoint.save import Position

REQUEST = TrainRequest(recipe="any.py", batch=8, rates=LearningRateOptions(8))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder with checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    save_steps("data=1", folder / FOLDER, 1, 2)
    return folder


@pytest.mark.parametrize(
    ("step", "steps", "epochs"), [(5, 5, None), (5, 4, None), (5, 1, None), (5, None, 1), (5, None, 2)]
)
def test_fewer_steps_than_were_made_leave_nothing_to_train(step: int, steps: int | None, epochs: int | None) -> None:
    # In the second epoch, whose 20 samples have all been trained on.
    with pytest.raises(NothingLeft, match=r"is of step 5, .* there is nothing left to train"):
        refuse_if_done(Path("x"), Position(step, 1, 20), steps, epochs, 20)


def test_more_steps_or_epochs_go_on() -> None:
    for steps, epochs in ((6, None), (None, 3), (None, None)):
        refuse_if_done(Path("x"), Position(5, 1, 20), steps, epochs, 20)
    refuse_if_done(Path("x"), Position(5, 1, 19), None, 2, 20)
    refuse_if_done(Path("x"), Position(5, 1, 20), None, 2, 0)  # of a stream nobody knows where it ends


def test_a_run_does_not_save_beside_later_checkpoints_or_those_of_another_run(saved: Path, tmp_path: Path) -> None:
    """A restart would go on from the newest, and --keep would remove this run's own."""

    def go_on(resume: Path, saves: bool = True, run: Path = saved) -> Path | None:
        saving = SavingOptions("1" if saves else None, resume=str(resume))
        return prepare_checkpoints(replace(REQUEST, saving=saving), run).resume_from

    first, second = (saved / FOLDER / f"step-{step:08d}" for step in (1, 2))
    copy = shutil.copytree(second, tmp_path / second.name)
    for wrong in (first, copy):
        with pytest.raises(PolylaneError, match=r"has checkpoints of another run, or later ones, up to step 2, which"):
            go_on(wrong)
        assert go_on(wrong, saves=False) == wrong and go_on(wrong, run=tmp_path / "new") == wrong
    assert {go_on(place) for place in (second, saved, saved / FOLDER)} == {second}


def test_what_is_passed_over_is_said(saved: Path, tmp_path: Path) -> None:
    run = shutil.copytree(saved, tmp_path / "run")
    request, said = replace(REQUEST, saving=SavingOptions("1", resume="auto")), list[str]()
    first, second = (run / FOLDER / f"step-{step:08d}" for step in (1, 2))
    assert prepare_checkpoints(request, run, warn=said.append).resume_from == second and said == []
    with (second / "rank-00000.safetensors").open("ab") as file:
        file.write(b"more")
    assert prepare_checkpoints(request, run, warn=said.append).resume_from == first
    (sentence,) = said
    assert re.match(
        rf"checkpoint {second}/rank-00000.safetensors: has \d+ bytes, expected .*; {first} is taken", sentence
    )
    (first / "manifest.json").write_text("{}")
    said.clear()
    assert prepare_checkpoints(request, run, warn=said.append).resume_from is None
    assert [each.endswith("; the run begins anew") for each in said] == [True, True]


@pytest.mark.parametrize("plan", ["data=1", "data=2,every=3"])  # of the latter, every replica's own weights
def test_another_model_is_named_by_its_tensor(plan: str, tmp_path: Path) -> None:
    save_steps(plan, tmp_path, 2)
    folder = tmp_path / "step-00000002"
    shapes = {name: tuple(value.shape) for name, value in small_model().state_dict(keep_vars=True).items()}
    check_same_model(folder, shapes)
    name = next(iter(shapes))
    with pytest.raises(PolylaneError, match=rf"{name} has the shape \[.*\], and \[7, 3\] in this run's model"):
        check_same_model(folder, {**shapes, name: (7, 3)})
    with pytest.raises(PolylaneError, match=f"has {name}, which this run's model does not have"):
        check_same_model(folder, {other: shape for other, shape in shapes.items() if other != name})


@pytest.mark.parametrize("grace", [float("inf"), float("nan"), 1e12])
def test_a_grace_that_no_timer_takes_is_refused(grace: float) -> None:
    with pytest.raises(PolylaneError, match=r"--grace .*: give seconds, from 0 to 86400"):
        command.run(replace(REQUEST, trouble=TroubleOptions(grace=grace)))


def test_an_exit_code_is_not_asked_of_torchruns_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(PolylaneError, match=r"--requeue-code is not for torchrun: the exit code is torchrun's own"):
        command.run(replace(REQUEST, trouble=TroubleOptions(requeue_code=75)))


def test_on_other_hosts_nobody_looks_at_the_runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    functions = ("model()", "data(split)", "loss(model, batch)", "optimizer(parameters)")
    (tmp_path / "r.py").write_text("".join(f"def {each}: ...\n" for each in functions))
    (tmp_path / "file").write_text("in the folder's place, on this host")
    request = replace(REQUEST, recipe=str(tmp_path / "r.py"), plan="data=2", run_folder=tmp_path / "file")
    train = command._claim_and_train
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        monkeypatch.setenv("WORLD_SIZE", "2")
        if rank == "0":
            with pytest.raises(PolylaneError, match="file is not a folder"):
                train(request, RunFolder(tmp_path / "file"), lambda request: "trained")
        else:
            assert train(request, RunFolder(tmp_path / "file"), lambda request: "trained") == "trained"


LOG = {"steps": 5, "samples": 40, "seconds": 1.5, "loss": 0.25, "epoch": [2.0, 16.0, 0.5]}
EDITED: dict[str, Any] = {
    "no mapping": [],
    "a step less": {**LOG, "steps": 4},
    "no number": {**LOG, "steps": "[/b]"},
    "without an end": {**LOG, "samples": float("inf")},
    "a list as loss": {**LOG, "loss": [0.5]},
    "no means": {**LOG, "epoch": 1},
    "means of more": {**LOG, "epoch": [1, 2, 3, 4]},
    "nothing": {},
}


def log_after(state: object) -> StepLog:
    log, manifest = StepLog(lambda message: None, lambda: 1), SimpleNamespace(run={"log": state}, **vars(Position(5)))
    resume_log(log, LoadedCheckpoint(Path("x"), manifest, {}))  # type: ignore[arg-type]
    return log


@pytest.mark.parametrize("name", EDITED)
def test_a_log_that_was_edited_is_one_sentence(name: str) -> None:
    with pytest.raises(PolylaneError, match=r"x/manifest.json: run.log is not the one of a run that made 5 steps"):
        log_after(EDITED[name])


def test_a_log_goes_on_where_a_run_has_kept_one() -> None:
    assert log_after(LOG).state()["steps"] == 5
    assert log_after(None).state()["steps"] == 0
