"""Build a cluster job from the options of ``polylane launch``: every mistake is one sentence."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from polylane.checkpoint.store import open_checkpoint
from polylane.cluster.catalogue import device_presets
from polylane.commands import planning
from polylane.commands import user_inputs as inputs
from polylane.commands.launching.cluster_job import (
    END_SECONDS,
    REQUEUE_CODE,
    START_SECONDS,
    STEP_SECONDS,
    WRONG_INPUT,
    CheckpointCost,
    ClusterJob,
    is_gpu,
)
from polylane.commands.launching.launch_request import LauncherName, LaunchRequest
from polylane.commands.launching.measure_state import measure_state
from polylane.commands.requests import TrainRequest
from polylane.commands.running.run_options import LONGEST_GRACE, complete_options
from polylane.commands.train import complete_training
from polylane.errors import PolylaneError, suggest_name
from polylane.plan.fixed_keys import parse_auto
from polylane.runtime.workers.launch_environment import Launch

if TYPE_CHECKING:
    from polylane.plan.plan import AnyPlan

# Options that some launchers alone take.
TAKEN: dict[LauncherName, tuple[str, ...]] = {
    "slurm": ("queue", "time"),
    "kubernetes": ("image", "volume", "queue"),
    "jobset": ("image", "volume", "queue"),
    "skypilot": ("image", "volume"),
}
OTHER_ENDS = {0: "that is done", 1: "whose worker failed", WRONG_INPUT: "with wrong input"}  # by exit code
CODE = PurePosixPath("/code")  # where an image has the user's files
RESTARTS, SAVE_EVERY = 3, "10m"
MOST_NAME = 40  # letters: a JobSet makes names of pods from it, which have 63 at most
GPU_CPUS = 8  # cores beside a GPU, for the loader's processes
WORKER_BYTES = 6 * 2**30  # of a process with torch and a CUDA context
_NAME = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")
_TIME = re.compile(r"((\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", re.ASCII)
_WORD = r"[A-Za-z0-9]([\w.-]*[A-Za-z0-9])?"
_LABEL = r"[a-z0-9]([a-z0-9-]*[a-z0-9])?"
# What a queue and a volume may be named, and what that is called.
QUEUES: dict[LauncherName, tuple[str, str]] = {
    "slurm": (rf"{_WORD}(,{_WORD})*", "a partition, or several as a,b, of letters, digits, hyphens and dots"),
    "kubernetes": (rf"(?=.{{1,63}}$){_WORD}", "a name of letters, digits, hyphens and dots, at most 63"),
}
VOLUMES: dict[LauncherName, tuple[str, str]] = {
    "skypilot": (_WORD, "a name of letters, digits, hyphens and dots"),
    "kubernetes": (rf"(?=.{{1,253}}$){_LABEL}(\.{_LABEL})*", "a claim's name, of lower-case letters, digits, hyphens"),
}


def build_job(request: LaunchRequest) -> ClusterJob:
    """Return the job that a launcher is to start.

    Raises:
        PolylaneError: an option, the recipe, the script or the plan is wrong, or they do not go together.
    """
    _check_options(request)
    plan = _read_plan(request)
    workers = plan.processes // request.hosts
    device = _choose_device(request)
    if request.run_folder is not None and not request.run_folder.name:
        raise PolylaneError(f"--run {request.run_folder}: give the name of a folder, such as /runs/first")
    name = _choose_name(request)
    folder = request.run_folder or Path("runs" if request.launcher == "slurm" else "/runs") / name
    restarts = RESTARTS if request.max_restarts is None else request.max_restarts
    _check_training(request, folder, restarts)
    state = measure_state(request, folder, plan.data if plan.sync.every > 1 else 1)
    grace = _choose_grace(request, state)
    _check_time(request, grace)
    return ClusterJob(
        request=request,
        name=name,
        command=tuple(_list_words(request, folder, workers, grace, restarts)),
        workers=workers,
        device=device,
        cpus=workers * (request.cpus or (GPU_CPUS if is_gpu(device) else 1)),
        memory=_choose_memory(request, device, workers, state),
        state=state,
        grace=grace,
        restarts=restarts,
        mount=_choose_mount(request, folder),
    )


def _check_options(request: LaunchRequest) -> None:
    for option in ("image", "volume", "queue", "time"):
        takers = [launcher for launcher, options in TAKEN.items() if option in options]
        if getattr(request, option) is not None and request.launcher not in takers:
            raise PolylaneError(f"--{option} is for --on {' or '.join(takers)}, and not for {request.launcher}")
    if request.launcher in ("kubernetes", "jobset") and not request.image:
        raise PolylaneError(
            f"--on {request.launcher} needs --image, the container's image with Python, torch, polylane and "
            f"{request.program}"
        )
    if request.launcher == "kubernetes" and request.hosts > 1 and request.max_restarts is not None:
        raise PolylaneError(
            "--max-restarts: the runtime of a TrainJob says how often pods are restarted: leave it out, or take "
            "--on jobset"
        )
    if request.image is not None and not re.fullmatch(r"\S+", request.image):
        raise PolylaneError(f"--image {request.image!r}: give the name of an image, which has no blanks")
    for option, value, rules in (("queue", request.queue, QUEUES), ("volume", request.volume, VOLUMES)):
        if value is None:
            continue
        pattern, form = rules.get(request.launcher, rules["kubernetes"])
        if not re.fullmatch(pattern, value, re.ASCII):
            raise PolylaneError(f"--{option} {value!r}: give {form}")
    if request.time is not None and not _TIME.fullmatch(request.time):
        raise PolylaneError(f"--time {request.time!r}: give a time as Slurm reads it, such as 12:00:00 or 2-00:00:00")
    if "workers" in request.values:
        raise PolylaneError("--workers: the plan says how many there are: leave it out")
    if "requeue_code" in request.values and request.launcher == "slurm" and request.hosts > 1:
        raise PolylaneError("--requeue-code: on several hosts of Slurm the exit code is torchrun's: leave it out")
    if (code := request.values.get("requeue_code", REQUEUE_CODE)) in OTHER_ENDS:
        raise PolylaneError(
            f"--requeue-code {code}: a run {OTHER_ENDS[code]} ends with it, and would be started again: give another "
            f"code, such as {REQUEUE_CODE}"
        )
    if request.arguments and not request.is_script:
        raise PolylaneError(f"{request.arguments[0]}: {request.program} is a recipe, which takes --set NAME=VALUE")


def _check_training(request: LaunchRequest, folder: Path, restarts: int) -> None:
    """Check the options of ``polylane train`` or ``run``, as that does when it begins."""
    starts_again = _is_one_node(request)
    if request.training.trouble.on_hang == "restart" and not starts_again:
        raise PolylaneError(
            f"--on-hang restart: --on {request.launcher} itself starts a run again that a hang has ended: leave it out"
        )
    resume = request.training.saving.resume
    # Slurm and SkyPilot have the files of this folder; other paths may be there on the cluster alone.
    if resume not in (None, "", "auto") and request.launcher in ("slurm", "skypilot"):
        _check_checkpoint(Path(resume))
    saving = replace(request.training.saving, max_restarts=restarts if starts_again else 0)
    training = replace(request.training, run_folder=folder, saving=saving)
    if isinstance(training, TrainRequest):
        complete_training(training, Launch())
    else:
        complete_options(training, Launch())


def _check_checkpoint(path: Path) -> None:
    if path.is_absolute():
        return
    try:
        open_checkpoint(path)
    except PolylaneError as error:
        raise PolylaneError(f"--resume: {error}; if the cluster alone has it, give its whole path") from None


def _is_one_node(request: LaunchRequest) -> bool:
    """Return whether it is a node of Slurm, on which polylane itself starts workers again."""
    return request.launcher == "slurm" and request.hosts == 1


def _read_plan(request: LaunchRequest) -> AnyPlan:
    """Return the plan, whose workers the hosts share equally."""
    if parse_auto(request.plan) is not None:
        raise PolylaneError(
            f"--plan {request.plan} says no number of workers: let polylane plan {request.program} --cluster CLUSTER "
            "-o plan.yaml find a plan, and give that file"
        )
    plan, hosts = inputs.read_plan(request.plan), request.hosts
    if plan.processes % hosts:
        divisor = max(number for number in range(1, hosts) if plan.processes % number == 0)
        raise PolylaneError(
            f"--hosts {hosts}: the plan takes {plan.processes} workers, which so many hosts cannot share equally: take "
            f"--hosts {divisor}, or another plan"
        )
    return plan


def _choose_device(request: LaunchRequest) -> str:
    name = request.device
    if name is None:
        import torch

        name = "gpu" if torch.cuda.is_available() else "cpu"
    names = ["gpu", *device_presets()]
    if name not in names:
        raise PolylaneError(
            f"--device {name}: there is no such device, known are {', '.join(names)}{suggest_name(name, names)}"
        )
    if request.launcher == "skypilot" and name == "gpu":
        raise PolylaneError("--on skypilot needs the GPU's name: give --device, such as --device h100-80g")
    return name


def _choose_name(request: LaunchRequest) -> str:
    """Return the job's name: as given, or of the letters of the run's folder or the program."""
    if request.name is not None:
        if not _NAME.fullmatch(request.name) or len(request.name) > MOST_NAME:
            raise PolylaneError(
                f"--name {request.name!r}: give lower-case letters, digits and hyphens, a letter first, at most "
                f"{MOST_NAME}, such as my-model"
            )
        return request.name
    program = request.program
    stem = Path(program).stem if program.endswith(".py") else program.rpartition(".")[2]
    text = stem if request.run_folder is None else request.run_folder.name
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).lstrip("-0123456789")[:MOST_NAME].strip("-")
    # Where letters would be left out, other trainings would have the same name, and so the same folder.
    if not label or any(letter.isalpha() and not letter.isascii() for letter in text):
        raise PolylaneError(
            f"{text!r} cannot be the job's name, which begins with a letter and has only those from a to z: give one "
            "with --name"
        )
    return label


def _choose_grace(request: LaunchRequest, state: CheckpointCost) -> int:
    """Return whole seconds from a stop signal to the end: for the step under way, and twice the time to save."""
    if "grace" not in request.values:
        return min(math.ceil(STEP_SECONDS + 2 * state.seconds), LONGEST_GRACE)
    grace = float(request.values["grace"])
    if not state.seconds < grace < math.inf:
        raise PolylaneError(
            f"--grace {grace:g}: saving a checkpoint takes {state.seconds:.2g} s ({state.source}): give more"
        )
    return math.ceil(grace)


def _check_time(request: LaunchRequest, grace: int) -> None:
    """Check that a job's time limit leaves time before the signal of its end."""
    limit = 0 if request.time is None else _count_seconds(request.time)
    minimum = START_SECONDS + grace + END_SECONDS
    if 0 < limit < minimum:  # 0: Slurm has no limit then
        raise PolylaneError(
            f"--time {request.time}: is {limit} s, and the signal to save a checkpoint comes {grace + END_SECONDS} s "
            f"before the end: give at least {-(-minimum // 60)} minutes"
        )


def _count_seconds(time: str) -> int:
    """Return the seconds of a time of Slurm: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S."""
    match = _TIME.fullmatch(time)
    assert match is not None  # was checked with the options
    days, *parts = match.group(2, 3, 4, 5)
    numbers = [int(part) for part in parts if part is not None]
    if days is None and len(numbers) < 3:
        numbers = [0, *numbers]
    hours, minutes, seconds = [*numbers, 0, 0][:3]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _choose_memory(request: LaunchRequest, device: str, workers: int, state: CheckpointCost) -> int | None:
    """Return the bytes that a host needs; None where the activations of CPU workers, which are not known, are in it."""
    if request.memory is not None:
        return planning.parse_memory(request.memory)
    if not is_gpu(device) or state.size is None:
        return None
    # What is saved is copied into the host's memory first; so are batches, and what is read of disks.
    return workers * WORKER_BYTES + 2 * -(-state.size // request.hosts)


def _choose_mount(request: LaunchRequest, folder: Path) -> str:
    """Return the folder that a container has the volume at: the one that the run's folder is in."""
    if request.launcher == "slurm":
        return ""
    # A relative one is in the image's folder; SkyPilot copies the user's files elsewhere.
    parent = (PurePosixPath() if request.launcher == "skypilot" else CODE) / PurePosixPath(folder).parent
    if ":" in str(parent):
        raise PolylaneError(f"--run {folder}: a folder of a container has no colon in its path: give another one")
    is_wrong = not parent.is_absolute() or parent == CODE or len(parent.parts) < 2 or ".." in parent.parts
    if is_wrong or parent.parts[1] in ("dev", "proc", "sys"):  # which the container itself has
        raise PolylaneError(f"--run {folder}: name a folder on the volume, such as /runs/{folder.name or 'a'}")
    return str(parent)


def _list_words(request: LaunchRequest, folder: Path, workers: int, grace: int, restarts: int) -> list[str]:
    """Return the words of the command: those of the user, and what they leave open."""
    words = ["polylane", "run" if request.is_script else "train", request.program]
    words += ["--workers", str(workers)] if request.hosts == 1 else []
    words += ["--plan", request.plan, "--run", str(folder), *request.options]
    defaults = {"save_every": SAVE_EVERY, "resume": "auto", "grace": str(grace)}
    if request.launcher != "slurm" or request.hosts == 1:  # torchrun ends with a code of its own
        defaults["requeue_code"] = str(REQUEUE_CODE)
    if _is_one_node(request):
        defaults["max_restarts"] = str(restarts)
    for option, value in defaults.items():
        if option not in request.values:
            words += [f"--{option.replace('_', '-')}", value]
    return [*words, *(["--", *request.arguments] if request.arguments else [])]
