"""Commands of the command line that run a training, and tell what became of it: train, export, report, why."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from polylane import cli_options as options
from polylane.cli_groups import GroupedCommand, spread_groups
from polylane.cli_options import ClipNorm, Json, Plan, Recipe, Seed, Set
from polylane.commands.learning_rates import parse_batch
from polylane.commands.requests import (
    ExportRequest,
    ReportRequest,
    RunRequest,
    TrainRequest,
    WhyRequest,
    build_request,
    default_restarts,
)
from polylane.commands.running.option_groups import (
    DataOptions,
    GoalOptions,
    LearningOptions,
    SavingOptions,
    TroubleOptions,
    WatchOptions,
)


def register(app: typer.Typer) -> None:
    """Add the commands to the application."""
    # Registered here and not by decorators: the application is in cli.py, which imports this module.
    for command in (train, run, export, report, why):
        app.command(cls=GroupedCommand)(spread_groups(command))


def train(
    context: typer.Context,
    recipe: Recipe,
    *,
    workers: options.WorkersOrRange = None,
    plan: Plan = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch: options.TrainBatch = "64",
    run: options.RunFolder = None,
    seed: Seed = 0,
    settings: Set = None,
    clip_norm: ClipNorm = None,
    drop_last: options.DropLast = False,
    on_nan: options.OnNan = "stop",
    audit: options.Audit = "auto",
    json: Json = False,
    data: DataOptions,
    learning: LearningOptions,
    saving: SavingOptions,
    goals: GoalOptions,
    trouble: TroubleOptions,
    watch: WatchOptions,
) -> None:
    """Train the model of a recipe, which has no loop of its own.

    Writes plan.yaml, metrics.jsonl (one line per step), model.safetensors (loads into the plain model), the timeline of
    one step (timeline.json, swimlane.html, trace.json for ui.perfetto.dev), report.html and checkpoints/ to DIR. Files
    of an earlier run are replaced when the run succeeds; until then it writes to DIR/unfinished.

    Exit codes: 1 if a worker failed, 2 for invalid input, 130 after Ctrl-C, 128 plus the signal number after SIGTERM,
    SIGHUP, SIGUSR1, SIGUSR2 or SIGXCPU. With --save-every or --max-restarts, such a signal saves a checkpoint first,
    within --grace, and the exit code is --requeue-code. Output that cannot be written is dropped without an error.

    \b
    Examples:
      polylane train examples/digits.py --workers 4 --plan data=2,pipeline=2
      polylane train examples/digits.py --run run/digits --save-every 10m --resume auto --max-restarts 3
      polylane train examples/digits.py --epochs 50 --early-stop test_loss:3 --keep-best accuracy
      polylane train examples/digits.py --plan data=4 --batch 512 --base-batch 64 --scale-lr linear --warmup 10
      torchrun --nproc-per-node 4 -m -- polylane train examples/digits.py
    """
    from polylane.commands import train as command

    (fewest, maximum), (size, largest) = workers or (None, None), parse_batch(batch)
    # What the user names are batches, of which a step has several.
    size, largest = size * data.accumulate, largest and largest * data.accumulate
    shared: dict[str, Any] = {"recipe": recipe, "batch": size, "settings": tuple(settings or ()), "seed": seed}
    split: dict[str, Any] = {"workers": maximum, "plan": plan, "clip_norm": clip_norm, "json": json, "audit": audit}
    length: dict[str, Any] = {"epochs": epochs, "steps": steps, "drop_last": drop_last, "run_folder": run}
    request = TrainRequest(
        **(shared | split | length | {"fewest_workers": fewest, "on_nan": on_nan}),
        rates=learning.build_rates(size, largest),
        saving=replace(saving, max_restarts=default_restarts(saving.max_restarts, workers)),
        trouble=trouble,
        watch=watch,
        goals=goals,
        data=data,
    )
    (context.obj or command.run)(request)  # polylane launch takes the request itself


def run(
    context: typer.Context,
    script: Annotated[str, typer.Argument(metavar="SCRIPT", help="Path of a Python file.", show_default=False)],
    arguments: options.ScriptArguments = None,
    *,
    workers: options.Workers = None,
    plan: options.ScriptPlan = None,
    run: options.RunFolder = None,
    audit: options.Audit = "auto",
    noise: options.Noise = "auto",
    saving: SavingOptions,
    trouble: TroubleOptions,
    watch: WatchOptions,
) -> None:
    """Run a training script that calls polylane.prepare.

    Every worker runs the script as python SCRIPT ARGUMENTS would, and polylane.prepare(model, optimizer, ...) in it
    splits the training by the plan. Only rank 0 prints. The script prints the numbers of one device; verify
    SCRIPT proves that.

    Writes plan.yaml, metrics.jsonl (one line per step), the timeline of one step, report.html and, with --save-every,
    checkpoints to DIR, which report and why read.

    The exit code is the script's own; 1 if a worker failed, 2 for invalid input, 130 after Ctrl-C, 128 plus the signal
    number after another signal. With --save-every, such a signal saves a checkpoint first, within --grace, and the exit
    code is --requeue-code.

    \b
    Examples:
      polylane run mnist.py --workers 4 --plan data=2,pipeline=2
      polylane run mnist.py --plan data=4 -- --epochs 3 --lr 0.1
      torchrun --nproc-per-node 4 -m -- polylane run mnist.py --plan pipeline=4
    """
    from polylane.commands import run as command

    request = RunRequest(
        script=script,
        arguments=tuple(arguments or ()),
        workers=workers,
        plan=plan,
        run_folder=run,
        saving=saving,
        trouble=trouble,
        watch=watch,
        audit=audit,
        noise=noise,
    )
    (context.obj or command.run)(request)


def export(
    checkpoint: Annotated[
        Path,
        typer.Argument(
            metavar="CHECKPOINT",
            help="A checkpoint folder, or a run folder, whose newest complete checkpoint is used.",
            show_default=False,
        ),
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The safetensors file to write.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there already.")] = False,
    json: Json = False,
) -> None:
    """Write the weights of a checkpoint to one file.

    The safetensors file contains the full weights and buffers of the model's state_dict(), under the model's own names,
    whichever plan saved them; where replicas differ (every=), their mean. Weights of type complex128, which safetensors
    does not support, are stored as NAME.real and NAME.imag.

    \b
    Example:
      polylane export run/digits model.safetensors
    """
    request = build_request(ExportRequest, locals())
    from polylane.commands import export as command

    command.run(request)


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN [RUN]", help="Folder of a run, or of two.", show_default=False),
    ],
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Page to write. Default: RUN/report.html; of two runs, report-A-B.html."),
    ] = None,
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Serve the page on this machine, behind a random token, and update it."),
    ] = False,
    port: Annotated[
        int, typer.Option(metavar="PORT", min=0, max=65535, help="Port of --serve. 0: any that is free.")
    ] = 0,
) -> None:
    """Write the page of a run, or of two to compare.

    Shows the verdict, swimlanes, where the time went, curves, memory and plan. The page is one file that loads nothing.
    Training writes it at the end of a run; this command writes it for a run that is under way, failed, or is older.
    What the folder lacks is said on the page. Two runs are shown beside each other, on the same axes.

    \b
    Examples:
      polylane report run/digits
      polylane report run/digits --serve
      polylane report run/digits run/digits-2 --html compare.html
    """
    request = build_request(ReportRequest, {**locals(), "runs": tuple(runs)})
    from polylane.commands.reporting import report_command as command

    command.run(request)


def why(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of the run.", show_default=False)],
    svg: options.Svg = None,
    html: options.Html = None,
    json: Json = False,
) -> None:
    """Explain why a run hung or failed.

    Names the worker, where it was, and what the other workers were doing. Shows the last steps up to that moment, with
    the culprit in red, and its stack. Exit code 2 where the run ended
    well.

    \b
    Example:
      polylane why run/digits --html why.html
    """
    request = build_request(WhyRequest, locals())
    from polylane.commands import why as command

    command.run(request)
