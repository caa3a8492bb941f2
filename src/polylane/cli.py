"""Command line (typer): parse each command's options into its request, call it, and turn errors into sentences."""

from __future__ import annotations

import re
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from polylane import __version__, cli_launching, cli_planning, cli_running
from polylane import cli_options as options
from polylane.cli_options import Batch, ClipNorm, Json, Plan, Recipe, Seed, Set, Workers
from polylane.commands.requests import (
    InspectRequest,
    LanesRequest,
    VerifyRequest,
    build_request,
)
from polylane.errors import LINES, PolylaneError, WorkerFailed, clean_sentence, clean_text, describe_error
from polylane.faults import PolylaneFault, explain_fault
from polylane.output import find_loss, guard_streams
from polylane.runtime.workers.failure import format_exit_code
from polylane.runtime.workers.launch_environment import is_first_of_host
from polylane.runtime.workers.stop_request import Stopped, describe_end
from polylane.runtime.workers.system_limits import explain_refusal
from polylane.schedule.schedules import ScheduleName

# None of the imports above imports torch, so that `polylane --help` does not wait for it. Each command imports its own
# module when it is called.

# click's UsageError, which is raised where the command line itself is wrong. It is found through typer, which may have
# a copy of click of its own.
_CommandLineError: type[Exception] = typer.BadParameter.__mro__[2]

# Commands as help lists them: first those that train, then what finds a plan, then what tells of a run.
ORDER = (
    *("run", "train", "launch", "verify", "plan", "inspect", "simulate", "probe", "doctor"),
    *("report", "why", "advise", "export", "lanes"),
)
INTERRUPTED = 130  # 128 + SIGINT, as shells count
ECHO_SECONDS = 2.0  # longer than torchrun takes to end the other workers once one has ended


class _Sentences(TyperGroup):
    """Command group in which a user's mistake is one sentence and an exit code, not a traceback.

    Exit codes: 2 for wrong input or too little memory, 1 for a failed worker or a plan that is not equal to one
    worker, or a fault of polylane's own, 128 and the signal's number for a run that a signal ended: 130 for Ctrl-C, 143
    for SIGTERM. Other exceptions, of the user's code or of a library, keep their traceback.
    """

    def list_commands(self, context: Any) -> list[str]:
        """Return the names of the commands in the order in which a user comes to need them."""
        return sorted(super().list_commands(context), key=ORDER.index)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run one command line and exit."""
        try:
            # In standalone mode click would print errors itself, in its own form.
            code = super().main(*args, **{**kwargs, "standalone_mode": False})
        except _CommandLineError as error:
            code = _say(clean_sentence(_plain(error.format_message()) + _hint(error)), 2)  # type: ignore[attr-defined]
        except PolylaneError as error:
            # What failed for want of memory or files is said as such, whatever was being done.
            failure = (error.__cause__ and explain_refusal(error.__cause__, None)) or error
            code = _say(str(failure), 1 if isinstance(failure, PolylaneFault) else 2)
        except WorkerFailed as error:
            code = _say(str(error), 1)
        except Stopped as stopped:
            sys.exit(_say(str(stopped), stopped.exit_code))
        except (typer.Abort, KeyboardInterrupt):
            code = INTERRUPTED
        except Exception as error:
            command = next((word for word in kwargs.get("args") or sys.argv[1:] if not word.startswith("-")), "")
            if (refused := explain_refusal(error, None)) is not None:
                code = _say(str(refused), 2)
            elif (fault := explain_fault(error, f"polylane {command}".rstrip())) is not None:
                code = _say(str(fault), 1)
            else:
                raise
        except BaseException as leaving:  # sys.exit, and exceptions of the user's own that are no Exception
            if (foreign := _describe_foreign_exit(leaving)) is None:
                raise
            code = _say(foreign, 2)
        if code == INTERRUPTED:
            _say(describe_end(signal.SIGINT), INTERRUPTED)
        if not code and (loss := find_loss()):
            code = _say(loss, 2)
        sys.exit(code if isinstance(code, int) else 0)


def _describe_foreign_exit(leaving: BaseException) -> str | None:
    """Describe where code that is not polylane's left a command in its midst, as by ``sys.exit``; None if ours did."""
    frame = traceback.extract_tb(leaving.__traceback__)[-1]
    if Path(frame.filename).is_relative_to(Path(__file__).parent):
        return None
    ending = f"sys.exit({format_exit_code(leaving)})" if isinstance(leaving, SystemExit) else describe_error(leaving)
    return f"{ending} at {frame.filename}:{frame.lineno} ended the command before it was done"


# Messages of typer and pydantic, and the plainer words that replace them.
_PLAIN = (
    (r"Input should be greater than or equal to", "must be at least"),
    (r"Input should be less than or equal to", "must be at most"),
    (r"Input should be a valid integer.*", "must be a whole number"),
    (r"Input should be a valid number.*", "must be a number"),
    (r"Value error, ", ""),
)


def _plain(message: str) -> str:
    for pattern, plain in _PLAIN:
        message = re.sub(pattern, plain, message)
    return message


def _hint(error: Exception) -> str:
    """Return what to do about a wrong command line; "" where its message says it all."""
    context: Any = getattr(error, "ctx", None)
    is_unknown = getattr(error, "option_name", None) is not None and hasattr(error, "possibilities")
    return " (the script's own arguments follow --)" if is_unknown and context and context.info_name == "run" else ""


def _say(message: str, code: int) -> int:
    """Print the message on stderr and return the exit code.

    Under torchrun most workers have the same message: the first of each host prints it, and the others wait until
    torchrun has ended them.
    """
    if not is_first_of_host():
        time.sleep(ECHO_SECONDS)
    print(f"polylane: {clean_text(message, keep=LINES)}", file=sys.stderr, flush=True)
    return code


app = typer.Typer(
    cls=_Sentences,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line: the console entry point.

    Args:
        arguments: the command line without the program's name; None: this process's own.
    """
    warnings.formatwarning = _told
    guard_streams()
    app(args=None if arguments is None else list(arguments), prog_name="polylane")


def _told(message: Any, category: Any, filename: str, lineno: int, line: str | None = None) -> str:
    """Format a warning: polylane's own as a note, others as Python does, with file and line."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        return f"note: {clean_sentence(str(message))}\n"
    return f"{filename}:{lineno}: {category.__name__}: {clean_text(str(message), keep=LINES)}\n"


@app.callback(invoke_without_command=True)
def _polylane(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    """Split the training of a PyTorch model over several workers, with the same numbers as on one device.

    SCRIPT is a Python file with a training loop of its own, which calls polylane.prepare(model, optimizer, loader).

    RECIPE is a Python file or module without a loop: it defines model(), loss(model, batch), optimizer(parameters) and
    data(split), and optionally scheduler(optimizer), collate(samples), init(module), metrics(model, batch),
    sampler(dataset) and callbacks().

    SPEC is a plan, which says how the training is split: a line of keys such as data=2,pipeline=2, the path of a plan
    file (written by inspect --write, or the plan.yaml of an earlier run), or auto for the plan that is predicted to be
    the fastest. Keys that are used most:

    \b
      data=N           N replicas, each on its own samples
      pipeline=N       N stages of the model, one after the other
      tensor=N         operators and their parameters split over N workers
      sequence=N       operators split over N workers, parameters on each
      microbatches=N   parts of a batch that pass through the stages
      schedule=NAME    order of the passes: 1f1b, zb-h1, interleaved, ...
      shard=WHAT       optimizer, gradients or parameters over replicas (ZeRO)
      precision=TYPE   bfloat16, float16: autocast
      recompute=WHAT   full, selective, budget:200MB: activations computed again
      compile=yes      each stage by torch.compile

    A mesh for each stage is written "[data=2 | tensor=2 | 1],microbatches=8". All keys: the page "Plans" of
    the documentation.

    \b
    Examples:
      polylane run mnist.py --workers 4 --plan data=2,pipeline=2
      polylane train examples/digits.py --workers 4 --plan data=2,pipeline=2
    """
    if version:
        typer.echo(__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


# The commands --------------------------------------------------------------------------------------------------------


cli_running.register(app)
cli_launching.register(app)


@app.command()
def verify(
    recipe: options.RecipeOrScript,
    arguments: options.ScriptArguments = None,
    workers: Workers = None,
    plan: Plan = None,
    steps: Annotated[int, typer.Option("--steps", metavar="K", min=1, help="Optimizer steps to train.")] = 3,
    batch: Batch = 64,
    seed: Seed = 0,
    settings: Set = None,
    clip_norm: ClipNorm = None,
    resume: options.ProveResume = False,
    resume_plan: options.ResumePlan = None,
    json: Json = False,
) -> None:
    """Prove that a plan computes the numbers of one device.

    A RECIPE is trained for K steps in float64, on one worker and by the plan, each step from the same state. Losses,
    gradients, weights, buffers and optimizer states must agree to within 1e-9. Otherwise the first operator whose value
    differs is named, and the exit code is 1.

    With --resume, checkpoints are verified: K steps without interruption, and K steps that are interrupted by a
    checkpoint and resumed on new workers, must agree bit by bit in losses, weights, buffers, optimizers and schedulers;
    with --resume-plan, which resumes under another plan, to within 1e-9. Otherwise the first tensor that differs is
    named, and the exit code is 1.

    A SCRIPT is run to its end twice, as it is and by the plan. The numbers that it prints, line by line, and the
    weights of its models at the end must agree: in float64, which is torch's default type in these runs, or to the
    precision of the script's own types. If they differ, further runs find out which numbers change every time, such
    as seconds, and what rounding alone changes. Each run writes the script's files.

    \b
    Examples:
      polylane verify examples/digits.py --workers 4 --plan data=2,pipeline=2
      polylane verify mnist.py --plan pipeline=2 -- --epochs 1
      polylane verify examples/digits.py --plan data=2 --resume --resume-plan pipeline=2 --steps 6
    """
    request = build_request(VerifyRequest, locals())
    from polylane.commands import verify as command

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
            help="Also show the plan's stages, the values sent between them, and how tensor= and sequence= shard the "
            "operators. auto: the plan predicted to be fastest on this machine.",
        ),
    ] = None,
    batch: Batch = 64,
    settings: Set = None,
    plan_file: Annotated[
        Path | None,
        typer.Option("--write", metavar="FILE", help="Write the plan to a file, for --plan."),
    ] = None,
    svg: Annotated[
        Path | None,
        typer.Option(
            "--svg", metavar="FILE", help="Draw a step from the measured times of operators, without communication."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Show the graph of a model, and how a plan cuts it.

    Lists operators, parameters, FLOPs of a forward pass and bytes of all values per module, and the modules that could
    not be captured, with the reason. With a plan, also lists its stages and every value sent between stages. With
    tensor= or sequence=, also lists how the operators of each module are sharded, the communication this requires, and
    which operators are not sharded and why.

    \b
    Examples:
      polylane inspect examples/unet.py --plan pipeline=4
      polylane inspect examples/gpt.py --plan tensor=2
      polylane inspect examples/gpt.py --plan pipeline=2,tensor=2 --write plan.yaml
    """
    request = build_request(InspectRequest, locals())
    from polylane.commands import inspect as command

    command.run(request)


cli_planning.register(app)


@app.command()
def lanes(
    stages: options.DrawnStages,
    microbatches: Annotated[int, typer.Option("--microbatches", metavar="M", min=1, help="Number of microbatches.")],
    schedule: Annotated[ScheduleName | None, typer.Argument(help="Name of the schedule.", show_default=False)] = None,
    compare: options.Compare = False,
    chunks: options.Chunks = None,
    batches: options.Batches = None,
    vertical_sync: options.VerticalSync = False,
    live: options.Live = None,
    replicas: options.Replicas = None,
    forward: options.ForwardTicks = "1",
    backward: options.BackwardTicks = "2",
    weight: options.WeightTicks = None,
    halving: options.Halving = "0",
    hop: options.HopTicks = "0",
    svg: options.Svg = None,
    html: options.Html = None,
    json: Json = False,
) -> None:
    """Draw the timeline of a pipeline schedule.

    Needs no model: durations of passes are given in ticks. Shows when each stage runs each microbatch, the utilization
    (busy time over total time), the makespan in ticks, the utilization of each worker between its first and last pass,
    and the maximum number of microbatches that it holds.
    interleaved and zb-v divide each stage into chunks (a, b, ...), to which durations then refer. zb-h1, zb-h2 and zb-v
    split backward passes into input gradients and weight gradients. pipedream and pipedream-2bw are drawn over several
    updates. auto is the order found by a search. With --replicas, several workers share a stage and take microbatches
    in turn. --compare draws all schedules.

    \b
    Examples:
      polylane lanes 1f1b --stages 4 --microbatches 8
      polylane lanes zb-v --stages 4 --microbatches 8
      polylane lanes interleaved --stages 4 --chunks 2 --microbatches 8 --hop 1
      polylane lanes 1f1b --stages examples/lanes/branches.yaml --microbatches 8
      polylane lanes 1f1b --stages 2 --microbatches 4 --replicas 2,1 --forward 2,1 --backward 2,1
      polylane lanes --compare --stages 4 --microbatches 8 --html schedules.html
    """
    request = build_request(LanesRequest, locals())
    from polylane.commands import lanes as command

    command.run(request)
