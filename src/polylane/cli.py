"""The command line, thin: parse, call, print."""

from __future__ import annotations

import os
import re
import sys
import time
import warnings
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from polylane import __version__, cli_planning
from polylane import cli_options as options
from polylane.cli_options import Batch, ClipNorm, Json, Plan, Recipe, Seed, Set, Workers
from polylane.commands.requests import InspectRequest, TrainRequest, VerifyRequest
from polylane.errors import PolylaneError, WorkerFailed

# Only the standard library, typer and what imports no torch stands above: `polylane --help` must not wait for it. Each
# command imports its own module.

# What click raises where the command line itself is wrong; typer brings its own copy of click, or none.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

INTERRUPTED = 130  # 128 + SIGINT, as shells count
ECHO_SECONDS = 2.0  # torchrun ends the others within a fraction of it, once one has ended


class _Sentences(TyperGroup):
    """A group of commands in which every error is one sentence and an exit code, never a traceback.

    2: what the user gave is wrong. 1: a worker failed, or a proof did. 130: Ctrl-C. Mistakes of our own keep theirs.
    """

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run one command line and exit."""
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _CommandLineError as error:
            code = _say(_plain(error.format_message()), 2)  # type: ignore[attr-defined]
        except PolylaneError as error:
            code = _say(str(error), 2)
        except WorkerFailed as error:
            code = _say(str(error), 1)
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        if code == INTERRUPTED:
            _say("interrupted", INTERRUPTED)
        sys.exit(code if isinstance(code, int) else 0)


# How typer says what a value must be, and how people do.
_PLAIN = (
    (r"Input should be greater than or equal to", "must be at least"),
    (r"Input should be less than or equal to", "must be at most"),
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Value error, ", ""),
)


def _plain(message: str) -> str:
    for said, plain in _PLAIN:
        message = re.sub(said, plain, message)
    return message


def _say(message: str, code: int) -> int:
    """The message on stderr. Under torchrun all workers mostly have the same to say: the first of each host says it."""
    if os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(ECHO_SECONDS)
    print(f"polylane: {message}", file=sys.stderr, flush=True)
    return code


app = typer.Typer(
    cls=_Sentences,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """The console entry point.

    Args:
        arguments: the command line without the program's name; default: this process's own.
    """
    warnings.formatwarning = _told
    app(args=None if arguments is None else list(arguments), prog_name="polylane")


def _told(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """A warning of polylane's own as a sentence; others as Python has them, with file and line."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"note: {message}\n"
    return f"{filename}:{lineno}: {category.__name__}: {message}\n"


@app.callback(invoke_without_command=True)
def _polylane(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Split the training of an ordinary PyTorch model over workers, with the same numbers as one device.

    A RECIPE is a Python file, or a package.module, with the functions model(), loss(model, batch),
    optimizer(parameters) and data(split); scheduler(optimizer) and collate(samples) if you like.

    A SPEC is a plan in one line, data=2,pipeline=2,schedule=1f1b,microbatches=8 (tensor=2 to split the operators and
    their parameters, sequence=2 to split the operators only, precision=bfloat16 for autocast); or with a mesh for each
    stage, "[data=2 | tensor=2 | 1],microbatches=8"; or a plan file: one that inspect --write made, the plan.yaml of an
    earlier run, or your own; or auto, for the plan that is predicted to be the fastest.

    \b
    Example:
      polylane train examples/digits.py --workers 4 --plan data=2,pipeline=2
    """
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The commands --------------------------------------------------------------------------------------------------------


@app.command()
def train(
    recipe: Recipe,
    workers: Workers = None,
    plan: Plan = None,
    epochs: options.Epochs = None,
    steps: options.Steps = None,
    batch: Batch = 64,
    run: options.RunFolder = None,
    seed: Seed = 0,
    set_: Set = None,
    clip_norm: ClipNorm = None,
    on_nan: options.OnNan = "stop",
    stop_on_nan: options.StopOnNan = False,
    drop_last: options.DropLast = False,
    optimizer: options.LargeBatchOptimizer = None,
    lr: options.LearningRate = None,
    scale_lr: options.ScaleRate = None,
    base_batch: options.BaseBatch = None,
    warmup: options.Warmup = 0,
    json: Json = False,
) -> None:
    """Train a recipe's model on N workers.

    Nothing changes a learning rate unless --scale-lr (Goyal et al. 2017; Krizhevsky 2014) or --warmup asks for it.
    LARS and LAMB: You et al. 2017 and 2020.

    DIR gets plan.yaml, metrics.jsonl (a line a step), model.safetensors (loads into the plain model), and one late
    step's timeline.json, swimlane.html and trace.json (for ui.perfetto.dev). An earlier run's are replaced when this
    one has ended well, and until then it writes into DIR/unfinished; weights that are no numbers are never saved.

    \b
    Examples:
      polylane train examples/digits.py --workers 4 --plan data=2,pipeline=2
      polylane train examples/digits.py --plan data=4 --batch 512 --base-batch 64 --scale-lr linear --warmup 10
      torchrun --nproc-per-node 4 -m -- polylane train examples/digits.py
    """
    from polylane.commands import train as command
    from polylane.commands.learning_rates import learning_rate_options

    request = TrainRequest(
        recipe=recipe,
        batch=batch,
        settings=tuple(set_ or ()),
        seed=seed,
        json=json,
        workers=workers,
        plan=plan,
        clip_norm=clip_norm,
        epochs=epochs,
        steps=steps,
        run_folder=run,
        on_nan="stop" if stop_on_nan else on_nan,
        drop_last=drop_last,
        rates=learning_rate_options(batch, optimizer, lr, scale_lr, base_batch, warmup),
    )
    command.run(request)


@app.command()
def verify(
    recipe: Recipe,
    workers: Workers = None,
    plan: Plan = None,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Optimizer steps to train.")] = 3,
    batch: Batch = 64,
    seed: Seed = 0,
    set_: Set = None,
    clip_norm: ClipNorm = None,
    json: Json = False,
) -> None:
    """Prove a plan equal to one worker, in float64.

    Trains K steps twice, on one worker and by the plan, with the same microbatches, and compares the losses, every
    gradient of step 1, and every weight and buffer after step K. Exit code 1 where any differs by more than 1e-9,
    relative; then the first operator whose value differs is named.

    \b
    Example:
      polylane verify examples/digits.py --workers 4 --plan data=2,pipeline=2
    """
    from polylane.commands import verify as command

    request = VerifyRequest(
        recipe=recipe,
        batch=batch,
        settings=tuple(set_ or ()),
        seed=seed,
        json=json,
        workers=workers,
        plan=plan,
        clip_norm=clip_norm,
        steps=steps,
    )
    if not command.run(request):
        raise typer.Exit(1)


@app.command()
def inspect(
    recipe: Recipe,
    plan: Annotated[
        str | None,
        typer.Option(
            "--plan",
            metavar="SPEC",
            help="Show its stages and crossings, too, and how tensor= and sequence= split the operators; auto for the "
            "best plan on this machine.",
        ),
    ] = None,
    batch: Batch = 64,
    set_: Set = None,
    write: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write the plan as a file, to edit and to give as --plan."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option("--svg", metavar="FILE", help="Draw a step as the measured times of the operators let it be."),
    ] = None,
    json: Json = False,
) -> None:
    """Show what is captured of a model, and how a plan cuts it.

    Per module: operators, parameters, FLOPs of a forward pass, bytes of all values; and what could not be captured,
    with the reason. With a plan: its stages, every value that crosses from one stage to another, and, for tensor= and
    sequence=, how the operators of every module are split, what that makes travel, and what stays whole and why.

    \b
    Examples:
      polylane inspect examples/unet.py --plan pipeline=4
      polylane inspect examples/gpt.py --plan tensor=2
      polylane inspect examples/gpt.py --plan pipeline=2,tensor=2 --write plan.yaml
    """
    from polylane.commands import inspect as command

    settings = tuple(set_ or ())
    command.run(
        InspectRequest(recipe=recipe, batch=batch, settings=settings, json=json, plan=plan, plan_file=write, svg=svg)
    )


cli_planning.register(app)


class _Schedule(StrEnum):
    """The schedules, by the names that plans give them."""

    NAIVE = "naive"
    AFAB = "afab"
    ONE_F_ONE_B = "1f1b"


@app.command()
def lanes(
    schedule: Annotated[_Schedule, typer.Argument(help="Which schedule.", show_default=False)],
    stages: Annotated[
        str,
        typer.Option("--stages", metavar="K|FILE", help="So many in a chain, or a YAML file of stages that branch."),
    ],
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", min=1, help="Microbatches in a batch.")],
    forward: Annotated[
        str, typer.Option("--forward", metavar="TICKS", help="Of one forward; 1,2,1 for stages that differ.")
    ] = "1",
    backward: Annotated[str, typer.Option("--backward", metavar="TICKS", help="Of one backward, likewise.")] = "2",
    svg: Annotated[Path | None, typer.Option("--svg", metavar="FILE", help="Write the picture as SVG.")] = None,
    html: Annotated[Path | None, typer.Option("--html", metavar="FILE", help="Write it as a page of its own.")] = None,
    json: Json = False,
) -> None:
    """Draw a schedule's swimlane from theory.

    Who runs which microbatch when, the utilization (coloured over total area), the makespan in ticks, and the most
    microbatches that each stage holds at once.

    \b
    Examples:
      polylane lanes 1f1b --stages 4 --microbatches 8
      polylane lanes 1f1b --stages examples/lanes/branches.yaml --microbatches 8
    """
    from polylane.commands import lanes as command

    command.run(
        schedule.value,
        stages=stages,
        microbatches=microbatches,
        forward=forward,
        backward=backward,
        svg=svg,
        html=html,
        json=json,
    )
