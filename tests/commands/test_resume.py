"""What a run may go on from: its own newest checkpoint, of the same model, with something left to train."""

from __future__ import annotations

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from polylane.commands import train as command
from polylane.commands.learning_rates import LearningRateOptions
from polylane.commands.logs.file_names import METRICS
from polylane.commands.requests import TrainRequest
from polylane.commands.running.option_groups import SavingOptions, TroubleOptions
from polylane.commands.running.resume import (
    FOLDER,
    NothingLeft,
    check_same_model,
    prepare_checkpoints,
    refuse_if_done,
)
from polylane.errors import PolylaneError
from polylane.runtime.checkpoint.save import Position
from tests.checkpoint.saved_runs import save_steps, small_model

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
        return prepare_checkpoints(replace(REQUEST, saving=saving), run, pytest.fail).resume_from

    first, second = (saved / FOLDER / f"step-{step:08d}" for step in (1, 2))
    copy = shutil.copytree(second, tmp_path / second.name)
    for wrong in (first, copy):
        with pytest.raises(PolylaneError, match=r"has checkpoints of another run, or later ones, up to step 2, which"):
            go_on(wrong)
        assert go_on(wrong, saves=False) == wrong and go_on(wrong, run=tmp_path / "new") == wrong
    assert {go_on(place) for place in (second, saved, saved / FOLDER)} == {second}


def go_on_by_itself(run: Path) -> tuple[Path | None, list[str]]:
    """Return the checkpoint that --resume auto takes, and what is said."""
    said = list[str]()
    saving = SavingOptions("1", resume="auto")
    return prepare_checkpoints(replace(REQUEST, saving=saving), run, said.append).resume_from, said


def test_a_checkpoint_that_is_passed_over_is_named(saved: Path, tmp_path: Path) -> None:
    """Nobody would look for the reason why days of training are made again, or a training begins anew."""
    run = shutil.copytree(saved, tmp_path / "run")
    first, second = (run / FOLDER / f"step-{step:08d}" for step in (1, 2))
    assert go_on_by_itself(run) == (second, [])
    (second / "rank-00000.safetensors").write_text("")
    newest, said = go_on_by_itself(run)
    assert newest == first
    (sentence,) = said
    assert re.search(r"/step-00000002/.*: has 0 bytes, expected \d+ bytes: this checkpoint is passed over$", sentence)
    (first / "manifest.json").write_text("{")
    newest, said = go_on_by_itself(run)
    assert newest is None and len(said) == 3
    assert said[1].startswith(f"checkpoint {first / 'manifest.json'}: is no JSON")
    assert said[2] == (f"{run / FOLDER}: none of the checkpoints in it is whole: the training begins at its first step")
    assert go_on_by_itself(tmp_path / "new") == (None, [])
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / METRICS).write_text("")
    sentence = f"{tmp_path / 'old'}: the run in it has saved no checkpoint: the training begins at its first step"
    assert go_on_by_itself(tmp_path / "old") == (None, [sentence])


def test_checkpoints_that_cannot_be_read_are_not_taken_for_none(saved: Path, tmp_path: Path) -> None:
    """A link to itself is what root cannot read either; others lack the permission."""
    run = shutil.copytree(saved, tmp_path / "run")
    for folder in (run / FOLDER).iterdir():
        (folder / "manifest.json").unlink()
        (folder / "manifest.json").symlink_to("manifest.json")
    newest, said = go_on_by_itself(run)
    assert newest is None and "Too many levels of symbolic links" in said[0] and "begins at its first" in said[-1]
    shutil.rmtree(run / FOLDER)
    for target in (FOLDER, "nowhere"):
        (run / FOLDER).symlink_to(target)
        with pytest.raises(PolylaneError, match=f"{FOLDER}: cannot be read: it is no folder, or a link to none"):
            go_on_by_itself(run)
        (run / FOLDER).unlink()


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
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(PolylaneError, match=r"--requeue-code is not for torchrun: the exit code is torchrun's own"):
        command.run(replace(REQUEST, trouble=TroubleOptions(requeue_code=75)))
