"""Resuming: the checkpoint that a run goes on from, the plan it goes on by, and whether the run is the same one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polylane.errors import PolylaneError, clean_sentence, format_plural

if TYPE_CHECKING:
    from polylane.checkpoint.store import CheckpointStore
    from polylane.commands.requests import TrainRequest
    from polylane.plan.plan import Plan
    from polylane.plan.spec import Spec

FOLDER = "checkpoints"  # in a run's folder


class NothingLeft(PolylaneError):
    """A run that is asked to go on has made all of its steps already.

    Args:
        folder: folder of the checkpoint of its last step.
        step: that step.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = folder, step
        super().__init__(folder, step)

    def __str__(self) -> str:
        return clean_sentence(
            f"checkpoint {self.folder}: is that of the last step, {self.step}: there is nothing left to train; give "
            "more --epochs or --steps"
        )


def prepare_checkpoints(request: TrainRequest, run_folder: Path, continues: bool = False) -> TrainRequest:
    """Return a request with the checkpoint to go on from, and the plan of that where it is the one asked for.

    Args:
        request: the options of the command line, with the plan that was chosen.
        run_folder: the run's folder, which this process has claimed.
        continues: whether torchrun has started this run again: its own newest checkpoint counts, not where it began.

    Raises:
        PolylaneError: there is no checkpoint, it is damaged; or a new run would mix its checkpoints with an earlier
            run's.
    """
    from polylane.checkpoint.store import CheckpointStore, open_checkpoint

    own = CheckpointStore(run_folder / FOLDER)
    request = replace(request, checkpoints=own.root)
    if continues and request.saves_checkpoints:
        own.remove_leftovers()
        if (latest := own.find_newest()) is not None:
            return resume_from(request, latest)
    if request.saving.resume is None:
        if request.saves_checkpoints and (known := own.list_steps()):
            raise PolylaneError(
                f"--run {run_folder}: has checkpoints of an earlier run, up to step {known[-1][0]}: go on from them "
                "with --resume auto, or choose another folder"
            )
        return request
    own.remove_leftovers()
    if request.saving.resume == "auto":
        newest = own.find_newest()
        return request if newest is None else resume_from(request, newest)
    named = open_checkpoint(Path(request.saving.resume))[0]
    if request.saves_checkpoints:
        _refuse_another_course(own, named)
    return resume_from(request, named)


def _refuse_another_course(own: CheckpointStore, named: Path) -> None:
    """Refuse to go on from an older checkpoint beside newer ones, which every restart would take for this run's.

    Raises:
        PolylaneError: the run's folder has checkpoints that the named one does not go on from.
    """
    known = own.list_steps()
    newest = next((place for place, (_, folder) in enumerate(known) if folder.resolve() == named.resolve()), -1)
    if later := known[newest + 1 :]:
        raise PolylaneError(
            f"--resume {named}: {own.root} has other checkpoints, up to step {later[-1][0]}, which a restart would "
            "take for newer ones: go on from them with --resume auto, remove them, or choose another folder with --run"
        )


def resume_from(request: TrainRequest, folder: Path) -> TrainRequest:
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


def _take_over_plan(asked: str | Spec | Plan | None, saved: Plan) -> str | Spec | Plan | None:
    from polylane.plan.spec import Spec, parse

    if not isinstance(asked, Spec):
        return asked
    of_saved = parse(saved.spec)
    microbatches = of_saved.microbatches if asked.microbatches is None else asked.microbatches
    return saved if replace(asked, microbatches=microbatches) == of_saved else asked


def describe_run(request: TrainRequest, samples: int | None) -> dict[str, Any]:
    """Return the facts about a run that one which goes on must share.

    Args:
        request: the options of the command line.
        samples: samples of the training data; None where that is not known.
    """
    return {"seed": request.seed, "batch": request.batch, "samples": samples}


def check_same_run(saved: Mapping[str, Any], own: Mapping[str, Any], folder: Path) -> None:
    """Refuse to go on with other data, in another order, or with other batches.

    Args:
        saved: facts of the checkpoint.
        own: facts of this run.
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
        if name in saved and saved[name] != own[name]:
            before, now = (
                format_plural(each, "sample") if name == "samples" and isinstance(each, int) else each
                for each in (saved[name], own[name])
            )
            raise PolylaneError(
                f"checkpoint {folder}: was trained with {option.format(before)}, and this run has "
                f"{option.format(now)}: {reason}"
            )
