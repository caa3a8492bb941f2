"""Resuming: the checkpoint that a run goes on from, the plan it goes on by, and whether the run is the same one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from polylane.commands.logs.file_names import METRICS
from polylane.errors import PolylaneError, clean_sentence, format_plural

if TYPE_CHECKING:
    from polylane.checkpoint.store import CheckpointStore
    from polylane.commands.requests import FolderRequest, TrainRequest
    from polylane.plan.plan import AnyPlan, Plan
    from polylane.runtime.checkpoint.save import Position
    from polylane.runtime.workers.world import World

R = TypeVar("R", bound="FolderRequest")

FOLDER, BEST = "checkpoints", "best"  # in a run's folder: the newest checkpoints, and the best ones


class NothingLeft(PolylaneError):
    """A run that is asked to go on has made all of its steps already.

    Args:
        folder: folder of the checkpoint of its last step.
        step: number of the run's last step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        super().__init__(folder, step)

    def __str__(self) -> str:
        return clean_sentence(
            f"checkpoint {self.folder}: is of step {self.step}, and this run is to end there or earlier: there is "
            "nothing left to train; give more --epochs or --steps"
        )


def prepare_checkpoints(request: R, run_folder: Path, warn: Callable[[str], None], continues: bool = False) -> R:
    """Return a request with the checkpoint to go on from, and the plan of that where it is the one asked for.

    Args:
        request: the options of the command line, with the plan that was chosen.
        run_folder: the run's folder, which this process has claimed.
        warn: called with a sentence about each checkpoint that is passed over, since it is not complete.
        continues: whether torchrun has started this run again: its own newest checkpoint counts, not where it began.

    Raises:
        PolylaneError: there is no checkpoint, it is damaged; or a new run would mix its checkpoints with an earlier
            run's.
    """
    from polylane.checkpoint.store import CheckpointStore, open_checkpoint

    store = CheckpointStore(run_folder / FOLDER)
    request = replace(request, checkpoints=store.root)
    if continues and request.saves_checkpoints:
        store.remove_leftovers()
        if (latest := find_whole(store, warn)) is not None:
            return resume_from(request, latest)
    if request.saving.resume is None:
        if request.saves_checkpoints and (steps := store.list_steps()):
            raise PolylaneError(
                f"--run {run_folder}: has checkpoints of an earlier run, up to step {steps[-1][0]}: resume from them "
                "with --resume auto, or choose another folder"
            )
        return request
    if request.saving.resume == "auto":
        store.remove_leftovers()
        if (newest := find_whole(store, warn)) is not None:
            return resume_from(request, newest)
        if store.list_steps():
            warn(f"{store.root}: none of the checkpoints in it is whole: the training begins at its first step")
        elif (run_folder / METRICS).is_file():
            warn(f"{run_folder}: the run in it has saved no checkpoint: the training begins at its first step")
        return request
    folder = open_checkpoint(Path(request.saving.resume))[0]
    if request.saves_checkpoints:
        store.remove_leftovers()
        _refuse_to_mix(store, folder, run_folder)
    return resume_from(request, folder)


def find_whole(store: CheckpointStore, warn: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint of a run that is whole; None if there is none.

    Its files are read and held against their checksums: nobody is there who could choose an earlier one.

    Args:
        store: checkpoints of the run's folder.
        warn: called with a sentence about each that is passed over.

    Raises:
        PolylaneError: the folder cannot be read.
    """
    from polylane.checkpoint.read_tensors import check_contents

    return store.find_newest(warn, check_contents)


def _refuse_to_mix(own: CheckpointStore, folder: Path, run_folder: Path) -> None:
    """Refuse to save beside checkpoints that are not of the run that goes on.

    A restart and --resume auto take the newest one, and --keep removes the oldest ones: of an earlier run that came
    further, they would take the earlier run's, and keep those in place of this run's.

    Args:
        own: checkpoints of the run's folder, which this run saves into.
        folder: the checkpoint to go on from.
        run_folder: the run's folder, for the error.

    Raises:
        PolylaneError: there are some, and the checkpoint to go on from is not the newest of them.
    """
    steps = own.list_steps()
    if steps and not steps[-1][1].samefile(folder):
        raise PolylaneError(
            f"--run {run_folder}: has checkpoints of another run, or later ones, up to step {steps[-1][0]}, which "
            f"would be mixed with those that follow {folder}: choose another folder for --run, or move {own.root} away"
        )


def share_checkpoints(request: R, world: World) -> R:
    """Return a request with the checkpoints that rank 0 has found, which alone looks at the run's folder; collective.

    Args:
        request: the options of a launcher's worker.
        world: this worker among all workers.
    """
    paths = (str(request.resume_from or ""), str(request.checkpoints or ""))
    resumed, checkpoints = (Path(path) if path else None for path in world.all_gather_object(paths)[0])
    return replace(request, resume_from=resumed, checkpoints=checkpoints)


def resume_from(request: R, folder: Path) -> R:
    """Return a request that goes on from a checkpoint.

    Stages are cut by measured times, which differ from one start to the next. Where the plan that is asked for is the
    one that was trained, the cuts are taken over, so that the numbers are the same bit for bit.

    Raises:
        PolylaneError: the checkpoint is damaged.
    """
    return replace(request, resume_from=folder, plan=_take_over_plan(request.plan, read_saved_plan(folder)))


def read_saved_plan(folder: Path) -> Plan:
    """Return the plan that a checkpoint was trained with.

    Raises:
        PolylaneError: the checkpoint is damaged.
    """
    from polylane.checkpoint.manifest import read_manifest
    from polylane.plan.plan_file import parse_plan

    return parse_plan(read_manifest(folder).plan, "of the checkpoint")


def _take_over_plan(plan: str | AnyPlan | None, saved: Plan) -> str | AnyPlan | None:
    from polylane.plan.spec import Spec, parse

    if not isinstance(plan, Spec):
        return plan
    of_saved = parse(saved.spec)
    microbatches = of_saved.microbatches if plan.microbatches is None else plan.microbatches
    return saved if replace(plan, microbatches=microbatches) == of_saved else plan


def describe_run(request: TrainRequest, samples: int | None) -> dict[str, Any]:
    """Return the facts about a run that one which goes on must share.

    Args:
        request: the options of the command line.
        samples: samples of the training data; None where that is not known.
    """
    return {"seed": request.seed, "batch": request.batch, "samples": samples}


def check_same_run(saved: Mapping[str, Any], facts: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with other data, in another order, or with other batches.

    Args:
        saved: facts of the checkpoint.
        facts: facts of this run.
        folder: folder of the checkpoint, for the error.

    Raises:
        PolylaneError: they are not the same: which, and what to give.
    """
    words = {
        "seed": ("--seed {}", "the order of the data is another then"),
        "batch": ("--batch {}", "steps would have other samples"),
        "samples": ("data('train') with {}", "steps would have other samples"),
    }
    for name, (option, reason) in words.items():
        if name in saved and saved[name] != facts[name]:
            old_value, new_value = (
                format_plural(value, "sample") if name == "samples" and isinstance(value, int) else value
                for value in (saved[name], facts[name])
            )
            raise PolylaneError(
                f"checkpoint {folder}: was trained with {option.format(old_value)}, and this run has "
                f"{option.format(new_value)}: {reason}"
            )


def check_same_model(folder: Path, shapes: Mapping[str, Sequence[int]]) -> None:
    """Refuse a model that is not the one of the checkpoint, by the first tensor that differs.

    It is done before the model is compiled: the plan that is taken over knows a model only by its graph's fingerprint.

    Args:
        folder: of the checkpoint to go on from.
        shapes: shape of every parameter and buffer of this run's model, by each of its names.

    Raises:
        PolylaneError: a tensor of its model is missing here, or has another shape.
    """
    from polylane.checkpoint.manifest import read_manifest

    try:
        tensors = read_manifest(folder).tensors
    except PolylaneError:  # perhaps on this host alone: loading it says so on all workers at once
        return
    for name, saved in tensors.items():
        kind, _, key = name.partition("/")
        if kind != "model":
            continue
        common, _, replica = key.rpartition("@")
        if replica.isdecimal() and f"model/{common}" not in tensors:  # a replica's own value
            key = common
        if key not in shapes:
            raise PolylaneError(
                f"checkpoint {folder}: has {key}, which this run's model does not have: it is of another model"
            )
        shape = list(saved.shape[:-1] if saved.is_complex else saved.shape)
        if shape != list(shapes[key]):
            raise PolylaneError(
                f"checkpoint {folder}: {key} has the shape {shape}, and {list(shapes[key])} in this run's "
                "model: it is of another model"
            )


def refuse_if_done(folder: Path, position: Position, steps: int | None, epochs: int | None, samples: int) -> None:
    """Refuse to go on from a checkpoint after which there is nothing left to train.

    Args:
        folder: of the checkpoint, for the error.
        position: where it is in the data.
        steps: optimizer steps that are asked for; None where epochs are.
        epochs: times through the data that are asked for; None where steps are.
        samples: samples of an epoch; 0 where that is not known.

    Raises:
        NothingLeft: it is that of the last step, or of a later one.
    """
    epochs_over = position.epoch + (samples > 0 and position.samples >= samples)
    if (steps is not None and position.step >= steps) or (epochs is not None and epochs_over >= epochs):
        raise NothingLeft(folder, position.step)
