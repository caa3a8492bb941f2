"""Run options: those of a run's folder, checkpoints and troubles, checked together; and the folder that they name."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from polylane.commands import user_inputs as inputs
from polylane.commands.running.run_folder import RunFolder
from polylane.errors import PolylaneError
from polylane.output import say_at_once
from polylane.runtime.checkpoint.run_control import parse_interval
from polylane.runtime.workers.launch_environment import Launch, keeps_exit_code
from polylane.runtime.workers.torchrun_worker import identify_launch

if TYPE_CHECKING:
    from polylane.commands.requests import FolderRequest

R = TypeVar("R", bound="FolderRequest")

LONGEST_GRACE = 24 * 3600  # seconds; timers of the operating system do not take any number


def complete_options(request: R, launch: Launch) -> R:
    """Check the options; return them, with ``save_every="auto"`` where restarts are asked for.

    Args:
        request: the options of the command line.
        launch: how this process was started.

    Raises:
        PolylaneError: an option is wrong, or does not go with another one or with the launcher.
    """
    saving, trouble = request.saving, request.trouble
    inputs.check_positive("--hang-after", trouble.hang_after)
    if not 0 <= trouble.grace <= LONGEST_GRACE:  # also where it is not a number
        raise PolylaneError(f"--grace {trouble.grace:g}: give seconds, from 0 to {LONGEST_GRACE} (a day)")
    if trouble.requeue_code and launch.launcher == "torchrun" and not keeps_exit_code():
        raise PolylaneError("--requeue-code is not for torchrun: the exit code is torchrun's own")
    if saving.restarts and launch.launcher not in ("", "torchrun"):
        raise PolylaneError(
            f"--max-restarts: {launch.launcher} starts no worker again; start torchrun on each node, or let the job "
            "be queued again and go on with --resume auto"
        )
    if saving.resume == "auto" and request.run_folder is None:
        raise PolylaneError(
            "--resume auto resumes from the newest checkpoint of the run's folder: name that with --run DIR"
        )
    if saving.resume == "":
        raise PolylaneError("--resume '': give auto, or the path of a checkpoint")
    if trouble.on_hang == "restart" and not saving.restarts:
        raise PolylaneError(
            "--on-hang restart needs --max-restarts N, the number of times that workers are started again"
        )
    if saving.restarts and saving.save_every is None:
        saving = replace(saving, save_every="auto")
    if saving.save_every is not None:
        parse_interval(saving.save_every)
    return replace(request, saving=saving)


def open_folder(request: FolderRequest, program: str) -> RunFolder:
    """Return the run's folder, not claimed yet: the one that was given, or one below ``run`` with the program's name.

    Args:
        request: the options of the command line.
        program: path of the Python file, or dotted name of the module, that is run.
    """
    name = Path(program).stem if program.endswith(".py") else program.rpartition(".")[2]
    return RunFolder(
        request.run_folder or Path("run") / name,
        given=request.run_folder is not None,
        launch=identify_launch(),
        warn=say_at_once if request.trouble.on_disk_error == "warn" else None,
    )
