"""Request of ``polylane launch``: plain data, made before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from polylane.commands.requests import RunRequest, TrainRequest

LauncherName = Literal["slurm", "kubernetes", "jobset", "skypilot"]


@dataclass(frozen=True, kw_only=True)
class LaunchRequest:
    """The options of ``polylane launch``.

    Attributes:
        program: path of a recipe or of a script, or the dotted name of a recipe's module.
        is_script: whether it is a script, which ``polylane run`` runs; a recipe is trained.
        launcher: what is to start the workers.
        hosts: number of hosts, each with as many of the plan's processes.
        plan: a line, or the path of a plan file.
        run_folder: the run's folder as the workers see it; None: one by the job's name.
        options: words of further options of ``polylane train`` or ``run``.
        values: values of these options, by the name of the command's parameter.
        training: the request that ``polylane train`` or ``run`` makes of these options, without plan and folder.
        arguments: the script's own arguments.
        device: "cpu", "gpu" or a device preset; None: what this machine has.
        cpus: CPU cores of a worker; None: eight beside a GPU, else one.
        memory: memory of a host, as text with a unit ("64 GB"); None: an estimate, where there is one.
        image: the container's image; None: the launcher starts no container.
        volume: name of the volume with the run's folder; None: "runs".
        queue: Slurm's partition, or the local queue of Kueue; None: the cluster's default.
        time: time limit, in the words of Slurm; None: the cluster's default.
        name: name of the job; None: by the run's folder or the program.
        max_restarts: times that the job is restarted after a worker has died.
        json: print one JSON object, in place of the file.
    """

    program: str
    is_script: bool
    launcher: LauncherName
    training: TrainRequest | RunRequest
    hosts: int
    plan: str
    run_folder: Path | None = None
    options: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    arguments: tuple[str, ...] = ()
    device: str | None = None
    cpus: int | None = None
    memory: str | None = None
    image: str | None = None
    volume: str | None = None
    queue: str | None = None
    time: str | None = None
    name: str | None = None
    max_restarts: int | None = None
    json: bool = False
