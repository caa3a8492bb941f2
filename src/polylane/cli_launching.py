"""The command of the command line that writes what a cluster's launcher is given: launch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from polylane import cli_options as options
from polylane.cli_options import Json
from polylane.commands.launching.launch_request import LauncherName, LaunchRequest
from polylane.commands.requests import build_request
from polylane.errors import PolylaneError

_ARGUMENTS = "arguments"  # key of a context's data: the words behind --


class _PassingCommand(TyperCommand):
    """A command that keeps options which it does not know, and apart from them the words behind ``--``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse the words of a command line."""
        end = args.index("--") if "--" in args else len(args)
        ctx.meta[_ARGUMENTS] = args[end + 1 :]
        return super().parse_args(ctx, args[:end])


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    # Registered here and not by a decorator: the application is in cli.py, which imports this module.
    passing = {"ignore_unknown_options": True, "allow_extra_args": True}
    app.command(cls=_PassingCommand, context_settings=passing)(launch)


_Launcher = Annotated[
    LauncherName,
    typer.Option(
        "--on",
        help="What starts the workers: Slurm, Kubernetes (a Job for one host, a TrainJob of Kubeflow Trainer for "
        "several), a JobSet of Kubernetes, or SkyPilot.",
    ),
]
_Plan = Annotated[
    str, typer.Option("--plan", metavar="SPEC", help="How to split the training: a line, or the path of a plan file.")
]
_Hosts = Annotated[
    int,
    typer.Option(
        "--hosts", metavar="N", min=1, max=2**16, help="Number of hosts, each with as many of the plan's workers."
    ),
]
_Run = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        help="The run's folder, on a disk that all hosts share. Default: runs/NAME; in containers, /runs/NAME.",
    ),
]
_Device = Annotated[
    str | None,
    typer.Option(
        "--device",
        metavar="DEVICE",
        help="What each worker has: gpu (on Kubernetes, NVIDIA's), cpu, or a device of cluster files, such as h100-80g "
        "or AMD's mi300x. Default: what this machine has.",
    ),
]
_Cpus = Annotated[
    int | None,
    typer.Option(
        "--cpus", metavar="N", min=1, max=2**16, help="CPU cores of each worker. Default: 8 with a GPU, else 1."
    ),
]
_Memory = Annotated[
    str | None,
    typer.Option(
        "--memory", metavar="SIZE", help='Memory of a host, such as "256 GiB". Default: an estimate for GPUs.'
    ),
]
_Image = Annotated[str | None, typer.Option("--image", metavar="IMAGE", help="The container's image. Not for Slurm.")]
_Volume = Annotated[
    str | None,
    typer.Option(
        "--volume",
        metavar="NAME",
        help="Volume with the run's folder: a PersistentVolumeClaim, or a volume of SkyPilot. Default: runs.",
    ),
]
_Queue = Annotated[
    str | None,
    typer.Option("--queue", metavar="NAME", help="Partition of Slurm, or several as a,b; or local queue of Kueue."),
]
_Time = Annotated[
    str | None, typer.Option("--time", metavar="TIME", help="Time limit of a Slurm job, such as 12:00:00.")
]
_Name = Annotated[
    str | None,
    typer.Option("--name", metavar="NAME", help="Name of the job. Default: by --run, or by the recipe or script."),
]
_MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        min=0,
        help="Number of times that the workers are restarted after one has died. Default: 3.",
    ),
]


def launch(
    context: typer.Context,
    program: options.RecipeOrScript,
    launcher: _Launcher,
    plan: _Plan,
    hosts: _Hosts = 1,
    run: _Run = None,
    device: _Device = None,
    cpus: _Cpus = None,
    memory: _Memory = None,
    image: _Image = None,
    volume: _Volume = None,
    queue: _Queue = None,
    time: _Time = None,
    name: _Name = None,
    max_restarts: _MaxRestarts = None,
    json: Json = False,
) -> None:
    """Print the job of a training, for the launcher of a cluster.

    The job starts the plan's workers on N hosts, saves a checkpoint every 10 minutes and before the launcher's time is
    over, and is started again from the newest one. Devices, memory, shared memory and the time between a stop signal
    and the end follow from the plan, the model and its optimizer; if the run's folder has a checkpoint, from that.

    All other options are those of polylane train or, for a SCRIPT, of polylane run, and stand behind the program. Their
    values are checked, and they become a part of the job's command, also in place of --save-every, --resume, --grace
    and --requeue-code.

    \b
    Examples:
      polylane launch mymodel.py --on slurm --hosts 2 --plan data=8 --device gpu --time 12:00:00 > mymodel.sbatch
      polylane launch mymodel.py --on jobset --hosts 2 --plan data=8 --device gpu --image IMAGE | kubectl apply -f -
      polylane launch train.py --on skypilot --plan data=4 --device a100-80g --save-every 5m -- --epochs 90
    """
    request = {name: value for name, value in locals().items() if name != "context"}
    request["run_folder"] = request.pop("run")
    if program.startswith("-"):  # an option that this command leaves to another one, and takes for an argument
        raise PolylaneError(
            f"{program}: the recipe or script stands first, and then the options of train or run: polylane launch "
            f"mymodel.py {program} ..."
        )
    from polylane.commands.verifying.script import is_script

    request["is_script"] = is_script(program)
    extra, arguments = tuple(context.args), tuple(context.meta[_ARGUMENTS])
    request |= _parse_extra(context, "run" if request["is_script"] else "train", [program, *extra])
    request |= {"options": extra, "arguments": arguments}
    from polylane.commands.launching import launch_command as command

    command.run(build_request(LaunchRequest, request))


def _parse_extra(context: typer.Context, name: str, words: list[str]) -> dict[str, Any]:
    """Return ``values`` that are given to another command, by name, and the request that it makes of them.

    Its own errors are raised for wrong ones.
    """
    assert context.parent is not None
    command: Any = context.parent.command.commands[name]  # type: ignore[attr-defined]
    requests = list[Any]()
    parsed = command.make_context(name, words, parent=context.parent, obj=requests.append)
    values = {
        key: value
        for key, value in parsed.params.items()
        if key not in ("recipe", "script") and parsed.get_parameter_source(key).name == "COMMANDLINE"
    }
    command.invoke(parsed)
    return {"values": values, "training": requests[0]}
