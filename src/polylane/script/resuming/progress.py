"""Script progress: where a script is in its loops, and the checkpoints from which it goes on at the next batch.

A checkpoint is taken where the loop asks a loader for its next batch, after the steps that are asked for. A resumed
script starts at its top: finished epochs and batches are passed over, and the state is restored at the same place.

    for epoch in polylane.epochs(range(10)):    # finished ones are passed over
        for x, y in loader:                     # batches as well; the state is restored before the next one
"""

from __future__ import annotations

import builtins
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import torch

from polylane.errors import PolylaneError
from polylane.output import say_at_once
from polylane.runtime.checkpoint.run_control import RunControl, parse_interval
from polylane.runtime.checkpoint.save import Position
from polylane.runtime.state.plain_values import SCALARS, from_plain, to_plain
from polylane.runtime.state.random_state import collect_generators, restore_generators
from polylane.script.loop import TrainingLoop
from polylane.script.resuming.loader import (
    LoaderPass,
    has_standing_processes,
    own_generator_states,
    restore_own_generators,
)
from polylane.script.resuming.saved_script import SavedScript

T = TypeVar("T")

_STATE = "polylane.state_dict"  # key of a mapping that stands for an object with a state_dict()


class ScriptProgress:
    """Where a script is, in its epochs and in the batches of its loaders.

    Args:
        checkpoints: folder of the run's checkpoints; None: none are saved.
        resume_from: folder of the checkpoint to go on from; None: the script begins.
        save_every: when checkpoints are saved, as the text of --save-every; None: never.
        keep: number of newest checkpoints that are kept.
        continues_on_disk_error: whether a checkpoint that could not be saved is a warning, and the training goes on.

    Attributes:
        saved: the checkpoint that is still to be restored; None where there is none.
        passed_over: number of batches that loaders have passed over so far.
    """

    def __init__(
        self,
        checkpoints: Path | None,
        resume_from: Path | None,
        save_every: str | None,
        keep: int,
        continues_on_disk_error: bool,
    ) -> None:
        self._folder, self._save_every, self._keep = checkpoints, save_every, keep
        self._continues_on_disk_error = continues_on_disk_error
        self.saved = None if resume_from is None else SavedScript(resume_from)
        self.standing = frozenset[int](self.saved.script.get("standing", ()) if self.saved is not None else ())
        self._loop: TrainingLoop | None = None
        self._loaders: Sequence[Any] = ()
        self._objects: Sequence[Any] = ()
        self._values = SimpleNamespace()
        self._control: RunControl | None = None
        self._epoch, self._is_inside, self._finished = 0, False, 0
        self._counts = dict[Any, int]()  # of this epoch's passes, by loader and modes
        self._passes: list[weakref.ref[LoaderPass]] = []
        self._latest: weakref.ref[LoaderPass] | None = None  # that has yielded a batch
        self._saving: LoaderPass | None = None  # the pass that a checkpoint is saved in; None: the end of all epochs
        self._is_settled, self._has_told, self.passed_over = False, False, 0
        if self.saved is not None:
            _follow_passed_batches(self)

    @property
    def is_active(self) -> bool:
        """Whether checkpoints are saved, or one is gone on from."""
        return self.saved is not None or (self._folder is not None and self._save_every is not None)

    @property
    def accelerator(self) -> torch.device | None:
        """The device of this worker, or None where it computes on the CPU."""
        return None if self._loop is None else self._loop.world.accelerator

    def watch(self, loop: TrainingLoop, loaders: Sequence[Any], objects: Sequence[Any]) -> None:
        """Have checkpoints hold a loop, and the states of objects beside it.

        Args:
            loop: the loop that prepare() has made of the script's.
            loaders: the data loaders that were prepared, in order.
            objects: schedulers and what else was prepared that has a ``state_dict``.

        Raises:
            PolylaneError: another loop was prepared before.
        """
        if self._loop is not None and self.is_active:
            raise PolylaneError("checkpoints are of one polylane.prepare(): prepare all models and optimizers in it")
        self._loop, self._loaders, self._objects = loop, loaders, objects

    # ---- epochs and values -------------------------------------------------------------------------------------------

    def epochs(self, values: Iterable[T]) -> Iterator[T]:
        """Yield the values of epochs that are not finished."""
        if self._is_inside:
            raise PolylaneError("polylane.epochs() inside of another: write it around the outer loop alone")
        self._is_inside = True
        try:
            for value in values:
                if self.saved is None or self._finished >= self.saved.epoch:
                    self._begin_epoch(self._finished)
                    yield value
                self._finished += 1
            self._begin_epoch(self._finished)
            if self.saved is not None and self.saved.loader is None and self._finished >= self.saved.epoch:
                self._restore()
            elif self.saved is None:
                self._save_last(None)
        finally:
            self._is_inside = False

    def _begin_epoch(self, number: int) -> None:
        self._epoch = number
        self._counts.clear()

    def remember(self, values: Mapping[str, Any]) -> SimpleNamespace:
        """Return the script's values, which checkpoints hold: those of the checkpoint, where they are restored."""
        for name, value in values.items():
            setattr(self._values, name, value)
        return self._values

    # ---- passes ------------------------------------------------------------------------------------------------------

    def begin_pass(self, batches: LoaderPass) -> None:
        """Give a new pass through a loader its number, and how many batches it passes over."""
        models = () if self._loop is None else self._loop.modes
        key = batches.number, torch.is_grad_enabled(), models
        batches.index = self._counts[key] = self._counts.get(key, -1) + 1
        batches.has_gradients = torch.is_grad_enabled() and any(models)
        self._passes = [ref for ref in self._passes if ref() is not None]
        self._passes.append(weakref.ref(batches))
        if self.saved is not None and self._is_in_saved_epoch():
            described = (entry for entry in self.saved.script["passes"] if batches.is_described_by(entry))
            batches.resumed = next(described, None)

    def _is_in_saved_epoch(self) -> bool:
        saved = self.saved
        return saved is not None and saved.has_epochs == self._is_inside and saved.epoch == self._epoch

    def reach(self, batches: LoaderPass) -> None:
        """Restore or save, where a pass through a loader is asked for its next batch."""
        if self.saved is not None:
            if batches.resumed is not None and batches.number == self.saved.loader:
                self._restore()
        elif self._is_settled and batches.has_gradients and batches.trains:
            if batches.index:
                self._tell_of_epochs()
            elif self._open_control() is not None:
                self._record_position(batches)
                assert self._control is not None
                if self._control.agree():
                    assert self._loop is not None
                    raise SystemExit(128 + self._loop.world.stop.number)

    def reach_end(self, batches: LoaderPass) -> None:
        """Save the end of a script's only pass through its data."""
        if self._is_settled and batches.trains and not batches.index and not self._is_inside:
            self._save_last(batches)

    def note_batch(self, batches: LoaderPass) -> None:
        """Note which pass has yielded a batch."""
        self._latest = weakref.ref(batches)

    def note_backward(self) -> None:
        """Note that parameters have gradients that wait for a step."""
        self._is_settled = False

    def note_step(self) -> None:
        """Note a step, for batches of the pass that has yielded the latest."""
        self._is_settled = True
        latest = None if self._latest is None else self._latest()
        if latest is not None:
            latest.note_step()

    def _tell_of_epochs(self) -> None:
        if not self._has_told and self._loop is not None and self._loop.world.rank == 0:
            say_at_once(
                "checkpoints are saved in the first pass through the data alone: write for epoch in "
                "polylane.epochs(range(...)):, so that a resumed run can pass over finished epochs"
            )
        self._has_told = True

    # ---- saving ------------------------------------------------------------------------------------------------------

    def _open_control(self) -> RunControl | None:
        """Return what decides when to save; None where nothing is saved, or not yet."""
        if self._loop is None:
            return None
        job = self._loop.runner.job
        if self._control is None and job is not None and self._folder is not None and self._save_every is not None:
            warn = _warn_of(job.world.rank) if self._continues_on_disk_error else None
            interval = parse_interval(self._save_every)
            self._control = RunControl(job, self._folder, interval, self._keep, job.world.stop, warn, dict)
            self._loop.runner.role.describe_script = self.describe
        return self._control

    def _record_position(self, batches: LoaderPass | None) -> None:
        assert self._loop is not None
        assert self._loop.runner.job is not None
        self._saving = batches
        self._loop.runner.job.record_position(
            Position(self._loop.runner.steps, self._epoch, 0 if batches is None else batches.samples)
        )

    def _save_last(self, batches: LoaderPass | None) -> None:
        """Save the end of all epochs, unless nothing was trained since the last checkpoint; collective.

        Args:
            batches: the pass that has ended, of a script without epochs.
        """
        if self._is_settled and (control := self._open_control()) is not None:
            self._record_position(batches)
            control.save(wait=True)

    def finish(self) -> None:
        """Wait until the checkpoint that is being written is complete; collective.

        Raises:
            PolylaneError: the script has ended before the place where it was to be resumed.
        """
        if self.saved is not None:
            raise PolylaneError(
                f"checkpoint {self.saved.folder}: was saved in epoch {self.saved.epoch + 1}, and the script has ended "
                "before it came there, untrained: give it the epochs, and the loaders, of the run that is resumed"
            )
        if self._control is not None:
            self._control.finish()
            self._control.tell_failed()

    def describe(self) -> dict[str, Any]:
        """Return all that a checkpoint holds of the script itself, as plain values."""
        assert self._loop is not None
        passes = [batches for ref in self._passes if (batches := ref()) is not None and not batches.is_finished]
        return {
            "epoch": self._epoch,
            "has_epochs": self._is_inside,
            "loader": None if self._saving is None else self._saving.number,
            "passes": [batches.describe() for batches in passes],
            "steps": self._loop.runner.steps,
            "generators": to_plain(collect_generators(self._loop.world.accelerator), "random state"),
            "standing": [i for i, loader in enumerate(self._loaders) if has_standing_processes(loader)],
            "loaders": [to_plain(own_generator_states(loader), "generators") for loader in self._loaders],
            "objects": [_describe_value(value, type(value).__name__) for value in self._objects],
            "values": {name: _describe_value(value, name) for name, value in vars(self._values).items()},
        }

    # ---- restoring ---------------------------------------------------------------------------------------------------

    def _restore(self) -> None:
        """Make the state that of the checkpoint; collective."""
        saved, self.saved = self.saved, None
        builtins.enumerate = _enumerate  # type: ignore[misc]
        assert saved is not None
        if self._loop is None:
            raise PolylaneError("polylane.prepare() was not called before the loop that is gone on with")
        self._loop.runner.resume(saved)
        script = saved.script
        if len(script["objects"]) != len(self._objects):
            raise PolylaneError(
                f"checkpoint {saved.folder}: was saved with {len(script['objects'])} schedulers and other objects, and "
                f"polylane.prepare() was given {len(self._objects)}: it is of another script"
            )
        for target, state in zip(self._objects, script["objects"], strict=True):
            target.load_state_dict(from_plain(state[_STATE]))
        for name, value in script["values"].items():
            if isinstance(value, dict) and _STATE in value:
                present = getattr(self._values, name, None)
                if present is not None and hasattr(present, "load_state_dict"):
                    present.load_state_dict(from_plain(value[_STATE]))
            else:
                setattr(self._values, name, from_plain(value))
        for loader, states in zip(self._loaders, script["loaders"], strict=False):
            restore_own_generators(loader, from_plain(states))
        restore_generators(from_plain(script["generators"]), self._loop.world.accelerator)


def _describe_value(value: Any, label: str) -> Any:
    if hasattr(value, "state_dict"):
        return {_STATE: to_plain(value.state_dict(), f"{label}.state_dict()")}
    return to_plain(value, label) if not isinstance(value, SCALARS) else value


def _warn_of(rank: int) -> Callable[[str], None]:
    return (lambda sentence: say_at_once(sentence)) if rank == 0 else (lambda sentence: None)


# ---- enumerate -------------------------------------------------------------------------------------------------------

_enumerate = enumerate


def _follow_passed_batches(progress: ScriptProgress) -> None:
    """Have ``enumerate`` count batches that are passed over, until the checkpoint is restored."""

    class FollowingEnumerate(_enumerate):  # type: ignore[type-arg]
        """Numbers of a loop that begins within an epoch: those of the batches that come."""

        _passed_over = 0

        def __next__(self) -> Any:
            old_count = progress.passed_over
            number, value = super().__next__()
            self._passed_over += progress.passed_over - old_count
            return number + self._passed_over, value

    builtins.enumerate = FollowingEnumerate  # type: ignore[misc]
