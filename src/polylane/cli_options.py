"""Options that several commands of the command line share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polylane.commands import requests
from polylane.commands.learning_rates import LargeBatch, NoiseMode, RateRule
from polylane.commands.running import option_groups
from polylane.verify.audit import AuditMode

Recipe = Annotated[
    str, typer.Argument(metavar="RECIPE", help="Path of a Python file, or a dotted module name.", show_default=False)
]
RecipeOrScript = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|SCRIPT",
        help="Path of a Python file, or a dotted module name, of a recipe; or path of a script.",
        show_default=False,
    ),
]
ScriptArguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="[-- ARGUMENTS]", help="The script's own arguments, after --.", show_default=False),
]
Plan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="How to split the training: a line such as data=2,pipeline=2, the path of a plan file, or auto for the "
        "plan predicted to be fastest on this machine. Default: data=N.",
    ),
]
ScriptPlan = Annotated[
    str | None,
    typer.Option(
        "--plan",
        metavar="SPEC",
        help="How to split the script's training: a line such as data=2,pipeline=2, the path of a plan file, or auto "
        "for the plan predicted to be fastest on N workers. Default: data=N; on one worker the script runs as it is.",
    ),
]
# The bound is that of a plan's workers.
Workers = Annotated[
    int | None,
    typer.Option(
        "--workers", metavar="N", min=1, max=2**20, help="Number of workers. Default: as many as the plan needs."
    ),
]


def _parse_workers(text: str) -> requests.WorkerRange:
    fewest, colon, maximum = text.partition(":")
    numbers = [int(part) for part in (fewest, maximum) if part.isascii() and part.isdecimal() and len(part) < 8]
    if len(numbers) != 1 + bool(colon) or not 1 <= numbers[0] <= numbers[-1] <= 2**20:
        raise typer.BadParameter("give a number of workers (4), or the fewest and the most (2:4)")
    return requests.WorkerRange(numbers[0] if colon else None, numbers[-1])


WorkersOrRange = Annotated[
    requests.WorkerRange | None,
    typer.Option(
        "--workers",
        metavar="N|MIN:MAX",
        parser=_parse_workers,
        help="Number of workers. With MIN:MAX, training continues on fewer workers, down to MIN, when some are lost. "
        "Default: as many as the plan needs.",
    ),
]
Batch = Annotated[
    int, typer.Option("--batch", metavar="B", min=1, max=2**30, help="Number of samples in a batch, over all workers.")
]
TrainBatch = Annotated[
    str,
    typer.Option(
        "--batch",
        metavar="B|auto",
        help="Number of samples in a batch, over all workers. auto, auto:FIRST or auto:FIRST:LARGEST: begin with FIRST "
        "(64) and follow the gradient noise, the learning rate along.",
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Keyword argument passed to the recipe's functions. Repeatable."),
]
Epochs = Annotated[int | None, typer.Option("--epochs", metavar="E", min=1, help="Number of epochs. Default: 1.")]
Steps = Annotated[
    int | None, typer.Option("--steps", metavar="S", min=1, help="Number of optimizer steps, instead of --epochs.")
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
        "--seed",
        metavar="S",
        min=0,
        max=2**32 - 1,
        help="Seed of the weights, the order of samples, and all random numbers of the model.",
    ),
]
ClipNorm = Annotated[
    float | None, typer.Option("--clip-norm", metavar="X", help="Clip the gradients to this total 2-norm.")
]
OnNan = Annotated[
    option_groups.OnNan,
    typer.Option(
        "--on-nan",
        help="If the loss is not finite: stop and report the first operator that was not, or warn and continue.",
    ),
]
Audit = Annotated[
    AuditMode,
    typer.Option(
        "--audit",
        help="Compute some steps a second time by your own code on one device, and compare: steps 1, 2, 4, 8, ..., of "
        "a recipe also the first of each epoch. auto: as many of them as fit into 1% of the training time, and stop if "
        "one differs; stop: all of them; warn: all, and continue if one differs; off: none.",
    ),
]
Noise = Annotated[
    NoiseMode,
    typer.Option(
        "--noise",
        help="Measure the gradient noise scale, which polylane advise reads of runs of train. auto: in as many steps "
        "as 2% of the training time allows, where the plan allows it; on: in every step.",
    ),
]
Ema = Annotated[
    float | None,
    typer.Option(
        "--ema",
        metavar="D",
        help="Keep an exponential moving average of the weights, of which the part D (0.999) remains in a step. Tests "
        "and the saved weights are the average's.",
    ),
]
Accumulate = Annotated[
    int,
    typer.Option(
        "--accumulate",
        metavar="N",
        min=1,
        max=2**20,
        help="Add up the gradients of N batches before an update: a step has N times --batch samples, in N times as "
        "many microbatches.",
    ),
]
LoaderWorkers = Annotated[
    int,
    typer.Option(
        "--loader-workers", metavar="N", min=0, max=256, help="Processes of each worker that load batches ahead."
    ),
]
Prefetch = Annotated[
    int | None,
    typer.Option("--prefetch", metavar="N", min=1, help="Batches that each of --loader-workers loads ahead."),
]
OverfitBatches = Annotated[
    int | None,
    typer.Option(
        "--overfit-batches",
        metavar="N",
        min=1,
        help="Train on the first N batches only, in their order, and test on them: a model that works overfits them.",
    ),
]
FastDevRun = Annotated[
    bool,
    typer.Option(
        "--fast-dev-run", help="Run one batch of the training data and one of the test data, to find mistakes."
    ),
]
Log = Annotated[
    str,
    typer.Option(
        "--log",
        metavar="NAMES",
        help="Send the numbers of metrics.jsonl also to tensorboard, wandb or mlflow, or to a class of your own, as "
        "module:Class; several are separated by commas.",
    ),
]
LogEvery = Annotated[
    float,
    typer.Option(
        "--log-every", metavar="SECONDS", min=0, help="Time between two lines of progress where stdout is no terminal."
    ),
]
OnHang = Annotated[
    option_groups.OnHang,
    typer.Option(
        "--on-hang",
        help="If a worker hangs: stop and report it, restart the workers (see --max-restarts), or report it and wait.",
    ),
]
HangAfter = Annotated[
    float | None,
    typer.Option(
        "--hang-after",
        metavar="SECONDS",
        help="Seconds without progress after which a worker is considered hung. Default: 8 s longer than a "
        "step usually takes, and 9.5 min outside of steps.",
    ),
]
Grace = Annotated[
    float,
    typer.Option(
        "--grace",
        metavar="SECONDS",
        min=0,
        help="Time to save a checkpoint after SIGTERM, Ctrl-C or another stop signal; then the run ends at once.",
    ),
]
RequeueCode = Annotated[
    int,
    typer.Option(
        "--requeue-code",
        metavar="CODE",
        min=0,
        max=125,
        help="Exit code of a run that a stop signal ended early, after saving a checkpoint; lets a batch "
        "system requeue the job.",
    ),
]
OnDiskError = Annotated[
    option_groups.OnDiskError,
    typer.Option(
        "--on-disk-error", help="If the run folder can no longer be written: warn once and continue, or stop."
    ),
]
SaveEvery = Annotated[
    str | None,
    typer.Option(
        "--save-every",
        metavar="INTERVAL",
        help="Interval between checkpoints: a number of steps (500), a time (30s, 10m, 2h), or auto, which "
        "bounds their cost.",
    ),
]
Keep = Annotated[
    int, typer.Option("--keep", metavar="N", min=1, help="Number of checkpoints to keep; older ones are deleted.")
]
Resume = Annotated[
    str | None,
    typer.Option(
        "--resume",
        metavar="auto|PATH",
        help="Resume from the newest complete checkpoint of --run, if there is one (auto), or from a "
        "checkpoint folder.",
    ),
]
MaxRestarts = Annotated[
    int | None,
    typer.Option(
        "--max-restarts",
        metavar="N",
        min=0,
        help="Number of times the workers are restarted after one has died. Default: 0; of train with "
        "--workers MIN:MAX, MAX - MIN.",
    ),
]
EarlyStop = Annotated[
    list[str] | None,
    typer.Option(
        "--early-stop",
        metavar="NAME[:max|min]:N",
        help="End once this result of the tests (test_loss, train_loss or a metric of the recipe) has not become "
        "better N times in a row. Losses are minimized, metrics are maximized, unless min or max says otherwise.",
    ),
]
StopAt = Annotated[
    list[str] | None,
    typer.Option(
        "--stop-at", metavar="NAME[:max|min]:VALUE", help="End once a result of the tests reaches this value."
    ),
]
KeepBest = Annotated[
    list[str] | None,
    typer.Option(
        "--keep-best",
        metavar="NAME[:max|min][:N]",
        help="Keep checkpoints of the N epochs (default: 1) with the best values of a result, in DIR/best.",
    ),
]
DropLast = Annotated[bool, typer.Option("--drop-last", help="Drop the last batch of an epoch if it is incomplete.")]
LargeBatchOptimizer = Annotated[
    LargeBatch | None,
    typer.Option("--optimizer", help="Use this large-batch optimizer instead of the recipe's. Requires --lr."),
]
LearningRate = Annotated[float | None, typer.Option("--lr", metavar="X", help="Learning rate of --optimizer.")]
ScaleRate = Annotated[
    RateRule | None,
    typer.Option("--scale-lr", help="Scale the recipe's learning rates from --base-batch to --batch."),
]
BaseBatch = Annotated[
    int | None,
    typer.Option(
        "--base-batch", metavar="B", min=1, help="Batch size for which the recipe's learning rates were chosen."
    ),
]
Warmup = Annotated[
    int,
    typer.Option(
        "--warmup", metavar="S", min=0, help="Number of steps over which learning rates rise to their full value."
    ),
]
Svg = Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the figure as SVG.")]
Html = Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write the result as an HTML page.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object.")]
Compare = Annotated[bool, typer.Option("--compare", help="Draw all schedules side by side, instead of one.")]
Chunks = Annotated[
    int | None,
    typer.Option(
        "--chunks",
        metavar="V",
        min=1,
        help="Number of chunks per stage, all on the same worker. Default: 2 where it has chunks, else 1.",
    ),
]
Batches = Annotated[
    int | None,
    typer.Option("--batches", metavar="T", min=1, help="Number of batches to draw for pipedream-2bw. Default: 2."),
]
VerticalSync = Annotated[
    bool, typer.Option("--vertical-sync", help="Use the same weight version on all stages of pipedream.")
]
Live = Annotated[
    int | None,
    typer.Option(
        "--live", metavar="L", min=1, help="Maximum number of live microbatches per worker, for auto. Default: all."
    ),
]
DrawnStages = Annotated[
    str,
    typer.Option(
        "--stages", metavar="K|FILE", help="Number of stages, or a YAML file that describes branching stages."
    ),
]
Replicas = Annotated[
    str | None,
    typer.Option(
        "--replicas",
        metavar="D",
        help="Number of replicas per stage, which take microbatches in turn; 2,1 sets it per stage.",
    ),
]
ForwardTicks = Annotated[
    str,
    typer.Option("--forward", metavar="TICKS", help="Duration of a forward pass in ticks; 1,2,1 sets it per stage."),
]
BackwardTicks = Annotated[
    str, typer.Option("--backward", metavar="TICKS", help="Duration of a backward pass in ticks, likewise.")
]
WeightTicks = Annotated[
    str | None,
    typer.Option(
        "--weight", metavar="TICKS", help="Part of --backward spent on weight gradients, likewise. Default: half."
    ),
]
Halving = Annotated[
    str,
    typer.Option(
        "--halving",
        metavar="PART",
        help="Overhead of splitting a backward pass in two, as a fraction (0.08), likewise.",
    ),
]
HopTicks = Annotated[
    str, typer.Option("--hop", metavar="TICKS", help="Duration of a message between two workers in ticks.")
]

ProveResume = Annotated[
    bool, typer.Option("--resume", help="Verify checkpointing: compare a resumed run with an uninterrupted one.")
]
ResumePlan = Annotated[
    str | None,
    typer.Option(
        "--resume-plan", metavar="SPEC", help="With --resume: also resume from the checkpoint under this plan."
    ),
]
