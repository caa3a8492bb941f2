"""Options that several commands of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from polylane.commands.requests import WorkerRange
from polylane.verify.audit import AuditMode

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A Python file, or a package.module.", show_default=False)
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="How to split the training: one line of data=, pipeline=, sequence=, tensor=, ..., a plan file, or auto "
        "for the best plan on this machine. Default: data=N.",
    ),
]
# The bound is that of a plan's workers.
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, max=2**20, help="Number of workers. Default: as many as the plan takes."
    ),
]


def _parse_workers(text: str) -> WorkerRange:
    fewest, colon, maximum = text.partition(":")
    numbers = [int(part) for part in (fewest, maximum) if part.isascii() and part.isdecimal() and len(part) < 8]
    if len(numbers) != 1 + bool(colon) or not 1 <= numbers[0] <= numbers[-1] <= 2**20:
        raise typer.BadParameter("give a number of workers (4), or the fewest and the most (2:4)")
    return WorkerRange(numbers[0] if colon else None, numbers[-1])


WorkersOrRange = Annotated[
    WorkerRange | None,
    typer.Option(
        "--workers",
        metavar="N|MIN:MAX",
        parser=_parse_workers,
        help="Number of workers; with MIN:MAX a lost one is left out, down to MIN. Default: as many as the plan takes.",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="B", min=1, max=2**30, help="Samples of a batch, over all workers.")
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A keyword argument of the recipe's functions. Repeatable."),
]
Epochs = Annotated[int | None, typer.Option("--epochs", metavar="E", min=1, help="Times through the data. Default: 1.")]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="S", min=1, help="Optimizer steps to train, in place of --epochs.")
]


def _parse_run_folder(text: str) -> Path:
    if not text.strip():  # as of a shell's variable that is not set: a path of it would be the current folder
        raise typer.BadParameter("give the name of a folder, such as run/first, or leave --run out")
    return Path(text)


RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        metavar="DIR",
        parser=_parse_run_folder,
        help="Folder for the run's files. Default: a new run/NAME, run/NAME-2, ...",
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed", metavar="S", min=0, max=2**32 - 1, help="Seed of the weights, the order of samples and all dropout."
    ),
]
ClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", metavar="X", help="Bound on the 2-norm of all gradients.")
]
OnNan = Annotated[
    Literal["stop", "warn"],
    typer.Option("--on-nan", help="If the loss is not finite: stop, naming the first operator; or warn and go on."),
]
Audit = Annotated[
    AuditMode,
    typer.Option(
        "--audit",
        help="Make steps 1, 2, 4, 8, ... and one of each epoch again as the recipe is written, in one process beside "
        "the training, and compare: auto keeps that below 1% of the time, and stops at a difference; stop audits "
        "every such step; warn goes on at a difference.",
    ),
]
OnHang = Annotated[
    Literal["stop", "restart", "wait"],
    typer.Option(
        "--on-hang",
        help="If a worker does not go on: stop, naming it; or name it and wait. Or restart, as --max-restarts allows.",
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        metavar="SECONDS",
        help="No progress for this long is a hang: in a step or the loader, and of a worker that cannot run (stopped, "
        "or its interpreter locked) anywhere. Default: 8 s longer than steps usually take; 9.5 min outside of steps.",
    ),
]
# Hidden: accepted for command lines from before --on-nan.
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        metavar="SECONDS",
        min=0,
        help="Where checkpoints are saved: time for one after SIGTERM, Ctrl-C and such, before the end at once.",
    ),
]
RequeueCode = Annotated[
    int,
    typer.Option(
        "--requeue-code",
        metavar="CODE",
        min=0,
        max=125,
        help="Exit code where SIGTERM or such a signal ended the training early and a checkpoint was saved, by which a "
        "batch system starts it again.",
    ),
]
OnDiskError = Annotated[
    Literal["warn", "stop"],
    typer.Option(
        "--on-disk-error", help="If the run folder cannot be written to any more: warn once and go on; or stop."
    ),
]
SaveEvery = Annotated[
    str | None,
    typer.Option(
        "--save-every",
        metavar="INTERVAL",
        help="Save checkpoints: every 500 steps (500), every ten minutes (10m, 30s, 2h), or auto: by what they cost.",
    ),
]
Keep = Annotated[int, typer.Option("--keep", metavar="N", min=1, help="Newest checkpoints that are kept.")]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Go on from the newest complete checkpoint of --run, if there is one; or from a checkpoint's folder.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        min=0,
        help="Start the workers again when one has died, so many times. Default: 0, or MAX - MIN of --workers.",
    ),
]
DropLast = Annotated[bool, typer.Option("--drop-last", help="Leave out an epoch's last batch if it is shorter.")]
LargeBatchOptimizer = Annotated[
    Literal["lars", "lamb"] | None,
    typer.Option("--optimizer", help="An optimizer for large batches in place of the recipe's, with --lr."),
]
LearningRate = Annotated[float | None, typer.Option("--lr", metavar="X", help="The learning rate of --optimizer.")]
ScaleRate = Annotated[
    Literal["linear", "sqrt"] | None,
    typer.Option("--scale-lr", help="Scale the recipe's learning rates from --base-batch to --batch."),
]
BaseBatch = Annotated[
    int | None,
    typer.Option(
        "--base-batch", metavar="B", min=1, help="The batch for which the recipe's learning rates were chosen."
    ),
]
Warmup = Annotated[
    int, typer.Option("--warmup", metavar="S", min=0, help="Steps in which learning rates rise to their full value.")
]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture as SVG.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as an HTML page.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Compare = Annotated[bool, typer.Option("--compare", help="All schedules side by side, in place of one.")]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks", metavar="V", min=1, help="Parts that each stage is cut into, all on its worker. Default: 2, or 1."
    ),
]
Batches = Annotated[
    int | None, typer.Option("--batches", metavar="T", min=1, help="Batches of a run of pipedream-2bw. Default: 2.")
]
VerticalSync = Annotated[
    bool, typer.Option("--vertical-sync", help="The stages of pipedream use the same version of their weights.")
]
Live = Annotated[
    int | None,
    typer.Option("--live", metavar="L", min=1, help="Most live microbatches of a worker, for auto. Default: all."),
]
DrawnStages = Annotated[
    str, typer.Option("--stages", metavar="K|FILE", help="A number of stages, or a YAML file of stages that branch.")
]
Replicas = Annotated[
    str | None,
    typer.Option(
        "--replicas",
        metavar="D",
        help="Replicas of a stage that take microbatches in turn; 2,1 for stages that differ.",
    ),
]
ForwardTicks = Annotated[
    str, typer.Option("--forward", metavar="TICKS", help="Time of one forward; 1,2,1 for stages that differ.")
]
BackwardTicks = Annotated[str, typer.Option("--backward", metavar="TICKS", help="Time of one backward, likewise.")]
WeightTicks = Annotated[
    str | None,
    typer.Option("--weight", metavar="TICKS", help="Of it, time of the weight gradients, likewise. Default: half."),
]
Halving = Annotated[
    str,
    typer.Option(
        "--halving", metavar="PART", help="What two halves of a backward take longer than it, as in 0.08; likewise."
    ),
]
HopTicks = Annotated[str, typer.Option("--hop", metavar="TICKS", help="Time of a value between two workers.")]

ProveResume = Annotated[bool, typer.Option("--resume", help="Prove checkpoints: go on from one, against no break.")]
ResumePlan = Annotated[
    str | None,
    typer.Option("--resume-plan", metavar="SPEC", help="With --resume: a plan that goes on from the checkpoint, too."),
]
